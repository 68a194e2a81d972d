//! The metadata of a commit, from which the next owner of a partition reads which records may have been started.

use std::fmt;

use super::identity::RecordIdentity;

/// Metadata of a commit. Kafka itself does not mark a record that was delivered before.
///
/// Encoded as `hapax1 open END IDENTITY` or `hapax1 clean IDENTITY`, where `IDENTITY` is that of the record before the
/// committed offset, or `-`. Earlier releases have written it without a checksum, and read one with it as unknown
/// metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CommitMetadata {
    /// Records from the committed offset up to, and without, `end` may have been delivered.
    Open { end: i64, handled: Option<RecordIdentity> },
    /// Each delivered record was acknowledged or returned; none is in progress.
    Clean { handled: Option<RecordIdentity> },
    /// The metadata is missing, or of another program.
    Unknown,
}

impl CommitMetadata {
    /// Parses metadata.
    pub(super) fn parse(metadata: &str) -> Self {
        let identity = |parts: &[&str]| match parts {
            ["-"] => Some(None),
            [timestamp_ms] => RecordIdentity::parse(timestamp_ms, None).map(Some),
            [timestamp_ms, checksum] => {
                RecordIdentity::parse(timestamp_ms, Some(checksum)).map(Some)
            }
            _ => None,
        };
        // Further parts belong to later versions, and are ignored.
        let parts: Vec<_> = metadata.splitn(6, ' ').collect();
        let parsed = match parts.as_slice() {
            ["hapax1", "open", end, rest @ ..] => end
                .parse()
                .ok()
                .and_then(|end| identity(rest).map(|handled| Self::Open { end, handled })),
            ["hapax1", "clean", rest @ ..] => identity(rest).map(|handled| Self::Clean { handled }),
            _ => None,
        };
        parsed.unwrap_or(Self::Unknown)
    }

    /// Returns the identity of the record before the committed offset, if it is known.
    pub(super) const fn handled(self) -> Option<RecordIdentity> {
        match self {
            Self::Open { handled, .. } | Self::Clean { handled } => handled,
            Self::Unknown => None,
        }
    }
}

impl fmt::Display for CommitMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |handled: &Option<RecordIdentity>| {
            handled.map_or("-".to_owned(), |handled| handled.to_string())
        };
        match self {
            Self::Open { end, handled } => write!(f, "hapax1 open {end} {}", text(handled)),
            Self::Clean { handled } => write!(f, "hapax1 clean {}", text(handled)),
            Self::Unknown => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_parsed_as_it_was_written() {
        let identity = |timestamp_ms, checksum| Some(RecordIdentity { timestamp_ms, checksum });
        for metadata in [
            CommitMetadata::Open { end: 17, handled: None },
            CommitMetadata::Open { end: 17, handled: identity(1_790_000_000_000, Some(u64::MAX)) },
            CommitMetadata::Open { end: 17, handled: identity(1_790_000_000_000, None) },
            CommitMetadata::Clean { handled: None },
            CommitMetadata::Clean { handled: identity(-1, Some(7)) },
        ] {
            assert_eq!(CommitMetadata::parse(&metadata.to_string()), metadata);
        }
        let earlier = CommitMetadata::Clean { handled: identity(1_790_000_000_000, None) };
        assert_eq!(CommitMetadata::parse("hapax1 clean 1790000000000"), earlier);
        for text in [
            "",
            "hapax1",
            "hapax1 open 1",
            "hapax1 clean",
            "hapax1 open x -",
            "hapax1 clean 1 x",
            "hapax1 clean 1 2 3",
            "hapax2 clean -",
        ] {
            assert_eq!(CommitMetadata::parse(text), CommitMetadata::Unknown, "{text}");
        }
    }
}

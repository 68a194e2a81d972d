//! The metadata of a commit, from which the next owner of a partition reads which records may have been started.

use std::fmt;

/// Metadata of a commit. Kafka itself does not mark a record that was delivered before.
///
/// Encoded as `hapax1 open END TIMESTAMP` or `hapax1 clean TIMESTAMP`, where `TIMESTAMP` is that of the record
/// before the committed offset, in milliseconds, or `-`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CommitMetadata {
    /// Records from the committed offset up to, and without, `end` may have been delivered.
    Open { end: i64, timestamp_ms: Option<i64> },
    /// Each delivered record was acknowledged or returned; none is in progress.
    Clean { timestamp_ms: Option<i64> },
    /// The metadata is missing, or of another program.
    Unknown,
}

impl CommitMetadata {
    /// Parses metadata.
    pub(super) fn parse(metadata: &str) -> Self {
        let mut parts = metadata.split(' ');
        let timestamp = |part: &str| match part {
            "-" => Some(None),
            part => part.parse().ok().map(Some),
        };
        let parsed = match (parts.next(), parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some("hapax1"), Some("open"), Some(end), Some(at), None) => end
                .parse()
                .ok()
                .and_then(|end| timestamp(at).map(|timestamp_ms| Self::Open { end, timestamp_ms })),
            (Some("hapax1"), Some("clean"), Some(at), None, None) => {
                timestamp(at).map(|timestamp_ms| Self::Clean { timestamp_ms })
            }
            _ => None,
        };
        parsed.unwrap_or(Self::Unknown)
    }

    /// Returns the timestamp of the record before the committed offset, in milliseconds, if it is known.
    pub(super) const fn timestamp_ms(self) -> Option<i64> {
        match self {
            Self::Open { timestamp_ms, .. } | Self::Clean { timestamp_ms } => timestamp_ms,
            Self::Unknown => None,
        }
    }
}

impl fmt::Display for CommitMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |timestamp: &Option<i64>| timestamp.map_or("-".to_owned(), |it| it.to_string());
        match self {
            Self::Open { end, timestamp_ms } => {
                write!(f, "hapax1 open {end} {}", text(timestamp_ms))
            }
            Self::Clean { timestamp_ms } => write!(f, "hapax1 clean {}", text(timestamp_ms)),
            Self::Unknown => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_parsed_as_it_was_written() {
        for metadata in [
            CommitMetadata::Open { end: 17, timestamp_ms: None },
            CommitMetadata::Open { end: 17, timestamp_ms: Some(1_790_000_000_000) },
            CommitMetadata::Clean { timestamp_ms: None },
            CommitMetadata::Clean { timestamp_ms: Some(-1) },
        ] {
            assert_eq!(CommitMetadata::parse(&metadata.to_string()), metadata);
        }
        for text in
            ["", "hapax1", "hapax1 open 1", "hapax1 clean", "hapax1 open x -", "hapax2 clean -"]
        {
            assert_eq!(CommitMetadata::parse(text), CommitMetadata::Unknown, "{text}");
        }
    }
}

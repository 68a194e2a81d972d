//! The metadata of a commit, from which the next owner of a partition reads which records may have been started.

use super::identity::{RecordIdentity, TopicCheck};

/// Metadata of a commit. Kafka itself does not mark a record that was delivered before.
///
/// Encoded as `hapax1 open END RECORD` or `hapax1 clean RECORD`, where `RECORD` is the last record that was handled, as
/// `TIMESTAMP CHECKSUM`, or `-`. Its offset follows, unless it is the one before the committed offset: control records may
/// be between them. Earlier releases have written it without checksum and offset, and read one that has more words than
/// theirs as unknown metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CommitMetadata {
    /// Records from the committed offset up to, and without, `end` may have been delivered.
    Open { end: i64, handled: Option<TopicCheck> },
    /// Each delivered record was acknowledged or returned; none is in progress.
    Clean { handled: Option<TopicCheck> },
    /// The metadata is missing, or of another program.
    Unknown,
}

impl CommitMetadata {
    /// Parses the metadata of a committed offset. One with more words, of a later version, is unknown.
    pub(super) fn parse(metadata: &str, offset: i64) -> Self {
        let before = offset.saturating_sub(1);
        let record = |parts: &[&str]| {
            let (at, timestamp_ms, checksum) = match parts {
                ["-"] => return Some(None),
                [timestamp_ms] => (before, timestamp_ms, None),
                [timestamp_ms, checksum] => (before, timestamp_ms, Some(*checksum)),
                [timestamp_ms, checksum, at] => {
                    let at = at.parse::<i64>().ok().filter(|at| *at <= before)?;
                    (at, timestamp_ms, Some(*checksum).filter(|it| *it != "-"))
                }
                _ => return None,
            };
            let expected = RecordIdentity::parse(timestamp_ms, checksum)?;
            Some(Some(TopicCheck { offset: at, expected }))
        };
        let parts: Vec<_> = metadata.splitn(7, ' ').collect();
        let parsed = match parts.as_slice() {
            ["hapax1", "open", end, rest @ ..] => end
                .parse()
                .ok()
                .and_then(|end| record(rest).map(|handled| Self::Open { end, handled })),
            ["hapax1", "clean", rest @ ..] => record(rest).map(|handled| Self::Clean { handled }),
            _ => None,
        };
        parsed.unwrap_or(Self::Unknown)
    }

    /// Returns the text of the metadata of a committed offset.
    pub(super) fn text(self, offset: i64) -> String {
        let record = |handled: Option<TopicCheck>| match handled {
            None => "-".to_owned(),
            Some(TopicCheck { offset: at, expected }) if at == offset.saturating_sub(1) => {
                expected.to_string()
            }
            Some(TopicCheck { offset: at, expected }) => {
                let unknown = if expected.checksum.is_none() { " -" } else { "" };
                format!("{expected}{unknown} {at}")
            }
        };
        match self {
            Self::Open { end, handled } => format!("hapax1 open {end} {}", record(handled)),
            Self::Clean { handled } => format!("hapax1 clean {}", record(handled)),
            Self::Unknown => String::new(),
        }
    }

    /// Returns the last record that was handled, if it is known.
    pub(super) const fn handled(self) -> Option<TopicCheck> {
        match self {
            Self::Open { handled, .. } | Self::Clean { handled } => handled,
            Self::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_parsed_as_it_was_written() {
        let record = |offset, timestamp_ms, checksum| {
            let expected = RecordIdentity { timestamp_ms, checksum };
            Some(TopicCheck { offset, expected })
        };
        for (metadata, text) in [
            (CommitMetadata::Open { end: 17, handled: None }, "hapax1 open 17 -"),
            (
                CommitMetadata::Open { end: 17, handled: record(8, 1_790, Some(u64::MAX)) },
                "hapax1 open 17 1790 ffffffffffffffff",
            ),
            (
                CommitMetadata::Open { end: 17, handled: record(6, 1_790, Some(7)) },
                "hapax1 open 17 1790 0000000000000007 6",
            ),
            (CommitMetadata::Clean { handled: None }, "hapax1 clean -"),
            (CommitMetadata::Clean { handled: record(8, -1, None) }, "hapax1 clean -1"),
            (CommitMetadata::Clean { handled: record(0, -1, None) }, "hapax1 clean -1 - 0"),
        ] {
            assert_eq!(metadata.text(9), text);
            assert_eq!(CommitMetadata::parse(text, 9), metadata, "{text}");
        }
        for text in [
            "",
            "hapax1",
            "hapax1 open 1",
            "hapax1 clean",
            "hapax1 open x -",
            "hapax1 clean 1 x",
            "hapax1 clean 1 -",
            "hapax1 clean 1 2 x",
            "hapax1 clean 1 2 9",
            "hapax1 open 1 1 2 3 4",
            "hapax1 clean 1 2 3 4",
            "hapax2 clean -",
        ] {
            assert_eq!(CommitMetadata::parse(text, 9), CommitMetadata::Unknown, "{text}");
        }
    }
}

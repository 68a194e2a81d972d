//! The metadata of a commit, by which the next owner of a partition knows what the last one has done.

use std::fmt;

/// The metadata of a commit. Kafka itself does not tell that a record was delivered before.
///
/// As text: `hapax1 open END TIME` or `hapax1 clean TIME`, where `TIME` is the time of the record
/// before the position, in milliseconds, or `-`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mark {
    /// Records from the position up to `end` may have been delivered.
    Open { end: i64, millis: Option<i64> },
    /// No record from the position on was delivered and left.
    Clean { millis: Option<i64> },
    /// The metadata is missing, or of another program.
    Unknown,
}

impl Mark {
    /// Reads metadata.
    pub(super) fn parse(metadata: &str) -> Self {
        let mut parts = metadata.split(' ');
        let millis = |text: &str| match text {
            "-" => Some(None),
            text => text.parse().ok().map(Some),
        };
        let mark = match (parts.next(), parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some("hapax1"), Some("open"), Some(end), Some(at), None) => {
                end.parse().ok().and_then(|end| millis(at).map(|millis| Self::Open { end, millis }))
            }
            (Some("hapax1"), Some("clean"), Some(at), None, None) => {
                millis(at).map(|millis| Self::Clean { millis })
            }
            _ => None,
        };
        mark.unwrap_or(Self::Unknown)
    }

    /// Returns the time of the record before the position, in milliseconds, if it is known.
    pub(super) const fn millis(self) -> Option<i64> {
        match self {
            Self::Open { millis, .. } | Self::Clean { millis } => millis,
            Self::Unknown => None,
        }
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |millis: &Option<i64>| millis.map_or("-".to_owned(), |it| it.to_string());
        match self {
            Self::Open { end, millis } => write!(f, "hapax1 open {end} {}", time(millis)),
            Self::Clean { millis } => write!(f, "hapax1 clean {}", time(millis)),
            Self::Unknown => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_as_they_were_written() {
        for mark in [
            Mark::Open { end: 17, millis: None },
            Mark::Open { end: 17, millis: Some(1_790_000_000_000) },
            Mark::Clean { millis: None },
            Mark::Clean { millis: Some(-1) },
        ] {
            assert_eq!(Mark::parse(&mark.to_string()), mark);
        }
        for text in
            ["", "hapax1", "hapax1 open 1", "hapax1 clean", "hapax1 open x -", "hapax2 clean -"]
        {
            assert_eq!(Mark::parse(text), Mark::Unknown, "{text}");
        }
    }
}

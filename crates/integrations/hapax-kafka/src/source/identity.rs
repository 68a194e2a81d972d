//! The identity of a log, by a record that was handled.
//!
//! The client returns neither the id of a topic nor whether it was created again. So the record before the next one
//! is compared with what is known of it: timestamp and checksum.

use std::fmt;

use hapax_core::Fingerprint;
use hapax_messages::Message;

/// Bytes of a payload that the checksum covers, beside its length: the polling thread computes it.
const HASHED: usize = 4096;

/// Known properties of a record. [`Display`](fmt::Display) and [`parse`](Self::parse) give and read the text in the metadata
/// of a commit: the timestamp in milliseconds, then the checksum in hexadecimal digits, unless it is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct RecordIdentity {
    /// In milliseconds; -1 if the record has none.
    pub(super) timestamp_ms: i64,
    /// Digest of key, headers, and length and beginning of the payload. `None` if an earlier release has stored the identity, or it is of a position in a
    /// database.
    pub(super) checksum: Option<u64>,
}

impl RecordIdentity {
    /// Returns the identity of a message with this timestamp.
    pub(super) fn of(message: &Message, timestamp_ms: i64) -> Self {
        let mut digest = Fingerprint::builder("hapax 1 kafka record");
        digest.field(message.key.as_deref().unwrap_or_default().as_bytes());
        for (name, value) in &message.headers {
            digest.field(name.as_bytes());
            digest.field(value);
        }
        let payload = &message.payload;
        digest
            .field(&(payload.len() as u64).to_be_bytes())
            .field(&payload[..payload.len().min(HASHED)]);
        let digest = digest.finish();
        let checksum = digest.as_bytes().first_chunk().copied().map(u64::from_be_bytes);
        Self { timestamp_ms, checksum }
    }

    /// Parses the parts of a text.
    pub(super) fn parse(timestamp_ms: &str, checksum: Option<&str>) -> Option<Self> {
        let checksum = checksum.map(|digits| u64::from_str_radix(digits, 16)).transpose().ok()?;
        Some(Self { timestamp_ms: timestamp_ms.parse().ok()?, checksum })
    }

    /// Returns whether both may be of one record: what is known of both is equal.
    fn matches(self, other: Self) -> bool {
        let is_other = self.checksum.zip(other.checksum).is_some_and(|(one, other)| one != other);
        self.timestamp_ms == other.timestamp_ms && !is_other
    }
}

impl fmt::Display for RecordIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.timestamp_ms)?;
        self.checksum.map_or(Ok(()), |checksum| write!(f, " {checksum:016x}"))
    }
}

/// The last record that was handled or received, by which a topic that was created again is detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TopicCheck {
    pub(super) offset: i64,
    pub(super) expected: RecordIdentity,
}

impl TopicCheck {
    /// Compares the first record that is fetched. Returns no error if the log lacks the expected record, which may have
    /// been compacted.
    pub(super) fn check(self, offset: i64, found: RecordIdentity) -> Result<(), Recreated> {
        match self.offset != offset || self.expected.matches(found) {
            true => Ok(()),
            false => Err(Recreated { offset, expected: self.expected, found }),
        }
    }
}

/// Error: at the offset of a record that was handled there is another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Recreated {
    pub(super) offset: i64,
    pub(super) expected: RecordIdentity,
    pub(super) found: RecordIdentity,
}

impl fmt::Display for Recreated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, expected, found } = self;
        let what = match expected.timestamp_ms == found.timestamp_ms {
            true => "another key, header or payload".to_owned(),
            false => format!("the timestamp {}", found.timestamp_ms),
        };
        write!(
            f,
            "expected the record {offset} with the timestamp {} that was received before, found one with {what}: the \
             topic was created again",
            expected.timestamp_ms
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_that_differ_in_a_part_have_other_identities() {
        let message = |key: &str, header: &str, payload: &'static str| {
            let message = Message::new("kafka://orders", payload).with_key(key);
            RecordIdentity::of(&message.with_header("message-id", header.to_owned()), 7)
        };
        let one = message("k", "1", "x");
        assert!(one.matches(message("k", "1", "x")));
        for other in [message("l", "1", "x"), message("k", "2", "x"), message("k", "1", "y")] {
            assert!(!one.matches(other), "{other:?}");
            let check = TopicCheck { offset: 4, expected: one };
            let error = check.check(4, other).unwrap_err().to_string();
            assert!(error.contains("found one with another key, header or payload"), "{error}");
            assert_eq!(check.check(5, other), Ok(()), "the record 4 was compacted");
        }
        assert!(!one.matches(RecordIdentity { timestamp_ms: 8, ..one }));
        assert!(one.matches(RecordIdentity { checksum: None, ..one }), "of an earlier release");
    }
}

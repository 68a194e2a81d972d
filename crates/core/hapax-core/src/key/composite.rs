//! Composite keys: identifiers of an operation and a time bucket.

use std::time::Duration;

use super::{Key, NaturalKey};
use crate::clock::Timestamp;

/// The key of an operation in the current time bucket, and its key in the bucket before.
///
/// For clients that cannot store a key: the same request of the same user within a minute, for
/// example, counts as a retry.
///
/// Time is divided into buckets of fixed length. Limits:
///
/// - Two operations that are equal on purpose are one within a bucket: the second is answered with
///   the first one's outcome.
/// - A retry in the next bucket is *new* under [`current`](Self::current) alone. Look for a record
///   of [`previous`](Self::previous) first, as `Idempotency::choose` does. A retry is then
///   recognised for at least one bucket: until the end of the bucket after that of its key,
///   whenever the operation was executed. A repetition on purpose is safe only after two buckets.
/// - Make the keys and choose anew for every call, retries included. A key that the client stored
///   instead executes again if its call failed retryably and another key was chosen since, which is
///   possible from one lease after the failure.
/// - No choice recognises a retry while the first request, from the bucket before, has not reached
///   the store.
/// - The time is that of the machine that makes the key. If the clocks of these machines differ by
///   more than a bucket, none of this holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompositeKey {
    current: Key,
    previous: Key,
}

impl CompositeKey {
    pub(super) fn at(
        now: Timestamp,
        parts: &NaturalKey,
        bucket: Duration,
    ) -> Result<Self, BucketError> {
        let micros = u64::try_from(bucket.as_micros()).ok().filter(|micros| *micros > 0);
        let micros = micros.ok_or(BucketError)?;
        let index = now.as_micros() / micros;
        let key = |index: u64| {
            let mut hasher = parts.hasher("hapax 1 composite key");
            hasher.update(&micros.to_be_bytes());
            hasher.update(&index.to_be_bytes());
            Key::hash(&hasher)
        };
        // No request is made in the bucket before the first one.
        Ok(Self { current: key(index), previous: key(index.wrapping_sub(1)) })
    }

    /// Returns the key of the current bucket.
    #[must_use]
    pub const fn current(&self) -> &Key {
        &self.current
    }

    /// Returns the key that the same operation had in the bucket before.
    #[must_use]
    pub const fn previous(&self) -> &Key {
        &self.previous
    }

    /// Returns both keys, the previous one first: the order in which to look for a record.
    #[must_use]
    pub const fn candidates(&self) -> [&Key; 2] {
        [&self.previous, &self.current]
    }
}

/// Error for a time bucket shorter than a microsecond or longer than the clock can count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a composite key needs a time bucket from one microsecond to half a million years")]
pub struct BucketError;

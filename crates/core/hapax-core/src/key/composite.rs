//! Keys from what is done and about when.

use std::time::Duration;

use super::{Key, NaturalKey};
use crate::clock::Timestamp;

/// A key of an operation and the stretch of time it was asked for in; and the one that it has if it
/// was asked for just before.
///
/// For clients that cannot keep a key: the same user asking for the same thing within a minute is
/// taken to retry.
///
/// Risks. Time is cut in fixed stretches. Whoever means it twice within one gets the first answer
/// twice: a defect if that is legitimate. A retry that falls into the next stretch is *new* under
/// [`current`](Self::current) alone: ask about [`previous`](Self::previous) first, as
/// `Idempotency::choose` does; asking twice on purpose is then safe only after two stretches, and a
/// retry is recognised for at least one: until the stretch after that of its key has ended, whenever
/// it was executed. Make it and choose anew for every call, retries too. A key that was kept executes
/// again, should its call have failed retryably and another key have been chosen since: that is so a
/// lease after such a failure. What no question settles is a retry while the first, from the stretch
/// before, has not reached the store yet. Time is that of whoever makes the key: where machines make
/// it whose clocks differ by more than a stretch, none of this holds.
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
        // The stretch before the first one is one that nobody asks in.
        Ok(Self { current: key(index), previous: key(index.wrapping_sub(1)) })
    }

    /// The key of the stretch of time that it is now.
    #[must_use]
    pub const fn current(&self) -> &Key {
        &self.current
    }

    /// The key that the same operation had in the stretch before.
    #[must_use]
    pub const fn previous(&self) -> &Key {
        &self.previous
    }

    /// Both, the earlier one first: the order in which to ask.
    #[must_use]
    pub const fn candidates(&self) -> [&Key; 2] {
        [&self.previous, &self.current]
    }
}

/// A stretch of time of less than a microsecond, or of more than there will be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a composite key needs a stretch of time: from a microsecond to half a million years")]
pub struct BucketError;

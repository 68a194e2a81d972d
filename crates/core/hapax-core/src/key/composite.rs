//! Keys of an operation and a time window.

use std::time::Duration;

use super::{Key, NaturalKey};
use crate::clock::Timestamp;

/// A key of an operation and the time window of its request; and the key that it would have in the
/// window before.
///
/// For clients that cannot store a key: the same user with the same request within a minute counts
/// as a retry.
///
/// Risks. Windows are fixed. Two requests within one window are one operation, which is a defect if
/// both are meant. A retry that falls into the next window is *new* under
/// [`current`](Self::current) alone: look for [`previous`](Self::previous) first, as
/// `Idempotency::choose` does. A second operation is then safe only after two windows, and a retry
/// is recognised for at least one: until the end of the window after that of its key, whenever it
/// was executed. Create and choose the key anew for every call, retries included. A key that was
/// stored executes again if its call failed retryably and another key was chosen since; a released
/// record stays for a lease. A retry is not recognised while the first request, from the window
/// before, has not reached the store yet. The time is that of the machine that creates the key:
/// none of this holds if clocks differ by more than a window.
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
        // No request has the window before the first one.
        Ok(Self { current: key(index), previous: key(index.wrapping_sub(1)) })
    }

    /// Returns the key of the present window.
    #[must_use]
    pub const fn current(&self) -> &Key {
        &self.current
    }

    /// Returns the key of the window before.
    #[must_use]
    pub const fn previous(&self) -> &Key {
        &self.previous
    }

    /// Returns both, the earlier one first: the order in which to look for them.
    #[must_use]
    pub const fn candidates(&self) -> [&Key; 2] {
        [&self.previous, &self.current]
    }
}

/// A time window of less than a microsecond, or longer than time is represented.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a composite key needs a time bucket from one microsecond to half a million years")]
pub struct BucketError;

//! An estimate of the authority's clock, without a call to it.
//!
//! It is the time in the authority's last answer plus the time that has passed on the monotonic
//! clock since. The authority read its clock at some moment between the call and its return, so
//! there are two estimates: the time is not before the one and not after the other, provided that
//! the two clocks run at the same rate.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax_core::Timestamp;
use tokio::time::Instant;

/// Age from which the last answer is not used any more: clocks drift, and step.
const STALE: Duration = Duration::from_secs(600);

/// The last answer of the authority.
#[derive(Debug, Default)]
pub(crate) struct ClockEstimate(Mutex<Option<ClockSample>>);

#[derive(Clone, Copy, Debug)]
struct ClockSample {
    said: Timestamp,
    called: Instant,
    returned: Instant,
}

/// The range in which the authority's time is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TimeRange {
    /// The time in the authority's last answer. The time now is not earlier, whatever the rates of
    /// the clocks.
    pub(crate) said: Timestamp,
    pub(crate) earliest: Timestamp,
    pub(crate) latest: Timestamp,
}

impl ClockEstimate {
    /// Records the time in an answer of the authority that has just arrived, for a call made at
    /// `called`.
    pub(crate) fn answered(&self, called: Instant, said: Timestamp) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Of answers that overlap, the one called last gives the narrowest range.
        if last.is_none_or(|last| last.called <= called) {
            *last = Some(ClockSample { said, called, returned: Instant::now() });
        }
    }

    pub(crate) fn now(&self) -> Option<TimeRange> {
        let last = (*self.0.lock().unwrap_or_else(PoisonError::into_inner))?;
        let since = last.returned.elapsed();
        (since < STALE).then(|| TimeRange {
            said: last.said,
            earliest: last.said.after(since),
            latest: last.said.after(last.called.elapsed()),
        })
    }
}

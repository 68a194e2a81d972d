//! What time it is at the authority, without asking.
//!
//! Its last answer said; since then as much passed as on our monotonic clock. That answer was made
//! somewhere between the call and its return, so there are two guesses: the time is not before one
//! and not after the other, as far as the two clocks run alike.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax_core::Timestamp;
use tokio::time::Instant;

/// A guess is worth nothing after so long without an answer: clocks drift, and step.
const STALE: Duration = Duration::from_secs(600);

/// The last answer.
#[derive(Debug, Default)]
pub(crate) struct ClockEstimate(Mutex<Option<ClockSample>>);

#[derive(Clone, Copy, Debug)]
struct ClockSample {
    said: Timestamp,
    called: Instant,
    returned: Instant,
}

/// Between which moments it is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TimeRange {
    /// What the authority said last: it is that late in any case, however the clocks run.
    pub(crate) said: Timestamp,
    pub(crate) earliest: Timestamp,
    pub(crate) latest: Timestamp,
}

impl ClockEstimate {
    /// A call at `called` was answered just now, and the authority said what time it was.
    pub(crate) fn answered(&self, called: Instant, said: Timestamp) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Of answers that overlap the one that was called last says most.
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

//! Pauses of the writer after a failure.

use std::time::Duration;

use hapax_core::Timestamp;

/// Pauses between attempts to reopen the database, or to write on a full disk: doubled from the
/// first to the last.
const FIRST: Duration = Duration::from_millis(100);
pub(crate) const LONGEST: Duration = Duration::from_secs(5);
/// Number of requests rejected meanwhile that end a pause of the first length; in proportion for
/// longer ones.
const REJECTIONS: usize = 1_000;

/// A pause after a failure. It is measured by the clock and by the requests rejected meanwhile,
/// because a clock may be set back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    pub(crate) since: Timestamp,
    pub(crate) length: Duration,
    pub(crate) rejected: usize,
}

impl Pause {
    /// Creates the first pause.
    pub(crate) const fn new(since: Timestamp) -> Self {
        Self { since, length: FIRST, rejected: 0 }
    }

    /// Returns the pause after another failure.
    pub(crate) fn longer(self, now: Timestamp) -> Self {
        Self { length: (self.length * 2).min(LONGEST), ..Self::new(now) }
    }

    pub(crate) fn is_over(&self, now: Timestamp) -> bool {
        let times = (self.length.as_millis() / FIRST.as_millis()) as usize;
        now.since(self.since) >= self.length || self.rejected >= REJECTIONS * times
    }
}

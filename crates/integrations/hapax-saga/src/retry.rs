//! How often a step is tried.

use std::time::Duration;

use hapax_core::Backoff;

/// How often, how long and at which intervals a step is tried, and how long a try may take.
///
/// The default: 20 tries within an hour, each of up to 30 s, with pauses of up to 0.5 s after the
/// first, doubled after each further one, up to 5 minutes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct StepRetry {
    pub(crate) tries: u32,
    pub(crate) span: Duration,
    pub(crate) timeout: Duration,
    pub(crate) backoff: Backoff,
}

impl Default for StepRetry {
    fn default() -> Self {
        Self {
            tries: 20,
            span: Duration::from_secs(60 * 60),
            timeout: Duration::from_secs(30),
            backoff: Backoff::new(Duration::from_millis(500), Duration::from_secs(5 * 60)),
        }
    }
}

impl StepRetry {
    /// Returns a retry for a time, counted from the first try, however many tries that are.
    pub fn within(span: Duration) -> Self {
        Self { tries: u32::MAX, span, ..Self::default() }
    }

    /// Sets the greatest number of tries. A definition with none is rejected.
    pub fn tries(mut self, tries: u32) -> Self {
        self.tries = tries;
        self
    }

    /// Sets the time after which a try is given up: whether it happened is then unknown. Above zero. It passes
    /// also while the process is frozen or its machine suspended.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the bound of the first pause between tries, and the bound of all.
    pub fn pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.backoff = Backoff::new(first, longest);
        self
    }
}

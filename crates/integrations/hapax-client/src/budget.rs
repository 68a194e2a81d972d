//! The budget of retries of a server.

use std::time::Duration;

use hapax_core::{Backoff, SystemEntropy};
use tokio::time::Instant;

/// Tokens of a full budget.
const TOKENS: u32 = 500;

/// Tokens that a retry takes, and a response that ends its operation returns.
const RETRY: u32 = 5;

/// Interval of retries while the budget is empty.
const TRICKLE: Duration = Duration::from_secs(1);

/// The longest pause of a resumed operation that was denied.
pub(crate) const LONGEST: Duration = Duration::from_secs(5 * 60);

/// Tries of resumed operations at once: with a server whose last try had a response, with one of which
/// none has ended, and with one whose last try had no response.
const RESPONDING: usize = 8;
const UNTRIED: usize = 2;
const FAILING: usize = 1;

/// Intervals at which denied operations of a server that answers, and of another one, are due again.
const SOON: Duration = Duration::from_millis(5);
const LATER: Duration = Duration::from_secs(1);

/// A budget of retries. A server that sends no final response gets 100 of them and then one a second, however
/// many operations wait. First tries take nothing.
#[derive(Debug)]
pub(crate) struct Budget {
    tokens: u32,
    /// Time of the next retry while the budget is empty.
    next: Option<Instant>,
    /// Whether the last try had no response; `None` before the first one has ended.
    failing: Option<bool>,
    /// Tries of resumed operations in progress.
    resumed: usize,
    /// Time at which the last one of the denied operations is due again.
    last_due: Option<Instant>,
}

impl Default for Budget {
    fn default() -> Self {
        Self { tokens: TOKENS, next: None, failing: None, resumed: 0, last_due: None }
    }
}

impl Budget {
    /// Takes the tokens of a retry. The error is the time of the next one.
    pub(crate) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        match self.next {
            _ if self.tokens >= RETRY => self.tokens -= RETRY,
            Some(next) if now < next => return Err(next),
            _ => self.next = Some(now + TRICKLE),
        }
        Ok(())
    }

    /// Returns the tokens of a retry, for a response, or because it was not sent.
    pub(crate) fn put_back(&mut self) {
        self.tokens = (self.tokens + RETRY).min(TOKENS);
    }

    /// Returns whether the last try had no response.
    pub(crate) fn is_failing(&self) -> bool {
        self.failing == Some(true)
    }

    /// Takes the end of a try.
    pub(crate) fn ended(&mut self, failed: bool) {
        self.failing = Some(failed);
    }

    /// Begins a try of a resumed operation, if few of them are in progress. A server that fails gets one
    /// only if a retry would be admitted.
    pub(crate) fn begin_resumed(&mut self, now: Instant) -> bool {
        let limit = match self.failing {
            Some(false) => RESPONDING,
            None => UNTRIED,
            Some(true) if self.tokens < RETRY && self.next.is_some_and(|next| now < next) => 0,
            Some(true) => FAILING,
        };
        let begins = self.resumed < limit;
        self.resumed += usize::from(begins);
        begins
    }

    /// Ends a try of a resumed operation.
    pub(crate) fn end_resumed(&mut self) {
        self.resumed = self.resumed.saturating_sub(1);
    }

    /// Returns the pause of a resumed operation that was denied: it grows with those that wait, which are
    /// due one after the other.
    pub(crate) fn pause(&mut self, now: Instant) -> Duration {
        let interval = if self.failing == Some(false) { SOON } else { LATER };
        let due = self.last_due.map_or(now, |last| last.max(now)) + interval;
        if due <= now + LONGEST {
            self.last_due = Some(due);
            return due - now;
        }
        let half = LONGEST / 2;
        half + Backoff::new(half, half).pause(1, &SystemEntropy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_server_gets_a_hundred_retries_and_one_a_second() {
        let (mut budget, begun) = (Budget::default(), Instant::now());
        let mut taken = 0;
        for tenth in 0..6_000_u32 {
            let now = begun + Duration::from_millis(100) * tenth;
            taken += (0..100).filter(|_| budget.take(now).is_ok()).count();
        }
        assert_eq!(taken, 100 + 600);
    }

    #[tokio::test(start_paused = true)]
    async fn responses_return_tokens_up_to_a_full_budget() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        while budget.take(now).is_ok() {}
        budget.put_back();
        assert_eq!(budget.take(now), Ok(()));
        assert_eq!(budget.take(now), Err(now + TRICKLE));
        (0..1_000).for_each(|_| budget.put_back());
        let retries = (0..1_000).filter(|_| budget.take(now).is_ok()).count();
        assert_eq!(retries, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_fails_gets_one_resumed_try_at_once() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        let begun = |budget: &mut Budget, now| {
            let begun = (0..100).filter(|_| budget.begin_resumed(now)).count();
            (0..begun).for_each(|_| budget.end_resumed());
            begun
        };
        assert_eq!(begun(&mut budget, now), UNTRIED);
        budget.ended(true);
        assert_eq!(begun(&mut budget, now), FAILING);
        while budget.take(now).is_ok() {}
        assert_eq!(begun(&mut budget, now), 0);
        assert_eq!(begun(&mut budget, now + TRICKLE), FAILING);
        budget.ended(false);
        assert_eq!(begun(&mut budget, now), RESPONDING);
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_of_a_denied_operation_grows_with_those_that_wait_and_falls_with_time() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        let pauses: Vec<_> = (0..1_000).map(|_| budget.pause(now)).collect();
        assert_eq!(pauses[..2], [LATER, LATER * 2]);
        assert!(pauses[300..].iter().all(|it| (LONGEST / 2..=LONGEST).contains(it)));
        assert_eq!(budget.pause(now + LONGEST), LATER);
        budget.ended(false);
        assert_eq!(budget.pause(now + LONGEST * 2), SOON);
    }
}

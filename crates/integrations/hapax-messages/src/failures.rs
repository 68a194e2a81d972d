//! The log of failed handlers.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::handler::MessageFailure;
use crate::id::MessageId;

/// Time between two warnings of a consumer.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Logs failures of handlers: one as a warning each minute, since in an outage all messages fail, and
/// the others at the level `debug`. A rejected message is no warning here: its dead letter is one, and has
/// the error, which may quote a response or a payload.
#[derive(Debug, Default)]
pub(crate) struct FailureLog(Mutex<Logged>);

#[derive(Debug, Default)]
struct Logged {
    warned_at: Option<Instant>,
    /// Number of failures since then.
    others: u64,
}

impl FailureLog {
    pub(crate) fn note(
        &self,
        consumer: &str,
        id: &MessageId,
        attempt: u32,
        failure: &MessageFailure,
    ) {
        let error = failure.text();
        let is_logged_elsewhere =
            matches!(failure, MessageFailure::Reject { .. } | MessageFailure::Withdraw { .. });
        let due = if is_logged_elsewhere { None } else { self.count() };
        match due {
            Some(others) => tracing::warn!(
                consumer,
                ?id,
                attempt,
                error,
                others,
                "a handler failed; `others` have failed since the last such warning"
            ),
            None => tracing::debug!(consumer, ?id, attempt, error, "a handler failed"),
        }
    }

    /// Counts a failure. Returns the number of earlier ones without a warning, if one is due.
    fn count(&self) -> Option<u64> {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.warned_at.is_some_and(|at| at.elapsed() < WARN_EVERY) {
            logged.others += 1;
            return None;
        }
        logged.warned_at = Some(Instant::now());
        Some(std::mem::take(&mut logged.others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_failure_a_minute_is_a_warning_which_counts_the_others() {
        let log = FailureLog::default();
        assert_eq!([log.count(), log.count(), log.count()], [Some(0), None, None]);
        tokio::time::advance(WARN_EVERY).await;
        assert_eq!([log.count(), log.count()], [Some(2), None]);
    }
}

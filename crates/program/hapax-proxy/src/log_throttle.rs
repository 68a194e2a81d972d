//! Limit of log lines that many requests would repeat.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time between two lines.
const EVERY: Duration = Duration::from_secs(60);

/// Lets one log line through a minute and counts the others.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    left_out: u64,
}

impl LogThrottle {
    /// Returns how many lines were left out since the last one, if another one is due now.
    pub(crate) fn due(&self) -> Option<u64> {
        // Nothing here panics half way through a change.
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if lines.last.is_some_and(|last| now - last < EVERY) {
            lines.left_out += 1;
            return None;
        }
        lines.last = Some(now);
        Some(std::mem::take(&mut lines.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_a_minute_is_due_with_the_number_left_out() {
        let seldom = LogThrottle::default();
        assert_eq!([seldom.due(), seldom.due(), seldom.due()], [Some(0), None, None]);
        tokio::time::advance(EVERY).await;
        assert_eq!([seldom.due(), seldom.due()], [Some(2), None]);
        tokio::time::advance(EVERY).await;
        assert_eq!(seldom.due(), Some(1));
    }
}

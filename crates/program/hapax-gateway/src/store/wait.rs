//! Opening of a store whose server may be unreachable at start.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{OpenStore, StoreOpenError, StoreOpener, seconds};

/// Pauses between attempts: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Interval of log lines during one wait.
const LOG_EVERY: Duration = Duration::from_secs(5);

impl StoreOpener {
    /// Opens the store. While its server is unreachable or starting up, it tries again for at most
    /// `wait`; other errors are returned at once. Log lines name `listen`, where clients wait
    /// meanwhile.
    ///
    /// Dropping the future closes the connection of the current attempt.
    ///
    /// # Errors
    /// [`StoreOpenError`]; [`TimedOut`](StoreOpenError::TimedOut) after a wait.
    pub(crate) async fn open_within(
        &self,
        wait: Duration,
        listen: SocketAddr,
    ) -> Result<OpenStore, StoreOpenError> {
        let begun = Instant::now();
        let mut logged: Option<Instant> = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.open().await {
                Ok(opened) => {
                    if logged.is_some() {
                        tracing::info!(waited = seconds(begun.elapsed()), "the store was reached");
                    }
                    return Ok(opened);
                }
                Err(error) => error,
            };
            let waited = begun.elapsed();
            if !error.is_unreachable() || wait.is_zero() {
                return Err(error);
            }
            if waited >= wait {
                return Err(StoreOpenError::TimedOut { waited, source: Box::new(error) });
            }
            if logged.is_none_or(|logged| logged.elapsed() >= LOG_EVERY) {
                logged = Some(Instant::now());
                tracing::warn!(
                    %error,
                    %listen,
                    admin = self.admin.map(tracing::field::display),
                    waited = seconds(waited),
                    at_most = seconds(wait),
                    "the store was not reached: waiting for it"
                );
            }
            // The last attempt is made at the end of the waiting time.
            sleep(pause.min(wait - waited)).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

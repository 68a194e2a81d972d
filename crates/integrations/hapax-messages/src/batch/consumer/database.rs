//! The database of a batch consumer: whether it answers, and its old ids.

use std::convert::Infallible;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::{AFTER_ERROR, BatchState};
use crate::batch::BatchError;
use crate::handler::describe;

/// Ids that one purge removes, the pause before the next one, and that after a purge which found
/// fewer.
const PURGE: u32 = 10_000;
const NEXT_PURGE: Duration = Duration::from_secs(1);
const PURGE_EVERY: Duration = Duration::from_secs(60);

impl BatchState {
    /// Removes ids whose retention has ended. Does not end.
    pub(super) async fn purge(&self) -> Infallible {
        loop {
            let purged = self.inbox.purge(PURGE).await;
            let is_rest = purged.as_ref().is_ok_and(|removed| *removed >= u64::from(PURGE));
            match purged {
                Ok(0) => {}
                Ok(removed) => tracing::debug!(
                    consumer = self.inbox.consumer(),
                    removed,
                    "ids whose retention has ended were removed"
                ),
                // Messages are handled all the same, but the table grows.
                Err(error) => tracing::warn!(
                    consumer = self.inbox.consumer(),
                    ?error,
                    "ids whose retention has ended were not removed, and the table of ids grows: run the SQL of \
                     `hapax sql --service-role NAME`, if a privilege is missing; it is tried \
                     again in a minute"
                ),
            }
            sleep(if is_rest { NEXT_PURGE } else { PURGE_EVERY }).await;
        }
    }

    /// Waits until the database answers. Checks it if no transaction does: messages whose deliveries have ended
    /// are dropped without another one. A check must not contradict transactions that still fail.
    pub(super) async fn until_database_is_up(&self, database: &mut watch::Receiver<bool>) {
        while !*database.borrow_and_update() {
            tokio::select! {
                // The sender is in `self`.
                _ = database.changed() => {}
                () = sleep(AFTER_ERROR) => {
                    if self.called_at().elapsed() > 2 * AFTER_ERROR {
                        self.note_database(&self.inbox.check().await);
                    }
                }
            }
        }
    }

    fn called_at(&self) -> MutexGuard<'_, Instant> {
        self.database_called_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores whether the database answers, from the result of a call.
    pub(super) fn note_database<T>(&self, result: &Result<T, BatchError>) {
        *self.called_at() = Instant::now();
        let (is_up, error) = match result {
            Err(BatchError::Unavailable(error)) => (false, describe(&**error)),
            _ => (true, String::new()),
        };
        self.database_is_up.send_if_modified(|was_up| {
            let changed = *was_up != is_up;
            if changed && is_up {
                tracing::info!(consumer = self.inbox.consumer(), "messages are received again");
            } else if changed {
                tracing::warn!(
                    consumer = self.inbox.consumer(),
                    error,
                    "the database is unavailable: no messages are received, and unacknowledged \
                     ones are held"
                );
            }
            *was_up = is_up;
            changed
        });
    }
}

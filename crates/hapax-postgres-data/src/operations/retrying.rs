//! Load, change, update; and again.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::time::{Instant, sleep, timeout_at};

use super::{Operations, Seen, seen};
use crate::error::{BoxError, DataError, Failure, ItemError};
use crate::executor::Executor;
use crate::retry::Retry;
use crate::versioned::{Loaded, version};

/// What became of an operation that was retried.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Retried<R> {
    /// It was applied, by this call.
    Applied {
        /// The version that the row has now.
        version: u64,
        /// What was written.
        row: R,
    },
    /// It was applied before, or by an attempt of this call whose reply was lost.
    AlreadyApplied {
        /// The version that the row had after that.
        version: u64,
    },
    /// There is no such row.
    NotFound,
}

/// Why an operation that was retried has no outcome.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RetryError<E> {
    /// The closure said no. Nothing was written.
    #[error("the change was declined")]
    Declined(#[source] E),
    /// Attempts or time are used up. The same call again, with the same operation, is safe.
    #[error("no success in {attempts} attempts")]
    GaveUp {
        /// How many were made.
        attempts: u32,
        /// Whether one of them may have been carried out, or may yet be. If not, nothing was written.
        in_doubt: bool,
        /// What hindered the last one; nothing if that was a conflict.
        #[source]
        source: Option<BoxError>,
    },
    /// What another attempt would not mend.
    #[error(transparent)]
    Data(DataError),
}

/// What is known so far.
#[derive(Debug, Default)]
struct Progress {
    attempts: u32,
    /// The version that an update expects of which nobody knows what became.
    in_doubt: Option<u64>,
    source: Option<BoxError>,
}

impl Progress {
    fn hindered(&mut self, by: impl Into<BoxError>) {
        self.source = Some(by.into());
    }

    fn give_up<E>(self) -> RetryError<E> {
        let Self { attempts, in_doubt, source } = self;
        RetryError::GaveUp { attempts, in_doubt: in_doubt.is_some(), source }
    }

    fn failed<E>(&mut self, failure: Failure) -> Result<(), RetryError<E>> {
        match failure.into_error() {
            error @ (DataError::Again(_) | DataError::Lost(_)) => {
                self.hindered(error);
                Ok(())
            }
            error => Err(RetryError::Data(error)),
        }
    }
}

impl Operations {
    /// Loads the row of `key`, has `change` make what it is to be, and updates it, under the id
    /// `operation`; from the beginning where another update came in between, or a connection is
    /// lost, within the limits of `retry`.
    ///
    /// `change` is pure: it is called once an attempt, and what it returns for a row depends on that
    /// row alone. It leaves the key as it is.
    ///
    /// `connect` makes a connection, or takes one from a pool: one at first, and another after one was
    /// lost. It must be outside of a transaction.
    ///
    /// May be dropped at any await: an update under way is carried out on a task of its own,
    /// which needs a runtime of tokio's.
    ///
    /// # Errors
    /// [`RetryError`].
    pub async fn retrying<K, R, E, C, X, Connecting>(
        &self,
        connect: impl Fn() -> Connecting,
        retry: &Retry,
        operation: &str,
        key: &K,
        mut change: impl FnMut(R) -> Result<R, E>,
    ) -> Result<Retried<R>, RetryError<E>>
    where
        K: Serialize + Sync,
        R: Serialize + DeserializeOwned + Send + Sync,
        C: Executor + 'static,
        X: Into<BoxError>,
        Connecting: Future<Output = Result<C, X>>,
    {
        let deadline = Instant::now() + retry.within();
        let (id, wanted) = (self.id(operation), self.rows.key(key).map_err(RetryError::Data)?);
        let mut progress = Progress::default();
        let mut connection: Option<C> = None;
        while progress.attempts < retry.most_attempts() {
            if progress.attempts > 0 {
                let until = Instant::now() + retry.pause(progress.attempts);
                if until >= deadline {
                    break;
                }
                sleep(until - Instant::now()).await;
            }
            progress.attempts += 1;

            let mut executor = match connection.take() {
                Some(executor) => executor,
                None => match timeout_at(deadline, connect()).await {
                    Ok(Ok(executor)) => executor,
                    Ok(Err(error)) => {
                        progress.hindered(error);
                        continue;
                    }
                    Err(_) => break,
                },
            };
            // Dropped when it takes too long: reading changes nothing.
            let looking = async {
                self.verified.once(&mut executor).await?;
                let rows = executor.query(&self.statements.look, &[&wanted, &id]).await;
                seen(&rows.map_err(Failure::into_error)?, operation)
            };
            let Loaded { version: expected, row } = match timeout_at(deadline, looking).await {
                Ok(Ok(Seen::Noted(version))) => return Ok(Retried::AlreadyApplied { version }),
                Ok(Ok(Seen::Nothing)) => return Ok(Retried::NotFound),
                Ok(Ok(Seen::There(loaded))) => loaded,
                Ok(Err(error @ (DataError::Lost(_) | DataError::Again(_)))) => {
                    progress.hindered(error);
                    continue;
                }
                Ok(Err(error)) => return Err(RetryError::Data(error)),
                Err(_) => break,
            };
            // Seen in one view: the row has moved on, and not by this operation. What expects the
            // version before will not find it.
            progress.in_doubt = progress.in_doubt.filter(|in_doubt| *in_doubt == expected);

            let before = self.fields(&row).map_err(RetryError::Data)?;
            let changed = change(row).map_err(RetryError::Declined)?;
            let item = self.changed(&changed, &before, expected).map_err(RetryError::Data)?;

            // On a task of its own: the statement commits, and who drops this future drops neither
            // it nor its connection half-way.
            let (statements, id) = (Arc::clone(&self.statements), id.clone());
            let updating = tokio::spawn(async move {
                let rows = executor.query(&statements.update, &[&item, &id]).await;
                (executor, rows)
            });
            progress.source = None;
            match timeout_at(deadline, updating).await {
                Ok(Ok((executor, Ok(rows)))) => {
                    connection = Some(executor);
                    if let Some(version) = version(&rows).map_err(RetryError::Data)? {
                        return Ok(Retried::Applied { version, row: changed });
                    }
                }
                Ok(Ok((executor, Err(failure @ Failure::Refused(_))))) => {
                    connection = Some(executor);
                    progress.failed(failure)?;
                }
                Ok(Ok((_, Err(failure)))) => {
                    progress.in_doubt = Some(expected);
                    progress.failed(failure)?;
                }
                // The runtime ends.
                Ok(Err(ended)) => {
                    progress.in_doubt = Some(expected);
                    progress.hindered(ended);
                    break;
                }
                Err(_) => {
                    progress.in_doubt = Some(expected);
                    break;
                }
            }
        }
        Err(progress.give_up())
    }

    fn fields<R: Serialize>(&self, row: &R) -> Result<Map<String, Value>, DataError> {
        self.rows.shape.fields(row).map_err(|problem| problem.at(0))
    }

    /// What the closure returned, as a parameter.
    fn changed<R: Serialize>(
        &self,
        row: &R,
        before: &Map<String, Value>,
        expected: u64,
    ) -> Result<String, DataError> {
        let fields = self.fields(row)?;
        let mut key = self.rows.layout.key.iter();
        if !key.all(|key| before.get(&key.name) == fields.get(&key.name)) {
            return Err(ItemError::KeyChanged.at(0));
        }
        self.rows.item(fields, expected)
    }
}

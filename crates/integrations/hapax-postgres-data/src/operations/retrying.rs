//! Updates that are retried after conflicts and lost replies.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{Seen, UpdateId, UpdateLog, seen, statements};
use crate::error::{DataError, DriverError, ItemError, StatementError};
use crate::executor::{Executor, Rows, TextQueries as _};
use crate::items::Fields;
use crate::layout::Column;
use crate::retry::Retry;
use crate::versioned::{VersionedRow, made, sent};

/// Result of an operation that was retried.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Retried<R> {
    /// The operation was applied, by this call.
    Applied {
        /// The version that the row has now.
        version: u64,
        /// The result of the change.
        row: R,
    },
    /// The operation was applied before, or by an attempt of this call whose reply was lost.
    AlreadyApplied {
        /// The version that the row had after that.
        version: u64,
    },
    /// There is no such row.
    NotFound,
}

/// Errors of [`UpdateLog::retrying`].
///
/// Each variant states in `outcome_unknown` whether an attempt whose reply was lost may have been
/// executed, or may still be. If so, only the same call with the same id can determine the result;
/// another id might apply the change twice. Otherwise nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RetryError<E> {
    /// The change returned an error.
    #[error("the change was declined")]
    Declined {
        /// True if an earlier attempt may have been executed, with unknown result.
        outcome_unknown: bool,
        /// The error of the change.
        #[source]
        source: E,
    },
    /// Attempts or time are used up. The same call again, with the same operation, is safe.
    #[error("no attempt out of {attempts} succeeded: call again with the same operation id")]
    GaveUp {
        /// Number of attempts.
        attempts: u32,
        /// Whether one of them may have been carried out, or may yet be.
        outcome_unknown: bool,
        /// The error of the last attempt; none if that was a conflict.
        #[source]
        source: Option<DriverError>,
    },
    /// An error that another attempt cannot resolve.
    #[error("the operation failed with an error that a retry cannot resolve: {source}")]
    Data {
        /// True if an earlier attempt may have been executed, with unknown result.
        outcome_unknown: bool,
        /// The error.
        #[source]
        source: DataError,
    },
}

impl<E> RetryError<E> {
    /// Returns whether an attempt may have been executed, or may still be.
    pub const fn outcome_unknown(&self) -> bool {
        match self {
            Self::Declined { outcome_unknown, .. }
            | Self::GaveUp { outcome_unknown, .. }
            | Self::Data { outcome_unknown, .. } => *outcome_unknown,
        }
    }
}

/// The known state so far.
#[derive(Debug, Default)]
struct Progress {
    attempts: u32,
    /// The version that an update with unknown result expects.
    outcome_unknown: Option<u64>,
    source: Option<DriverError>,
}

impl Progress {
    fn hindered(&mut self, by: impl Into<DriverError>) {
        self.source = Some(by.into());
    }

    fn give_up<E>(self) -> RetryError<E> {
        let Self { attempts, outcome_unknown, source } = self;
        RetryError::GaveUp { attempts, outcome_unknown: outcome_unknown.is_some(), source }
    }

    fn data<E>(&self, source: DataError) -> RetryError<E> {
        RetryError::Data { outcome_unknown: self.outcome_unknown.is_some(), source }
    }

    /// Records a temporary error, or returns a permanent one.
    fn failed<E>(&mut self, error: DataError) -> Result<(), RetryError<E>> {
        if !error.passes() {
            return Err(self.data(error));
        }
        self.hindered(error);
        Ok(())
    }
}

impl UpdateLog {
    /// Loads the row of `key`, computes the new row with `change`, and updates the row under the id
    /// `operation`. It starts again after a conflict, a lost connection, or a temporary rejection
    /// by the server, within the limits of `retry`.
    ///
    /// `change` must be pure: it is called once in each attempt, and its result must depend on the
    /// given row only. It must not change the key. Only the fields that it changes are written; the
    /// other columns keep their values, whatever `R` contains of them. A changed `json` or `jsonb`
    /// field is written completely as `R` represents it, with numbers that an `f64` may have
    /// rounded.
    ///
    /// The second of two changes with the same id is [`AlreadyApplied`](Retried::AlreadyApplied),
    /// unless the id contains the [request](UpdateId::for_request).
    ///
    /// `connect` makes a connection, or takes one from a pool: one at first, and another after one was
    /// lost. It must be outside of a transaction.
    ///
    /// The future may be dropped at any await: an update in progress continues on its own task, which
    /// needs a tokio runtime. It waits for another transaction until shortly before the deadline,
    /// by a `lock_timeout` for this one statement (the session's own applies if it is shorter), so
    /// the connection is free again soon. If several locks are needed, the limit applies to each.
    /// Other waits of the server are limited by the settings of the caller's connections:
    /// `statement_timeout`, and `lock_timeout` for tables that are being altered.
    ///
    /// # Errors
    /// [`RetryError`].
    pub async fn retrying<K, R, E, C, X, Connecting>(
        &self,
        connect: impl Fn() -> Connecting,
        retry: &Retry,
        operation: impl Into<UpdateId>,
        key: &K,
        mut change: impl FnMut(R) -> Result<R, E>,
    ) -> Result<Retried<R>, RetryError<E>>
    where
        K: Serialize + Sync,
        R: Serialize + DeserializeOwned + Send + Sync,
        C: Executor + 'static,
        X: Into<DriverError>,
        Connecting: Future<Output = Result<C, X>>,
    {
        let deadline = Instant::now() + retry.within();
        let mut progress = Progress::default();
        let attempt = self.attempt(operation.into(), key).map_err(|error| progress.data(error))?;
        let mut connection: Option<C> = None;
        while progress.attempts < retry.most_attempts() {
            if progress.attempts > 0 {
                let until = Instant::now() + retry.pause(progress.attempts);
                if until >= deadline {
                    break;
                }
                sleep_until(until).await;
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
                attempt.look(&mut executor).await
            };
            let VersionedRow { version: expected, row } = match timeout_at(deadline, looking).await
            {
                Ok(Ok(Seen::Noted(version))) => return Ok(Retried::AlreadyApplied { version }),
                Ok(Ok(Seen::Nothing)) => return Ok(Retried::NotFound),
                Ok(Ok(Seen::There(loaded))) => loaded,
                Ok(Err(error)) => {
                    progress.failed(error)?;
                    continue;
                }
                Err(_) => break,
            };
            // Seen in one view: the row has moved on, and not by this operation. What expects the
            // version before will not find it.
            progress.outcome_unknown =
                progress.outcome_unknown.filter(|outcome_unknown| *outcome_unknown == expected);

            let before = self.fields(&row).map_err(|error| progress.data(error))?;
            let changed = change(row).map_err(|source| RetryError::Declined {
                outcome_unknown: progress.outcome_unknown.is_some(),
                source,
            })?;
            let update = self
                .fields(&changed)
                .and_then(|after| attempt.update(&before, after, expected, deadline))
                .map_err(|error| progress.data(error))?;

            // On a task of its own: the statement commits, and who drops this future drops neither
            // it nor its connection half-way.
            let updating = tokio::spawn(async move {
                let rows = update.send(&mut executor).await;
                (executor, rows)
            });
            progress.source = None;
            let (mut executor, rows) = match timeout_at(deadline, updating).await {
                Ok(Ok(sent)) => sent,
                // The runtime ends.
                Ok(Err(ended)) => {
                    progress.outcome_unknown = Some(expected);
                    progress.hindered(ended);
                    break;
                }
                Err(_) => {
                    progress.outcome_unknown = Some(expected);
                    break;
                }
            };
            match rows {
                Ok(rows) => match made(&rows) {
                    Ok(Some(version)) => return Ok(Retried::Applied { version, row: changed }),
                    Ok(None) => {}
                    // It was carried out, and a trigger was there.
                    Err(error) => {
                        progress.outcome_unknown = Some(expected);
                        return Err(progress.data(error));
                    }
                },
                Err(failure @ StatementError::Lost(_)) => {
                    progress.outcome_unknown = Some(expected);
                    progress.failed(failure.into_error())?;
                    continue;
                }
                Err(failure) => {
                    let refused = failure.into_error();
                    if matches!(refused, DataError::UniqueViolation { .. }) {
                        // Of the id, which another row got meanwhile; or of the row's own.
                        let looking = attempt.look::<R>(&mut executor);
                        match timeout_at(deadline, looking).await {
                            Ok(Ok(Seen::Noted(version))) => {
                                return Ok(Retried::AlreadyApplied { version });
                            }
                            Ok(Ok(Seen::There(now))) if now.version == expected => {
                                return Err(progress.data(refused));
                            }
                            Ok(Ok(_)) => progress.hindered(refused),
                            Ok(Err(error)) => {
                                progress.failed(error)?;
                                continue;
                            }
                            Err(_) => {
                                progress.hindered(refused);
                                break;
                            }
                        }
                    } else {
                        progress.failed(refused)?;
                    }
                }
            }
            connection = Some(executor);
        }
        Err(progress.give_up())
    }

    fn fields<R: Serialize>(&self, row: &R) -> Result<Fields, DataError> {
        self.rows.shape.fields(row).map_err(|problem| problem.at(0))
    }

    fn attempt<K: Serialize>(
        &self,
        operation: UpdateId,
        key: &K,
    ) -> Result<Attempt<'_>, DataError> {
        let key = self.rows.key(key)?;
        let (wanted, id) = (self.rows.item(&key)?, self.id(&operation));
        Ok(Attempt { of: self, wanted, key, id, asked: operation.request_fingerprint(), operation })
    }
}

/// The values that all attempts share.
struct Attempt<'a> {
    of: &'a UpdateLog,
    operation: UpdateId,
    key: Fields,
    wanted: String,
    id: String,
    asked: String,
}

impl Attempt<'_> {
    async fn look<R: DeserializeOwned>(
        &self,
        executor: &mut impl Executor,
    ) -> Result<Seen<R>, DataError> {
        let look = &self.of.statements.look;
        let rows = executor.query(look, &[&self.wanted, &self.id, &self.asked]).await;
        seen(&rows.map_err(StatementError::into_error)?, &self.operation)
    }

    /// The fields that differ, of the row that was asked for: what serde made of the others, and of
    /// the key, may not be what is there.
    fn update(
        &self,
        before: &Fields,
        mut after: Fields,
        expected: u64,
        deadline: Instant,
    ) -> Result<Update, DataError> {
        let UpdateLog { rows, layout, .. } = self.of;
        let same = |after: &Fields, Column { name, .. }: &Column| {
            before.get(name).map(|field| field.get()) == after.get(name).map(|field| field.get())
        };
        if !rows.layout.key.iter().all(|key| same(&after, key)) {
            return Err(ItemError::KeyChanged.at(0));
        }
        let fields: Vec<&Column> =
            rows.layout.fields.iter().filter(|field| !same(&after, field)).collect();
        let mut item = self.key.clone();
        item.extend(fields.iter().filter_map(|field| after.remove_entry(&field.name)));
        Ok(Update {
            text: statements::update(rows, layout, fields, true),
            item: rows.item(&item)?,
            expected: sent(expected)?,
            id: self.id.clone(),
            asked: self.asked.clone(),
            lock_timeout: lock_timeout(deadline.saturating_duration_since(Instant::now())),
        })
    }
}

/// How many milliseconds to wait for a lock, so that the answer is there in time.
fn lock_timeout(left: Duration) -> String {
    let most = i32::MAX.unsigned_abs().into();
    (left * 9 / 10).as_millis().clamp(1, most).to_string()
}

/// A statement, with all that it needs.
struct Update {
    text: String,
    item: String,
    expected: String,
    id: String,
    asked: String,
    lock_timeout: String,
}

impl Update {
    async fn send(&self, executor: &mut impl Executor) -> Result<Rows, StatementError> {
        let Self { text, item, expected, id, asked, lock_timeout } = self;
        executor.query(text, &[item, expected, id, asked, lock_timeout]).await
    }
}

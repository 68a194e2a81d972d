//! The batch mode: ids and effects in one transaction.

use std::error::Error as StdError;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    BatchError, BatchInbox, BatchItem, DeadLetter, EntryState, MessageFailure, MessageId,
};
use hapax_postgres_data::{Executor, SqlParameter, SqlRow, SqlValue, StatementError};

use crate::connections::Connections;
use crate::dead_letters::{REMOVE, put};

/// Begins with the level for which the functions are written.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
const ENTER: &str = "SELECT item, state, pg_current_xact_id_if_assigned()::text
    FROM hapax_inbox($1, $2, $3, make_interval(secs => $4))";
/// Precedes COMMIT. It fails in a transaction that has failed, which COMMIT would roll back without an
/// error. COMMIT has no timeout: one that is interrupted while it waits for a standby succeeds.
const TRANSACTION: &str =
    "SELECT pg_current_xact_id_if_assigned()::text, set_config('statement_timeout', '0', true)";
const PARK: &str = "SELECT hapax_inbox_park($1, $2)::text";
const CLEAR: &str = "DELETE FROM hapax_attempts WHERE id = hapax_message_id($1, $2)";
const ATTEMPT: &str = "SELECT hapax_inbox_attempt($1, $2, make_interval(secs => $3))";
const FAILED: &str = "SELECT hapax_inbox_failed($1, $2, $3, make_interval(secs => $4))";

/// Bytes of a row of `hapax_inbox` and its index entry.
const ID_BYTES: u64 = 120;

/// Code that handles the new messages of a batch on a connection in a transaction.
pub trait BatchHandler<C>: Send + Sync + 'static {
    /// Writes the effects of `messages`, which is not empty, and neither commits nor rolls back.
    ///
    /// # Errors
    /// [`MessageFailure`], about all of them: the batch is rolled back, and tried again in halves.
    fn handle<'a>(
        &'a self,
        connection: &'a mut C,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>>;
}

impl<C, W> BatchHandler<C> for W
where
    W: for<'a> Fn(&'a mut C, &'a [BatchItem]) -> BoxFuture<'a, Result<(), MessageFailure>>
        + Send
        + Sync
        + 'static,
{
    fn handle<'a>(
        &'a self,
        connection: &'a mut C,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        self(connection, messages)
    }
}

/// The inbox of a consumer in batch mode, on connections of type `C`.
pub struct PgInbox<C> {
    shared: Arc<InboxTable<C>>,
}

struct InboxTable<C> {
    consumer: String,
    connections: Connections<C>,
    retention: Duration,
    handler: Box<dyn BatchHandler<C>>,
}

impl<C> fmt::Debug for PgInbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgInbox").field("consumer", &self.shared.consumer).finish_non_exhaustive()
    }
}

impl<C: Executor + 'static> PgInbox<C> {
    /// Creates the inbox of `consumer`, which knows the ids of handled messages for `retention`.
    pub fn new(
        consumer: impl Into<String>,
        connections: Connections<C>,
        retention: Duration,
        handler: impl BatchHandler<C>,
    ) -> Self {
        let (consumer, handler) = (consumer.into(), Box::new(handler));
        Self { shared: Arc::new(InboxTable { consumer, connections, retention, handler }) }
    }
}

fn unavailable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> BatchError {
    BatchError::Unavailable(error.into())
}

fn failed(error: StatementError) -> BatchError {
    match error {
        error if error.is("55P03") => BatchError::InProgress,
        error if error.is("40001") || error.is("40P01") => BatchError::Conflict(error.into()),
        error => unavailable(error),
    }
}

/// Returns whether an error of a handler, or a source of it, states that its transaction lost
/// against another.
fn is_conflict(error: &(dyn StdError + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| (**error).source());
    causes.any(|cause| {
        let code = cause.downcast_ref::<tokio_postgres::Error>().and_then(|error| error.code());
        code.is_some_and(|code| ["40001", "40P01"].contains(&code.code()))
            || cause
                .downcast_ref::<StatementError>()
                .is_some_and(|error| error.is("40001") || error.is("40P01"))
            || is_conflict_of_sqlx(cause)
    })
}

#[cfg(feature = "sqlx")]
fn is_conflict_of_sqlx(error: &(dyn StdError + 'static)) -> bool {
    let database = error.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    database
        .and_then(sqlx::error::DatabaseError::code)
        .is_some_and(|code| ["40001", "40P01"].contains(&&*code))
}

#[cfg(not(feature = "sqlx"))]
const fn is_conflict_of_sqlx(_: &(dyn StdError + 'static)) -> bool {
    false
}

fn integer(rows: &[SqlRow]) -> Option<i64> {
    rows.first()?.first()?.integer()
}

impl<C: Executor + 'static> InboxTable<C> {
    fn retention_secs(&self) -> SqlParameter<'static> {
        SqlParameter::Integer(Some(i64::try_from(self.retention.as_secs()).unwrap_or(i64::MAX)))
    }

    /// Applies a batch in a transaction. The connection is in none afterwards, or lost.
    async fn apply(
        &self,
        batch: Vec<BatchItem>,
        is_counted: bool,
    ) -> Result<Vec<EntryState>, BatchError> {
        let mut connection = self.connections.connect().await.map_err(unavailable)?;
        connection.run(BEGIN, &[]).await.map_err(unavailable)?;
        let written = self.write(&mut connection, &batch, is_counted).await;
        let end = if written.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = connection.run(end, &[]).await;
        match written {
            // Without a reply the batch may be committed: it is applied again.
            // A COMMIT that the server rejects, for a deferred constraint, is the handler's error.
            Ok(states) => ended.map(|_| states).map_err(handler_error),
            Err(error) => Err(error),
        }
    }

    async fn write(
        &self,
        connection: &mut C,
        batch: &[BatchItem],
        is_counted: bool,
    ) -> Result<Vec<EntryState>, BatchError> {
        let (states, transaction) = self.enter(connection, batch).await?;
        let new: Vec<_> = batch
            .iter()
            .zip(&states)
            .filter(|(_, state)| **state == EntryState::New)
            .map(|(item, _)| item.clone())
            .collect();
        if new.is_empty() {
            connection.run(TRANSACTION, &[]).await.map_err(failed)?;
            return Ok(states);
        }
        // Its creation may panic too. Without the rollback that follows, the connection would return
        // to its pool within the transaction.
        let handling = AssertUnwindSafe(async { self.handler.handle(connection, &new).await });
        match handling.catch_unwind().await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) if is_conflict(failure.cause()) => {
                return Err(BatchError::Conflict(failure.text().into()));
            }
            Ok(Err(failure)) => return Err(BatchError::Handler(failure)),
            Err(_) => {
                return Err(BatchError::Handler(MessageFailure::retry("the handler panicked")));
            }
        }
        if is_counted && let [one] = &*new {
            let parameters = [
                SqlParameter::Text(Some(&self.consumer)),
                SqlParameter::Text(Some(one.id().as_str())),
            ];
            connection.run(CLEAR, &parameters).await.map_err(handler_error)?;
        }
        for letter in new.iter().filter_map(BatchItem::letter) {
            let parameters = [SqlParameter::Bytes(Some(letter))];
            connection.run(REMOVE, &parameters).await.map_err(handler_error)?;
        }
        let now = connection.run(TRANSACTION, &[]).await.map_err(handler_error)?;
        if now.into_iter().next().and_then(|row| row.into_iter().next()) != Some(transaction) {
            let text = "the handler ended the transaction: it neither commits nor rolls back";
            return Err(BatchError::Handler(MessageFailure::retry(text)));
        }
        Ok(states)
    }

    /// Inserts the ids. Returns a state for each, and the name of the transaction.
    async fn enter(
        &self,
        connection: &mut C,
        batch: &[BatchItem],
    ) -> Result<(Vec<EntryState>, SqlValue), BatchError> {
        let ids: Vec<_> = batch.iter().map(|item| Some(item.id().as_str())).collect();
        let digests: Vec<_> = batch
            .iter()
            .map(|item| {
                let mut digest = hapax_core::Fingerprint::builder("hapax 1 message");
                *digest.field(&item.message().payload).finish().as_bytes()
            })
            .collect();
        let digests: Vec<_> = digests.iter().map(|digest| Some(&digest[..])).collect();
        let parameters = [
            SqlParameter::Text(Some(&self.consumer)),
            SqlParameter::Texts(&ids),
            SqlParameter::ByteStrings(&digests),
            self.retention_secs(),
        ];
        let rows = connection.run(ENTER, &parameters).await.map_err(failed)?;
        let mut transaction = SqlValue::Null;
        let mut states = Vec::with_capacity(rows.len());
        for row in rows {
            let [_, state, name] = <[SqlValue; 3]>::try_from(row).map_err(|_| other_rows())?;
            transaction = name;
            states.push(entry_state(state)?);
        }
        if states.len() == batch.len() { Ok((states, transaction)) } else { Err(other_rows()) }
    }

    /// Enters a message as parked and stores its letter, in one transaction.
    async fn park(&self, letter: DeadLetter, enters: bool) -> Result<EntryState, BatchError> {
        let mut connection = self.connections.connect().await.map_err(unavailable)?;
        connection.run(BEGIN, &[]).await.map_err(unavailable)?;
        let written = async {
            let id = letter.message_id.as_ref().filter(|_| enters);
            let state = match id {
                Some(id) => self.enter_parked(&mut connection, id, &letter).await?,
                None => EntryState::New,
            };
            // Otherwise another process has handled or parked the message.
            if state == EntryState::New {
                put(&mut connection, &letter).await.map_err(failed)?;
            }
            connection.run(TRANSACTION, &[]).await.map_err(failed)?;
            Ok(state)
        };
        let written = written.await;
        let end = if written.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = connection.run(end, &[]).await;
        written.and_then(|state| ended.map(|_| state).map_err(failed))
    }

    async fn enter_parked(
        &self,
        connection: &mut C,
        id: &MessageId,
        letter: &DeadLetter,
    ) -> Result<EntryState, BatchError> {
        let mut digest = hapax_core::Fingerprint::builder("hapax 1 message");
        let digest = *digest.field(&letter.message.payload).finish().as_bytes();
        let parameters = [
            SqlParameter::Text(Some(&self.consumer)),
            SqlParameter::Texts(&[Some(id.as_str())]),
            SqlParameter::ByteStrings(&[Some(&digest[..])]),
            self.retention_secs(),
        ];
        let rows = connection.run(ENTER, &parameters).await.map_err(failed)?;
        let state = rows.into_iter().next().and_then(|row| row.into_iter().nth(1));
        let state = entry_state(state.ok_or_else(other_rows)?)?;
        if state == EntryState::New {
            let parameters =
                [SqlParameter::Text(Some(&self.consumer)), SqlParameter::Text(Some(id.as_str()))];
            connection.run(PARK, &parameters).await.map_err(failed)?;
        }
        Ok(state)
    }
}

fn entry_state(state: SqlValue) -> Result<EntryState, BatchError> {
    match state.text().as_deref() {
        Some("new") => Ok(EntryState::New),
        Some("duplicate") => Ok(EntryState::Duplicate),
        Some("conflict") => Ok(EntryState::Conflict),
        _ => Err(other_rows()),
    }
}

/// A statement of ours that fails after the handler, or COMMIT: it is the handler's error, which it
/// ignored or deferred, or the connection is lost.
fn handler_error(error: StatementError) -> BatchError {
    match failed(error) {
        BatchError::Unavailable(error)
            if matches!(error.downcast_ref(), Some(StatementError::Rejected(_))) =>
        {
            BatchError::Handler(MessageFailure::retry(error))
        }
        other => other,
    }
}

fn other_rows() -> BatchError {
    unavailable("expected the rows of hapax_inbox, found others: run the migrations")
}

impl<C: Executor + 'static> BatchInbox for PgInbox<C> {
    fn consumer(&self) -> &str {
        &self.shared.consumer
    }

    fn retention(&self) -> Duration {
        self.shared.retention
    }

    fn bytes_per_id(&self) -> u64 {
        ID_BYTES
    }

    fn apply(
        &self,
        batch: Vec<BatchItem>,
        is_counted: bool,
    ) -> BoxFuture<'_, Result<Vec<EntryState>, BatchError>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            // On a task: a connection that returns to its pool within a transaction would keep it open.
            let applied = tokio::spawn(async move { shared.apply(batch, is_counted).await });
            applied.await.unwrap_or_else(|error| Err(unavailable(error)))
        })
    }

    fn attempt<'a>(&'a self, id: &'a MessageId) -> BoxFuture<'a, Result<u32, BatchError>> {
        Box::pin(async move {
            let mut connection = self.shared.connections.connect().await.map_err(unavailable)?;
            let parameters = [
                SqlParameter::Text(Some(&self.shared.consumer)),
                SqlParameter::Text(Some(id.as_str())),
                self.shared.retention_secs(),
            ];
            let rows = connection.run(ATTEMPT, &parameters).await.map_err(failed)?;
            integer(&rows).and_then(|made| u32::try_from(made).ok()).ok_or_else(other_rows)
        })
    }

    fn note_failure<'a>(
        &'a self,
        id: &'a MessageId,
        error: &'a str,
    ) -> BoxFuture<'a, Result<u32, BatchError>> {
        Box::pin(async move {
            let mut connection = self.shared.connections.connect().await.map_err(unavailable)?;
            let parameters = [
                SqlParameter::Text(Some(&self.shared.consumer)),
                SqlParameter::Text(Some(id.as_str())),
                SqlParameter::Text(Some(error)),
                self.shared.retention_secs(),
            ];
            let rows = connection.run(FAILED, &parameters).await.map_err(failed)?;
            integer(&rows).and_then(|made| u32::try_from(made).ok()).ok_or_else(other_rows)
        })
    }

    fn park<'a>(
        &'a self,
        letter: &'a DeadLetter,
        enters: bool,
    ) -> BoxFuture<'a, Result<EntryState, BatchError>> {
        let (shared, letter) = (Arc::clone(&self.shared), letter.clone());
        Box::pin(async move {
            let parked = tokio::spawn(async move { shared.park(letter, enters).await });
            parked.await.unwrap_or_else(|error| Err(unavailable(error)))
        })
    }
}

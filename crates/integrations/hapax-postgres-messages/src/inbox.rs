//! The batch mode: ids and effects in one transaction.

mod errors;
mod hashed;
mod name;
mod positions;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use hapax_core::Namespace;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    BatchAttempt, BatchError, BatchInbox, BatchItem, DeadLetter, EntryState, Message,
    MessageFailure, MessageId, PositionStep,
};
use hapax_postgres_data::{Executor, SqlParameter, SqlRow, SqlValue, StatementError};
use tokio::time::{Instant, timeout_at};

use self::errors::{failed, handler_error, is_aborted, other_rows, unavailable};
use self::hashed::HashedIds;
use self::name::ConsumerName;
use crate::connections::{Connections, TIMEOUTS, TimedConnection};
use crate::dead_letters::put;
use crate::schema::check_one_set;

/// Begins with the level for which the functions are written.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
const INSERT: &str = "SELECT e.states, pg_current_xact_id_if_assigned()::text,
        hapax_limit_timeout('statement_timeout', $5),
        hapax_limit_timeout('idle_in_transaction_session_timeout', $6)
    FROM hapax_inbox_insert($1, $2::uuid[], $3::uuid[], make_interval(secs => $4)) AS e (states)";
/// Precedes COMMIT. It fails in a transaction that has failed, which COMMIT would roll back without
/// an error. COMMIT has no timeout: one that is interrupted while it waits for a standby succeeds.
const TRANSACTION: &str =
    "SELECT pg_current_xact_id_if_assigned()::text, set_config('statement_timeout', '0', true)";
const PARK: &str = "SELECT hapax_inbox_park($1, $2)::text";
const CLEAR: &str = "DELETE FROM hapax_attempts WHERE id = hapax_scoped_hash($1, $2)";
/// Removes the dead letter of a message that was handled, perhaps as another copy. One by which it was
/// parked again stays.
const REMOVE: &str = "SELECT hapax_dead_letter_remove($1)::text";
/// Removes the dead letter of a message that was redriven, where no id excludes that another copy is
/// handled too. No row: it does not exist any more, or another transaction has locked it.
const REMOVE_UNLOCKED: &str = "DELETE FROM hapax_dead_letters WHERE id = (
        SELECT id FROM hapax_dead_letters WHERE id = $1 FOR UPDATE SKIP LOCKED
    ) RETURNING number";
const ATTEMPT: &str = "SELECT a.attempt::bigint, a.crashes::bigint
    FROM hapax_inbox_attempt($1, $2, make_interval(secs => $3)) a";
const PURGE: &str = "SELECT hapax_inbox_purge($1::integer)";
const FAILED: &str = "SELECT hapax_inbox_failed($1, $2, $3, make_interval(secs => $4))";

/// A hundred years of 365 days, in seconds.
const MAX_RETENTION: u64 = 100 * 365 * 24 * 60 * 60;

/// Bytes of a row of `hapax_inbox` and its index entry.
const ID_BYTES: u64 = 120;

/// Code that handles the new messages of a batch on a connection in a transaction.
pub trait BatchHandler<C>: Send + Sync + 'static {
    /// Writes the effects of `messages`, which is not empty, and neither commits nor rolls back. The
    /// future is dropped after [`PgInbox::transaction_timeout`].
    ///
    /// # Errors
    /// [`MessageFailure`], which concerns all of them: the batch is rolled back, and tried again in
    /// halves.
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
///
/// If the database does not answer within a timeout, the call fails with
/// [`BatchError::Unavailable`], as after a lost reply: the batch is not acknowledged, and is applied
/// again. The connection is [discarded](Connections::discard_with). A COMMIT is never cancelled: it may
/// still be executed, and then the messages of the batch are duplicates.
pub struct PgInbox<C> {
    shared: Arc<InboxTable<C>>,
    settings: InboxSettings,
    purges: bool,
}

/// Timeouts of an inbox, and what its transactions record of messages.
#[derive(Clone, Copy, Debug)]
struct InboxSettings {
    has_ids: bool,
    has_positions: bool,
    /// For each statement of the inbox, and for a connection of the pool.
    statement: Duration,
    /// From BEGIN to the end of the handler.
    transaction: Duration,
}

struct InboxTable<C> {
    consumer: ConsumerName,
    connections: Connections<C>,
    retention: Duration,
    handler: Arc<dyn BatchHandler<C>>,
    /// Whether there is one set of tables.
    is_checked: AtomicBool,
}

impl<C> fmt::Debug for PgInbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let consumer = self.shared.consumer.stored();
        f.debug_struct("PgInbox").field("consumer", &consumer).finish_non_exhaustive()
    }
}

impl<C: Executor + 'static> PgInbox<C> {
    /// Creates the inbox of `consumer`, whose name has at most 255 bytes. It keeps the ids of handled messages
    /// for `retention`, at least a second and at most a hundred years.
    pub fn new(
        consumer: impl Into<String>,
        connections: Connections<C>,
        retention: Duration,
        handler: impl BatchHandler<C>,
    ) -> Self {
        let consumer = ConsumerName::new(&Namespace::default(), consumer.into());
        let (handler, is_checked) = (Arc::new(handler), AtomicBool::new(false));
        let shared = InboxTable { consumer, connections, retention, handler, is_checked };
        let settings = InboxSettings {
            has_ids: true,
            has_positions: false,
            statement: Duration::from_secs(10),
            transaction: Duration::from_secs(60),
        };
        Self { shared: Arc::new(shared), settings, purges: true }
    }

    /// Sets the namespace of the consumer: services that share the tables have different ones, so that consumers
    /// with one name have ids, positions and dead letters of their own. Rows have the name of
    /// [`Namespace::stored_consumer`], of at most 255 bytes. Default: the empty one.
    #[must_use]
    pub fn namespace(mut self, namespace: &Namespace) -> Self {
        let InboxTable { consumer, connections, retention, handler, .. } = &*self.shared;
        self.shared = Arc::new(InboxTable {
            consumer: consumer.within(namespace),
            connections: connections.clone(),
            retention: *retention,
            handler: Arc::clone(handler),
            is_checked: AtomicBool::new(false),
        });
        self
    }

    /// Advances the position of a partition in the transaction of each batch, beside the ids. The source
    /// takes its positions from this inbox
    /// ([`PositionStore`](hapax_messages::PositionStore)).
    #[must_use]
    pub const fn advance_positions(mut self) -> Self {
        (self.settings.has_ids, self.settings.has_positions) = (true, true);
        self
    }

    /// Advances the position of a partition in the transaction of each batch, and keeps no ids. A message
    /// that its producer publishes twice has two records, and is handled twice. A relay may publish a message
    /// again after a restart: use [`advance_positions`](Self::advance_positions) for its messages.
    #[must_use]
    pub const fn advance_positions_without_ids(mut self) -> Self {
        (self.settings.has_ids, self.settings.has_positions) = (false, true);
        self
    }

    /// Sets whether a [`BatchConsumer`](hapax_messages::BatchConsumer) removes ids whose retention has
    /// ended: 10,000 at a time, at start and each minute, and each second while more are left. With
    /// `false` call `hapax_inbox_purge` regularly; otherwise the table grows for ever. Default true.
    #[must_use]
    pub const fn purge_expired(mut self, purges: bool) -> Self {
        self.purges = purges;
        self
    }

    /// Sets the time for the database to answer each statement of the inbox, COMMIT included, and for a
    /// connection. Default 10 s; 20 ms to 24 h.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.settings.statement = timeout.clamp(TIMEOUTS.0, TIMEOUTS.1);
        self
    }

    /// Sets the time from BEGIN to the end of the handler. Then its future is dropped, and the batch
    /// has failed. The server ends a statement after the same time, and an idle transaction after the
    /// sum of `transaction_timeout` and `statement_timeout`, unless the role has shorter ones. Default 60 s; 20 ms to 24 h.
    #[must_use]
    pub fn transaction_timeout(mut self, timeout: Duration) -> Self {
        self.settings.transaction = timeout.clamp(TIMEOUTS.0, TIMEOUTS.1);
        self
    }
}

fn milliseconds(time: Duration) -> SqlParameter<'static> {
    SqlParameter::Integer(Some(i64::try_from(time.as_millis()).unwrap_or(i64::MAX)))
}

fn integer(rows: &[SqlRow]) -> Option<i64> {
    rows.first()?.first()?.integer()
}

impl<C: Executor + 'static> InboxTable<C> {
    /// Returns the retention, within the bounds of the SQL functions.
    fn retention_secs(&self) -> SqlParameter<'static> {
        let seconds = self.retention.as_secs().clamp(1, MAX_RETENTION);
        SqlParameter::Integer(Some(i64::try_from(seconds).unwrap_or(i64::MAX)))
    }

    /// Rejects tables that exist twice in the search path, or in which the handler would find those of another
    /// schema, before the first transaction.
    async fn check(&self, connection: &mut TimedConnection<C>) -> Result<(), BatchError> {
        if self.is_checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        check_one_set(connection, self.connections.named_schema()).await.map_err(unavailable)?;
        self.is_checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Applies a batch in a transaction. The connection is in none afterwards, or lost or given up.
    async fn apply(
        &self,
        batch: Vec<BatchItem>,
        clear_attempts: bool,
        settings: InboxSettings,
    ) -> Result<Vec<EntryState>, BatchError> {
        let mut connection = self.connect(settings).await?;
        self.check(&mut connection).await?;
        connection.run(BEGIN, &[]).await.map_err(unavailable)?;
        let written = self.write(&mut connection, &batch, clear_attempts, settings).await;
        let end = if written.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = connection.run(end, &[]).await;
        match written {
            // Without a reply the batch may be committed: it is applied again.
            // A COMMIT that the server rejects, for a deferred constraint, is the handler's error.
            Ok(states) => ended.map(|_| states).map_err(handler_error),
            Err(error) => match ended {
                // The database is away: nothing says that the handler is the cause.
                Err(lost) if connection.get_mut().is_none() => Err(unavailable(lost)),
                _ => Err(error),
            },
        }
    }

    async fn connect(&self, settings: InboxSettings) -> Result<TimedConnection<C>, BatchError> {
        self.consumer.check().map_err(unavailable)?;
        TimedConnection::connect(&self.connections, settings.statement).await.map_err(unavailable)
    }

    async fn write(
        &self,
        connection: &mut TimedConnection<C>,
        batch: &[BatchItem],
        clear_attempts: bool,
        settings: InboxSettings,
    ) -> Result<Vec<EntryState>, BatchError> {
        let deadline = Instant::now() + settings.transaction;
        let (states, transaction) = self.record(connection, batch, settings).await?;
        let of = |state| {
            let items = batch.iter().zip(&states).filter(move |(_, found)| **found == state);
            items.map(|(item, _)| item)
        };
        let some;
        let new = match states.iter().all(|state| *state == EntryState::New) {
            true => batch,
            false => {
                some = of(EntryState::New).cloned().collect::<Vec<_>>();
                &*some
            }
        };
        if !settings.has_ids {
            // Before the handler: of several copies, and of a copy and an operator who removes the dead
            // letter, one removes it. That of a duplicate stays, which may have been parked again.
            for dead_letter in new.iter().filter_map(BatchItem::dead_letter) {
                let parameters = [SqlParameter::Bytes(Some(dead_letter))];
                let removed = connection.run(REMOVE_UNLOCKED, &parameters).await.map_err(failed)?;
                if removed.is_empty() {
                    return Err(BatchError::InProgress);
                }
            }
        }
        if !new.is_empty() {
            self.handle(connection, new, deadline, settings).await?;
        }
        if settings.has_ids {
            let redriven = of(EntryState::New).chain(of(EntryState::Duplicate));
            for dead_letter in redriven.filter_map(BatchItem::dead_letter) {
                let parameters = [SqlParameter::Bytes(Some(dead_letter))];
                connection.run(REMOVE, &parameters).await.map_err(handler_error)?;
            }
        }
        if new.is_empty() {
            connection.run(TRANSACTION, &[]).await.map_err(failed)?;
            return Ok(states);
        }
        if clear_attempts && let [one] = new {
            self.clear(connection, one.id()).await.map_err(handler_error)?;
        }
        let now = connection.run(TRANSACTION, &[]).await.map_err(handler_error)?;
        if now.into_iter().next().and_then(|row| row.into_iter().next()) != Some(transaction) {
            let text = "expected an open transaction after the handler, found it ended: remove COMMIT \
                        and ROLLBACK from the handler";
            return Err(BatchError::Handler(MessageFailure::retry(text)));
        }
        Ok(states)
    }

    async fn clear(
        &self,
        connection: &mut TimedConnection<C>,
        id: &MessageId,
    ) -> Result<(), StatementError> {
        let parameters = [
            SqlParameter::Text(Some(self.consumer.stored())),
            SqlParameter::Text(Some(id.as_str())),
        ];
        connection.run(CLEAR, &parameters).await.map(drop)
    }

    /// Calls the handler with the new messages of a batch, until `deadline`.
    async fn handle(
        &self,
        connection: &mut TimedConnection<C>,
        new: &[BatchItem],
        deadline: Instant,
        settings: InboxSettings,
    ) -> Result<(), BatchError> {
        let own = connection.get_mut().ok_or_else(other_rows)?;
        // Creating the future may panic too. Without the rollback that follows, the connection
        // would return to its pool within the transaction.
        let handling = AssertUnwindSafe(async { self.handler.handle(own, new).await });
        match timeout_at(deadline, handling.catch_unwind()).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(failure))) if is_aborted(failure.cause()) => {
                Err(BatchError::Aborted(failure.text().into()))
            }
            Ok(Ok(Err(failure))) => Err(BatchError::Handler(failure)),
            Ok(Err(_)) => Err(BatchError::Handler(MessageFailure::retry("the handler panicked"))),
            Err(_) => {
                // Its last statement goes on, for at most this time: the rollback waits for it. An
                // answer says that the handler is slow, and not the database away.
                connection.extend(settings.transaction);
                Err(BatchError::Handler(MessageFailure::retry(format!(
                    "expected the handler to end within {:?} of BEGIN, found it running: set a longer \
                     `transaction_timeout`, or fewer messages in a transaction",
                    settings.transaction
                ))))
            }
        }
    }

    /// Inserts the ids of messages. Returns a state for each, and the name of the transaction.
    async fn insert(
        &self,
        connection: &mut TimedConnection<C>,
        messages: impl Iterator<Item = (&MessageId, &Message)>,
        settings: InboxSettings,
    ) -> Result<(Vec<EntryState>, SqlValue), BatchError> {
        let ids = HashedIds::of(&self.consumer, messages);
        let [keys, digests] = ids.columns();
        let parameters = [
            SqlParameter::Text(Some(self.consumer.stored())),
            SqlParameter::Texts(&keys),
            SqlParameter::Texts(&digests),
            self.retention_secs(),
            milliseconds(settings.transaction),
            // Later than the rollback of a handler that does not end.
            milliseconds(settings.transaction.saturating_add(settings.statement)),
        ];
        let rows = connection.run(INSERT, &parameters).await.map_err(failed)?;
        let row = rows.into_iter().next().and_then(|row| <[SqlValue; 4]>::try_from(row).ok());
        let [states, transaction, ..] = row.ok_or_else(other_rows)?;
        Ok((ids.states(Some(states))?, transaction))
    }

    /// Stores a dead letter and, if `inserts_id`, inserts the id of its message as parked, in one
    /// transaction, in which the position advances by `step`.
    async fn park(
        &self,
        dead_letter: DeadLetter,
        inserts_id: bool,
        step: Option<PositionStep>,
        settings: InboxSettings,
    ) -> Result<EntryState, BatchError> {
        let mut connection = self.connect(settings).await?;
        connection.run(BEGIN, &[]).await.map_err(unavailable)?;
        let written = async {
            let state = self
                .write_parked(&mut connection, &dead_letter, inserts_id, step, settings)
                .await?;
            connection.run(TRANSACTION, &[]).await.map_err(failed)?;
            Ok(state)
        };
        let written = written.await;
        // After a mismatch it is parked again, under another reason.
        let commits = matches!(written, Ok(EntryState::New | EntryState::Duplicate));
        let end = if commits { "COMMIT" } else { "ROLLBACK" };
        let ended = connection.run(end, &[]).await;
        written.and_then(|state| ended.map(|_| state).map_err(failed))
    }

    async fn write_parked(
        &self,
        connection: &mut TimedConnection<C>,
        dead_letter: &DeadLetter,
        inserts_id: bool,
        step: Option<PositionStep>,
        settings: InboxSettings,
    ) -> Result<EntryState, BatchError> {
        if settings.has_positions {
            let step = step.ok_or(BatchError::Fenced)?;
            // The caller has decided that it is parked, whatever the other dead letters are.
            if self.advance(connection, &step, None, settings).await?.is_done {
                return Ok(EntryState::Duplicate);
            }
        }
        let id = dead_letter.message_id.as_ref().filter(|_| inserts_id);
        let state = match id {
            Some(id) if settings.has_ids => {
                self.insert_parked(connection, id, dead_letter, settings).await?
            }
            Some(id) => {
                self.clear(connection, id).await.map_err(failed)?;
                EntryState::New
            }
            None => EntryState::New,
        };
        // Otherwise another process has handled or parked the message.
        if state == EntryState::New {
            put(connection, dead_letter).await.map_err(failed)?;
        }
        Ok(state)
    }

    async fn insert_parked(
        &self,
        connection: &mut TimedConnection<C>,
        id: &MessageId,
        dead_letter: &DeadLetter,
        settings: InboxSettings,
    ) -> Result<EntryState, BatchError> {
        let message = std::iter::once((id, &dead_letter.message));
        let (states, _) = self.insert(connection, message, settings).await?;
        let state = states.first().copied().ok_or_else(other_rows)?;
        if state == EntryState::New {
            let parameters = [
                SqlParameter::Text(Some(self.consumer.stored())),
                SqlParameter::Text(Some(id.as_str())),
            ];
            connection.run(PARK, &parameters).await.map_err(failed)?;
        }
        Ok(state)
    }
}

impl<C: Executor + 'static> BatchInbox for PgInbox<C> {
    fn consumer(&self) -> &str {
        self.shared.consumer.stored()
    }

    fn retention(&self) -> Duration {
        self.shared.retention
    }

    fn bytes_per_id(&self) -> u64 {
        if self.settings.has_ids { ID_BYTES } else { 0 }
    }

    fn advances_positions(&self) -> bool {
        self.settings.has_positions
    }

    fn apply(
        &self,
        batch: Vec<BatchItem>,
        clear_attempts: bool,
    ) -> BoxFuture<'_, Result<Vec<EntryState>, BatchError>> {
        let (shared, settings) = (Arc::clone(&self.shared), self.settings);
        Box::pin(async move {
            // On a task: a connection that returns to its pool within a transaction would keep it
            // open.
            let applied =
                tokio::spawn(async move { shared.apply(batch, clear_attempts, settings).await });
            applied.await.unwrap_or_else(|error| Err(unavailable(error)))
        })
    }

    fn count_attempt<'a>(
        &'a self,
        id: &'a MessageId,
    ) -> BoxFuture<'a, Result<BatchAttempt, BatchError>> {
        Box::pin(async move {
            let mut connection = self.shared.connect(self.settings).await?;
            let parameters = [
                SqlParameter::Text(Some(self.shared.consumer.stored())),
                SqlParameter::Text(Some(id.as_str())),
                self.shared.retention_secs(),
            ];
            let rows = connection.run(ATTEMPT, &parameters).await.map_err(failed)?;
            let Some([number, crashes]) = rows.first().map(Vec::as_slice) else {
                return Err(other_rows());
            };
            let count = |value: &SqlValue| {
                let count = value.integer().and_then(|count| u32::try_from(count).ok());
                count.ok_or_else(other_rows)
            };
            Ok(BatchAttempt { number: count(number)?, crashes: count(crashes)? })
        })
    }

    fn note_failure<'a>(
        &'a self,
        id: &'a MessageId,
        error: &'a str,
    ) -> BoxFuture<'a, Result<u32, BatchError>> {
        Box::pin(async move {
            let mut connection = self.shared.connect(self.settings).await?;
            let parameters = [
                SqlParameter::Text(Some(self.shared.consumer.stored())),
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
        dead_letter: &'a DeadLetter,
        inserts_id: bool,
        step: Option<&'a PositionStep>,
    ) -> BoxFuture<'a, Result<EntryState, BatchError>> {
        let (shared, dead_letter) = (Arc::clone(&self.shared), dead_letter.clone());
        let (settings, step) = (self.settings, step.cloned());
        Box::pin(async move {
            let parked =
                tokio::spawn(
                    async move { shared.park(dead_letter, inserts_id, step, settings).await },
                );
            parked.await.unwrap_or_else(|error| Err(unavailable(error)))
        })
    }

    fn check(&self) -> BoxFuture<'_, Result<(), BatchError>> {
        Box::pin(async move {
            let mut connection = self.shared.connect(self.settings).await?;
            connection.run("SELECT", &[]).await.map(drop).map_err(failed)
        })
    }

    fn purge(&self, limit: u32) -> BoxFuture<'_, Result<u64, BatchError>> {
        Box::pin(async move {
            if !self.purges {
                return Ok(0);
            }
            let mut connection = self.shared.connect(self.settings).await?;
            let parameters = [SqlParameter::Integer(Some(limit.into()))];
            let rows = connection.run(PURGE, &parameters).await.map_err(failed)?;
            integer(&rows).and_then(|removed| u64::try_from(removed).ok()).ok_or_else(other_rows)
        })
    }
}

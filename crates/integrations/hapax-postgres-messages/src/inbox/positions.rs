//! Positions mode: the position of a partition advances in the transaction of a batch.

use hapax_core::store::BoxFuture;
use hapax_messages::{
    AcquiredPosition, BatchError, BatchItem, DeadLetter, EntryState, Partition, PositionError,
    PositionStep, PositionStore,
};
use hapax_postgres_data::{Executor, SqlParameter, SqlValue};

use super::errors::{failed, other_rows};
use super::hashed::HashedIds;
use super::{InboxSettings, InboxTable, PgInbox, milliseconds};
use crate::connections::{ConnectCause, TimedConnection};

const ACQUIRE: &str = "SELECT a.next_offset, a.handled_millis, a.fence, a.is_new::text
    FROM hapax_position_acquire($1, $2, $3::integer, $4) a";
const IS_OWNER: &str = "SELECT EXISTS (
        SELECT FROM hapax_positions
        WHERE consumer = $1 AND topic = $2 AND partition = $3::integer AND fence = $4
    )::text";
/// Expands to a statement that advances a position and returns further columns. It reads the dead letters after the
/// step, since a transaction of an earlier owner may have stored one. For these arguments
/// `hapax_dead_letter_states` returns null if and only if the consumer has none.
macro_rules! advance {
    ($columns:literal) => {
        concat!(
            "SELECT a.state, pg_current_xact_id_if_assigned()::text,
                CASE a.state WHEN 'advanced' THEN
                    hapax_dead_letter_states($1, ARRAY[NULL::text], ARRAY[NULL::bytea], '-')
                END,
                hapax_limit_timeout('statement_timeout', $8),
                hapax_limit_timeout('idle_in_transaction_session_timeout', $9)",
            $columns,
            " FROM hapax_position_advance($1, $2, $3::integer, $4, $5, $6, $7) AS a (state)"
        )
    };
}
/// Advances a position.
const ADVANCE: &str = advance!("");
/// Advances a position and, if it is advanced now, inserts the ids of the step's messages.
const ADVANCE_AND_INSERT: &str = advance!(
    ", CASE a.state WHEN 'advanced' THEN
        hapax_inbox_insert($1, $10::uuid[], $11::uuid[], make_interval(secs => $12))
    END"
);
const DEAD_LETTER_STATES: &str = "SELECT hapax_dead_letter_states($1, $2, $3, $4)";

const OTHER_ROWS: &str =
    "expected the row of a position, found other rows: run the SQL of `hapax sql`";

/// The result of a step in the transaction of its batch.
pub(super) struct Advanced {
    /// The name of the transaction.
    transaction: SqlValue,
    /// Whether the position was advanced in an earlier transaction.
    pub(super) is_done: bool,
    /// Whether the consumer has dead letters. False if `is_done`.
    has_dead_letters: bool,
    /// States of the inserted ids, in their order. Empty without ids, or if `is_done`.
    id_states: Vec<EntryState>,
}

impl<C: Executor + 'static> InboxTable<C> {
    /// Advances the position and inserts the ids, as the mode requires. Returns a state for each message, and
    /// the name of the transaction.
    pub(super) async fn record(
        &self,
        connection: &mut TimedConnection<C>,
        batch: &[BatchItem],
        settings: InboxSettings,
    ) -> Result<(Vec<EntryState>, SqlValue), BatchError> {
        let messages = batch.iter().map(|item| (item.id(), item.message()));
        if !settings.has_positions {
            return self.insert(connection, messages, settings).await;
        }
        let ids = settings.has_ids.then(|| HashedIds::of(&self.consumer, messages));
        let steps: Option<Vec<_>> = batch.iter().map(BatchItem::step).collect();
        // Steps that do not follow each other cannot begin at the position.
        let step = steps.and_then(|steps| PositionStep::merge(steps.into_iter()));
        let step = step.ok_or(BatchError::Fenced)?;
        let Advanced { transaction, is_done, has_dead_letters, id_states } =
            self.advance(connection, &step, ids.as_ref(), settings).await?;
        if is_done {
            return Ok((vec![EntryState::Duplicate; batch.len()], transaction));
        }
        let mut states = vec![EntryState::New; batch.len()];
        if has_dead_letters || batch.iter().any(|item| item.dead_letter().is_some()) {
            self.exclude(connection, batch, &mut states).await?;
        }
        for (state, by_id) in states.iter_mut().zip(id_states) {
            // A dead letter decides only about messages that are new.
            if by_id != EntryState::New {
                *state = by_id;
            }
        }
        let is_excluded =
            |state: &EntryState| matches!(state, EntryState::Mismatch | EntryState::Blocked);
        match states.iter().any(is_excluded) {
            true => Err(BatchError::MustPark(states)),
            false => Ok((states, transaction)),
        }
    }

    /// Advances the position of a partition and inserts `ids`, if any, in the transaction of the messages of the step.
    pub(super) async fn advance(
        &self,
        connection: &mut TimedConnection<C>,
        step: &PositionStep,
        ids: Option<&HashedIds>,
        settings: InboxSettings,
    ) -> Result<Advanced, BatchError> {
        let mut parameters = vec![
            SqlParameter::Text(Some(self.consumer.stored())),
            SqlParameter::Text(Some(&step.partition.topic)),
            SqlParameter::Integer(Some(step.partition.number.into())),
            offset(step.fence),
            offset(step.from),
            offset(step.to),
            SqlParameter::Integer(Some(step.timestamp_ms)),
            milliseconds(settings.transaction),
            // Later than the rollback of a handler that does not end.
            milliseconds(settings.transaction.saturating_add(settings.statement)),
        ];
        let [keys, digests] = ids.map(HashedIds::columns).unwrap_or_default();
        let statement = if ids.is_some() {
            parameters.extend([
                SqlParameter::Texts(&keys),
                SqlParameter::Texts(&digests),
                self.retention_secs(),
            ]);
            ADVANCE_AND_INSERT
        } else {
            ADVANCE
        };
        let rows = connection.run(statement, &parameters).await.map_err(failed)?;
        let mut row = rows.into_iter().next().ok_or_else(other_rows)?.into_iter();
        let (Some(state), Some(transaction), Some(letters)) = (row.next(), row.next(), row.next())
        else {
            return Err(other_rows());
        };
        let is_done = match state.text().as_deref() {
            Some("advanced") => false,
            Some("done") => true,
            Some("fenced") => return Err(BatchError::Fenced),
            _ => return Err(other_rows()),
        };
        // After the columns of the two timeouts.
        let id_states = match ids {
            Some(ids) if !is_done => ids.states(row.nth(2))?,
            _ => Vec::new(),
        };
        Ok(Advanced {
            transaction,
            is_done,
            has_dead_letters: letters != SqlValue::Null,
            id_states,
        })
    }

    /// Changes the state of each message that a dead letter excludes.
    async fn exclude(
        &self,
        connection: &mut TimedConnection<C>,
        batch: &[BatchItem],
        states: &mut Vec<EntryState>,
    ) -> Result<(), BatchError> {
        let keys: Vec<_> = batch.iter().map(|item| item.message().key.as_deref()).collect();
        let id_of = |item: &BatchItem| {
            DeadLetter::id_of(self.consumer.stored(), Some(item.id()), item.message())
        };
        let letters: Vec<_> = batch.iter().map(id_of).collect();
        let letters: Vec<_> = letters.iter().map(|id| Some(&id[..])).collect();
        let redriven = batch.iter().map(|it| if it.dead_letter().is_some() { 'r' } else { '-' });
        let redriven: String = redriven.collect();
        let parameters = [
            SqlParameter::Text(Some(self.consumer.stored())),
            SqlParameter::Texts(&keys),
            SqlParameter::ByteStrings(&letters),
            SqlParameter::Text(Some(&redriven)),
        ];
        let rows = connection.run(DEAD_LETTER_STATES, &parameters).await.map_err(failed)?;
        let row = rows.into_iter().next().and_then(|row| row.into_iter().next());
        // Null: the last dead letter was removed since the step.
        let Some(codes) = row.ok_or_else(other_rows)?.text() else { return Ok(()) };
        let found: Option<Vec<_>> = codes.chars().map(letter_state).collect();
        let found = found.filter(|found| found.len() == batch.len());
        *states = found.ok_or_else(other_rows)?;
        Ok(())
    }
}

/// Returns the state that a code of `hapax_dead_letter_states` stands for.
const fn letter_state(code: char) -> Option<EntryState> {
    match code {
        'n' => Some(EntryState::New),
        'd' => Some(EntryState::Duplicate),
        'b' => Some(EntryState::Blocked),
        _ => None,
    }
}

fn offset(offset: u64) -> SqlParameter<'static> {
    SqlParameter::Integer(Some(i64::try_from(offset).unwrap_or(i64::MAX)))
}

impl<C: Executor + 'static> PositionStore for PgInbox<C> {
    fn acquire<'a>(
        &'a self,
        partition: &'a Partition,
        first: u64,
    ) -> BoxFuture<'a, Result<AcquiredPosition, PositionError>> {
        Box::pin(async move {
            let acquired = self.shared.acquire(partition, first, self.settings).await;
            acquired.map_err(PositionError::new)
        })
    }

    fn is_owner<'a>(
        &'a self,
        partition: &'a Partition,
        fence: u64,
    ) -> BoxFuture<'a, Result<bool, PositionError>> {
        Box::pin(async move {
            let is_owner = self.shared.is_owner(partition, fence, self.settings).await;
            is_owner.map_err(PositionError::new)
        })
    }
}

impl<C: Executor + 'static> InboxTable<C> {
    async fn acquire(
        &self,
        partition: &Partition,
        first: u64,
        settings: InboxSettings,
    ) -> Result<AcquiredPosition, ConnectCause> {
        let row = self.position_row(ACQUIRE, partition, first, settings).await?;
        let acquired = row.and_then(|[next, timestamp_ms, fence, is_new]| {
            Some(AcquiredPosition {
                next: u64::try_from(next.integer()?).ok()?,
                handled_timestamp_ms: timestamp_ms.integer(),
                fence: u64::try_from(fence.integer()?).ok()?,
                is_new: is_new.text()? == "true",
            })
        });
        acquired.ok_or_else(|| OTHER_ROWS.into())
    }

    async fn is_owner(
        &self,
        partition: &Partition,
        fence: u64,
        settings: InboxSettings,
    ) -> Result<bool, ConnectCause> {
        let row = self.position_row(IS_OWNER, partition, fence, settings).await?;
        let is_owner = row.and_then(|[is_owner]| is_owner.text());
        is_owner.map(|it| it == "true").ok_or_else(|| OTHER_ROWS.into())
    }

    /// Returns the row of a statement about a position, whose last parameter is `number`; `None` if there are other
    /// rows.
    async fn position_row<const N: usize>(
        &self,
        statement: &str,
        partition: &Partition,
        number: u64,
        settings: InboxSettings,
    ) -> Result<Option<[SqlValue; N]>, ConnectCause> {
        self.consumer.check()?;
        let mut connection =
            TimedConnection::connect(&self.connections, settings.statement).await?;
        let parameters = [
            SqlParameter::Text(Some(self.consumer.stored())),
            SqlParameter::Text(Some(&partition.topic)),
            SqlParameter::Integer(Some(partition.number.into())),
            offset(number),
        ];
        let rows = connection.run(statement, &parameters).await?;
        Ok(rows.into_iter().next().and_then(|row| <[SqlValue; N]>::try_from(row).ok()))
    }
}

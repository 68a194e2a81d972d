//! The schedule: a table beside the one of records.
//!
//! 1. Changes are sent in batches, like swaps, on another connection. Two processes seldom change one
//!    row at once, because an entry belongs to the owner of its operation.
//! 2. An insertion is rejected if the tables were emptied or replaced since they were used before, like
//!    a claim under `block`: they may have lost the outcome of its operation.
//! 3. `due` and `entries` use the connection for maintenance (`maintenance.rs`); `queues`, which counts
//!    every row, opens a connection of its own. Reads on both are confirmed, see `link.rs`.
//! 4. `due` reads the first entries of each queue by one index.

#[cfg(feature = "sqlx")]
mod sqlx;
mod transactional;
pub(crate) mod write;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule, ScheduleEntry,
};
use hapax_core::store::BoxFuture;
use hapax_core::store::parts::Admission;
use hapax_core::{EntryId, OperationId, Sealer, StoreError, Timestamp};
use tokio::time::{Instant, timeout};
use tokio_postgres::Row;

use self::write::{Change, ScheduleJob};
use crate::error::{PostgresStoreError, TransactionFailure, is_missing};
use crate::link::{PgConnection, StatementCall};
use crate::maintenance::{Job, MaintenanceError};
use crate::record::{DamagedRow, bytes, get, micros, time};
use crate::secret::Purpose;
use crate::sql::Verb;
use crate::store::PostgresStore;

/// Limit of entries that one call returns, which are all in memory.
const MOST: u32 = 10_000;

/// Number of timeouts that counting the entries may take.
const COUNTING: u32 = 10;

impl PostgresStore {
    /// Queues a change and waits for its answer.
    async fn change(&self, key: EntryKey, change: Change) -> Result<bool, StoreError> {
        let lane = self.shared.schedule.lane(&key.operation);
        let deadline = Instant::now() + self.shared.setup.answer;
        let admission = match &change {
            Change::Insert { .. } => Admission::NewKey,
            Change::Postpone { .. } | Change::Remove => Admission::Any,
        };
        let job = |ticket, reply| ScheduleJob { key, change, ticket, deadline, reply };
        self.ask(lane, admission, job).await.map_err(named)
    }

    fn seal_note(&self, key: &EntryKey, note: &[u8]) -> Result<Vec<u8>, StoreError> {
        let entropy = &*self.shared.setup.options.entropy;
        self.sealer.seal_note(key, note, entropy).map_err(StoreError::unavailable)
    }

    async fn read_schedule(&self, job: Job) -> Result<Vec<Row>, StoreError> {
        let rows = self.upkeep.run(job).await;
        rows.map_err(|error| named(MaintenanceError::into_read_error(error)))
    }

    /// Counts all entries, which takes a second for some millions: on a separate connection, so that
    /// polls do not wait for it.
    async fn count_queues(&self) -> Result<Vec<Row>, StoreError> {
        let setup = &self.shared.setup;
        let limit = setup.answer.saturating_mul(COUNTING);
        let opened = PgConnection::open(setup, Purpose::Inspect).await;
        let link = opened.map_err(|error| {
            StoreError::unavailable(PostgresStoreError::Connect(Arc::new(error)))
        })?;
        let begin = setup.begin_with(limit, setup.answer);
        let call = StatementCall { verb: Verb::ScheduleQueues, parameters: Vec::new() };
        let counted = timeout(limit, link.transact(setup, &begin, call)).await;
        let lost = Err(TransactionFailure::Lost(PostgresStoreError::TimedOut));
        let rows = counted.unwrap_or(lost).map_err(|failure| named(failure.into_read_error()))?;
        link.close().await;
        Ok(rows)
    }

    /// Opens at most `limit` entries.
    fn open_rows(&self, rows: &[Row], limit: u32) -> Result<OpenedRows, StoreError> {
        let first = rows.first().ok_or_else(unreadable)?;
        let EntryRow { now, count, next, .. } =
            EntryRow::read(first).map_err(StoreError::corrupt)?;
        let mut entries = Vec::with_capacity(rows.len());
        for row in rows.iter().take(limit as usize) {
            let found = EntryRow::read(row).map_err(StoreError::corrupt)?.entry;
            entries.extend(found.map(|entry| (entry.key, entry.open(&self.sealer))));
        }
        // Further ones were counted, and left out because of a limit.
        let more = count.is_some_and(|count| count > entries.len() as u64);
        Ok(OpenedRows { now, entries, more, next })
    }
}

// Cancellation: as for swaps, see the store.
impl Schedule for PostgresStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let NewEntry { key, queue, due_in, note } = entry;
            let note = self.seal_note(&key, &note)?;
            let insert = Change::Insert { queue, delay: micros(due_in), note };
            self.change(key, insert).await.map(drop)
        })
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move {
            let mut queues: Vec<_> = queues.iter().map(|queue| queue.as_str().to_owned()).collect();
            queues.sort_unstable();
            queues.dedup();
            let limit = limit.get().min(MOST);
            let rows = self.read_schedule(Job::Due { queues, limit: limit.into() }).await?;
            let OpenedRows { now, entries, more, next } = self.open_rows(&rows, limit)?;
            let next_in = match more {
                true => Some(Duration::ZERO),
                false => next.map(|next| next.since(now)),
            };
            Ok(DueEntries { now, entries, next_in })
        })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            // No entry is due later than the greatest number of the column.
            let expected = match expected.map(|due| i64::try_from(due.as_micros())) {
                Some(Err(_)) => return Ok(false),
                Some(Ok(expected)) => Some(expected),
                None => None,
            };
            self.change(key, Change::Postpone { expected, delay: micros(due_in) }).await
        })
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.change(key, Change::Remove).await.map(drop) })
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move {
            // The shortest ones come before every key.
            let after = after.map_or_else(Default::default, |EntryKey { operation, id }| {
                [operation.as_bytes().to_vec(), id.as_bytes().to_vec()]
            });
            let limit = limit.get().min(MOST);
            // One more shows whether there are further ones.
            let job = Job::Entries { after, limit: i64::from(limit) + 1 };
            let rows = self.read_schedule(job).await?;
            let OpenedRows { now, entries, more, .. } = self.open_rows(&rows, limit)?;
            Ok(EntryPage::new(now, entries, more))
        })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(async move {
            let rows = self.count_queues().await?;
            rows.iter().map(|row| status(row).map_err(StoreError::corrupt)).collect()
        })
    }
}

/// Names the cause of an error that a missing schedule causes.
fn named(error: StoreError) -> StoreError {
    let StoreError::Unavailable(source) = &error else { return error };
    match source.downcast_ref() {
        Some(PostgresStoreError::Rejected(db)) if is_missing(db.code()) => {
            StoreError::unavailable(PostgresStoreError::NoSchedule)
        }
        _ => error,
    }
}

fn unreadable() -> StoreError {
    StoreError::unavailable(PostgresStoreError::UnexpectedAnswer)
}

struct OpenedRows {
    now: Timestamp,
    entries: Vec<(EntryKey, Result<ScheduleEntry, StoreError>)>,
    /// Whether there are entries that were left out.
    more: bool,
    next: Option<Timestamp>,
}

/// A row of a statement that loads entries.
struct EntryRow {
    now: Timestamp,
    count: Option<u64>,
    /// Time at which the next entry is due.
    next: Option<Timestamp>,
    entry: Option<SealedEntry>,
}

struct SealedEntry {
    key: EntryKey,
    queue: Result<QueueName, DamagedRow>,
    due: Timestamp,
    note: Vec<u8>,
}

impl EntryRow {
    fn read(row: &Row) -> Result<Self, DamagedRow> {
        let count: Option<i64> = get(row, 1)?;
        Ok(Self {
            now: time(get(row, 0)?)?,
            count: count.and_then(|count| u64::try_from(count).ok()),
            next: get::<Option<i64>>(row, 2)?.map(time).transpose()?,
            entry: SealedEntry::read(row)?,
        })
    }
}

impl SealedEntry {
    fn read(row: &Row) -> Result<Option<Self>, DamagedRow> {
        let Some(operation) = get::<Option<&[u8]>>(row, 3)? else { return Ok(None) };
        let operation = OperationId::from_bytes(bytes(operation)?);
        let key = EntryKey { operation, id: EntryId::from_bytes(bytes(get(row, 4)?)?) };
        let (queue, note) = (queue(row, 5), get(row, 7)?);
        Ok(Some(Self { key, queue, due: time(get(row, 6)?)?, note }))
    }

    fn open(self, sealer: &Sealer) -> Result<ScheduleEntry, StoreError> {
        let Self { key, queue, due, note } = self;
        let queue = queue.map_err(StoreError::corrupt)?;
        let note = sealer.open_note(&key, &note).map_err(StoreError::corrupt)?;
        Ok(ScheduleEntry { key, queue, due, note })
    }
}

fn queue(row: &Row, at: usize) -> Result<QueueName, DamagedRow> {
    QueueName::new(get::<&str>(row, at)?).map_err(|_| DamagedRow)
}

fn status(row: &Row) -> Result<QueueStatus, DamagedRow> {
    let (now, count, first) = (time(get(row, 0)?)?, get::<i64>(row, 2)?, time(get(row, 3)?)?);
    Ok(QueueStatus {
        queue: queue(row, 1)?,
        entries: u64::try_from(count).map_err(|_| DamagedRow)?,
        overdue: now.since(first),
    })
}

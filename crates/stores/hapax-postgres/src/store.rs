//! The store.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::schedule::Schedule;
use hapax_core::store::parts::Admission;
use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Notify, Page, Reaped, ScanStep, Snapshot, Swap, Swapped,
    Visitor, scan_by_pages,
};
use hapax_core::{Inspect, OperationId, Sealer, Secret, Store, StoreError, Timestamp};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_postgres::Row;

use crate::connect::{self, Prepared};
use crate::error::{PostgresConnectError, PostgresStoreError};
use crate::identity;
use crate::link::{ConnectionSetup, PgConnection};
use crate::listen::Listener;
use crate::maintenance::{Job, Maintenance};
use crate::options::PostgresOptions;
use crate::queue::{Item, Queue, Ticket};
use crate::reader;
use crate::record::{ResultRow, Write};
use crate::schedule::write::ScheduleJob;
use crate::secret::Purpose;
use crate::server_info::Tables;
use crate::shared::{LoadJob, Shared};
use crate::swaps::SwapJob;
use crate::walk::{self, Visited};
use crate::writer::{Writer, WriterConnection, WriterMode};

/// Number of tasks that send single swaps. This many keys can be locked by transactions that were
/// left open before other single swaps must wait.
const ALONE: usize = 4;

/// Limit of rows that one transaction removes, so that none is long.
const REAP_CHUNK: u32 = 500;

/// A durable store in PostgreSQL, for any number of processes.
///
/// Its statements are sent by tasks on the runtime that it was connected on. Dropping it, like
/// [`close`](Self::close), accepts no more requests and finishes those that wait; only `close`
/// reports when they are finished.
pub struct PostgresStore {
    pub(crate) shared: Arc<Shared>,
    pub(crate) sealer: Sealer,
    pub(crate) upkeep: Arc<Maintenance>,
    listener: Option<Listener>,
    finished: Mutex<Option<JoinHandle<()>>>,
    tables: Tables,
}

/// Counters of a store since it was connected, and its current load.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PostgresStats {
    /// Transactions with swaps that were sent.
    pub batches: u64,
    /// Swaps in the committed ones, conflicts included. Divided by `batches`: the batch size.
    pub swaps: u64,
    /// Conflicts among them.
    pub conflicts: u64,
    /// Swaps that were sent again because of a race with another process.
    pub again: u64,
    /// Swaps that were sent alone: their row was locked, or their batch was rejected.
    pub alone: u64,
    /// Swaps whose answer was lost.
    pub lost: u64,
    /// Connections made.
    pub connections: u64,
    /// Records reaped.
    pub removed: u64,
    /// Transactions with changes of the schedule that were sent.
    pub schedule_batches: u64,
    /// Changes in the committed ones.
    pub schedule_writes: u64,
    /// Swaps and changes of the schedule that wait.
    pub queued: usize,
    /// Keys that are known to have waiters in other processes.
    pub awaited: usize,
}

impl PostgresStore {
    /// Connects: checks the server, creates or migrates the tables, and starts the tasks.
    ///
    /// # Errors
    /// [`PostgresConnectError`]. Changes of the tables until then stay.
    ///
    /// # Panics
    /// Outside a tokio runtime with time and I/O.
    pub async fn connect(options: PostgresOptions) -> Result<Self, PostgresConnectError> {
        let sealer = options.sealer();
        let setup = ConnectionSetup::new(options);
        let Prepared { link, tables } = connect::prepare(&setup).await?;
        let listener = setup.options.listen.then(|| Listener::new(&setup));
        let bell = listener.as_ref().map(Listener::bell);
        let shared = Arc::new(Shared::new(setup, bell));
        let upkeep = Maintenance::new(Arc::clone(&shared));
        let finished = tokio::spawn(run(Arc::clone(&shared), Arc::clone(&upkeep), link));
        let finished = Mutex::new(Some(finished));
        Ok(Self { shared, sealer, upkeep, listener, finished, tables })
    }

    /// Returns the identity of these tables: the time of their creation, in microseconds. A copy of
    /// the database has the same one.
    #[must_use]
    pub fn identity(&self) -> String {
        self.tables.made.to_string()
    }

    /// Returns the time of the first write to these tables, by which they became a store; `None` if there
    /// was none when this store was connected.
    #[must_use]
    pub fn created(&self) -> Option<Timestamp> {
        self.tables.created()
    }

    /// Returns the identity of the tables in which this store claims, for
    /// [`PostgresOptions::identity`] of later processes; `None` before the first write.
    #[must_use]
    pub fn known_identity(&self) -> Option<String> {
        self.shared.setup.known.expected()
    }

    /// Returns whether the tables were emptied or replaced, and no operator confirmed it.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.shared.setup.known.is_replaced()
    }

    /// Accepts the tables as they are, for every process that uses them: operations of the earlier
    /// tables may execute again.
    ///
    /// # Errors
    /// [`PostgresConnectError`]; the tables are not confirmed, or it is unknown whether they are.
    pub async fn confirm(&self) -> Result<(), PostgresConnectError> {
        let setup = &self.shared.setup;
        let link = PgConnection::open(setup, Purpose::Write).await?;
        let confirmed = timeout(setup.answer, identity::confirm(link.client(), setup)).await;
        link.close().await;
        confirmed.unwrap_or(Err(PostgresConnectError::TimedOut))
    }

    /// Returns the secret that names keys.
    #[must_use]
    pub fn secret(&self) -> Option<&Secret> {
        self.shared.setup.options.naming_secret()
    }

    /// Returns the counters and the current load.
    #[must_use]
    pub fn stats(&self) -> PostgresStats {
        let Shared { swaps, schedule, counters, .. } = &*self.shared;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        PostgresStats {
            batches: read(&swaps.counters.batches),
            swaps: read(&swaps.counters.writes),
            conflicts: read(&counters.conflicts),
            again: read(&swaps.counters.again),
            alone: read(&swaps.counters.alone),
            lost: read(&swaps.counters.lost),
            connections: read(&counters.connections),
            removed: read(&counters.removed),
            schedule_batches: read(&schedule.counters.batches),
            schedule_writes: read(&schedule.counters.writes),
            queued: swaps.waiting() + schedule.waiting(),
            awaited: self.listener.as_ref().map_or(0, Listener::awaited),
        }
    }

    /// Accepts no more requests, finishes those that wait, and closes the connections. If the
    /// future is dropped, all of that still happens.
    pub async fn close(&self) {
        self.shared.close();
        let finished = {
            let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
            finished.take()
        };
        if let Some(finished) = finished {
            // It ends early only with the runtime.
            finished.await.ok();
        }
    }

    pub(crate) fn seal(&self, swap: &Swap) -> Result<Write, StoreError> {
        let entropy = &*self.shared.setup.options.entropy;
        let sealed = self
            .sealer
            .seal(&swap.id, swap.write_id, &swap.draft.record, entropy)
            .map_err(StoreError::unavailable)?;
        Ok(Write::new(swap, sealed))
    }

    /// Notifies the waiters for `key` in other processes of a write that this store did not make
    /// itself.
    pub(crate) fn tell(&self, key: &OperationId) {
        if let Some(bell) = &self.shared.bell {
            bell.ring(key);
        }
    }

    /// Queues a job and waits for its answer, until the timeout.
    pub(crate) async fn ask<J: Item, T>(
        &self,
        queue: &Queue<J>,
        admission: Admission,
        job: impl FnOnce(Ticket, oneshot::Sender<Result<T, StoreError>>) -> J,
    ) -> Result<T, StoreError> {
        let ticket = Ticket::default();
        let (reply, answer) = oneshot::channel();
        queue.push(job(ticket.clone(), reply), admission).map_err(StoreError::unavailable)?;
        let ticket = Withdrawn(ticket);
        let silence = match timeout(self.shared.setup.answer, answer).await {
            Ok(Ok(answer)) => return answer,
            // The task has ended, and the runtime with it.
            Ok(Err(_)) => PostgresStoreError::Closed,
            Err(_) => PostgresStoreError::TimedOut,
        };
        // The sender marks the ticket first, so the request either was sent or never will be.
        Err(if ticket.0.withdraw() {
            StoreError::unavailable(match silence {
                PostgresStoreError::TimedOut => PostgresStoreError::NotSent,
                closed => closed,
            })
        } else {
            StoreError::ambiguous(silence)
        })
    }
}

/// Withdraws the request when dropped: a request whose caller is gone need not be sent.
struct Withdrawn(Ticket);

impl Drop for Withdrawn {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}

/// Starts the tasks and waits until all have ended, in order: writes that lanes pass on are sent by
/// the tasks of single writes, which therefore end after the lanes.
async fn run(shared: Arc<Shared>, upkeep: Arc<Maintenance>, mut link: Option<PgConnection>) {
    let mut first = JoinSet::new();
    let writer = |way, link| Writer::new(Arc::clone(&shared), way, WriterConnection::writing(link));
    for lane in 0..shared.swaps.lanes.len() {
        first.spawn(writer(WriterMode::Batches(lane), link.take()).run::<SwapJob>());
    }
    for lane in 0..shared.schedule.lanes.len() {
        first.spawn(writer(WriterMode::Batches(lane), None).run::<ScheduleJob>());
    }
    first.spawn(reader::run(Arc::clone(&shared)));
    let mut alone = JoinSet::new();
    for _ in 0..ALONE {
        alone.spawn(writer(WriterMode::Alone, None).run::<SwapJob>());
    }
    alone.spawn(writer(WriterMode::Alone, None).run::<ScheduleJob>());
    while first.join_next().await.is_some() {}
    shared.swaps.alone.close();
    shared.schedule.alone.close();
    while alone.join_next().await.is_some() {}
    upkeep.close().await;
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("stats", &self.stats())
            .field("sealer", &self.sealer)
            .finish_non_exhaustive()
    }
}

fn is_replaced(error: &StoreError) -> bool {
    let StoreError::Unavailable(source) = error else { return false };
    matches!(source.downcast_ref(), Some(PostgresStoreError::Replaced))
}

// Cancellation: each method queues a job and awaits the answer. If it is dropped before the first,
// nothing happened; if after, the job is withdrawn, unless a task has sent it: then the task
// completes the job and drops the answer.
impl Store for PostgresStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            // Sealed here and not on the writer's task, so that many records are sealed in
            // parallel.
            let write = self.seal(&swap)?;
            let admission = Admission::of(write.expected.as_ref());
            let key = write.key;
            let lane = self.shared.swaps.lane(&key);
            let deadline = Instant::now() + self.shared.setup.answer;
            let job = |ticket, reply| SwapJob { write, ticket, deadline, reply };
            match self.ask(lane, admission, job).await {
                // An existing record answers the claim.
                Err(error) if is_replaced(&error) => {
                    let seen = self.load(&key).await?;
                    if seen.stored.is_some() { Ok(Swapped::Conflict(seen)) } else { Err(error) }
                }
                answer => answer?.open(&key, &self.sealer),
            }
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            let job = |ticket, reply| LoadJob { key: *key, ticket, reply };
            let loaded =
                self.ask(&self.shared.loads, Admission::Any, job).await.map_err(|error| {
                    match error {
                        // Nothing was changed, whether or not it was sent.
                        StoreError::Ambiguous(source) => StoreError::Unavailable(source),
                        other => other,
                    }
                })?;
            let stored = loaded.found.map(|found| found.open(key, &self.sealer)).transpose()?;
            Ok(Snapshot { now: loaded.now, stored })
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move {
            let mut reaped = Reaped::default();
            let mut left = limit.get();
            while left > 0 {
                let chunk = left.min(REAP_CHUNK);
                let rows = self.upkeep.run(Job::Reap { limit: chunk.into() }).await;
                let rows = rows.map_err(crate::maintenance::MaintenanceError::into_store_error)?;
                let (removed, moved) = counts(&rows)?;
                crate::shared::count(&self.shared.counters.removed, removed as usize);
                reaped.removed += removed;
                reaped.more = removed + moved >= chunk;
                if !reaped.more {
                    break;
                }
                left -= chunk;
            }
            Ok(reaped)
        })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let notify = self.listener.as_ref().map(|_| self as &dyn Notify);
        let schedule = self.tables.schedule.then_some(self as &dyn Schedule);
        let secrets = self.shared.setup.options.ring.as_ref();
        Capabilities { secrets, notify, shared: true, schedule }
    }
}

impl Inspect for PostgresStore {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            // One row more than requested shows that there are more.
            let limit_and_one = i64::from(limit.get()) + 1;
            // Every key is larger than the empty one.
            let after = after.map_or_else(Vec::new, |key| key.as_bytes().to_vec());
            let rows = self.upkeep.run(Job::Page { after, limit: limit_and_one }).await;
            let rows = rows.map_err(crate::maintenance::MaintenanceError::into_read_error)?;
            self.read_page(&rows, limit.get() as usize)
        })
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        if self.tables.reads_blocks {
            Box::pin(walk::step(&self.upkeep, &self.sealer, from, limit, Visited::Undecided, visit))
        } else {
            scan_by_pages(self, from, limit, visit)
        }
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        if self.tables.reads_blocks {
            Box::pin(walk::step(
                &self.upkeep,
                &self.sealer,
                from,
                limit,
                Visited::All(since),
                visit,
            ))
        } else {
            scan_by_pages(self, from, limit, visit)
        }
    }
}

impl PostgresStore {
    fn read_page(&self, rows: &[Row], limit: usize) -> Result<Page, StoreError> {
        let nonsense = || StoreError::unavailable(PostgresStoreError::UnexpectedAnswer);
        let first = rows.first().ok_or_else(nonsense)?;
        let now = ResultRow::read(first).map_err(StoreError::corrupt)?.now;
        let found: Option<i64> = first.try_get(9).map_err(|_| nonsense())?;
        let mut records = Vec::new();
        for row in rows.iter().take(limit) {
            let ResultRow { key, found, .. } = ResultRow::read(row).map_err(StoreError::corrupt)?;
            let Some(key) = key else { continue };
            let stored = match found {
                Ok(Some(found)) => found.open(&key, &self.sealer),
                Ok(None) => continue,
                Err(damaged) => Err(StoreError::corrupt(damaged)),
            };
            records.push((key, stored));
        }
        // Rows beyond the limit of bytes were counted and left out.
        let more = usize::try_from(found.unwrap_or(0)).is_ok_and(|found| found > records.len());
        Ok(Page { now, records, more })
    }
}

impl Notify for PostgresStore {
    fn written<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, ()> {
        match &self.listener {
            Some(listener) => Box::pin(listener.written(key)),
            None => Box::pin(std::future::pending()),
        }
    }
}

/// Returns the numbers of rows removed and moved.
fn counts(rows: &[Row]) -> Result<(u32, u32), StoreError> {
    let nonsense = || StoreError::ambiguous(PostgresStoreError::UnexpectedAnswer);
    let [row] = rows else { return Err(nonsense()) };
    let count = |at: usize| {
        let count: i64 = row.try_get(at).map_err(|_| nonsense())?;
        u32::try_from(count).map_err(|_| nonsense())
    };
    Ok((count(0)?, count(1)?))
}

//! The tasks that write.
//!
//! 1. While a batch is under way swaps queue, and then all are sent in one statement, at most one
//!    per key.
//! 2. A batch that the server rejects did not happen; each swap of it is sent alone, so that only
//!    the one that caused the rejection fails. If the answer to a batch is lost, each swap of it is
//!    ambiguous.
//! 3. A row that another transaction has locked is left out of the batch. Its swap is sent alone,
//!    on another connection, where it waits for the lock without delaying others.
//! 4. Nothing can deadlock. Batches wait only for rows that others are inserting, and they process
//!    keys in order; a swap alone in its transaction has no lock while it waits.
//!
//! The tasks belong to the store and not to callers: a caller that is dropped drops the answer.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{OperationId, StoreError};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Row;

use crate::error::{PostgresStoreError, TransactionFailure};
use crate::identity::recognise;
use crate::link::{ConnectionSetup, Parameter, PgConnection, StatementCall};
use crate::queue::Queue;
use crate::record::{RawSwapped, ResultRow, Write};
use crate::secret::Purpose;
use crate::shared::{Shared, SwapJob, count};
use crate::sql::Verb;

/// Approximate limit of the records in a batch, in bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Pauses between attempts to connect: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Time after which an unused connection is closed, if it is rarely needed.
const IDLE: Duration = Duration::from_secs(60);

/// The queue of a writer, and the way in which it is processed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WriterMode {
    /// Sends the swaps of this lane in batches.
    Batches(usize),
    /// Sends the swaps that batches left over, one by one.
    Alone,
}

#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    way: WriterMode,
    line: WriterConnection,
    /// Whether the last batch had several swaps.
    crowded: bool,
}

/// A connection that is made again automatically.
#[derive(Debug)]
pub(crate) struct WriterConnection {
    link: Option<PgConnection>,
    purpose: Purpose,
    pause: Duration,
}

impl Writer {
    pub(crate) const fn new(shared: Arc<Shared>, way: WriterMode, line: WriterConnection) -> Self {
        Self { shared, way, line, crowded: false }
    }

    /// Writes until the queue is closed and empty.
    pub(crate) async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let queue = self.queue(&shared);
        while self.line.rest(queue.wait(), self.way == WriterMode::Alone).await {
            let link = match self.line.link(&shared).await {
                Ok(link) => link,
                Err(error) => {
                    // No request in the queue was sent.
                    for job in queue.drain() {
                        job.reply.send(Err(StoreError::unavailable(error.clone()))).ok();
                    }
                    self.line.pause().await;
                    continue;
                }
            };
            let jobs = match self.way {
                WriterMode::Batches(_) => {
                    if self.crowded {
                        gather(queue).await;
                    }
                    queue.take(shared.setup.options.batch, BATCH_BYTES)
                }
                WriterMode::Alone => queue.take(1, BATCH_BYTES),
            };
            self.crowded = jobs.len() > 1;
            let keys: Vec<OperationId> = jobs.iter().map(|job| job.write.key).collect();
            if !jobs.is_empty() && !write(&shared, self.way, link, jobs).await {
                self.line.hang_up();
            }
            queue.done(&keys);
        }
        self.line.close().await;
    }

    fn queue<'a>(&self, shared: &'a Shared) -> &'a Queue<SwapJob> {
        match self.way {
            WriterMode::Batches(lane) => &shared.lanes[lane],
            WriterMode::Alone => &shared.alone,
        }
    }
}

/// Lets callers that were just answered queue their next swaps, so that these are in the next batch
/// and not in the one after it: callers would otherwise fall into two groups that alternate, each
/// of half the size. Ends as soon as no swap arrives, so it takes no time then.
async fn gather(queue: &Queue<SwapJob>) {
    let mut waiting = queue.len();
    for _ in 0..8 {
        tokio::task::yield_now().await;
        let now = queue.len();
        if now == waiting {
            return;
        }
        waiting = now;
    }
}

/// Sends a batch and answers its callers. Returns whether the connection is still usable.
async fn write(shared: &Shared, way: WriterMode, link: &PgConnection, jobs: Vec<SwapJob>) -> bool {
    let mut writes: Vec<_> = jobs.iter().map(|job| &job.write).collect();
    // In the order of keys: batches that insert the same keys then wait for each other in one
    // direction.
    writes.sort_unstable_by_key(|write| write.key);
    let columns = Columns::of(&writes);
    let patient = way == WriterMode::Alone;
    let begin = match way {
        WriterMode::Batches(_) => Cow::Borrowed(shared.setup.begin()),
        WriterMode::Alone => Cow::Owned(begin_alone(&jobs, &shared.setup)),
    };
    let mut parameters = columns.parameters();
    parameters.push(&patient);
    // A claim that may execute again also compares, until the replacement is known, so that it is
    // logged.
    let unaware = !shared.setup.known.is_replaced();
    let compares = jobs.iter().any(|job| job.write.strict || (job.write.is_new && unaware));
    let known = compares.then(|| shared.setup.known.expected()).flatten();
    let verb = match &known {
        Some(known) => {
            parameters.push(known);
            Verb::SwapKnown
        }
        None => Verb::Swap,
    };
    let call = StatementCall { verb, parameters };
    let sent = link.transact(&shared.setup, &begin, call);
    count(&shared.counters.batches, 1);
    // After the timeout the transaction may still be committed; the connection is given up.
    let outcome = timeout(shared.setup.answer, sent).await;
    let failure = match outcome {
        // Without the expected identity nothing was written.
        Ok(Ok(rows)) if rows.is_empty() && known.is_some() => {
            return replaced(shared, way, link, jobs).await;
        }
        Ok(Ok(rows)) => match said(&rows) {
            Some(said) => {
                settle(shared, way, jobs, said);
                return true;
            }
            None => TransactionFailure::Lost(PostgresStoreError::UnexpectedAnswer),
        },
        Ok(Err(failure)) => failure,
        Err(_) => TransactionFailure::Lost(PostgresStoreError::TimedOut),
    };
    let good = !failure.ends_connection();
    if failure.is_locked() && way == WriterMode::Alone {
        // Swaps of the same key that queue for the same lock fail with it.
        for behind in jobs.iter().flat_map(|job| shared.alone.drain_key(&job.write.key)) {
            behind.reply.send(Err(failure.clone().into_store_error())).ok();
        }
    }
    fail(shared, jobs, &failure);
    good
}

/// Rejects the swaps that require the expected tables, unless an operator confirmed the present
/// ones; the others are sent again. Returns whether the connection is still usable.
async fn replaced(
    shared: &Shared,
    way: WriterMode,
    link: &PgConnection,
    jobs: Vec<SwapJob>,
) -> bool {
    let looking = recognise(link.client(), &shared.setup, Purpose::Inspect);
    let recognised = timeout(shared.setup.answer, looking).await;
    let accepted = matches!(recognised, Ok(Ok(true)));
    // In their original order.
    for job in jobs.into_iter().rev() {
        if accepted || !job.write.strict {
            job.ticket.wait_again();
            shared.queue_of(way, &job).put_back(job);
        } else {
            job.reply.send(Err(StoreError::unavailable(PostgresStoreError::Replaced))).ok();
        }
    }
    matches!(recognised, Ok(Ok(_)))
}

/// Returns the BEGIN of a single swap. It waits for a lock for at most half of the timeout, and
/// ends early enough for the caller to receive the answer.
fn begin_alone(jobs: &[SwapJob], setup: &ConnectionSetup) -> String {
    let now = Instant::now();
    let left = jobs.iter().map(|job| job.deadline.saturating_duration_since(now)).min();
    let left = left.unwrap_or_default() * 3 / 4;
    setup.begin_with(left, left.min(setup.answer / 2))
}

/// Returns the rows by key; `None` if they cannot be read.
fn said(rows: &[Row]) -> Option<HashMap<OperationId, ResultRow>> {
    let mut by_key = HashMap::with_capacity(rows.len());
    for row in rows {
        let said = ResultRow::read(row).ok()?;
        // The first row of a key is used: if this statement wrote it, all of them are the same.
        by_key.entry(said.key?).or_insert(said);
    }
    Some(by_key)
}

fn settle(
    shared: &Shared,
    way: WriterMode,
    jobs: Vec<SwapJob>,
    mut said: HashMap<OperationId, ResultRow>,
) {
    count(&shared.counters.swaps, jobs.len());
    let mut again = VecDeque::new();
    for job in jobs {
        let said = said.remove(&job.write.key);
        let written = said.as_ref().is_some_and(|said| said.written);
        match said.and_then(|said| said.answer(&job.write)) {
            Some(answer) => {
                if matches!(answer, Ok(RawSwapped::Conflict { .. })) {
                    count(&shared.counters.conflicts, 1);
                }
                if let Some(bell) = shared.bell.as_ref().filter(|_| written && job.write.ends()) {
                    bell.ring(&job.write.key);
                }
                job.reply.send(answer).ok();
            }
            None => again.push_front(job),
        }
    }
    for job in again {
        // It was committed without this swap, so this attempt did nothing.
        job.ticket.wait_again();
        if job.write.expected.is_none() || way == WriterMode::Alone {
            // A write of another transaction was not visible yet. By now it is.
            count(&shared.counters.again, 1);
            shared.queue_of(way, &job).put_back(job);
        } else {
            shared.pass_on(job);
        }
    }
}

fn fail(shared: &Shared, jobs: Vec<SwapJob>, failure: &TransactionFailure) {
    let rolled_back = matches!(failure, TransactionFailure::Rejected(_));
    if rolled_back && jobs.len() > 1 {
        for job in jobs {
            job.ticket.wait_again();
            shared.pass_on(job);
        }
        return;
    }
    if !rolled_back {
        count(&shared.counters.lost, jobs.len());
        // Before the answers: a swap that is sent again must not take its own write for confirmed.
        shared.setup.distrust_connections();
    }
    for job in jobs {
        job.reply.send(Err(failure.clone().into_store_error())).ok();
    }
}

impl Shared {
    /// Queues a swap that did nothing in a batch to be sent alone, if the queue has space.
    fn pass_on(&self, job: SwapJob) {
        match self.alone.pass_on(job) {
            Ok(()) => count(&self.counters.alone, 1),
            Err(job) => {
                job.reply.send(Err(StoreError::unavailable(PostgresStoreError::QueueFull))).ok();
            }
        }
    }

    fn queue_of(&self, way: WriterMode, job: &SwapJob) -> &Queue<SwapJob> {
        match way {
            WriterMode::Batches(_) => self.lane(&job.write.key),
            WriterMode::Alone => &self.alone,
        }
    }
}

impl Default for WriterConnection {
    fn default() -> Self {
        Self { link: None, purpose: Purpose::Inspect, pause: FIRST_PAUSE }
    }
}

impl WriterConnection {
    /// Creates a connection for writing records.
    pub(crate) const fn writing(link: Option<PgConnection>) -> Self {
        Self { link, purpose: Purpose::Write, pause: FIRST_PAUSE }
    }

    /// Waits for `work`; closes the connection if that takes long and it is needed `rarely`.
    pub(crate) async fn rest(&mut self, work: impl Future<Output = bool>, rarely: bool) -> bool {
        let mut work = std::pin::pin!(work);
        if rarely && self.link.is_some() {
            match timeout(IDLE, &mut work).await {
                Ok(more) => return more,
                Err(_) => self.close().await,
            }
        }
        work.await
    }

    /// Returns the connection, made again if necessary. Bounded in time.
    pub(crate) async fn link(
        &mut self,
        shared: &Shared,
    ) -> Result<&PgConnection, PostgresStoreError> {
        let link = match self.link.take().filter(|link| !link.is_closed()) {
            Some(link) => link,
            None => open(shared, self.purpose).await?,
        };
        self.pause = FIRST_PAUSE;
        Ok(self.link.insert(link))
    }

    /// Pauses after a failed attempt to connect.
    pub(crate) async fn pause(&mut self) {
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LAST_PAUSE);
    }

    /// Closes the connection, whose state is unknown.
    pub(crate) fn hang_up(&mut self) {
        self.link = None;
    }

    pub(crate) async fn close(&mut self) {
        if let Some(link) = self.link.take() {
            link.close().await;
        }
    }
}

async fn open(shared: &Shared, purpose: Purpose) -> Result<PgConnection, PostgresStoreError> {
    let opened = PgConnection::open(&shared.setup, purpose).await;
    match opened {
        Ok(link) => {
            count(&shared.counters.connections, 1);
            Ok(link)
        }
        Err(error) => {
            tracing::warn!(%error, "no connection to PostgreSQL");
            Err(PostgresStoreError::Connect(Arc::new(error)))
        }
    }
}

/// Swaps as columns, the form in which a statement takes many at once.
#[derive(Debug, Default)]
pub(crate) struct Columns<'a> {
    keys: Vec<&'a [u8]>,
    write_ids: Vec<&'a [u8]>,
    states: Vec<&'static str>,
    sealed: Vec<&'a [u8]>,
    leases: Vec<i64>,
    keeps: Vec<Option<i64>>,
    graces: Vec<i64>,
    hints: Vec<i64>,
    expected: Vec<Option<&'a [u8]>>,
    next_fences: Vec<bool>,
}

impl<'a> Columns<'a> {
    pub(crate) fn of(writes: &[&'a Write]) -> Self {
        let mut columns = Self::default();
        for write in writes {
            columns.keys.push(write.key.as_bytes());
            columns.write_ids.push(write.write_id.as_bytes());
            columns.states.push(write.state);
            columns.sealed.push(&write.sealed);
            columns.leases.push(write.lease);
            columns.keeps.push(write.keep);
            columns.graces.push(write.grace);
            columns.hints.push(write.hint);
            columns.expected.push(write.expected.as_ref().map(|write_id| &write_id.as_bytes()[..]));
            columns.next_fences.push(write.next_fence);
        }
        columns
    }

    /// Returns the parameters, in the order of [`crate::sql::SWAP_IN_TYPES`].
    pub(crate) fn parameters(&self) -> Vec<Parameter<'_>> {
        let Self {
            keys,
            write_ids,
            states,
            sealed,
            leases,
            keeps,
            graces,
            hints,
            expected,
            next_fences,
        } = self;
        vec![keys, write_ids, states, sealed, leases, keeps, graces, hints, expected, next_fences]
    }
}

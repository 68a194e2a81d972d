//! The tasks that write.
//!
//! 1. While a batch is under way swaps queue, and then all go in one statement, at most one of each
//!    key.
//! 2. A batch that the server refuses did not happen; each swap of it goes alone, so that the one
//!    that it stumbled over is found. A batch whose answer was lost is ambiguous, each swap of it.
//! 3. A row that somebody has locked is left out of the batch, and its swap goes alone, on another
//!    connection, where it waits for the lock without keeping others waiting.
//! 4. Nothing can deadlock. Batches wait for nothing but rows that others are inserting, and they
//!    do everything in order of key; who is alone in its transaction holds nothing while it waits.
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

/// Bytes of records in a batch, about.
const BATCH_BYTES: usize = 4 << 20;

/// Pauses between attempts to connect: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// After which a connection that is only needed now and then is closed.
const IDLE: Duration = Duration::from_secs(60);

/// Which queue a writer empties, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WriterMode {
    /// In batches, that of this lane.
    Batches(usize),
    /// One by one, what batches left over.
    Alone,
}

#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    way: WriterMode,
    line: WriterConnection,
    /// Whether the last batch was one.
    crowded: bool,
}

/// A connection that comes back by itself.
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
                    // Nothing of it was sent.
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

/// Lets those who were just answered ask again, so that they are in the next batch and not in the
/// one after it: callers would fall into two groups that take turns, each of half the size. Ends
/// as soon as nobody comes, so that it takes no time where they stay away.
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

/// Sends a batch and answers its callers. Whether the connection is still good.
async fn write(shared: &Shared, way: WriterMode, link: &PgConnection, jobs: Vec<SwapJob>) -> bool {
    let mut writes: Vec<_> = jobs.iter().map(|job| &job.write).collect();
    // In order of key: batches that insert the same keys then wait for each other in one direction.
    writes.sort_unstable_by_key(|write| write.key);
    let columns = Columns::of(&writes);
    let patient = way == WriterMode::Alone;
    let begin = match way {
        WriterMode::Batches(_) => Cow::Borrowed(shared.setup.begin()),
        WriterMode::Alone => Cow::Owned(begin_alone(&jobs, &shared.setup)),
    };
    let mut parameters = columns.parameters();
    parameters.push(&patient);
    // What may execute again compares as well until that is known, so that it is in the log.
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
    // Dropped by the time-out the transaction may yet be committed, and the connection is given up.
    let outcome = timeout(shared.setup.answer, sent).await;
    let failure = match outcome {
        // Without the identity that was expected nothing was written.
        Ok(Ok(rows)) if rows.is_empty() && known.is_some() => {
            return replaced(shared, way, link, jobs).await;
        }
        Ok(Ok(rows)) => match said(&rows) {
            Some(said) => {
                settle(shared, way, jobs, said);
                return true;
            }
            None => TransactionFailure::Lost(PostgresStoreError::Nonsense),
        },
        Ok(Err(failure)) => failure,
        Err(_) => TransactionFailure::Lost(PostgresStoreError::TimedOut),
    };
    let good = !failure.ends_connection();
    if failure.is_locked() && way == WriterMode::Alone {
        // Others that wait behind it for the same lock hear so with it.
        for behind in jobs.iter().flat_map(|job| shared.alone.drain_key(&job.write.key)) {
            behind.reply.send(Err(failure.clone().into_store_error())).ok();
        }
    }
    fail(shared, jobs, &failure);
    good
}

/// Rejects what needs the tables that were expected, unless an operator confirmed those that are
/// there; the others are sent again. Whether the connection is still good.
async fn replaced(
    shared: &Shared,
    way: WriterMode,
    link: &PgConnection,
    jobs: Vec<SwapJob>,
) -> bool {
    let looking = recognise(link.client(), &shared.setup, Purpose::Inspect);
    let recognised = timeout(shared.setup.answer, looking).await;
    let accepted = matches!(recognised, Ok(Ok(true)));
    // In the order in which they came.
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

/// A lock is waited for no longer than half of the time, and so that the caller still hears of it.
fn begin_alone(jobs: &[SwapJob], setup: &ConnectionSetup) -> String {
    let now = Instant::now();
    let left = jobs.iter().map(|job| job.deadline.saturating_duration_since(now)).min();
    let left = left.unwrap_or_default() * 3 / 4;
    setup.begin_with(left, left.min(setup.answer / 2))
}

/// What the rows say, by key; `None` if they cannot be read.
fn said(rows: &[Row]) -> Option<HashMap<OperationId, ResultRow>> {
    let mut by_key = HashMap::with_capacity(rows.len());
    for row in rows {
        let said = ResultRow::read(row).ok()?;
        // The first one counts: what is there now, of those that were written, is the same.
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
        // It was committed without this one: this copy did nothing.
        job.ticket.wait_again();
        if job.write.expected.is_none() || way == WriterMode::Alone {
            // Somebody else's write was not visible yet. By now it is.
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
        // Before the answers: a swap that is sent again must not take its own write for recorded.
        shared.setup.distrust_connections();
    }
    for job in jobs {
        job.reply.send(Err(failure.clone().into_store_error())).ok();
    }
}

impl Shared {
    /// What did nothing in a batch is to go alone, if there is room for it there.
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
    /// One to write records on.
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

    /// The connection, made anew if need be. Bounded in time.
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

    /// After an attempt to connect that failed.
    pub(crate) async fn pause(&mut self) {
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LAST_PAUSE);
    }

    /// The connection is in a state that nobody knows.
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

/// Writes as columns, which is how a statement takes many at once.
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

    /// In the order of [`crate::sql::SWAP_IN_TYPES`].
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

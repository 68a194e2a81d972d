//! The tasks that write: swaps of records, and changes of the schedule.
//!
//! 1. While a batch is in progress writes queue, and then all are sent in one statement, at most one
//!    per operation id.
//! 2. A batch that the server rejects did not happen; each write of it is sent alone, so that only
//!    the one that caused the rejection fails. If the answer to a batch is lost, each write of it is
//!    ambiguous.
//! 3. A row that another transaction has locked is left out of the batch. Its write is sent alone,
//!    on another connection, where it waits for the lock without delaying others.
//! 4. Nothing can deadlock. Batches wait only for rows that others are inserting, and they process
//!    keys in order; a write alone in its transaction has no lock while it waits.
//!
//! The tasks belong to the store and not to callers: a caller that is dropped drops the answer.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{OperationId, StoreError};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Row;

use crate::error::{PostgresStoreError, TransactionFailure};
use crate::identity::recognise;
use crate::link::{ConnectionSetup, PgConnection};
use crate::queue::{Item, Queue};
use crate::secret::Purpose;
use crate::shared::{Shared, WriteQueues, count};

/// Approximate limit of the records or notes in a batch, in bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Pauses between attempts to connect: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Time after which an unused connection is closed, if it is rarely needed.
const IDLE: Duration = Duration::from_secs(60);

/// The queue of a writer, and the way in which it is processed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WriterMode {
    /// Sends the writes of this lane in batches.
    Batches(usize),
    /// Sends the writes that batches left over, one by one.
    Alone,
}

/// A kind of writes.
pub(crate) trait WriteJob: Item + fmt::Debug + Send + Sync + Sized + 'static {
    /// The answers of a statement, by key.
    type Answers: Send;

    /// Whether the connection for batches is closed while it is unused.
    const RARE: bool;

    /// Returns the queues of this kind.
    fn queues(shared: &Shared) -> &WriteQueues<Self>;

    /// Returns the time at which its caller's timeout ends.
    fn deadline(&self) -> Instant;

    /// Returns the tables that it requires.
    fn required(&self) -> RequiredTables;

    /// Returns whether it changes an existing row, which another transaction may have locked.
    fn changes_row(&self) -> bool;

    /// Sends writes of distinct keys in a transaction. With `terms.known` they are written only to the
    /// tables of that identity; with others there are no rows in the answer.
    fn send(
        jobs: &[Self],
        link: &PgConnection,
        setup: &ConnectionSetup,
        terms: SendTerms<'_>,
    ) -> impl Future<Output = Result<Vec<Row>, TransactionFailure>> + Send;

    /// Returns the answers in the rows; `None` if they cannot be read.
    fn read(rows: &[Row]) -> Option<Self::Answers>;

    /// Answers its caller. Returns it if there is no answer, because this statement left it out.
    fn answer(self, answers: &mut Self::Answers, shared: &Shared) -> Option<Self>;

    /// Answers its caller with an error.
    fn fail(self, error: StoreError);
}

/// The tables that a write requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RequiredTables {
    /// Those that were used before.
    Known,
    /// Any, but others are logged.
    Logged,
    /// Any.
    Any,
}

/// The way in which writes are sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendTerms<'a> {
    pub(crate) begin: &'a str,
    /// Whether to wait for locks.
    pub(crate) patient: bool,
    /// The identity of the tables that the writes require.
    pub(crate) known: Option<&'a String>,
}

#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    way: WriterMode,
    line: WriterConnection,
    /// Whether the last batch had several writes.
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
    pub(crate) async fn run<J: WriteJob>(mut self) {
        let shared = Arc::clone(&self.shared);
        let queues = J::queues(&shared);
        let queue = match self.way {
            WriterMode::Batches(lane) => &queues.lanes[lane],
            WriterMode::Alone => &queues.alone,
        };
        let rarely = J::RARE || self.way == WriterMode::Alone;
        while self.line.rest(queue.wait(), rarely).await {
            let link = match self.line.link(&shared).await {
                Ok(link) => link,
                Err(error) => {
                    // No request in the queue was sent.
                    for job in queue.drain() {
                        job.fail(StoreError::unavailable(error.clone()));
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
            let keys: Vec<OperationId> = jobs.iter().map(|job| *job.key()).collect();
            if !jobs.is_empty() && !write(&shared, self.way, link, jobs).await {
                self.line.hang_up();
            }
            queue.done(&keys);
        }
        self.line.close().await;
    }
}

/// Lets callers that were just answered queue their next writes, so that these are in the next batch
/// and not in the one after it: callers would otherwise fall into two groups that alternate, each
/// of half the size. Ends as soon as no write arrives, so it takes no time then.
async fn gather<J: Item>(queue: &Queue<J>) {
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
async fn write<J: WriteJob>(
    shared: &Shared,
    way: WriterMode,
    link: &PgConnection,
    jobs: Vec<J>,
) -> bool {
    let patient = way == WriterMode::Alone;
    let begin = match way {
        WriterMode::Batches(_) => Cow::Borrowed(shared.setup.begin()),
        WriterMode::Alone => Cow::Owned(begin_alone(&jobs, &shared.setup)),
    };
    // A claim that may execute again also compares, until the replacement is known, so that it is
    // logged.
    let unaware = !shared.setup.known.is_replaced();
    let compares = jobs.iter().any(|job| match job.required() {
        RequiredTables::Known => true,
        RequiredTables::Logged => unaware,
        RequiredTables::Any => false,
    });
    let known = compares.then(|| shared.setup.known.expected()).flatten();
    let terms = SendTerms { begin: &begin, patient, known: known.as_ref() };
    let sent = J::send(&jobs, link, &shared.setup, terms);
    count(&J::queues(shared).counters.batches, 1);
    // After the timeout the transaction may still be committed; the connection is given up.
    let outcome = timeout(shared.setup.answer, sent).await;
    let failure = match outcome {
        // Without the expected identity nothing was written.
        Ok(Ok(rows)) if rows.is_empty() && known.is_some() => {
            return replaced(shared, way, link, jobs).await;
        }
        Ok(Ok(rows)) => match J::read(&rows) {
            Some(answers) => {
                settle(shared, way, jobs, answers);
                return true;
            }
            None => TransactionFailure::Lost(PostgresStoreError::UnexpectedAnswer),
        },
        Ok(Err(failure)) => failure,
        Err(_) => TransactionFailure::Lost(PostgresStoreError::TimedOut),
    };
    let good = !failure.ends_connection();
    if failure.is_locked() && way == WriterMode::Alone {
        // Writes of the same key that queue for the same lock fail with it.
        let alone = &J::queues(shared).alone;
        for behind in jobs.iter().flat_map(|job| alone.drain_key(job.key())) {
            behind.fail(failure.clone().into_store_error());
        }
    }
    fail(shared, jobs, &failure);
    good
}

/// Rejects the writes that require the expected tables, unless an operator confirmed the present
/// ones; the others are sent again. Returns whether the connection is still usable.
async fn replaced<J: WriteJob>(
    shared: &Shared,
    way: WriterMode,
    link: &PgConnection,
    jobs: Vec<J>,
) -> bool {
    let looking = recognise(link.client(), &shared.setup, Purpose::Inspect);
    let recognised = timeout(shared.setup.answer, looking).await;
    let accepted = matches!(recognised, Ok(Ok(true)));
    // In their original order.
    for job in jobs.into_iter().rev() {
        if accepted || job.required() != RequiredTables::Known {
            job.ticket().wait_again();
            J::queues(shared).queue_of(way, &job).put_back(job);
        } else {
            job.fail(StoreError::unavailable(PostgresStoreError::Replaced));
        }
    }
    matches!(recognised, Ok(Ok(_)))
}

/// Returns the BEGIN of a single write. It waits for a lock for at most half of the timeout, and
/// ends early enough for the caller to receive the answer.
fn begin_alone<J: WriteJob>(jobs: &[J], setup: &ConnectionSetup) -> String {
    let now = Instant::now();
    let left = jobs.iter().map(|job| job.deadline().saturating_duration_since(now)).min();
    let left = left.unwrap_or_default() * 3 / 4;
    setup.begin_with(left, left.min(setup.answer / 2))
}

fn settle<J: WriteJob>(shared: &Shared, way: WriterMode, jobs: Vec<J>, mut answers: J::Answers) {
    let queues = J::queues(shared);
    count(&queues.counters.writes, jobs.len());
    let mut again = VecDeque::new();
    for job in jobs {
        if let Some(job) = job.answer(&mut answers, shared) {
            again.push_front(job);
        }
    }
    for job in again {
        // It was committed without this write, so this attempt did nothing.
        job.ticket().wait_again();
        if !job.changes_row() || way == WriterMode::Alone {
            // A write of another transaction was not visible yet. By now it is.
            count(&queues.counters.again, 1);
            queues.queue_of(way, &job).put_back(job);
        } else {
            queues.pass_on(job);
        }
    }
}

fn fail<J: WriteJob>(shared: &Shared, jobs: Vec<J>, failure: &TransactionFailure) {
    let queues = J::queues(shared);
    let rolled_back = matches!(failure, TransactionFailure::Rejected(_));
    if rolled_back && jobs.len() > 1 {
        for job in jobs {
            job.ticket().wait_again();
            queues.pass_on(job);
        }
        return;
    }
    if !rolled_back {
        count(&queues.counters.lost, jobs.len());
        // Before the answers: a write that is sent again must not take its own write for confirmed.
        shared.setup.distrust_connections();
    }
    for job in jobs {
        job.fail(failure.clone().into_store_error());
    }
}

impl<J: WriteJob> WriteQueues<J> {
    /// Queues a write that did nothing in a batch to be sent alone, if the queue has space.
    fn pass_on(&self, job: J) {
        match self.alone.pass_on(job) {
            Ok(()) => count(&self.counters.alone, 1),
            Err(job) => job.fail(StoreError::unavailable(PostgresStoreError::QueueFull)),
        }
    }

    fn queue_of(&self, way: WriterMode, job: &J) -> &Queue<J> {
        match way {
            WriterMode::Batches(_) => self.lane(job.key()),
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

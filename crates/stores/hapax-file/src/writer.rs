//! The thread that writes: one transaction after another, each with all requests that wait.
//!
//! While one commit is being synced, requests queue; then all of them go into the next one. So the
//! cost of a sync does not depend on the number of requests in it.
//!
//! Answers to callers:
//! - No request is answered before the commit with its write is durable, not even with a conflict:
//!   it may be a conflict with a swap of the same batch.
//! - Failure before the commit began: the transaction is dropped, so nothing of it was written or
//!   will be: `Unavailable`.
//! - Failure of the commit: it may be on disk or not, so every write of it is `Ambiguous`. The
//!   requests queued behind it were not applied: `Unavailable`. Then the database is reopened,
//!   because neither the engine's state nor the kernel's cache reflects the disk any more.
//! - Full disk: the reserve is released at the first write that fails for lack of space, so that
//!   requests in progress can be recorded. Once it is used up, writes are `Unavailable` for a pause
//!   that doubles, and requests that only read, such as replays, are answered as before.
//! - A file that is not at its path any more, or another one there: writes are `Unavailable` until it is back.
//! - A caller that is gone changes nothing: its write is applied, and the answer is dropped.
//!
//! Changes of the schedule are writes as swaps are, in the same transactions.

use std::collections::VecDeque;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_channel::oneshot;
use hapax_core::store::Reaped;
use hapax_core::{StoreError, Timestamp};
use redb::{Database, StorageError, WriteTransaction};

use crate::backing::Backing;
use crate::batch::{Batch, Removal};
use crate::batch_context::{BatchContext, DiskFull};
use crate::clock::ClockMark;
use crate::database::{self, guarded};
use crate::error::{FileStoreError, is_full, unchanged};
use crate::job::{AppliedJob, Job, WriteJob};
use crate::lock_file::LockFile;
use crate::pause::{LONGEST, Pause};
use crate::queue::Woken;
use crate::shared::{Shared, count};

/// Limit of writes in one transaction.
const MAX_WRITES: usize = 512;
/// Bytes of records and entries, written or read, from which on a transaction takes no further
/// writes.
const MAX_BYTES: usize = 16 << 20;
/// Highest limit of index entries that one transaction reads for reaping.
const MAX_DUE: usize = 64;
/// Lowest limit of index entries that one transaction reads for reaping.
const MIN_DUE: usize = 4;
/// Time without writes after which reaping gets a separate commit.
const QUIET_TIME: Duration = Duration::from_millis(5);
/// Time for which a commit that has only insertions of entries waits for another write. A saga saves its
/// first log when it inserts its entry, and both share a commit.
const BESIDE_INSERTION: Duration = Duration::from_millis(1);
/// Free bytes above `min_free_bytes` from which on the reserve is made again.
const FREE_FOR_RESERVE: u64 = 64 << 20;

pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) backing: Arc<dyn Backing>,
    pub(crate) cache_bytes: usize,
    pub(crate) min_free_bytes: u64,
    pub(crate) quick_recovery_above: u64,
    /// At least the fence of every record that was reaped.
    pub(crate) floor: u64,
    /// The mark of the clock in the file.
    pub(crate) mark: ClockMark,
    /// True if the mark cannot be written, because its block is damaged.
    pub(crate) no_mark: bool,
    pub(crate) readers: Vec<JoinHandle<()>>,
    pub(crate) lock: Option<Arc<LockFile>>,
    /// Writes that precede those in the queue.
    pub(crate) pending: VecDeque<WriteJob>,
    pub(crate) reaps: VecDeque<Reap>,
    /// Whether there is a reserve to be released when the disk is full.
    pub(crate) reserve: bool,
    /// The pause after a write that found the disk full and no reserve: until it is over, writes
    /// are rejected and reads answered.
    pub(crate) full_since: Option<Pause>,
    /// True if the index of expiry is damaged. The records themselves are intact: they are written
    /// without it, and nothing is removed.
    pub(crate) no_index: bool,
}

/// A removal in progress, over several commits.
pub(crate) struct Reap {
    left: u32,
    removed: u32,
    reply: oneshot::Sender<Result<Reaped, StoreError>>,
}

/// The result of a batch.
enum BatchEnd {
    /// The whole batch is durable.
    Committed(Filled),
    /// Nothing was written. One write found damage; the others are repeated without it.
    Damaged { over: Option<WriteJob>, error: StorageError, again: Vec<WriteJob> },
    /// Nothing was written, and the database must be reopened.
    Failed { jobs: Vec<WriteJob>, error: redb::Error },
    /// The batch may have been written.
    Ambiguous { jobs: Vec<WriteJob>, error: redb::Error },
}

impl Writer {
    /// Writes until the store is closed and every queued request is done. `_end` is dropped last.
    pub(crate) fn run(mut self, _end: &WriterExit) {
        loop {
            if self.pending.is_empty() {
                // Reaping shares the commits of writes. A separate commit would delay writes that
                // arrive a moment later, so it waits for a time without any.
                let lull = (!self.reaps.is_empty()).then_some(QUIET_TIME);
                if self.shared.jobs.wait(lull) == Woken::Closed {
                    break;
                }
            }
            if !self.backing.is_in_place() {
                if !self.wait_for_file() {
                    break;
                }
                continue;
            }
            if !self.step() && !self.reopen() {
                break;
            }
        }
        self.finish();
    }

    /// Rejects requests until the file is at its path again. Returns false if the store was closed before. The database
    /// stays open: if the file was removed, it is the last copy, and replays are read from it.
    fn wait_for_file(&mut self) -> bool {
        tracing::error!("{}", FileStoreError::Moved);
        loop {
            self.refuse(|| FileStoreError::Moved);
            // A request that arrives after the file was moved back is executed.
            let woken = self.shared.jobs.wait(Some(LONGEST));
            if self.backing.is_in_place() {
                tracing::info!("the file of the store is at its path again");
                return true;
            }
            if woken == Woken::Closed {
                return false;
            }
        }
    }

    /// Executes one transaction. Returns whether the database is still usable.
    fn step(&mut self) -> bool {
        let ended = {
            let shared = Arc::clone(&self.shared);
            let guard = shared.database();
            let Some(database) = &*guard else { return false };
            // If the engine panics, the replies of the batch are dropped: `Ambiguous`.
            match catch_unwind(AssertUnwindSafe(|| self.transact(database))) {
                Ok(ended) => ended,
                Err(_) => return false,
            }
        };
        self.notice(&ended);
        if matches!(ended, BatchEnd::Failed { .. } | BatchEnd::Ambiguous { .. }) {
            // Closed before any answer, so that no read uses a broken database.
            self.close_database();
        }
        self.settle(ended)
    }

    /// Releases the reserve on a full disk, once, for requests in progress. After that writes pause,
    /// longer each time, and reads continue. The first write that succeeds ends the pauses.
    fn notice(&mut self, ended: &BatchEnd) {
        let now = self.shared.clock.now();
        match ended {
            BatchEnd::Failed { error, .. } | BatchEnd::Ambiguous { error, .. }
                if is_full(error) =>
            {
                if mem::take(&mut self.reserve)
                    && matches!(self.backing.release_reserve(), Ok(true))
                {
                    tracing::warn!(
                        "the disk is full: the reserve was released, so that requests in progress can \
                         be recorded; free disk space"
                    );
                    return;
                }
                let pause = self.full_since.map(|pause| pause.longer(now));
                let pause = pause.unwrap_or_else(|| Pause::new(now));
                tracing::error!(
                    retry_ms = pause.length.as_millis() as u64,
                    "the disk is full: nothing can be recorded until disk space is free"
                );
                self.full_since = Some(pause);
            }
            BatchEnd::Committed(Filled { wrote: true, .. }) => self.full_since = None,
            _ => {}
        }
        if !self.reserve && self.full_since.is_none() {
            let enough = self.min_free_bytes.saturating_add(FREE_FOR_RESERVE);
            if self.backing.available().is_ok_and(|free| free.is_some_and(|free| free >= enough)) {
                self.reserve = self.backing.reserve().is_ok();
            }
        }
    }

    fn transact(&mut self, database: &Database) -> BatchEnd {
        let length = self.backing.length().map_err(redb::Error::from);
        let begun = length.and_then(|length| {
            // When it opens a file, the engine verifies all of it and fails at damage, unless the
            // file was written for a quick recovery.
            let damaged = self.shared.damages.count() > 0;
            database::begin(database, damaged || length >= self.quick_recovery_above)
        });
        let transaction = match begun {
            Ok(transaction) => transaction,
            Err(error) => return BatchEnd::Failed { jobs: Vec::new(), error },
        };
        let filled = match self.fill(&transaction) {
            Ok(filled) => filled,
            Err(ended) => {
                let ended = *ended;
                // If the abort fails, the repair at the next opening undoes the rest.
                return match (transaction.abort(), ended) {
                    (Err(error), BatchEnd::Damaged { over, again, .. }) => {
                        let jobs = again.into_iter().chain(over).collect();
                        BatchEnd::Failed { jobs, error: error.into() }
                    }
                    (_, ended) => ended,
                };
            }
        };
        if filled.wrote {
            if let Err(error) = transaction.commit() {
                let jobs = again(filled.applied, None);
                return BatchEnd::Ambiguous { jobs, error: error.into() };
            }
            count(&self.shared.counters.commits, 1);
        } else if let Err(error) = transaction.abort() {
            let jobs = again(filled.applied, None);
            return BatchEnd::Failed { jobs, error: error.into() };
        }
        BatchEnd::Committed(filled)
    }

    /// Applies the requests that wait.
    fn fill(&mut self, transaction: &WriteTransaction) -> Result<Filled, Box<BatchEnd>> {
        let mut applied = Vec::new();
        let mut batch =
            Batch::open(transaction, self.floor).map_err(|error| failed(Vec::new(), error))?;
        let now = self.shared.clock.now();
        let no_writes = self.full_since.is_some_and(|pause| !pause.is_over(now));
        let no_index = self.no_index;
        let terms =
            BatchContext { epoch: self.shared.epoch, full: self.full(), no_writes, no_index };
        let (mut bytes, mut lingers) = (0, true);
        while applied.len() < MAX_WRITES && bytes + batch.entry_bytes() < MAX_BYTES {
            let Some(job) = self.next() else {
                let beside =
                    mem::take(&mut lingers) && applied.iter().all(AppliedJob::is_insertion);
                if beside && !applied.is_empty() {
                    self.shared.jobs.wait(Some(BESIDE_INSERTION));
                    continue;
                }
                break;
            };
            let (job, error) = match apply(&mut batch, job, self.shared.clock.now(), terms) {
                Ok(job) => {
                    bytes += job.record_bytes();
                    applied.push(job);
                    continue;
                }
                Err(stopped) => *stopped,
            };
            return Err(match error {
                error @ StorageError::Corrupted(_) if batch.in_index() => {
                    // Repeated without the index, once: `no_index` stays.
                    self.leave_index(&error);
                    let again = again(applied, Some(job));
                    Box::new(BatchEnd::Damaged { over: None, error, again })
                }
                error @ StorageError::Corrupted(_) => {
                    let (over, again) = (Some(job), again(applied, None));
                    Box::new(BatchEnd::Damaged { over, error, again })
                }
                error => failed(again(applied, Some(job)), error),
            });
        }
        if let Some(pause) = &mut self.full_since {
            pause.rejected += applied.len();
        }
        let mut removal = None;
        if no_index && !self.reaps.is_empty() {
            // Without the index nothing is found; each call is answered with an error.
            let damaged = StorageError::Corrupted("the index of what is due is damaged".to_owned());
            self.end_reap(Err(unchanged(damaged)));
        } else if let Some(reap) = self.reaps.front()
            && !no_writes
        {
            // As many as the swaps of this commit will leave to be reaped, at two swaps per record.
            // So reaping keeps up, and hardly delays the requests in the same commit.
            let beside = match applied.len() {
                0 => MAX_DUE,
                writes => (writes / 2).clamp(MIN_DUE, MAX_DUE),
            };
            let (now, limit) = (self.shared.clock.now(), reap.left.min(beside as u32));
            match guarded(|| batch.remove_due(now, limit)) {
                Ok(removed) => removal = Some(removed),
                Err(error @ StorageError::Corrupted(_)) => {
                    if batch.in_index() {
                        self.leave_index(&error);
                    }
                    let (over, again) = (None, again(applied, None));
                    return Err(Box::new(BatchEnd::Damaged { over, error, again }));
                }
                Err(error) => return Err(failed(again(applied, None), error)),
            }
        }
        // After the times of all writes, which it covers. A commit that fails leaves the former one.
        let mark = self.shared.clock.next_mark(self.mark.time);
        if let Some(mark) = mark.filter(|_| batch.wrote() && !self.no_mark)
            && let Err(error) = guarded(|| batch.write_mark(mark))
        {
            let again = again(applied, None);
            return Err(match error {
                error @ StorageError::Corrupted(_) => {
                    self.leave_mark(&error);
                    Box::new(BatchEnd::Damaged { over: None, error, again })
                }
                error => failed(again, error),
            });
        }
        let wrote = batch.wrote();
        let mark = mark.filter(|_| wrote).unwrap_or(self.mark);
        Ok(Filled { applied, removal, floor: batch.floor(), mark, wrote })
    }

    fn leave_mark(&mut self, error: &StorageError) {
        self.no_mark = true;
        tracing::error!(
            %error,
            "the mark of the clock is damaged and is not written: do not set the clock back, stop \
             the process, and write the intact records to a new file with `hapax doctor --salvage OLD \
             NEW`"
        );
    }

    fn leave_index(&mut self, error: &StorageError) {
        if !mem::replace(&mut self.no_index, true) {
            tracing::error!(
                %error,
                "the index of expiry is damaged: records are kept and written without it, and none \
                 is removed; stop the process and write the intact records to a new file with `hapax \
                 doctor --salvage OLD NEW`"
            );
        }
    }

    /// Returns the next write, and collects the reaps before it.
    fn next(&mut self) -> Option<WriteJob> {
        loop {
            if let Some(job) = self.pending.pop_front() {
                return Some(job);
            }
            match self.shared.jobs.pop()? {
                Job::Write(job) => return Some(job),
                Job::Reap { limit, reply } => {
                    self.reaps.push_back(Reap { left: limit, removed: 0, reply });
                }
            }
        }
    }

    /// Sends the answers. Returns whether the database is still usable.
    fn settle(&mut self, ended: BatchEnd) -> bool {
        match ended {
            BatchEnd::Committed(Filled { applied, removal, floor, mark, .. }) => {
                (self.floor, self.mark) = (floor, mark);
                let is_swap = |job: &&AppliedJob| matches!(job, AppliedJob::Swap(..));
                let swaps = applied.iter().filter(is_swap).count();
                count(&self.shared.counters.swaps, swaps as u64);
                applied.into_iter().for_each(AppliedJob::answer);
                if let Some(removal) = removal {
                    self.removed(removal);
                }
                true
            }
            BatchEnd::Damaged { over, error, again } => {
                // At least one request leaves the batch each time, so the repetitions end.
                for job in again.into_iter().rev() {
                    self.pending.push_front(job);
                }
                match (over, self.reaps.is_empty()) {
                    (Some(job), _) => job.fail(unchanged(error)),
                    (None, false) => self.end_reap(Err(unchanged(error))),
                    (None, true) => {}
                }
                true
            }
            BatchEnd::Failed { jobs, error } => self.fail(jobs, error, StoreError::unavailable),
            BatchEnd::Ambiguous { jobs, error } => self.fail(jobs, error, StoreError::ambiguous),
        }
    }

    /// Fails the writes of a transaction, and those that wait. Returns false: the database is not usable.
    fn fail(
        &mut self,
        jobs: Vec<WriteJob>,
        error: redb::Error,
        kind: fn(Arc<FileStoreError>) -> StoreError,
    ) -> bool {
        let error = Arc::new(FileStoreError::Engine(error));
        jobs.into_iter().for_each(|job| job.fail(kind(Arc::clone(&error))));
        self.refuse(|| FileStoreError::Reopening);
        false
    }

    fn removed(&mut self, removal: Removal) {
        count(&self.shared.counters.removed, removal.removed.into());
        let Some(reap) = self.reaps.front_mut() else { return };
        reap.removed += removal.removed;
        reap.left -= removal.removed;
        if !removal.more || reap.left == 0 {
            let done = Reaped { removed: reap.removed, more: removal.more };
            self.end_reap(Ok(done));
        }
    }

    fn end_reap(&mut self, with: Result<Reaped, StoreError>) {
        if let Some(reap) = self.reaps.pop_front() {
            reap.reply.send(with).ok();
        }
    }

    /// Answers every waiting request that it was not executed. Returns their number. Requests that
    /// arrive meanwhile wait for the next time: callers that retry at once would otherwise keep
    /// this from ending.
    fn refuse(&mut self, reason: fn() -> FileStoreError) -> usize {
        let reason = || StoreError::unavailable(reason());
        let waiting = self.pending.len() + self.shared.jobs.len();
        for job in (0..waiting).map_while(|_| self.next()).collect::<Vec<_>>() {
            job.fail(reason());
        }
        while !self.reaps.is_empty() {
            self.end_reap(Err(reason()));
        }
        waiting
    }

    /// Reopens the database. Returns whether it succeeded before the store was closed.
    ///
    /// The epoch stays: this process continues, and so do its leases.
    fn reopen(&mut self) -> bool {
        self.close_database();
        let mut pause = Pause::new(self.shared.clock.now());
        loop {
            match self.try_open() {
                Ok((database, floor)) => {
                    self.floor = floor;
                    *self.shared.database_alone() = Some(database);
                    count(&self.shared.counters.reopened, 1);
                    return true;
                }
                // The writes of an opening need the reserve, too.
                Err(error) if is_full(&error) && mem::take(&mut self.reserve) => {
                    if matches!(self.backing.release_reserve(), Ok(true)) {
                        continue;
                    }
                }
                Err(error) => {
                    let retry_ms = pause.length.as_millis() as u64;
                    tracing::warn!(%error, retry_ms, "the database cannot be opened again yet");
                }
            }
            // Meanwhile requests are rejected at once.
            pause.since = self.shared.clock.now();
            while !pause.is_over(self.shared.clock.now()) {
                match self.shared.jobs.wait(Some(pause.length)) {
                    Woken::Item => {
                        pause.rejected += self.refuse(|| FileStoreError::Reopening);
                    }
                    Woken::Closed => return false,
                    Woken::TimedOut => break,
                }
            }
            pause = pause.longer(self.shared.clock.now());
        }
    }

    fn try_open(&self) -> Result<(Database, u64), redb::Error> {
        let open = || -> Result<_, redb::Error> {
            let database = database::open(&*self.backing, self.cache_bytes, &self.shared.damages)?;
            let floor = database::floor(&database)?;
            Ok((database, floor))
        };
        catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|_| Err(redb::Error::DatabaseClosed))
    }

    /// Ends the readers, closes the database, and only then releases the lock.
    fn finish(mut self) {
        self.refuse(|| FileStoreError::Closed);
        for reader in self.readers.drain(..) {
            reader.join().ok();
        }
        self.close_database();
        if let Some(lock) = &self.lock {
            lock.release();
        }
    }

    /// Closes the database once it is not in use.
    fn close_database(&self) {
        let database = self.shared.database_alone().take();
        database::close(database);
    }

    fn full(&self) -> Option<DiskFull> {
        let needed = self.min_free_bytes;
        let free = self.backing.available().ok().flatten()?;
        (free < needed).then_some(DiskFull { free, needed })
    }
}

/// Ends the wait for the thread when dropped, so also after a panic.
pub(crate) struct WriterExit(pub(crate) Arc<Shared>);

impl Drop for WriterExit {
    fn drop(&mut self) {
        self.0.close();
        while self.0.jobs.pop().is_some() {}
        self.0.ended();
    }
}

struct Filled {
    applied: Vec<AppliedJob>,
    removal: Option<Removal>,
    floor: u64,
    mark: ClockMark,
    wrote: bool,
}

/// Applies a write. An error concerns the transaction, and has the job.
fn apply(
    batch: &mut Batch<'_>,
    job: WriteJob,
    now: Timestamp,
    terms: BatchContext,
) -> Result<AppliedJob, Box<(WriteJob, StorageError)>> {
    match job {
        WriteJob::Swap(job) => match guarded(|| batch.apply(&job, now, terms)) {
            Ok(answer) => Ok(AppliedJob::Swap(job, answer)),
            Err(error) => Err(Box::new((WriteJob::Swap(job), error))),
        },
        WriteJob::Entry(job) => match guarded(|| batch.apply_entry(&job, now, terms)) {
            Ok(answer) => Ok(AppliedJob::Entry(job, answer)),
            Err(error) => Err(Box::new((WriteJob::Entry(job), error))),
        },
    }
}

/// Returns the writes of a transaction that was not committed, and the one after them, in order.
fn again(applied: Vec<AppliedJob>, next: Option<WriteJob>) -> Vec<WriteJob> {
    applied.into_iter().map(AppliedJob::into_job).chain(next).collect()
}

fn failed(jobs: Vec<WriteJob>, error: impl Into<redb::Error>) -> Box<BatchEnd> {
    Box::new(BatchEnd::Failed { jobs, error: error.into() })
}

//! State shared by the store's callers and its threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

use futures_channel::oneshot;
use hapax_core::OperationId;
use hapax_core::store::parts::QueueLimits;
use redb::Database;

use crate::blocks::Damages;
use crate::clock::DatabaseClock;
use crate::job::Job;
use crate::queue::Queue;
use crate::reader::ReadJob;
use crate::record::Epoch;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) jobs: Queue<Job>,
    pub(crate) reads: Queue<ReadJob>,
    pub(crate) clock: DatabaseClock,
    pub(crate) epoch: Epoch,
    pub(crate) counters: Counters,
    pub(crate) damages: Damages,
    /// `None` while the database is reopened, and once it is closed. Every use has the lock for
    /// reading, so closing waits for all uses.
    database: RwLock<Option<Database>>,
    closing: Mutex<Closing>,
    /// Whether the store accepts no more requests, for threads that pause.
    stopped: (Mutex<bool>, Condvar),
}

/// Counters since the store was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commits: AtomicU64,
    pub(crate) swaps: AtomicU64,
    pub(crate) reopened: AtomicU64,
    pub(crate) removed: AtomicU64,
}

#[derive(Debug)]
enum Closing {
    /// The callers that wait for the end.
    Waited(Vec<oneshot::Sender<()>>),
    Done,
}

/// Limit of waiting reads. Each is a key or a page, so their size does not matter.
const READS: QueueLimits = QueueLimits { items: 4096, bytes: usize::MAX };

impl Shared {
    pub(crate) fn new(
        database: Database,
        jobs: QueueLimits,
        clock: DatabaseClock,
        epoch: Epoch,
        damages: Damages,
    ) -> Self {
        Self {
            jobs: Queue::new(jobs),
            reads: Queue::new(READS),
            clock,
            epoch,
            counters: Counters::default(),
            damages,
            database: RwLock::new(Some(database)),
            closing: Mutex::new(Closing::Waited(Vec::new())),
            stopped: (Mutex::new(false), Condvar::new()),
        }
    }

    /// No write under this lock is left half done, so a poisoned lock is usable.
    pub(crate) fn database(&self) -> RwLockReadGuard<'_, Option<Database>> {
        self.database.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the database is not in use.
    pub(crate) fn database_alone(&self) -> RwLockWriteGuard<'_, Option<Database>> {
        self.database.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts no more requests. Queued ones are still executed.
    pub(crate) fn close(&self) {
        self.jobs.close();
        self.reads.close();
        *self.stopped.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stopped.1.notify_all();
    }

    /// Waits for `pause`, or until the store is closed. Returns whether it is open.
    pub(crate) fn pause(&self, pause: Duration) -> bool {
        let stopped = self.stopped.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.stopped.1.wait_timeout_while(stopped, pause, |stopped| !*stopped);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Returns a receiver that resolves, or whose sender is dropped, once the database is closed.
    pub(crate) fn closed(&self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        match &mut *self.closing() {
            Closing::Waited(senders) => senders.push(sender),
            Closing::Done => drop(sender),
        }
        receiver
    }

    /// Notifies the callers that wait for the end, by dropping their senders.
    pub(crate) fn ended(&self) {
        *self.closing() = Closing::Done;
    }

    fn closing(&self) -> MutexGuard<'_, Closing> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Returns the key in the form of the tables.
pub(crate) const fn name(key: &OperationId) -> &[u8; 32] {
    key.as_bytes()
}

//! What the store's callers and its threads share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

use futures_channel::oneshot;
use hapax_core::{Clock, OperationId, StoreError};
use redb::Database;

use crate::batch::SwapJob;
use crate::blocks::Damages;
use crate::queue::{Queue, QueueLimit};
use crate::reader::ReadJob;
use crate::record::Epoch;

/// What waits for the writer.
#[derive(Debug)]
pub(crate) enum Job {
    Swap(SwapJob),
    Reap { limit: u32, reply: oneshot::Sender<Result<hapax_core::store::Reaped, StoreError>> },
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) jobs: Queue<Job>,
    pub(crate) reads: Queue<ReadJob>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) epoch: Epoch,
    pub(crate) counters: Counters,
    pub(crate) damages: Damages,
    /// `None` while it is reopened, and once it is closed. Whoever uses the database holds the
    /// lock for reading, so it is closed when nobody does.
    database: RwLock<Option<Database>>,
    closing: Mutex<Closing>,
    /// Whether it takes no more requests, for threads that pause.
    stopped: (Mutex<bool>, Condvar),
}

/// What happened since the store was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commits: AtomicU64,
    pub(crate) swaps: AtomicU64,
    pub(crate) reopened: AtomicU64,
    pub(crate) removed: AtomicU64,
}

#[derive(Debug)]
enum Closing {
    /// Those who wait for the end.
    Waited(Vec<oneshot::Sender<()>>),
    Done,
}

/// Waiting reads. Each is a key or a page; nothing of size is held for them.
const READS: QueueLimit = QueueLimit { items: 4096, bytes: usize::MAX };

impl Shared {
    pub(crate) fn new(
        database: Database,
        jobs: QueueLimit,
        clock: Arc<dyn Clock>,
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

    /// Nothing is left half done under this lock: a poisoned one is as good as any.
    pub(crate) fn database(&self) -> RwLockReadGuard<'_, Option<Database>> {
        self.database.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody uses the database.
    pub(crate) fn database_alone(&self) -> RwLockWriteGuard<'_, Option<Database>> {
        self.database.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more requests. What is queued is still done.
    pub(crate) fn close(&self) {
        self.jobs.close();
        self.reads.close();
        *self.stopped.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stopped.1.notify_all();
    }

    /// Waits for so long, or until the store is closed. Returns whether it is open.
    pub(crate) fn pause(&self, pause: Duration) -> bool {
        let stopped = self.stopped.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.stopped.1.wait_timeout_while(stopped, pause, |stopped| !*stopped);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Resolves, or is dropped unresolved, once the database is closed.
    pub(crate) fn closed(&self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        match &mut *self.closing() {
            Closing::Waited(senders) => senders.push(sender),
            Closing::Done => drop(sender),
        }
        receiver
    }

    /// Tells those who wait for the end. Dropping their senders does.
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

/// The key as the tables have it.
pub(crate) const fn name(key: &OperationId) -> &[u8; 32] {
    key.as_bytes()
}

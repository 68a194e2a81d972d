//! Timed work of executions: renewals of leases, and futures that move to a task. Most executions end
//! before that, so no task is spawned for each.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::idempotency::deadline_after;

/// The work that becomes due, by time. One task sleeps until the first of these times.
#[derive(Debug)]
pub(super) struct Timer {
    queue: Arc<SharedQueue>,
    task: AbortHandle,
}

#[derive(Debug, Default)]
struct SharedQueue {
    queue: Mutex<Queue>,
    /// Notified when the task has to wake earlier.
    earlier: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    entries: BTreeMap<EntryId, Weak<dyn Due>>,
    last: u64,
    /// Time at which the task wakes; `None` while it waits for an entry.
    wakes_at: Option<Instant>,
    /// Number of drains in progress.
    drains: usize,
}

/// Time of an entry, with a number that distinguishes entries of one time.
type EntryId = (Instant, u64);

/// Work that the timer begins. Its methods do not block.
pub(super) trait Due: fmt::Debug + Send + Sync {
    /// Begins the work at its time.
    fn begin(self: Arc<Self>, runtime: &Handle);

    /// Begins the work before its time, if a drain would wait for its caller otherwise.
    fn drain(self: Arc<Self>, runtime: &Handle);
}

/// An entry of the timer. Dropping it removes the entry.
#[derive(Debug)]
pub(super) struct TimerEntry {
    queue: Arc<SharedQueue>,
    id: EntryId,
}

impl Timer {
    /// Starts the task on `runtime`. It ends when the timer is dropped.
    pub(super) fn start(runtime: &Handle) -> Self {
        let queue = Arc::<SharedQueue>::default();
        let task = runtime.spawn(Arc::clone(&queue).run(runtime.clone())).abort_handle();
        Self { queue, task }
    }

    /// Returns whether its runtime still runs. After that nothing becomes due.
    pub(super) fn is_running(&self) -> bool {
        !self.task.is_finished()
    }

    /// Begins `work` after `delay`, unless the entry is dropped first. Also returns true if the entry is
    /// now the first one, for which the timer's task has to set its alarm anew.
    pub(super) fn enter(&self, delay: Duration, work: Weak<dyn Due>) -> (TimerEntry, bool) {
        self.insert(self.queue.lock(), delay, work)
    }

    fn insert(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        delay: Duration,
        work: Weak<dyn Due>,
    ) -> (TimerEntry, bool) {
        let at = deadline_after(delay);
        queue.last += 1;
        let id = (at, queue.last);
        queue.entries.insert(id, work);
        let is_first = queue.wakes_at.is_none_or(|wakes_at| at < wakes_at);
        if is_first {
            queue.wakes_at = Some(at);
        }
        drop(queue);
        if is_first {
            self.queue.earlier.notify_one();
        }
        (TimerEntry { queue: Arc::clone(&self.queue), id }, is_first)
    }

    /// Enters work for which a drain would wait: while there is a drain, it begins at once.
    pub(super) fn enter_drained(&self, delay: Duration, work: Weak<dyn Due>) -> TimerEntry {
        // One lock for both: a drain that is not counted yet copies the entry afterwards.
        let queue = self.queue.lock();
        let delay = if queue.drains > 0 { Duration::ZERO } else { delay };
        self.insert(queue, delay, work).0
    }

    /// Begins the work of all entries for which a drain would wait, and of those that are entered
    /// before the returned value is dropped.
    pub(super) fn drain(&self, runtime: &Handle) -> TimerDrain {
        // Copied: work takes its own lock, under which others wait for this one.
        let entries: Vec<_> = {
            let mut queue = self.queue.lock();
            queue.drains += 1;
            queue.entries.values().map(Weak::clone).collect()
        };
        let drain = TimerDrain(Arc::clone(&self.queue));
        entries.iter().filter_map(Weak::upgrade).for_each(|work| work.drain(runtime));
        drain
    }
}

/// A drain in progress, until it is dropped.
#[derive(Debug)]
pub(super) struct TimerDrain(Arc<SharedQueue>);

impl Drop for TimerDrain {
    fn drop(&mut self) {
        self.0.lock().drains -= 1;
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl SharedQueue {
    async fn run(self: Arc<Self>, runtime: Handle) {
        loop {
            // A notification between this and the wait is kept.
            let wakes_at = self.lock().wakes_at;
            let elapsed = async {
                match wakes_at {
                    Some(wakes_at) => sleep_until(wakes_at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = elapsed => {}
                () = self.earlier.notified() => continue,
            }
            for work in self.take_due().into_values() {
                // Work may drop the last reference to a future of a caller. A panic there ends neither
                // this task nor the renewals of others.
                let begin = AssertUnwindSafe(|| {
                    if let Some(work) = work.upgrade() {
                        work.begin(&runtime);
                    }
                });
                if catch_unwind(begin).is_err() {
                    tracing::error!(
                        "a renewal or a detached future panicked in the timer: its lease may lapse; others are not affected"
                    );
                }
            }
        }
    }

    /// Takes the entries that are due.
    fn take_due(&self) -> BTreeMap<EntryId, Weak<dyn Due>> {
        let now = Instant::now();
        let mut queue = self.lock();
        let later = queue.entries.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut queue.entries, later);
        queue.wakes_at = queue.entries.first_key_value().map(|((at, _), _)| *at);
        due
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No code under the lock panics; if it did, the map would be consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TimerEntry {
    fn drop(&mut self) {
        // It may have been taken already.
        self.queue.lock().entries.remove(&self.id);
    }
}

//! Renewals of leases. Most executions end before their first one is due, so that no task is spawned
//! for them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use super::idempotency::deadline_after;
use super::lease::{FinishError, LeaseState};

/// The leases of operations under way, by the time of their first renewal.
///
/// One task sleeps until the first of these times, and spawns a task for each lease that is due,
/// which renews it from then on. It ends if no lease is left when it wakes; a later operation spawns
/// it again.
#[derive(Debug, Default)]
pub(super) struct RenewalSchedule {
    queue: Mutex<RenewalQueue>,
    /// Notified when the task has to wake earlier.
    earlier: Notify,
}

#[derive(Debug, Default)]
struct RenewalQueue {
    due: BTreeMap<RenewalEntry, Weak<RenewedLease>>,
    last: u64,
    /// Time at which the task wakes; `None` while there is no task.
    wakes_at: Option<Instant>,
}

/// Time of a first renewal, with a number that distinguishes entries of one time.
type RenewalEntry = (Instant, u64);

/// A lease whose operation is under way.
#[derive(Debug)]
struct RenewedLease(Arc<LeaseState>);

/// The renewals of a lease during an operation. Dropping it ends them; a renewal under way continues
/// on its task.
#[derive(Debug)]
pub(super) struct Renewal {
    lease: Arc<RenewedLease>,
    entry: RenewalEntry,
}

impl RenewalSchedule {
    /// Renews `lease` every third of its time until the returned value is dropped. Also returns
    /// whether the task of the schedule was spawned just now.
    pub(super) fn renew(
        self: &Arc<Self>,
        lease: &Arc<LeaseState>,
        runtime: &Handle,
    ) -> (Renewal, bool) {
        let at = deadline_after(lease.renewal_interval());
        let lease = Arc::new(RenewedLease(Arc::clone(lease)));
        let mut queue = self.lock();
        queue.last += 1;
        let entry = (at, queue.last);
        queue.due.insert(entry, Arc::downgrade(&lease));
        let before = queue.wakes_at;
        queue.wakes_at = Some(before.map_or(at, |before| before.min(at)));
        drop(queue);
        match before {
            None => drop(runtime.spawn(Arc::clone(self).run(at, runtime.clone()))),
            Some(before) if at < before => self.earlier.notify_one(),
            Some(_) => {}
        }
        (Renewal { lease, entry }, before.is_none())
    }

    async fn run(self: Arc<Self>, mut wakes_at: Instant, runtime: Handle) {
        loop {
            tokio::select! {
                () = sleep_until(wakes_at) => {}
                () = self.earlier.notified() => {
                    // While this task exists there is such a time, except for a notification that
                    // an earlier task did not receive.
                    wakes_at = self.lock().wakes_at.unwrap_or(wakes_at);
                    continue;
                }
            }
            let (due, next) = self.take_due();
            for lease in due.into_values() {
                runtime.spawn(renew(lease));
            }
            match next {
                Some(next) => wakes_at = next,
                // Decided under the lock: the next operation finds that there is no task.
                None => return,
            }
        }
    }

    /// Takes the leases that are due, and returns the time of the next one.
    fn take_due(&self) -> (BTreeMap<RenewalEntry, Weak<RenewedLease>>, Option<Instant>) {
        let now = Instant::now();
        let mut queue = self.lock();
        let later = queue.due.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut queue.due, later);
        queue.wakes_at = queue.due.first_key_value().map(|((at, _), _)| *at);
        (due, queue.wakes_at)
    }

    fn lock(&self) -> MutexGuard<'_, RenewalQueue> {
        // No code under the lock panics; if it did, the map would be consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.lease.0.inner.renewals.lock().due.remove(&self.entry);
    }
}

/// Renews a lease every third of its time, from now on, until its operation has ended.
async fn renew(lease: Weak<RenewedLease>) {
    loop {
        // Not held during the sleep, so that an operation that ended ends the task.
        let Some((renewal, interval)) =
            lease.upgrade().map(|lease| (lease.0.renew(), lease.0.renewal_interval()))
        else {
            return;
        };
        let pause = match renewal.await {
            // In a transaction the lease was renewed for as long as that may take.
            Ok(()) | Err(FinishError::InTransaction) => interval,
            Err(FinishError::Lost | FinishError::Gone) => return,
            // Sooner: two of three renewals may fail before the lease lapses.
            Err(_) => interval / 4,
        };
        sleep(pause).await;
    }
}

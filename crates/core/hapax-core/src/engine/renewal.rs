//! Renewals of a lease during its operation.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;

use super::lease::{FinishError, LeaseState};
use super::timer::{Due, TimerEntry};

/// The renewals of a lease during an operation. Dropping it ends them; a renewal in progress continues
/// on its task.
#[derive(Debug)]
pub(super) struct Renewal(
    #[expect(dead_code, reason = "it keeps the lease alive")] Arc<RenewedLease>,
);

/// A lease whose operation is in progress.
#[derive(Debug)]
struct RenewedLease {
    lease: Arc<LeaseState>,
    /// The next renewal; dropped with the lease.
    next: Mutex<Option<TimerEntry>>,
}

impl Renewal {
    /// Renews `lease` every third of its time, counted from its claim, until the returned value is
    /// dropped. Also returns whether the task of the timer has to run before.
    pub(super) fn begin(lease: &Arc<LeaseState>) -> (Self, bool) {
        let first = lease.renewal_interval().saturating_sub(lease.age());
        let lease = Arc::new(RenewedLease { lease: Arc::clone(lease), next: Mutex::default() });
        let is_first = lease.renew_after(first);
        (Self(lease), is_first)
    }
}

impl RenewedLease {
    /// Enters the next renewal. Returns whether the task of the timer has to run before.
    fn renew_after(self: &Arc<Self>, pause: Duration) -> bool {
        let work = Arc::downgrade(self) as Weak<dyn Due>;
        let (entry, is_first) = self.lease.inner.timer.enter(pause, work);
        // The entry that it replaces was due, so its drop, which locks the timer, finds nothing.
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(entry);
        is_first
    }
}

impl Due for RenewedLease {
    fn begin(self: Arc<Self>, runtime: &Handle) {
        let (renewal, interval) = (self.lease.renew(), self.lease.renewal_interval());
        // Not kept alive, so that the end of the operation ends its renewals.
        let lease = Arc::downgrade(&self);
        runtime.spawn(async move {
            let pause = match renewal.await {
                // In a transaction the lease was renewed for as long as that may take.
                Ok(()) | Err(FinishError::InTransaction) => interval,
                Err(FinishError::Lost | FinishError::Gone) => return,
                // Sooner: two of three renewals may fail before the lease lapses.
                Err(_) => interval / 4,
            };
            if let Some(lease) = lease.upgrade() {
                lease.renew_after(pause);
            }
        });
    }

    fn drain(self: Arc<Self>, _: &Handle) {}
}

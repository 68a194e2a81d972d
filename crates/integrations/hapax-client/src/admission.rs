//! The admission of tries to a server: permits and the budget of its retries.
//!
//! 1. A caller waits for its permit in the order of arrival, before its operation is claimed: it writes
//!    nothing while it waits, however many do. Permits are of one server each, so that one server delays no
//!    other.
//! 2. A caller whose try is a retry waits for the budget first, and has no permit meanwhile. One of all
//!    that wait looks at the budget.
//! 3. A permit is of one try: it is dropped at the end of the try, and a pause has none.
//! 4. Resumed operations have permits of their own, of which a server gets few while it fails, and all
//!    servers that fail get half. A denied operation is due again later, the more of them wait.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as FairMutex, Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use crate::budget::Budget;

/// Tries of callers at once, of one server.
const TRIES: usize = 1_024;

/// Admits tries to one server.
#[derive(Debug)]
pub(crate) struct Admission {
    budget: Mutex<Budget>,
    permits: Arc<Semaphore>,
    /// Locked by the first of the callers that wait for a retry.
    retries: FairMutex<()>,
    /// Notified when tokens were returned.
    returned: Notify,
    /// Permits of resumed operations of all servers that fail.
    failing: Arc<Semaphore>,
}

/// A permit for one try. Dropped during the try, it counts as one without a response.
#[derive(Debug)]
pub(crate) struct TryPermit {
    admission: Arc<Admission>,
    /// The permit of a caller, or of a server that fails.
    _permit: Option<OwnedSemaphorePermit>,
    is_resumed: bool,
    has_tokens: bool,
    is_in_progress: bool,
}

impl Admission {
    pub(crate) fn new(failing: Arc<Semaphore>) -> Self {
        Self {
            budget: Mutex::default(),
            permits: Arc::new(Semaphore::new(TRIES)),
            retries: FairMutex::default(),
            returned: Notify::new(),
            failing,
        }
    }

    /// Returns the number of free permits of callers.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.permits.available_permits()
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        // Each change is one call.
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the permit of a caller's try.
    pub(crate) async fn caller(self: &Arc<Self>, is_retry: bool) -> TryPermit {
        let mut permit = self.permit(None, false);
        if is_retry {
            self.retry().await;
            permit.has_tokens = true;
        }
        // Never closed.
        permit._permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        permit
    }

    /// Returns the permit of a caller's first try, if one is free.
    pub(crate) fn try_caller(self: &Arc<Self>) -> Option<TryPermit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(self.permit(Some(permit), false))
    }

    /// Returns the permit of a resumed operation. The error is the time after which it is admitted at the
    /// earliest.
    pub(crate) fn resumed(self: &Arc<Self>) -> Result<TryPermit, Duration> {
        let mut budget = self.budget();
        let now = Instant::now();
        let failing = match budget.is_failing() {
            true => Arc::clone(&self.failing).try_acquire_owned().map(Some),
            false => Ok(None),
        };
        match failing {
            Ok(permit) if budget.begin_resumed(now) => Ok(self.permit(permit, true)),
            _ => Err(budget.pause(now)),
        }
    }

    /// Returns the tokens of a retry, for a response.
    pub(crate) fn responded(&self) {
        self.budget().put_back();
        self.returned.notify_one();
    }

    fn permit(
        self: &Arc<Self>,
        permit: Option<OwnedSemaphorePermit>,
        is_resumed: bool,
    ) -> TryPermit {
        let (has_tokens, is_in_progress) = (false, false);
        let admission = Arc::clone(self);
        TryPermit { admission, _permit: permit, is_resumed, has_tokens, is_in_progress }
    }

    /// Waits for the tokens of a retry.
    async fn retry(&self) {
        let _first = self.retries.lock().await;
        loop {
            let returned = self.returned.notified();
            let taken = self.budget().take(Instant::now());
            let Err(next) = taken else { return };
            tokio::select! {
                () = returned => {}
                () = sleep_until(next) => {}
            }
        }
    }
}

impl TryPermit {
    /// Takes the tokens of a retry, if the permit has none. The error is the time after which they are
    /// there at the earliest.
    pub(crate) fn retry(&mut self) -> Result<(), Duration> {
        if self.has_tokens {
            return Ok(());
        }
        let now = Instant::now();
        // Not before those that wait.
        let is_first = self.admission.retries.try_lock();
        let mut budget = self.admission.budget();
        let taken = is_first.is_ok_and(|_first| budget.take(now).is_ok());
        self.has_tokens = taken;
        if taken { Ok(()) } else { Err(budget.pause(now)) }
    }

    /// Begins the try.
    pub(crate) const fn begin(&mut self) {
        self.is_in_progress = true;
    }

    /// Ends the try.
    pub(crate) fn end(mut self, failed: bool) {
        (self.is_in_progress, self.has_tokens) = (false, false);
        self.admission.budget().ended(failed);
    }
}

impl Drop for TryPermit {
    fn drop(&mut self) {
        let mut budget = self.admission.budget();
        if self.is_resumed {
            budget.end_resumed();
        }
        if self.is_in_progress {
            budget.ended(true);
        } else if self.has_tokens {
            budget.put_back();
            self.admission.returned.notify_one();
        }
    }
}

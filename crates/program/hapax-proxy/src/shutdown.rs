//! Phases of the shutdown, and the requests in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

/// Phases of a shutdown, in order. (this crate has no gateway)
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum ShutdownPhase {
    /// Requests are accepted.
    #[default]
    Serving,
    /// Requests are accepted, and readiness probes fail, so that load balancers choose other
    /// servers.
    Leaving,
    /// Requests in progress finish; new ones are rejected.
    Draining,
    /// Connections are closed once their pending bytes are written.
    Closing,
}

/// The phase and the number of requests in progress. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    phase: watch::Sender<ShutdownPhase>,
    active_requests: Arc<AtomicUsize>,
}

impl Shutdown {
    /// Enters `phase`.
    pub fn enter(&self, phase: ShutdownPhase) {
        self.phase.send_replace(phase);
    }

    /// Returns the phase that was entered last.
    #[must_use]
    pub fn phase(&self) -> ShutdownPhase {
        *self.phase.borrow()
    }

    /// Resolves once `phase`, or a later one, is reached.
    pub async fn reached(&self, phase: ShutdownPhase) {
        // This cannot fail: `self` holds the sender.
        let _ = self.phase.subscribe().wait_for(|now| *now >= phase).await;
    }

    /// Returns the number of requests whose responses are not completely handed over.
    #[must_use]
    pub fn active_requests(&self) -> usize {
        self.active_requests.load(Ordering::Acquire)
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn begin_request(&self) -> ActiveRequest {
        self.active_requests.fetch_add(1, Ordering::AcqRel);
        ActiveRequest(Arc::clone(&self.active_requests))
    }
}

/// A request in progress; dropping it ends the count.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<AtomicUsize>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

//! Drain: the count of requests in progress, and the end of new ones.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::concurrency::ConcurrencyPermit;

/// A gate that counts the requests inside and rejects new ones while it drains.
#[derive(Debug)]
pub(super) struct DrainGate {
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    inside: usize,
    draining: bool,
    stopping: bool,
}

/// The requests and writes that a drain left. Nothing is left if it equals the default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use = "executions that were cut off have unknown outcomes, and deferred ones may be lost"]
pub struct DrainReport {
    /// Number of requests that did not finish within the grace and were cut off.
    pub cut_off: usize,
    /// The requests that were in progress at the end of the drain: their handlers did not end, or
    /// their outcomes wait for memory of the backlog.
    pub left: usize,
    /// The writes of the layer's engine that the store has not accepted: outcomes and releases that are
    /// only in memory. They are lost if the process ends now, and the policies for unknown outcomes
    /// apply: under `reexecute` a retry executes again.
    pub deferred: usize,
}

impl DrainGate {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: watch::Sender::default() })
    }

    /// Admits a request; `None` during a drain. The check and the count are under one lock, so that
    /// a drain that begins later waits for the request.
    pub(super) fn enter(self: &Arc<Self>) -> Option<DrainPermit> {
        let mut entered = false;
        self.state.send_if_modified(|state| {
            entered = !state.draining;
            state.inside += usize::from(entered);
            // A drain waits for the end of the last request only.
            false
        });
        entered.then(|| DrainPermit { gate: Arc::clone(self), concurrency: None })
    }

    /// Returns whether the requests inside must end.
    pub(super) fn is_stopping(&self) -> bool {
        self.state.borrow().stopping
    }

    /// Resolves when the requests inside must end.
    pub(super) async fn stopping(&self) {
        // The sender is part of `self`, which outlives the wait.
        let _ = self.state.subscribe().wait_for(|state| state.stopping).await;
    }

    /// Rejects new requests and waits until none is inside. `last` is the time to record the
    /// requests that were cut off after `grace`.
    pub(super) async fn drain(&self, grace: Duration, last: Duration) -> DrainReport {
        self.state.send_modify(|state| state.draining = true);
        let mut state = self.state.subscribe();
        if timeout(grace, state.wait_for(|state| state.inside == 0)).await.is_ok() {
            return DrainReport::default();
        }
        let cut_off = self.state.borrow().inside;
        self.state.send_modify(|state| state.stopping = true);
        let _ = timeout(last, state.wait_for(|state| state.inside == 0)).await;
        let left = self.state.borrow().inside;
        DrainReport { cut_off, left, deferred: 0 }
    }
}

/// A permit to be inside, returned when it is dropped.
#[derive(Debug)]
pub(super) struct DrainPermit {
    gate: Arc<DrainGate>,
    /// The permit among the caller's keys in flight, returned together with this one.
    concurrency: Option<ConcurrencyPermit>,
}

impl DrainPermit {
    pub(super) fn gate(&self) -> &DrainGate {
        &self.gate
    }

    /// Adds a concurrency permit, which is returned together with this one.
    pub(super) fn with(mut self, concurrency: ConcurrencyPermit) -> Self {
        self.concurrency = Some(concurrency);
        self
    }
}

impl Drop for DrainPermit {
    fn drop(&mut self) {
        // First: a drain that sees no requests finds the permit free.
        drop(self.concurrency.take());
        self.gate.state.send_if_modified(|state| {
            state.inside -= 1;
            state.draining && state.inside == 0
        });
    }
}

/// Resolves at the first signal that ends a service; never if there can be none.
pub(super) async fn signalled() {
    let interrupted = async {
        match tokio::signal::ctrl_c().await {
            Ok(()) => {}
            Err(error) => {
                tracing::error!(%error, "the layer cannot wait for SIGINT: end the service by SIGTERM");
                std::future::pending().await
            }
        }
    };
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminated) => tokio::select! {
                () = interrupted => {}
                _ = terminated.recv() => {}
            },
            Err(error) => {
                tracing::error!(%error, "the layer cannot wait for SIGTERM: end the service by SIGINT");
                interrupted.await;
            }
        }
    }
    #[cfg(not(unix))]
    interrupted.await;
}

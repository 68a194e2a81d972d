//! Drain: the count of requests under way, and the end of new ones.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::concurrency::ConcurrencyPermit;

/// Counts the requests inside, and keeps new ones out once it is draining.
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

/// The requests and writes that a drain left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use = "work that was cut off left outcomes that nobody knows"]
pub struct DrainReport {
    /// Requests that did not end within the grace and were cut off.
    pub cut_off: usize,
    /// The requests that were under way at the end of the drain: their handlers did not end, or
    /// their outcomes wait for memory of the backlog.
    pub left: usize,
}

impl DrainGate {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: watch::Sender::default() })
    }

    /// Lets a request in; `None` once it is draining. One look and one count under one lock: a
    /// drain that begins later waits for it.
    pub(super) fn enter(self: &Arc<Self>) -> Option<DrainPermit> {
        let entered = self.state.send_if_modified(|state| {
            state.inside += usize::from(!state.draining);
            !state.draining
        });
        entered.then(|| DrainPermit { gate: Arc::clone(self), place: None })
    }

    /// Whether what is inside must end.
    pub(super) fn is_stopping(&self) -> bool {
        self.state.borrow().stopping
    }

    /// Resolves when what is inside must end.
    pub(super) async fn stopping(&self) {
        // The sender is `self`: it outlives the wait.
        let _ = self.state.subscribe().wait_for(|state| state.stopping).await;
    }

    /// `last`: how long what was cut off may take to record that.
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
        DrainReport { cut_off, left }
    }
}

/// A place inside; given up when dropped.
#[derive(Debug)]
pub(super) struct DrainPermit {
    gate: Arc<DrainGate>,
    /// Among the caller's keys in flight, for as long.
    place: Option<ConcurrencyPermit>,
}

impl DrainPermit {
    pub(super) fn gate(&self) -> &DrainGate {
        &self.gate
    }

    /// Gives `place` up together with this.
    pub(super) fn with(mut self, place: ConcurrencyPermit) -> Self {
        self.place = Some(place);
        self
    }
}

impl Drop for DrainPermit {
    fn drop(&mut self) {
        // First: a drain that sees no requests finds the permit free.
        drop(self.place.take());
        self.gate.state.send_modify(|state| state.inside -= 1);
    }
}

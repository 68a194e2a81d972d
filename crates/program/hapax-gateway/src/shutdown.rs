//! Phases of the shutdown, and the requests under way.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_http::Body;
use http_body::{Frame, SizeHint};
use tokio::sync::watch;

/// Phases of a gateway, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum ShutdownPhase {
    /// Requests are accepted.
    Serving,
    /// Requests are accepted, and readiness probes fail, so that load balancers choose other
    /// servers.
    Leaving,
    /// Requests under way finish; new ones are rejected.
    Draining,
    /// Connections are closed once their pending bytes are written.
    Closing,
}

/// The phase and the number of requests under way. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Shutdown {
    phase: watch::Sender<ShutdownPhase>,
    active_requests: Arc<AtomicUsize>,
}

impl Shutdown {
    pub(crate) fn new() -> Self {
        Self { phase: watch::Sender::new(ShutdownPhase::Serving), active_requests: Arc::default() }
    }

    pub(crate) fn enter(&self, phase: ShutdownPhase) {
        self.phase.send_replace(phase);
    }

    pub(crate) fn phase(&self) -> ShutdownPhase {
        *self.phase.borrow()
    }

    /// Resolves once `phase`, or a later one, is reached.
    pub(crate) async fn reached(&self, phase: ShutdownPhase) {
        // This cannot fail: `self` holds the sender.
        let _ = self.phase.subscribe().wait_for(|now| *now >= phase).await;
    }

    /// Returns the number of requests whose responses are not completely handed over.
    pub(crate) fn active_requests(&self) -> usize {
        self.active_requests.load(Ordering::Acquire)
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn begin_request(&self) -> ActiveRequest {
        self.active_requests.fetch_add(1, Ordering::AcqRel);
        ActiveRequest(Arc::clone(&self.active_requests))
    }
}

/// A request under way; dropping it ends the count.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<AtomicUsize>);

impl ActiveRequest {
    /// Keeps the count until `body` is handed over or dropped.
    pub(crate) fn guard_body(self, body: Body) -> Body {
        Body::new(GuardedBody::new(body, self))
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A body that keeps a guard until the body is handed over or dropped.
#[derive(Debug)]
pub(crate) struct GuardedBody<B, G> {
    body: B,
    _guard: G,
}

impl<B, G> GuardedBody<B, G> {
    pub(crate) const fn new(body: B, guard: G) -> Self {
        Self { body, _guard: guard }
    }
}

impl<B, G> http_body::Body for GuardedBody<B, G>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    G: Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

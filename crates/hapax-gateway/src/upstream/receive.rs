//! Responses, and what becomes of their connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::{Body, BoxError};
use http::{Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::wire::Wire;
use super::{ENDING, Failure, Inner, Upstream, cut};

/// How long a connection may go nowhere once its response is over or given up: a server that
/// answered early, and neither reads the rest of the request nor closes.
const SETTLE: Duration = Duration::from_secs(1);

/// Hands the response on, and keeps the connection once it is read whole. `asked`: to switch
/// protocols.
pub(super) async fn receive(
    Upstream { inner, timeout }: &Upstream,
    wire: Wire,
    mut response: Response<Incoming>,
    place: OwnedSemaphorePermit,
    asked: bool,
) -> Result<Response<Body>, Failure> {
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        if !asked {
            return Err(Failure::Broken("the upstream switched protocols unasked".into()));
        }
        // The wire stays until its driver has given the connection up.
        let io = hyper::upgrade::on(&mut response).await;
        let io = io.map_err(|error| Failure::Broken(error.into()))?;
        let tunnel = Tunnel { io, silence: *timeout, _place: place };
        let mut response = response.map(|_| Body::empty());
        response.extensions_mut().insert(Switched(Arc::new(Mutex::new(Some(tunnel)))));
        return Ok(response);
    }
    let (parts, body) = response.into_parts();
    let (over, is_over) = watch::channel(());
    tokio::spawn(settle(Arc::clone(inner), wire, place, is_over));
    let body = Receiving {
        body,
        silence: *timeout,
        waiting: None,
        cut: Box::pin(cut(inner.cut.subscribe())),
        over: Some(over),
    };
    Ok(Response::from_parts(parts, Body::new(body)))
}

/// A connection that has left HTTP. Its place is taken until it is dropped.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) io: Upgraded,
    /// The longest, of both sides at once.
    pub(crate) silence: Duration,
    pub(crate) _place: OwnedSemaphorePermit,
}

/// A response extension: the connection on which protocols were switched, for whoever takes it first.
#[derive(Clone, Debug)]
pub(crate) struct Switched(Arc<Mutex<Option<Tunnel>>>);

impl Switched {
    pub(crate) fn take(&self) -> Option<Tunnel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Keeps the connection for another request once the response is read whole and the request
/// written whole; ends it where that takes too long. The place is free again when neither the
/// connection nor what is left of the request takes up anything any more.
async fn settle(
    inner: Arc<Inner>,
    mut wire: Wire,
    place: OwnedSemaphorePermit,
    is_over: watch::Receiver<()>,
) {
    let meter = Arc::clone(&wire.meter);
    let over = |mut is_over: watch::Receiver<()>| async move {
        // Its sender is dropped when the body is read, fails or is dropped.
        while is_over.changed().await.is_ok() {}
    };
    let stuck = async {
        over(is_over.clone()).await;
        let over = Instant::now();
        loop {
            // What is still being read goes on.
            let deadline = over.max(meter.last()) + SETTLE;
            if deadline <= Instant::now() {
                break;
            }
            sleep_until(deadline).await;
        }
    };
    let ready = tokio::select! {
        ready = wire.reusable(over(is_over.clone())) => ready,
        () = stuck => false,
        () = cut(inner.cut.subscribe()) => false,
    };
    if ready {
        inner.pool.put(wire);
    } else {
        // The driver has let go of the rest of the request before the place is free.
        wire.end().await;
    }
    drop(place);
}

/// The body of a response: it fails where the upstream is silent for too long, or is cut off.
struct Receiving {
    body: Incoming,
    silence: Duration,
    /// Set while it waits for the upstream: a client that reads slowly is no silence.
    waiting: Option<Pin<Box<Sleep>>>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Dropped once the body is over, or with it.
    over: Option<watch::Sender<()>>,
}

impl http_body::Body for Receiving {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.waiting = None;
            if !matches!(frame, Some(Ok(_))) || this.body.is_end_stream() {
                this.over = None;
            }
            return Poll::Ready(
                frame.map(|frame| frame.map_err(|error| Failure::Broken(error.into()).into())),
            );
        }
        if this.cut.as_mut().poll(cx).is_ready() {
            let error = Failure::Broken(ENDING.into());
            return Poll::Ready(Some(Err(error.into())));
        }
        let silence = this.silence;
        let timer = this.waiting.get_or_insert_with(|| Box::pin(sleep(silence)));
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(Failure::Timeout.into())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

//! One upstream server: connections, time-outs, and what became of a request that got no answer.
//!
//! A request without an answer is one of two things. *Nothing was sent*: then it did not happen, its
//! key is released and it may be sent again. Or *something was sent*: then nobody knows. The
//! difference is decided by a count of the bytes that were handed on below hyper and its buffers, to
//! the kernel or to TLS. It is read after the task that drives the connection has stopped, so no byte can follow; and it
//! is compared with the count before the request was handed over, when the connection was idle and
//! hyper's buffers were empty (an HTTP/1.1 connection is ready for a request only after the one
//! before it is written and answered whole, and in HTTP/2 it is given none before, and counted is only
//! what requests consist of). An unchanged count is therefore proof that not one byte
//! of the request left this process. Everything else counts as unknown, even a single byte: a proxy
//! or a server may act on what it guesses.
//!
//! With one exception, since here it is the server that knows: a request that it refuses by
//! `REFUSED_STREAM`, or by a `GOAWAY` that names an earlier one as the last that it looked at, was not
//! acted upon (RFC 9113 8.7). It counts as not sent, though it is not tried again from here.
//!
//! A request of which nothing was sent is tried once more, on a new connection, if it had been given
//! to one that was kept from before (the server had closed it meanwhile), and if hyper hands the
//! request back, which it does when it had not begun to encode it.

mod connect;
mod connection;
mod meter;
mod normalize;
mod pool;
mod receive;
mod registry;
mod socket;
mod upload;

use std::error::Error;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use http::header::UPGRADE;
use http::uri::Authority;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until};

pub(crate) use connect::{ConnectOptions, Origin};
use connection::UpstreamConnection;
use hapax_http::{Body, BoxError};
pub(crate) use meter::Metered;
use pool::Pool;
use receive::{RequestTraits, receive};
pub(crate) use receive::{Switched, Tunnel};
pub(crate) use registry::Upstreams;
use upload::Upload;
pub(crate) use upload::UploadError;

/// The most bytes of a response head, and that hyper buffers of a body.
const MAX_BUFFER: usize = 128 * 1024;

/// The most header fields of an answer, in each version of HTTP.
const MAX_FIELDS: usize = crate::guard::MAX_FIELDS;

/// Why requests under way are cut off.
const ENDING: &str = "the gateway is ending";

/// A server that requests are forwarded to. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    inner: Arc<Inner>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    origin: Origin,
    connect: ConnectOptions,
    pool: Pool,
    permits: Arc<Semaphore>,
    cut: watch::Sender<bool>,
    /// Whether it was said that its answers end with their connections.
    warned: AtomicBool,
}

/// Why there is no response.
#[derive(Debug)]
pub(crate) enum UpstreamError {
    /// Too many requests are under way already. Nothing was sent.
    Busy,
    /// Nothing was sent.
    Unreachable(BoxError),
    /// Something was sent, and the connection failed.
    Broken(BoxError),
    /// Something was sent, and no answer came in time.
    Timeout,
    /// Not all of it was sent, because of whoever the request is from.
    Upload(UploadError),
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "Too many requests to the upstream are under way. Nothing was sent.",
            Self::Unreachable(_) => "The upstream could not be reached. Nothing was sent.",
            Self::Broken(_) => "The upstream broke off: the request may have taken effect.",
            Self::Timeout => "No answer came in time: the request may have taken effect.",
            Self::Upload(UploadError::Slow) => {
                "The request's body comes too slowly. What came of it may have been passed on."
            }
            Self::Upload(UploadError::Broken) => {
                "The request's body broke off. What came of it may have been passed on."
            }
        })
    }
}

impl Error for UpstreamError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreachable(source) | Self::Broken(source) => Some(&**source),
            Self::Busy | Self::Timeout | Self::Upload(_) => None,
        }
    }
}

impl Upstream {
    /// The server at `origin`, which may be silent for `timeout` and serve `concurrent` requests at
    /// once.
    pub(crate) fn new(
        origin: Origin,
        timeout: Duration,
        concurrent: usize,
        connect: ConnectOptions,
    ) -> Self {
        let inner = Inner {
            origin,
            pool: Pool::new(connect.idle),
            connect,
            permits: Arc::new(Semaphore::new(concurrent)),
            cut: watch::Sender::new(false),
            warned: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner), timeout }
    }

    /// The same server and its connections, which may be silent for `timeout`.
    pub(crate) fn with_timeout(&self, timeout: Duration) -> Self {
        Self { inner: Arc::clone(&self.inner), timeout }
    }

    /// Whether anybody but this holds it or has a request under way there.
    pub(crate) fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Where it is.
    pub(crate) fn origin(&self) -> &Origin {
        &self.inner.origin
    }

    /// Its host, and port unless that goes without saying: what it expects as `Host`.
    pub(crate) fn authority(&self) -> &Authority {
        &self.inner.origin.authority
    }

    /// Drops connections that have been idle for too long.
    pub(crate) fn prune(&self) {
        self.inner.pool.prune();
    }

    /// Ends every request under way, now and from now on: what was sent counts as broken.
    pub(crate) fn cut(&self) {
        self.inner.cut.send_replace(true);
    }

    /// Sends a request in origin form, and waits for the head of a response from which something
    /// follows: it is kept, or decides about others.
    ///
    /// It is sent on no connection on which `HEAD` was answered: some servers send a body all the same,
    /// later, and it would be taken for this request's answer.
    ///
    /// Where the request asks to switch protocols and the response does, it has
    /// [`Switched`] among its extensions. Dropping the future ends the connection; what was sent stays
    /// sent.
    pub(crate) async fn send(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Body>, UpstreamError> {
        self.send_for(request, true).await
    }

    /// Like [`send`](Self::send), for a response that is only passed on, on any connection.
    pub(crate) async fn pass(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Body>, UpstreamError> {
        self.send_for(request, false).await
    }

    async fn send_for(
        &self,
        request: Request<Body>,
        counts: bool,
    ) -> Result<Response<Body>, UpstreamError> {
        let Ok(place) = Arc::clone(&self.inner.permits).try_acquire_owned() else {
            return Err(UpstreamError::Busy);
        };
        let switch = request.headers().contains_key(UPGRADE);
        let asked = RequestTraits { switch, head: request.method() == Method::HEAD, counts };
        let (request, upload) = Upload::watch(request);
        let alone = counts && self.inner.connect.fresh;
        let kept = if alone { None } else { self.inner.pool.take(counts) };
        let answered = match kept {
            Some(connection) => match self.send_on(connection, request).await {
                Err(SendError { again: Some(request), .. }) => self.send_fresh(*request).await,
                answered => answered.map_err(|unanswered| unanswered.failure),
            },
            None => self.send_fresh(request).await,
        };
        match (answered, upload.fault()) {
            (Ok((connection, response)), _) => {
                receive(self, connection, response, place, asked).await
            }
            (Err(UpstreamError::Broken(_) | UpstreamError::Unreachable(_)), Some(fault)) => {
                Err(UpstreamError::Upload(fault))
            }
            (Err(failure), _) => Err(failure),
        }
    }

    async fn send_fresh(
        &self,
        request: Request<Body>,
    ) -> Result<(UpstreamConnection, Response<Incoming>), UpstreamError> {
        let Inner { origin, connect, cut: ending, .. } = &*self.inner;
        let connection = tokio::select! {
            connection = connect.dial(origin, self.timeout) => connection,
            () = cut(ending.subscribe()) => Err(ENDING.into()),
        };
        let connection = connection.map_err(UpstreamError::Unreachable)?;
        self.send_on(connection, request).await.map_err(|unanswered| unanswered.failure)
    }

    async fn send_on(
        &self,
        mut connection: UpstreamConnection,
        request: Request<Body>,
    ) -> Result<(UpstreamConnection, Response<Incoming>), SendError> {
        let meter = Arc::clone(&connection.meter);
        let before = meter.written();
        let begun = Instant::now();
        let sent = {
            let mut sending = pin!(connection.try_send(request));
            let mut cut = self.inner.cut.subscribe();
            loop {
                // An upload that goes on is no silence.
                let deadline = begun.max(meter.last()) + self.timeout;
                tokio::select! {
                    sent = &mut sending => break SendResult::Answered(sent),
                    _ = cut.wait_for(|cut| *cut) => break SendResult::Cut,
                    () = sleep_until(deadline) => {
                        if meter.last() + self.timeout <= Instant::now() {
                            break SendResult::TimedOut;
                        }
                    }
                }
            }
        };
        let (failure, reason): (fn(BoxError) -> UpstreamError, _) = match sent {
            SendResult::Answered(Ok(response)) => return Ok((connection, response)),
            SendResult::Answered(Err(mut error)) => {
                let again = error.take_message();
                let error = error.into_error();
                let refused = is_refused(&error);
                let error: BoxError = error.into();
                connection.end().await;
                let unsent = meter.written() == before;
                return Err(if unsent {
                    let failure = UpstreamError::Unreachable(error);
                    SendError { failure, again: again.map(Box::new) }
                } else if refused {
                    SendError { failure: UpstreamError::Unreachable(error), again: None }
                } else {
                    SendError { failure: UpstreamError::Broken(error), again: None }
                });
            }
            SendResult::Cut => (UpstreamError::Broken, ENDING),
            SendResult::TimedOut => (|_| UpstreamError::Timeout, "no answer in time"),
        };
        connection.end().await;
        let failure = if meter.written() == before {
            UpstreamError::Unreachable(reason.into())
        } else {
            failure(reason.into())
        };
        Err(SendError { failure, again: None })
    }
}

enum SendResult<R> {
    Answered(R),
    Cut,
    TimedOut,
}

struct SendError {
    failure: UpstreamError,
    /// The request, if it may be tried again.
    again: Option<Box<Request<Body>>>,
}

/// Whether the server said that it did not act upon the request. h2 gives a `GOAWAY` of the other side
/// to those streams only that are above the last one it names.
fn is_refused(error: &hyper::Error) -> bool {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            return error.is_remote() && (refused || error.is_go_away());
        }
        source = error.source();
    }
    false
}

async fn cut(mut cut: watch::Receiver<bool>) {
    // The sender lives as long as the upstream; without it nobody can cut any more.
    if cut.wait_for(|cut| *cut).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;

//! Upstream server: connections, timeouts, and the outcome of requests without a response.
//!
//! For a request without a response there are two cases. *Nothing was sent*: it did not happen, its
//! key is released, and it may be sent again. *Something was sent*: its outcome is unknown. The
//! cases are distinguished by a count of the bytes that were handed to the kernel or to TLS, below
//! hyper and its buffers. The count is read after the task that drives the connection has stopped,
//! so no byte can follow. It is compared with the count before the request was handed over, when
//! the connection was idle and hyper's buffers were empty: an HTTP/1.1 connection is ready for a
//! request only after the previous one is completely written and answered; an HTTP/2 connection
//! carries one request at a time too, and only the frames of requests are counted. An unchanged
//! count is therefore proof that not one byte of the request left this process. Any other count
//! makes the outcome unknown, even after a single byte: a proxy or a server may act on a partial
//! request.
//!
//! There is one exception, in which the server decides: a request that it rejects by
//! `REFUSED_STREAM`, or by a `GOAWAY` that names an earlier request as the last one it processed,
//! was not executed (RFC 9113 8.7). It counts as not sent, but the gateway does not retry it.
//!
//! A request of which nothing was sent is tried once more, on a new connection, under two
//! conditions: it was given to a reused connection (which the server may have closed meanwhile),
//! and hyper returns the request, which it does if it had not begun to encode it.

mod connect;
mod connect_proxy;
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
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::header::UPGRADE;
use http::uri::Authority;
use http::{HeaderMap, Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until};

use crate::{BodyError, BoxedBody};
pub use connect::{ConnectOptions, Origin, UpstreamProtocol};
pub use connect_proxy::ConnectProxy;
use connection::UpstreamConnection;
pub(crate) use meter::Metered;
use pool::Pool;
pub use receive::ReceivedBody;
pub(crate) use receive::Tunnel;
use receive::{RequestTraits, UsedConnections, receive};
pub use registry::Upstreams;
use upload::Upload;
pub use upload::UploadError;

/// Largest response head, and largest part of a body that hyper buffers, in bytes.
const MAX_BUFFER: usize = 128 * 1024;

/// Largest number of header fields of a response, in each version of HTTP.
const MAX_FIELDS: usize = crate::guard::MAX_FIELDS;

/// Reason for which requests in progress are cut off.
const ENDING: &str = "the gateway is shutting down";

/// A server that requests are forwarded to. Clones are cheap and share connections.
#[derive(Clone, Debug)]
pub struct Upstream {
    inner: Arc<Inner>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    origin: Origin,
    connect: ConnectOptions,
    pool: Pool,
    permits: Arc<Semaphore>,
    used: Mutex<UsedConnections>,
    cut: watch::Sender<bool>,
    /// True once the log has warned that responses end with their connections.
    warned: AtomicBool,
}

/// A request extension: sets headers from the time for which a response is awaited.
#[derive(Clone, Copy)]
pub(crate) struct BeforeSend(pub(crate) fn(&mut HeaderMap, Duration));

/// Reasons for which there is no response.
#[derive(Debug)]
pub enum UpstreamError {
    /// Too many requests are in progress already. Nothing was sent.
    Busy,
    /// Nothing was sent.
    Unreachable(BodyError),
    /// Something was sent, and the connection failed.
    Broken(BodyError),
    /// Something was sent, and no response arrived in time.
    Timeout,
    /// The client did not send the complete request.
    Upload(UploadError),
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "Too many requests to the upstream are in progress. Nothing was sent.",
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
    /// Creates an upstream at `origin`, with a timeout and at most `concurrent` requests at once.
    pub fn new(
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
            used: Mutex::default(),
            cut: watch::Sender::new(false),
            warned: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner), timeout }
    }

    /// Returns the same server with its connections, and another timeout.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { inner: Arc::clone(&self.inner), timeout }
    }

    /// Returns whether another clone exists or has a request in progress.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.inner.origin
    }

    /// Returns its host, and its port unless it is the default one: its value of `Host`.
    #[must_use]
    pub fn authority(&self) -> &Authority {
        &self.inner.origin.authority
    }

    /// Drops connections that have been idle for too long.
    pub fn prune(&self) {
        self.inner.pool.prune();
    }

    /// Ends every request in progress, now and from now on. The outcome of those that were sent is
    /// unknown.
    pub fn cut(&self) {
        self.inner.cut.send_replace(true);
        self.inner.end_used();
    }

    /// Sends a request in origin form, and waits for the head of a response that is stored or
    /// decides about other requests.
    ///
    /// It uses no connection on which `HEAD` was answered: some servers send a body later
    /// nevertheless, which would be taken for this request's response.
    ///
    /// If the request wants to switch protocols and the response does, the response has a
    /// [`Switch`](crate::Switch) among its extensions. Dropping the future ends the connection;
    /// bytes that were sent cannot be revoked.
    ///
    /// # Errors
    /// [`UpstreamError`] shows whether anything of the request was sent.
    pub async fn send<B>(
        &self,
        request: Request<B>,
    ) -> Result<Response<ReceivedBody>, UpstreamError>
    where
        B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Send + 'static,
    {
        let (request, upload) = Upload::watch(request);
        self.send_for(request, upload, true).await
    }

    /// Sends a request like [`send`](Self::send), on any connection, if its response is only passed
    /// on.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    pub async fn pass<B>(
        &self,
        request: Request<B>,
    ) -> Result<Response<ReceivedBody>, UpstreamError>
    where
        B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Send + 'static,
    {
        let (request, upload) = Upload::watch(request);
        self.send_for(request, upload, false).await
    }

    async fn send_for(
        &self,
        request: Request<BoxedBody>,
        upload: Upload,
        counts: bool,
    ) -> Result<Response<ReceivedBody>, UpstreamError> {
        let Ok(permit) = Arc::clone(&self.inner.permits).try_acquire_owned() else {
            return Err(UpstreamError::Busy);
        };
        let switch = request.headers().contains_key(UPGRADE);
        let traits = RequestTraits { switch, head: request.method() == Method::HEAD, counts };
        let alone = counts && self.inner.connect.fresh;
        let kept = if alone { None } else { self.inner.pool.take(counts) };
        let answered = self.send_on_any(kept, request).await;
        match (answered, upload.fault()) {
            (Ok((connection, response)), _) => {
                receive(self, connection, response, permit, traits).await
            }
            (Err(UpstreamError::Broken(_) | UpstreamError::Unreachable(_)), Some(fault)) => {
                Err(UpstreamError::Upload(fault))
            }
            (Err(failure), _) => Err(failure),
        }
    }

    /// Sends a request on a connection of the pool, if there is one, and otherwise, or if nothing of
    /// the request was sent, on a new one.
    async fn send_on_any(
        &self,
        mut kept: Option<UpstreamConnection>,
        mut request: Request<BoxedBody>,
    ) -> Result<(UpstreamConnection, Response<Incoming>), UpstreamError> {
        loop {
            let is_new = kept.is_none();
            let connection = match kept.take() {
                Some(connection) => connection,
                // Boxed: it is large, and most requests need no new connection.
                None => Box::pin(self.dial()).await.map_err(UpstreamError::Unreachable)?,
            };
            match self.send_on(connection, request).await {
                Err(SendError { again: Some(unsent), .. }) if !is_new => request = *unsent,
                answered => return answered.map_err(|unanswered| unanswered.failure),
            }
        }
    }

    async fn dial(&self) -> Result<UpstreamConnection, BodyError> {
        let Inner { origin, connect, cut: ending, .. } = &*self.inner;
        tokio::select! {
            connection = connect.dial(origin, self.timeout) => connection,
            () = cut(ending.subscribe()) => Err(ENDING.into()),
        }
    }

    async fn send_on(
        &self,
        mut connection: UpstreamConnection,
        mut request: Request<BoxedBody>,
    ) -> Result<(UpstreamConnection, Response<Incoming>), SendError> {
        let meter = Arc::clone(&connection.meter);
        let before = meter.written();
        let begun = Instant::now();
        if let Some(BeforeSend(fill)) = request.extensions().get().copied() {
            fill(request.headers_mut(), self.timeout);
        }
        let sent = {
            let mut sending = pin!(connection.try_send(request));
            let mut cut = self.inner.cut.subscribe();
            loop {
                // The timeout begins anew while the upload makes progress.
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
        let (failure, reason): (fn(BodyError) -> UpstreamError, _) = match sent {
            SendResult::Answered(Ok(response)) => return Ok((connection, response)),
            SendResult::Answered(Err(mut error)) => {
                let again = error.take_message();
                let error = error.into_error();
                let rejected = is_rejected_stream(&error);
                let error: BodyError = error.into();
                connection.end().await;
                let unsent = meter.written() == before;
                return Err(if unsent {
                    let failure = UpstreamError::Unreachable(error);
                    SendError { failure, again: again.map(Box::new) }
                } else if rejected {
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
    again: Option<Box<Request<BoxedBody>>>,
}

/// Returns whether the server declared that it did not execute the request. h2 applies a `GOAWAY`
/// of the other side only to streams above the last one that it names.
fn is_rejected_stream(error: &hyper::Error) -> bool {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let rejected = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            return error.is_remote() && (rejected || error.is_go_away());
        }
        source = error.source();
    }
    false
}

async fn cut(mut cut: watch::Receiver<bool>) {
    // The sender lives as long as the upstream; after that, requests can no longer be cut off.
    if cut.wait_for(|cut| *cut).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;

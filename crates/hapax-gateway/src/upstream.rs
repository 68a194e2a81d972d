//! One upstream server: connections, time-outs, and what became of a request that got no answer.
//!
//! A request without an answer is one of two things. *Nothing was sent*: then it did not happen, its
//! key is released and it may be sent again. Or *something was sent*: then nobody knows. The
//! difference is decided by a count of the bytes that the kernel took, below hyper and its buffers.
//! It is read after the task that drives the connection has stopped, so no byte can follow; and it
//! is compared with the count before the request was handed over, when the connection was idle and
//! hyper's buffers were empty (an HTTP/1.1 connection is ready for a request only after the one
//! before it is written and answered whole). An unchanged count is therefore proof that not one byte
//! of the request left this process. Everything else counts as unknown, even a single byte: a proxy
//! or a server may act on what it guesses.
//!
//! A request of which nothing was sent is tried once more, on a new connection, if it had been given
//! to one that was kept from before (the server had closed it meanwhile), and if hyper hands the
//! request back, which it does when it had not begun to encode it.

mod all;
mod pool;
mod wire;

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Authority;
use http::{Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

pub(crate) use all::Upstreams;
use hapax_http::{Body, BoxError};
use pool::Pool;
use wire::Wire;

/// The most bytes of a response head, and that hyper buffers of a body.
const MAX_BUFFER: usize = 128 * 1024;

/// Why requests under way are cut off.
const ENDING: &str = "the gateway is ending";

/// How long a connection may take to be made. Nothing is sent before.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a connection may go nowhere once its response is over or given up: a server that
/// answered early, and neither reads the rest of the request nor closes.
const SETTLE: Duration = Duration::from_secs(1);

/// A server that requests are forwarded to. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    inner: Arc<Inner>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    authority: Authority,
    pool: Pool,
    places: Arc<Semaphore>,
    cut: watch::Sender<bool>,
}

/// Why there is no response.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Too many requests are under way already. Nothing was sent.
    Busy,
    /// Nothing was sent.
    Unreachable(BoxError),
    /// Something was sent, and the connection failed.
    Broken(BoxError),
    /// Something was sent, and no answer came in time.
    Timeout,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "Too many requests to the upstream are under way. Nothing was sent.",
            Self::Unreachable(_) => "The upstream could not be reached. Nothing was sent.",
            Self::Broken(_) => "The upstream broke off: the request may have taken effect.",
            Self::Timeout => "No answer came in time: the request may have taken effect.",
        })
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreachable(source) | Self::Broken(source) => Some(&**source),
            Self::Busy | Self::Timeout => None,
        }
    }
}

impl Upstream {
    /// The server at `authority` (port 80 unless it says another), which may be silent for
    /// `timeout` and serve `concurrent` requests at once.
    pub(crate) fn new(authority: Authority, timeout: Duration, concurrent: usize) -> Self {
        let inner = Inner {
            authority,
            pool: Pool::default(),
            places: Arc::new(Semaphore::new(concurrent)),
            cut: watch::Sender::new(false),
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

    /// Its host, and port if it is not 80: what it expects as `Host`.
    pub(crate) fn authority(&self) -> &Authority {
        &self.inner.authority
    }

    /// Drops connections that have been idle for too long.
    pub(crate) fn prune(&self) {
        self.inner.pool.prune();
    }

    /// Ends every request under way, now and from now on: what was sent counts as broken.
    pub(crate) fn cut(&self) {
        self.inner.cut.send_replace(true);
    }

    /// Sends a request in origin form, and waits for the head of the response.
    ///
    /// Dropping the future ends the connection; what was sent stays sent.
    pub(crate) async fn send(&self, request: Request<Body>) -> Result<Response<Body>, Failure> {
        let Ok(place) = Arc::clone(&self.inner.places).try_acquire_owned() else {
            return Err(Failure::Busy);
        };
        if let Some(wire) = self.inner.pool.take() {
            match self.send_on(wire, request).await {
                Ok((wire, response)) => return self.receive(wire, response, place),
                Err(Unanswered { again: Some(request), .. }) => {
                    let (wire, response) = self.send_fresh(*request).await?;
                    return self.receive(wire, response, place);
                }
                Err(Unanswered { failure, .. }) => return Err(failure),
            }
        }
        let (wire, response) = self.send_fresh(request).await?;
        self.receive(wire, response, place)
    }

    async fn send_fresh(
        &self,
        request: Request<Body>,
    ) -> Result<(Wire, Response<Incoming>), Failure> {
        let wire = self.connect().await?;
        self.send_on(wire, request).await.map_err(|unanswered| unanswered.failure)
    }

    async fn connect(&self) -> Result<Wire, Failure> {
        let authority = &self.inner.authority;
        // Brackets around an IPv6 address belong to the authority, not to the address.
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let connect = async {
            let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(80))).await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = tokio::select! {
            stream = timeout(CONNECT.min(self.timeout), connect) => {
                stream.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }
            () = cut(self.inner.cut.subscribe()) => Err(io::Error::other(ENDING)),
        };
        let stream = stream.map_err(|error| Failure::Unreachable(error.into()))?;
        Wire::open(stream).await.map_err(|error| Failure::Unreachable(error.into()))
    }

    async fn send_on(
        &self,
        mut wire: Wire,
        request: Request<Body>,
    ) -> Result<(Wire, Response<Incoming>), Unanswered> {
        let before = wire.meter.written();
        let begun = Instant::now();
        let sent = {
            let mut sending = pin!(wire.sender.try_send_request(request));
            let mut cut = self.inner.cut.subscribe();
            loop {
                // An upload that goes on is no silence.
                let deadline = begun.max(wire.meter.last()) + self.timeout;
                tokio::select! {
                    sent = &mut sending => break Sent::Answered(sent),
                    _ = cut.wait_for(|cut| *cut) => break Sent::Cut,
                    () = sleep_until(deadline) => {
                        if wire.meter.last() + self.timeout <= Instant::now() {
                            break Sent::Silent;
                        }
                    }
                }
            }
        };
        let (failure, reason): (fn(BoxError) -> Failure, _) = match sent {
            Sent::Answered(Ok(response)) => return Ok((wire, response)),
            Sent::Answered(Err(mut error)) => {
                let again = error.take_message();
                let error: BoxError = error.into_error().into();
                wire.end().await;
                let unsent = wire.meter.written() == before;
                return Err(if unsent {
                    let failure = Failure::Unreachable(error);
                    Unanswered { failure, again: again.map(Box::new) }
                } else {
                    Unanswered { failure: Failure::Broken(error), again: None }
                });
            }
            Sent::Cut => (Failure::Broken, ENDING),
            Sent::Silent => (|_| Failure::Timeout, "no answer in time"),
        };
        wire.end().await;
        let failure = if wire.meter.written() == before {
            Failure::Unreachable(reason.into())
        } else {
            failure(reason.into())
        };
        Err(Unanswered { failure, again: None })
    }

    /// Hands the response on, and keeps the connection once it is read whole.
    fn receive(
        &self,
        wire: Wire,
        response: Response<Incoming>,
        place: OwnedSemaphorePermit,
    ) -> Result<Response<Body>, Failure> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            // It was not asked to.
            return Err(Failure::Broken("the upstream switched protocols unasked".into()));
        }
        let (parts, body) = response.into_parts();
        let (over, is_over) = oneshot::channel();
        tokio::spawn(settle(Arc::clone(&self.inner), wire, place, is_over));
        let body = Receiving {
            body,
            silence: self.timeout,
            waiting: None,
            cut: Box::pin(cut(self.inner.cut.subscribe())),
            over: Some(over),
        };
        Ok(Response::from_parts(parts, Body::new(body)))
    }
}

/// Keeps the connection for another request once the response is read whole and the request
/// written whole; ends it where that takes too long. The place is free again when neither the
/// connection nor what is left of the request takes up anything any more.
async fn settle(
    inner: Arc<Inner>,
    mut wire: Wire,
    place: OwnedSemaphorePermit,
    is_over: oneshot::Receiver<()>,
) {
    let meter = Arc::clone(&wire.meter);
    let stuck = async {
        // Its sender is dropped when the body is read, fails or is dropped.
        let _ = is_over.await;
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
        ready = wire.sender.ready() => ready.is_ok(),
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

enum Sent<R> {
    Answered(R),
    Cut,
    Silent,
}

struct Unanswered {
    failure: Failure,
    /// The request, if it may be tried again.
    again: Option<Box<Request<Body>>>,
}

async fn cut(mut cut: watch::Receiver<bool>) {
    // The sender lives as long as the upstream; without it nobody can cut any more.
    if cut.wait_for(|cut| *cut).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The body of a response: it fails where the upstream is silent for too long, or is cut off.
struct Receiving {
    body: Incoming,
    silence: Duration,
    /// Set while it waits for the upstream: a client that reads slowly is no silence.
    waiting: Option<Pin<Box<Sleep>>>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Dropped once the body is over, or with it.
    over: Option<oneshot::Sender<()>>,
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, duplex};
    use tokio::net::TcpListener;

    use super::*;

    /// A connection that takes `takes` bytes, and then breaks.
    struct Breaking {
        takes: usize,
    }

    impl AsyncRead for Breaking {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Breaking {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.takes == 0 {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let taken = self.takes.min(bytes.len());
            self.takes -= taken;
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// An upstream that answers, and one kept connection to it.
    async fn with_kept<S>(io: S) -> (Upstream, TcpListener)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string().parse().unwrap();
        let upstream = Upstream::new(authority, Duration::from_secs(5), 10);
        let mut wire = Wire::open(io).await.unwrap();
        wire.sender.ready().await.unwrap();
        upstream.inner.pool.put(wire);
        (upstream, listener)
    }

    fn request() -> Request<Body> {
        let mut request = Request::new(Body::from(Bytes::from_static(b"body")));
        *request.method_mut() = http::Method::POST;
        request
    }

    #[tokio::test]
    async fn a_kept_connection_that_is_gone_is_replaced() {
        let (here, there) = duplex(1024);
        let (upstream, listener) = with_kept(here).await;
        // Nothing runs in between: the gateway cannot know when it takes the connection.
        drop(there);
        let answering = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = vec![0; 1024];
            let mut read = 0;
            while !buffer[..read].ends_with(b"body") {
                read += stream.read(&mut buffer[read..]).await.unwrap();
            }
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        };
        let (response, ()) = tokio::join!(upstream.send(request()), answering);
        assert_eq!(response.unwrap().status(), 204);
    }

    #[tokio::test]
    async fn a_connection_that_took_nothing_leaves_nothing_unknown() {
        let (upstream, _listener) = with_kept(Breaking { takes: 0 }).await;
        let failure = upstream.send(request()).await.unwrap_err();
        assert!(matches!(failure, Failure::Unreachable(_)), "{failure:?}");
    }

    #[tokio::test]
    async fn a_single_byte_leaves_it_unknown_and_is_not_sent_again() {
        let (upstream, listener) = with_kept(Breaking { takes: 1 }).await;
        let failure = tokio::select! {
            failure = upstream.send(request()) => failure.unwrap_err(),
            _ = listener.accept() => panic!("it was sent again"),
        };
        assert!(matches!(failure, Failure::Broken(_)), "{failure:?}");
    }

    #[tokio::test]
    async fn too_many_at_once_are_refused() {
        let (upstream, _listener) = with_kept(Breaking { takes: 9999 }).await;
        let places = upstream.inner.places.clone().acquire_many_owned(10).await.unwrap();
        assert!(matches!(upstream.send(request()).await, Err(Failure::Busy)));
        drop(places);
    }

    /// An upstream that answers before it has read the request, and then neither reads nor closes.
    async fn early(answer: &'static [u8]) -> (Upstream, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string().parse().unwrap();
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 1]).await.unwrap();
            stream.write_all(answer).await.unwrap();
            std::future::pending::<()>().await;
        });
        (Upstream::new(authority, Duration::from_secs(60), 1), serving)
    }

    fn large() -> Request<Body> {
        let mut request = request();
        *request.body_mut() = Body::from(Bytes::from(vec![0; 32 << 20]));
        request
    }

    async fn is_free(upstream: &Upstream) {
        let free = Arc::clone(&upstream.inner.places).acquire_owned();
        drop(timeout(Duration::from_secs(20), free).await.unwrap().unwrap());
    }

    #[tokio::test]
    async fn an_early_answer_does_not_keep_the_rest_of_the_request() {
        let answer = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno";
        let (upstream, serving) = early(answer).await;
        let response = upstream.send(large()).await.unwrap();
        assert!(matches!(upstream.send(request()).await, Err(Failure::Busy)));
        let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
        assert_eq!(body.to_bytes(), "no");
        is_free(&upstream).await;
        assert!(upstream.inner.pool.take().is_none());
        serving.abort();
    }

    #[tokio::test]
    async fn nor_does_one_that_is_given_up_or_cut_off() {
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno";
        let (upstream, serving) = early(answer).await;
        drop(upstream.send(large()).await.unwrap());
        is_free(&upstream).await;
        serving.abort();
        let (upstream, serving) = early(answer).await;
        let _response = upstream.send(large()).await.unwrap();
        upstream.cut();
        is_free(&upstream).await;
        serving.abort();
    }
}

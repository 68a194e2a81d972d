//! Connections to the upstream, with one request at a time on each.
//!
//! HTTP/2 could carry many requests at once. But closing the connection because of one of them
//! would end the others, and for none of them would it be known whether it was sent. So a
//! connection carries one request here too, and concurrent requests need as many connections as in
//! HTTP/1.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot::{self, error::TryRecvError::Closed};
use tokio::task::{JoinHandle, JoinSet};

use crate::BoxedBody;
use crate::body::GuardedBody;

use super::meter::{Meter, Metered};
use super::normalize;
use super::socket::SocketProbe;
use super::{MAX_BUFFER, MAX_FIELDS, Origin};

/// Bytes of a request that wait to be written in HTTP/2.
const SEND_BUFFER: usize = 64 * 1024;

/// One connection: its sender, and the tasks that drive it.
#[derive(Debug)]
pub(super) struct UpstreamConnection {
    sender: Sender,
    pub(super) meter: Arc<Meter>,
    /// Whether `HEAD` was answered on it, in HTTP/1.
    pub(super) had_head: bool,
    /// Socket below HTTP/1: unrequested bytes would be taken for the next response.
    probe: Option<SocketProbe>,
    driver: JoinHandle<()>,
    tasks: Tasks,
}

#[derive(Debug)]
enum Sender {
    Http1(http1::SendRequest<BoxedBody>),
    Http2 {
        sender: http2::SendRequest<BoxedBody>,
        origin: Origin,
        /// Resolves when the request's body is completely read or dropped.
        sent: Option<oneshot::Receiver<()>>,
    },
}

impl UpstreamConnection {
    /// Opens HTTP/1.1 on `io`, whose socket is the one of `probe`. Nothing is written yet.
    pub(super) async fn http1<S>(io: S, probe: Option<SocketProbe>) -> hyper::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let io = Metered::new(io, false);
        let meter = io.meter();
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(MAX_BUFFER)
            .max_headers(MAX_FIELDS)
            .handshake::<_, BoxedBody>(TokioIo::new(io))
            .await?;
        let driver = tokio::spawn(drive(connection.with_upgrades()));
        let (sender, tasks) = (Sender::Http1(sender), Tasks::default());
        Ok(Self { sender, meter, had_head: false, probe, driver, tasks })
    }

    /// Opens HTTP/2 with `origin` on `io`. No request is written before the server has sent its
    /// settings, which show that it speaks HTTP/2.
    pub(super) async fn http2<S>(io: S, origin: &Origin) -> hyper::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let io = Metered::new(io, true);
        let (meter, tasks) = (io.meter(), Tasks::default());
        // One response at a time: the connection's window is that of the stream.
        let window = MAX_BUFFER as u32;
        let (sender, connection) = http2::Builder::new(tasks.clone())
            .initial_max_send_streams(0)
            .initial_stream_window_size(window)
            .initial_connection_window_size(window)
            .max_header_list_size(window)
            .max_send_buf_size(SEND_BUFFER)
            .max_concurrent_reset_streams(16)
            .handshake::<_, BoxedBody>(TokioIo::new(io))
            .await?;
        let driver = tokio::spawn(drive(connection));
        let sender = Sender::Http2 { sender, origin: origin.clone(), sent: None };
        Ok(Self { sender, meter, had_head: false, probe: None, driver, tasks })
    }

    /// Returns whether it takes a request now: it is idle, and no unrequested bytes have arrived.
    ///
    /// hyper checks this too, but only for bytes of which the runtime was notified.
    pub(super) fn is_ready(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => {
                sender.is_ready() && self.probe.as_ref().is_none_or(SocketProbe::is_quiet)
            }
            Sender::Http2 { sender, .. } => sender.is_ready() && !sender.is_closed(),
        }
    }

    /// Sends a request in the form of the protocol. A request of which nothing was encoded may be
    /// returned with the error.
    pub(super) async fn try_send(
        &mut self,
        mut request: Request<BoxedBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<BoxedBody>>> {
        match &mut self.sender {
            Sender::Http1(sender) => {
                normalize::for_http1(&mut request);
                sender.try_send_request(request).await
            }
            Sender::Http2 { sender, origin, sent } => {
                normalize::for_http2(&mut request, origin);
                // The body drops its guard when it is sent.
                let (guard, dropped) = oneshot::channel();
                *sent = Some(dropped);
                let body = |body| BoxedBody::new(GuardedBody::new(body, guard));
                sender.try_send_request(request.map(body)).await
            }
        }
    }

    /// Returns whether the request is completely written, and another one can follow, now that its
    /// response is read.
    pub(super) fn is_reusable(&mut self) -> bool {
        match &mut self.sender {
            // hyper is ready only when the response is completely read too.
            Sender::Http1(sender) => sender.is_ready(),
            Sender::Http2 { sender, sent, .. } => {
                if sent.as_mut().is_some_and(|sent| sent.try_recv() == Err(Closed)) {
                    // It must not be awaited any more.
                    *sent = None;
                }
                sent.is_none() && sender.is_ready() && !sender.is_closed()
            }
        }
    }

    /// Waits until the request is completely written and its response, whose body was read or
    /// dropped, completely read. Returns whether another request can follow.
    pub(super) async fn reusable(&mut self) -> bool {
        match &mut self.sender {
            // hyper is ready only then.
            Sender::Http1(sender) => sender.ready().await.is_ok(),
            Sender::Http2 { sender, sent, .. } => {
                if let Some(sent) = sent {
                    // Its sender is dropped with the body.
                    let _ = sent.await;
                }
                sender.ready().await.is_ok()
            }
        }
    }

    /// Ends the connection and waits until its tasks have stopped. The meter does not change
    /// afterwards.
    pub(super) async fn end(&mut self) {
        self.driver.abort();
        // Aborted, panicked or finished: in each case it no longer runs.
        let _ = (&mut self.driver).await;
        self.tasks.end().await;
    }
}

async fn drive(connection: impl Future<Output = hyper::Result<()>>) {
    if let Err(error) = connection.await {
        tracing::debug!(%error, "an upstream connection ended");
    }
}

impl Drop for UpstreamConnection {
    fn drop(&mut self) {
        self.driver.abort();
        self.tasks.lock().abort_all();
    }
}

/// Tasks of an HTTP/2 connection: the one that reads and writes, and those that send bodies.
#[derive(Clone, Debug, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        // No change can panic half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all tasks, and those that they spawn meanwhile.
    async fn end(&self) {
        loop {
            let mut tasks = std::mem::take(&mut *self.lock());
            if tasks.is_empty() {
                return;
            }
            tasks.shutdown().await;
        }
    }
}

impl<F> hyper::rt::Executor<F> for Tasks
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let mut tasks = self.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(future);
    }
}

//! What stands behind: handlers, and a server for them where they are an upstream.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_http::server::ExecutionHandle;
use hapax_http::{Body, BoxError};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::http::client::TIMEOUT;

/// A request as the handler gets it.
#[derive(Clone, Debug)]
pub struct HandlerRequest {
    /// Its method.
    pub method: Method,
    /// Its target as the handler sees it.
    pub uri: Uri,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its whole body.
    pub body: Bytes,
    /// Its trailers.
    pub trailers: Option<HeaderMap>,
    /// The fencing token: of the extension in a library, of the header behind a gateway.
    pub fence: Option<u64>,
    /// The attempt, likewise.
    pub attempt: Option<u32>,
    /// The operation id, likewise.
    pub operation: Option<String>,
}

/// What is protected.
pub type Handler = Arc<dyn Fn(HandlerRequest) -> BoxFuture<'static, Response<Body>> + Send + Sync>;

/// A handler of an asynchronous function.
pub fn handler<F, A>(answer: F) -> Handler
where
    F: Fn(HandlerRequest) -> A + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    Arc::new(move |call| Box::pin(answer(call)))
}

/// Answers 201 with the number of the run.
#[must_use]
pub fn counting(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |_| {
        let run = runs.next();
        async move { reply(201, run.to_string()) }
    })
}

/// An answer in plain text.
#[must_use]
pub fn reply(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// Reads a request and has it handled. A fence is told by [`ExecutionHandle`], or else by the headers
/// of a gateway, if they are there.
pub async fn perform<B>(handler: &Handler, request: Request<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let (parts, body) = request.into_parts();
    // Whoever breaks off in the middle is not handled.
    let Ok(body) = body.collect().await else { return reply(400, "broken off") };
    let execution = parts.extensions.get::<ExecutionHandle>();
    let told = |name| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let fence = match execution {
        Some(execution) => execution.fence().to_string().parse().ok(),
        None => told("idempotency-fence").and_then(|text| text.parse().ok()),
    };
    let attempt = match execution {
        Some(execution) => Some(execution.attempt()),
        None => told("idempotency-attempt").and_then(|text| text.parse().ok()),
    };
    let operation = match execution {
        Some(execution) => Some(execution.id().to_string()),
        None => told("idempotency-operation-id").map(str::to_owned),
    };
    let trailers = body.trailers().cloned();
    let call = HandlerRequest {
        method: parts.method,
        uri: parts.uri,
        headers: parts.headers,
        body: body.to_bytes(),
        trailers,
        fence,
        attempt,
        operation,
    };
    handler(call).await
}

/// A server, until it is dropped.
#[derive(Debug)]
pub struct TestServer {
    /// Where it listens.
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

/// Serves a handler without any layer, as an upstream, over HTTP/1.1 and HTTP/2 in the clear.
pub async fn serve(handler: Handler) -> TestServer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let handler = Arc::clone(&handler);
            let service = service_fn(move |request| {
                let handler = Arc::clone(&handler);
                async move { Ok::<_, Infallible>(perform(&handler, request).await) }
            });
            tokio::spawn(async move {
                let server = auto::Builder::new(TokioExecutor::new());
                drop(server.serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    TestServer { address, task }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Counts runs.
#[derive(Clone, Debug)]
pub struct ExecutionCount(Arc<watch::Sender<usize>>);

impl ExecutionCount {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// Counts one, and says which it is, from 1.
    #[allow(
        clippy::must_use_candidate,
        clippy::should_implement_trait,
        reason = "it counts, and is no iterator"
    )]
    pub fn next(&self) -> usize {
        let mut run = 0;
        self.0.send_modify(|count| {
            *count += 1;
            run = *count;
        });
        run
    }

    /// How many there have been.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Resolves when there have been `count`.
    pub async fn reach(&self, count: usize) {
        let mut runs = self.0.subscribe();
        let reached = tokio::time::timeout(TIMEOUT, runs.wait_for(|runs| *runs >= count)).await;
        assert!(reached.is_ok(), "{} runs where {count} were awaited", self.count());
    }
}

impl Default for ExecutionCount {
    fn default() -> Self {
        Self::new()
    }
}

/// Something that handlers wait for.
#[derive(Clone, Debug)]
pub struct HandlerGate(Arc<watch::Sender<bool>>);

impl HandlerGate {
    /// A closed one.
    #[must_use]
    pub fn closed() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Lets everybody through from now on.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    /// Resolves when it is open.
    pub async fn pass(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

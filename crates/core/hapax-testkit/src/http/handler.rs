//! Handlers of inner services, and a server for them as an upstream.

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

/// A request as the handler receives it.
#[derive(Clone, Debug)]
pub struct HandlerRequest {
    /// Its method.
    pub method: Method,
    /// Its target as the handler receives it.
    pub uri: Uri,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its whole body.
    pub body: Bytes,
    /// Its trailers.
    pub trailers: Option<HeaderMap>,
    /// The fence: from the extension in a library, from the header behind a gateway.
    pub fence: Option<u64>,
    /// The attempt, from the same source.
    pub attempt: Option<u32>,
    /// The operation id, from the same source.
    pub operation: Option<String>,
}

/// The handler that is protected.
pub type Handler = Arc<dyn Fn(HandlerRequest) -> BoxFuture<'static, Response<Body>> + Send + Sync>;

/// Returns a handler that calls an asynchronous function.
pub fn handler<F, A>(answer: F) -> Handler
where
    F: Fn(HandlerRequest) -> A + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    Arc::new(move |call| Box::pin(answer(call)))
}

/// Returns a handler that answers 201 with the number of the execution.
#[must_use]
pub fn counting(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |_| {
        let run = runs.next();
        async move { reply(201, run.to_string()) }
    })
}

/// Returns a response in plain text.
#[must_use]
pub fn reply(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// Reads a request and calls the handler. The fence comes from [`ExecutionHandle`], or else from
/// the headers of a gateway, if they are present.
pub async fn perform<B>(handler: &Handler, request: Request<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let (parts, body) = request.into_parts();
    // An incomplete request does not reach the handler.
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

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct TestServer {
    /// Address on which it listens.
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

/// Serves a handler without any layer, as an upstream, over HTTP/1.1 and HTTP/2 in cleartext.
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

/// A counter of executions.
#[derive(Clone, Debug)]
pub struct ExecutionCount(Arc<watch::Sender<usize>>);

impl ExecutionCount {
    /// Returns a counter at zero.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// Counts one execution and returns its number, from 1.
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

    /// Returns the count.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Resolves when the count has reached `count`.
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

/// A gate for which handlers wait.
#[derive(Clone, Debug)]
pub struct HandlerGate(Arc<watch::Sender<bool>>);

impl HandlerGate {
    /// Returns a closed gate.
    #[must_use]
    pub fn closed() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    /// Resolves when the gate is open.
    pub async fn pass(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

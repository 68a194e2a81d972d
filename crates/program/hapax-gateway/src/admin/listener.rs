//! Listener for operators: few connections, none of which can be occupied indefinitely.
//!
//! 1. If all permits are taken, the oldest connection without a request in progress is closed: one
//!    that has sent nothing, half a head, or an earlier request.
//! 2. Requests other than probes have fewer permits than there are connections, so a probe always
//!    finds one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use hapax_proxy::guard::{GuardState, Guarded, MAX_HEAD};
use hapax_proxy::{
    ClientNetwork, ConnectionLimit, GuardedBody, PacedBody, SheddableConnections, SheddableEntry,
    Shutdown, ShutdownPhase,
};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_service::Service;

use crate::own_headers::remove_reserved;

/// Largest number of connections; further ones wait in the kernel's queue.
const CONNECTIONS: usize = 64;

/// Largest number of concurrent requests that are not probes.
const REQUESTS: usize = 48;

/// Paths of health probes, for which permits are reserved.
const PROBES: [&str; 2] = ["/healthz", "/readyz"];

/// Time without a request in progress after which a connection may be closed for another one.
const IDLE: Duration = Duration::from_millis(200);

/// Time that a shed connection may take to end.
const LEAVE: Duration = Duration::from_secs(1);

/// Timeout of a request's head and of an idle connection.
const HEAD: Duration = Duration::from_secs(10);

/// Timeout of a peer that sends nothing in the middle of a body, or receives nothing of a response.
const STALL: Duration = Duration::from_secs(10);

/// Serves each request with the `app` of its arrival until the gateway closes, then finishes the
/// requests in progress. Dropping the future ends all of them.
pub(super) async fn serve(listener: TcpListener, app: watch::Receiver<Router>, shutdown: Shutdown) {
    let permits = ConnectionLimit::new(CONNECTIONS, "operators", IDLE);
    let requests = Arc::new(Semaphore::new(REQUESTS));
    let mut connections = JoinSet::new();
    let mut closing = pin!(shutdown.reached(ShutdownPhase::Closing));
    // The accepted connection that waits for a permit.
    let mut next = None;
    loop {
        // Cancel-safe: an accepted connection is already in `next`.
        tokio::select! {
            biased;
            () = &mut closing => break,
            Some(_) = connections.join_next() => {}
            Some(place) = permits.take(), if next.is_some() => {
                if let Some((stream, peer)) = next.take() {
                    let idle = Idle::enter(permits.sheddable(), peer);
                    let shared = (app.clone(), Arc::clone(&requests), shutdown.clone());
                    connections.spawn(async move {
                        connection(stream, peer, idle, shared).await;
                        drop(place);
                    });
                }
            }
            accepted = permits.accept(&listener), if next.is_none() => next = Some(accepted),
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Whether a connection has a request in progress. Clones are of the same connection.
#[derive(Clone, Debug)]
struct Idle(Arc<IdleState>);

#[derive(Debug)]
struct IdleState {
    sheddable: Arc<SheddableConnections>,
    source: ClientNetwork,
    shed: Arc<Notify>,
    entry: Mutex<Option<SheddableEntry>>,
}

impl Idle {
    fn enter(sheddable: &Arc<SheddableConnections>, peer: SocketAddr) -> Self {
        let (source, shed) = (ClientNetwork::of(peer.ip()), Arc::default());
        let entry = sheddable.enter(source, Arc::clone(&shed));
        let entry = Mutex::new(Some(entry));
        Self(Arc::new(IdleState { sheddable: Arc::clone(sheddable), source, shed, entry }))
    }

    /// Counts a request as in progress until the result is dropped.
    fn begin(&self) -> ActiveProbe {
        self.set(None);
        ActiveProbe(self.clone())
    }

    fn set(&self, entry: Option<SheddableEntry>) {
        // No change can panic half way.
        let before = {
            let mut held = self.0.entry.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *held, entry)
        };
        drop(before);
    }
}

/// A request in progress.
#[derive(Debug)]
struct ActiveProbe(Idle);

impl Drop for ActiveProbe {
    fn drop(&mut self) {
        let IdleState { sheddable, source, shed, .. } = &*self.0.0;
        self.0.set(Some(sheddable.enter(*source, Arc::clone(shed))));
    }
}

/// State that all connections share: the routes, the permits for requests other than probes, and
/// the phase.
type Shared = (watch::Receiver<Router>, Arc<Semaphore>, Shutdown);

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    idle: Idle,
    (app, requests, shutdown): Shared,
) {
    let guarded = Guarded::new(stream, &[], STALL);
    let heads = guarded.heads();
    let service = service_fn(|request| {
        // A separate statement, so that the lock is not held while the request is answered.
        let app = app.borrow().clone();
        let (busy, heads, requests) = (idle.begin(), Arc::clone(&heads), Arc::clone(&requests));
        async move {
            let response = answer(app, heads, requests, request, peer).await?;
            Ok::<_, Infallible>(response.map(|body| Body::new(GuardedBody::new(body, busy))))
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .max_buf_size(MAX_HEAD + 16 * 1024)
            .serve_connection(TokioIo::new(guarded), service)
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = shutdown.reached(ShutdownPhase::Closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = idle.0.shed.notified() => {
            // A request that arrived at this moment is answered.
            connection.as_mut().graceful_shutdown();
            timeout(LEAVE, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an operator's connection failed");
    }
}

async fn answer(
    mut app: Router,
    heads: Arc<GuardState>,
    requests: Arc<Semaphore>,
    mut request: Request<Incoming>,
    peer: SocketAddr,
) -> Result<Response, Infallible> {
    if let Some(rejection) = heads.rejection() {
        return Ok(hapax_operators::error(
            StatusCode::BAD_REQUEST,
            "bad-request",
            &rejection.to_string(),
        ));
    }
    let place = match requests.try_acquire_owned() {
        Ok(place) => Some(place),
        Err(_) if PROBES.contains(&request.uri().path()) => None,
        Err(_) => {
            let reason = "too many requests are in progress: retry in a second";
            return Ok(hapax_operators::error(
                StatusCode::SERVICE_UNAVAILABLE,
                "overloaded",
                reason,
            ));
        }
    };
    request.extensions_mut().insert(ConnectInfo(peer));
    // A router is always ready.
    let clean = |trailers: &mut HeaderMap| remove_reserved(trailers, false);
    let paced = |body| Body::new(PacedBody::new(body, STALL, true, false, clean));
    let response = app.call(request.map(paced)).await?;
    Ok(response.map(|body| Body::new(GuardedBody::new(body, place))))
}

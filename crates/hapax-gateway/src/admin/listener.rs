//! Connections of operators: few, and none that can be held for nothing.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_service::Service;

use crate::front::Patient;
use crate::guard::{Guarded, Heads, MAX_HEAD};
use crate::work::{Phase, Work};

/// Connections at once; further ones wait in the kernel's queue.
const CONNECTIONS: usize = 64;

/// How long a head may take, and a connection be idle.
const HEAD: Duration = Duration::from_secs(10);

/// How long a peer may be silent in the middle of a body, or take nothing of an answer.
const STALL: Duration = Duration::from_secs(10);

/// Serves each request by what `app` is when it arrives, until the gateway closes; then what is under
/// way. Dropping the future ends all.
pub(super) async fn serve(listener: TcpListener, app: watch::Receiver<Router>, work: Work) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    let mut closing = pin!(work.reached(Phase::Closing));
    loop {
        // The semaphore is never closed.
        let accepted = tokio::select! {
            biased;
            () = &mut closing => break,
            Some(_) = connections.join_next() => continue,
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await;
                listener.accept().await.map(|(stream, _)| (stream, place))
            } => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                let serving = connection(stream, app.clone(), work.clone());
                connections.spawn(async move {
                    serving.await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "an operator's connection could not be accepted");
                // Out of descriptors, most likely: it does not pass by trying at once.
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, app: watch::Receiver<Router>, work: Work) {
    let guarded = Guarded::new(stream, &[], STALL);
    let heads = guarded.heads();
    let service = service_fn(|request| {
        // A statement of its own: the lock is not held while the request is answered.
        let app = app.borrow().clone();
        answer(app, Arc::clone(&heads), request)
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
        () = work.reached(Phase::Closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an operator's connection failed");
    }
}

async fn answer(
    mut app: Router,
    heads: Arc<Heads>,
    request: Request<Incoming>,
) -> Result<Response, Infallible> {
    if let Some(refusal) = heads.refusal() {
        return Ok(hapax_operators::error(
            StatusCode::BAD_REQUEST,
            "bad-request",
            &refusal.to_string(),
        ));
    }
    // A router has nothing to wait for before it is called.
    app.call(request.map(|body| Body::new(Patient::new(body, STALL, true)))).await
}

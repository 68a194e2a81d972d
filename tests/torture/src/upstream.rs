//! The service behind the gateway. It is slow and sometimes busy, and it never ends, so that its
//! records are complete. Each incarnation of a gateway has its own upstream port, which
//! distinguishes late requests of a killed gateway from those of its successor.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::dice::{Dice, mix};
use crate::ledger::Ledger;
use crate::lock;
use crate::response::{EXECUTION, UpstreamResponse};

/// An upstream for one incarnation of a gateway.
pub(crate) struct Upstream {
    pub(crate) port: u16,
    accepting: JoinHandle<()>,
}

impl Upstream {
    pub(crate) async fn start(
        ledger: Arc<Mutex<Ledger>>,
        incarnation: u64,
        seed: u64,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(serve(stream, Service { ledger: ledger.clone(), incarnation, seed }));
            }
        });
        Ok(Self { port, accepting })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        // Accepts no new connections. Requests in progress continue, as on a separate host.
        self.accepting.abort();
    }
}

#[derive(Clone)]
struct Service {
    ledger: Arc<Mutex<Ledger>>,
    incarnation: u64,
    seed: u64,
}

async fn serve(stream: TcpStream, service: Service) {
    let handler = service_fn(move |request| {
        let service = service.clone();
        async move { Ok::<_, Infallible>(service.handle(request).await) }
    });
    // A killed gateway ends the connection with an error, which is expected.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), handler).await;
}

impl Service {
    async fn handle(self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let header = |name: &str| {
            let value = request.headers().get(name).and_then(|value| value.to_str().ok());
            value.map(|value| value.trim_matches('"').to_owned())
        };
        let key = header("idempotency-key");
        let fence = header("idempotency-fence").and_then(|fence| fence.parse().ok());
        let (Some(key), Some(fence)) = (key, fence) else {
            return status(StatusCode::BAD_REQUEST);
        };
        if request.method() == Method::GET {
            return self.outcome(&key, fence);
        }
        lock(&self.ledger).begin(&key, fence, self.incarnation);
        if request.into_body().collect().await.is_err() {
            // It took no effect: the gateway was killed while it sent the request.
            lock(&self.ledger).decline(&key, fence);
            return status(StatusCode::BAD_REQUEST);
        }
        // A separate task: hyper drops the handler when the gateway is killed.
        let work = tokio::spawn(self.execute(key, fence));
        work.await.unwrap_or_else(|_| status(StatusCode::INTERNAL_SERVER_ERROR))
    }

    async fn execute(self, key: String, fence: u64) -> Response<Full<Bytes>> {
        let mut dice = Dice::new(mix(self.seed ^ fence));
        tokio::time::sleep(work_time(&mut dice)).await;
        if dice.once_in(12) {
            lock(&self.ledger).decline(&key, fence);
            return declined();
        }
        if !lock(&self.ledger).take_effect(&key, fence) {
            return declined();
        }
        tokio::time::sleep(work_time(&mut dice)).await;
        let effect = UpstreamResponse::of(&key, fence);
        reply(effect.status, fence, effect.body)
    }

    /// Answers the reconcile request that the gateway sends before it executes a key again.
    fn outcome(&self, key: &str, fence: u64) -> Response<Full<Bytes>> {
        if fence == 0 {
            // The gateway's probe has a fence that no execution has.
            return did_not_happen();
        }
        let mut ledger = lock(&self.ledger);
        let counts = &mut ledger.counts;
        let asked = counts.hook_happened + counts.hook_did_not + counts.hook_cannot_say;
        if Dice::new(self.seed ^ asked).once_in(8) {
            counts.hook_cannot_say += 1;
            return status(StatusCode::SERVICE_UNAVAILABLE);
        }
        let Some(fence) = ledger.reconcile(key, fence) else {
            return did_not_happen();
        };
        let effect = UpstreamResponse::of(key, fence);
        let mut response = reply(200, fence, effect.body);
        response.headers_mut().insert("idempotency-status", effect.status.into());
        response
    }
}

/// Returns the duration of an execution: mostly short, so that many requests fit between two kills.
fn work_time(dice: &mut Dice) -> Duration {
    if dice.once_in(4) {
        dice.up_to(Duration::from_millis(60))
    } else {
        dice.up_to(Duration::from_millis(5))
    }
}

fn reply(code: u16, fence: u64, body: Vec<u8>) -> Response<Full<Bytes>> {
    let mut response = status(StatusCode::from_u16(code).unwrap_or_default());
    response.headers_mut().insert(EXECUTION, fence.into());
    *response.body_mut() = Full::from(body);
    response
}

/// Returns a 404 with the outcome header. Routers answer a bare 404 too, so that it would prove
/// nothing.
fn did_not_happen() -> Response<Full<Bytes>> {
    let mut response = status(StatusCode::NOT_FOUND);
    let marker = HeaderValue::from_static("did-not-happen");
    response.headers_mut().insert("idempotency-outcome", marker);
    response
}

/// Returns a 503 that states that nothing happened. A bare 503 would be an unknown outcome.
fn declined() -> Response<Full<Bytes>> {
    let mut response = status(StatusCode::SERVICE_UNAVAILABLE);
    let retryable = HeaderValue::from_static("retryable");
    response.headers_mut().insert("idempotency-outcome", retryable);
    response
}

fn status(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    response
}

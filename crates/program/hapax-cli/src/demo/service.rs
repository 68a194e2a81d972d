//! The payments service of the demo: a separate process, which is flaky on purpose.
//!
//! - `POST /charges` with `Idempotency-Key` and `{"order": 17, …}` makes a charge: 201. The [`Plan`]
//!   decides the fault of each request.
//! - `GET /charges/by-operation` with `Idempotency-Operation-Id` and `Idempotency-Fence` returns the
//!   verdict about an operation: 200 with the response that the charge got or should have got; 404
//!   with `Idempotency-Outcome: did-not-happen` if there was no charge, and the fence is rejected from
//!   then on; 503 if there is no verdict yet. Fence 0 is the gateway's probe, for an operation that
//!   never existed.
//!
//! The service prints `ready ADDRESS` once it listens, `stalled ORDER` after a stall, and `holding
//! ORDER` when a request is at the worst moment for a kill: charged, and not answered. When its
//! standard input ends, it accepts no more requests, finishes those under way (a charge may be
//! late, but it is made) and exits. Therefore it does not outlive the demo.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

use super::ledger::{ChargeLookup, Ledger, Order};
use super::plan::{Fault, Plan, Random};
use super::times;

/// The most requests under way; more are answered 503.
const MAX_REQUESTS: u32 = 1024;

/// The largest request body, in bytes.
const MAX_BODY: usize = 64 * 1024;

/// The arguments of the service.
#[derive(Debug, clap::Args)]
pub(crate) struct ServiceArgs {
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// The file that charges are written to.
    #[arg(long)]
    ledger: PathBuf,
    /// The seed of the plan of faults.
    #[arg(long)]
    seed: u64,
    /// The number of payments in the plan.
    #[arg(long)]
    payments: u16,
    /// The first request for this order or a later one is held, instead of its planned fault.
    #[arg(long)]
    hold_from: Option<u32>,
}

/// Serves until standard input ends.
pub(crate) async fn run(args: ServiceArgs) -> io::Result<()> {
    let listener = TcpListener::bind(args.listen).await?;
    let (close, closing) = watch::channel(false);
    let service = Arc::new(Service {
        ledger: Mutex::new(Ledger::open(&args.ledger)?),
        pace: Mutex::new(Random::new(args.seed)),
        plan: Plan::new(args.seed, args.payments),
        hold_from: args.hold_from,
        held: AtomicBool::new(false),
        closing,
        permits: Arc::new(Semaphore::new(usize::try_from(MAX_REQUESTS).map_err(io::Error::other)?)),
    });
    print_line(&format!("ready {}", listener.local_addr()?))?;
    let accepting = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(Arc::clone(&service).connection(stream))),
                // The client closed the connection, or descriptors are scarce for the moment.
                Err(_) => sleep(times::WORK).await,
            }
        }
    };
    tokio::select! {
        () = accepting => {}
        () = input_ended() => {}
    }
    close.send_replace(true);
    // With all permits acquired, no request is under way, and new requests get no permit.
    let _ = service.permits.acquire_many(MAX_REQUESTS).await;
    Ok(())
}

#[derive(Debug)]
struct Service {
    ledger: Mutex<Ledger>,
    pace: Mutex<Random>,
    plan: Plan,
    hold_from: Option<u32>,
    held: AtomicBool,
    closing: watch::Receiver<bool>,
    permits: Arc<Semaphore>,
}

/// The reply to a request.
enum Reply {
    Response(Response<Full<Bytes>>),
    /// No response: the connection is closed.
    None,
}

/// The body of a request for a charge. Other fields are ignored.
#[derive(Deserialize)]
struct ChargeRequest {
    order: u32,
}

impl Service {
    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let response = service_fn(move |request| Arc::clone(&self).respond(request));
        // An error here is a client that disconnected, or a reply that is lost on purpose.
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), response)
            .await;
    }

    /// Handles a request on a separate task: hyper drops this future when the client hangs up, but
    /// a requested charge is made all the same. That is why retries are dangerous.
    async fn respond(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> io::Result<Response<Full<Bytes>>> {
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, "busy");
            let retryable = HeaderValue::from_static("retryable");
            response.headers_mut().insert("idempotency-outcome", retryable);
            return Ok(response);
        };
        let handling = tokio::spawn(async move {
            let reply = self.handle(request).await;
            drop(permit);
            reply
        });
        match handling.await.map_err(io::Error::other)?? {
            Reply::Response(response) => Ok(response),
            Reply::None => Err(io::Error::other("the reply is lost")),
        }
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> io::Result<Reply> {
        let (head, body) = request.into_parts();
        let (key, fence) = match (text(&head.headers, "idempotency-key"), fence(&head.headers)) {
            (Some(key), Ok(fence)) => (key, fence),
            _ => return Ok(Reply::Response(problem(StatusCode::BAD_REQUEST, "key or fence"))),
        };
        // The same key of another caller is another operation: the operation id differs.
        let operation =
            text(&head.headers, "idempotency-operation-id").unwrap_or_else(|| key.clone());
        match (&head.method, head.uri.path()) {
            (&Method::POST, "/charges") => {
                let body = Limited::new(body, MAX_BODY).collect().await;
                let body = body.map_err(io::Error::other)?.to_bytes();
                match serde_json::from_slice(&body) {
                    Ok(ChargeRequest { order }) => {
                        self.charge(Order { order, key, operation, fence }).await
                    }
                    Err(_) => Ok(Reply::Response(problem(StatusCode::BAD_REQUEST, "body"))),
                }
            }
            (&Method::GET, "/charges/by-operation") => match fence {
                Some(fence) => self.look_up(operation, fence).await.map(Reply::Response),
                None => Ok(Reply::Response(problem(StatusCode::BAD_REQUEST, "fence"))),
            },
            _ => Ok(Reply::Response(problem(StatusCode::NOT_FOUND, "no such path"))),
        }
    }

    async fn charge(self: Arc<Self>, request: Order) -> io::Result<Reply> {
        let (order, began) = (request.order, Instant::now());
        let this = Arc::clone(&self);
        let fault = self
            .with_ledger(move |ledger| ledger.arrive(order, |arrival| this.fault(order, arrival)))
            .await?;
        sleep(self.pace()).await;
        match fault {
            Some(Fault::Reject) => {
                let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, "try again");
                // Nothing was charged. Without this header a 503 means an unknown outcome.
                let retryable = HeaderValue::from_static("retryable");
                response.headers_mut().insert("idempotency-outcome", retryable);
                return Ok(Reply::Response(response));
            }
            Some(Fault::StallBeforeCharge) => sleep(times::STALL).await,
            _ => {}
        }
        let charge = self.with_ledger(|ledger| ledger.charge(request)).await?;
        if began.elapsed() >= times::SLOW {
            self.with_ledger(move |ledger| ledger.slow(order)).await?;
        }
        if fault == Some(Fault::StallBeforeCharge) {
            print_line(&format!("stalled {order}"))?;
        }
        let Some(charge) = charge else {
            let mut response = problem(StatusCode::CONFLICT, "stale fence");
            // No charge was made and none will be: this is not an outcome to store for the key.
            let retryable = HeaderValue::from_static("retryable");
            response.headers_mut().insert("idempotency-outcome", retryable);
            return Ok(Reply::Response(response));
        };
        match fault {
            Some(Fault::LoseReply) => return Ok(Reply::None),
            Some(Fault::FailAfterCharge) => {
                return Ok(Reply::Response(problem(StatusCode::INTERNAL_SERVER_ERROR, "sorry")));
            }
            Some(Fault::StallAfterCharge) => {
                sleep(times::STALL).await;
                print_line(&format!("stalled {order}"))?;
            }
            Some(Fault::Hold) => {
                print_line(&format!("holding {order}"))?;
                let mut closing = self.closing.clone();
                tokio::select! {
                    _ = closing.wait_for(|closing| *closing) => {}
                    () = sleep(times::HOLD) => {}
                }
            }
            Some(Fault::StallBeforeCharge | Fault::Reject) | None => {}
        }
        Ok(Reply::Response(charged(StatusCode::CREATED, charge.id, charge.order)))
    }

    async fn look_up(
        self: Arc<Self>,
        operation: String,
        fence: u64,
    ) -> io::Result<Response<Full<Bytes>>> {
        if fence == 0 {
            // The gateway's probe is not in the ledger, which counts reconcile requests about
            // charges.
            return Ok(did_not_happen());
        }
        let verdict = self
            .with_ledger(move |ledger| {
                // One operation in three gets no verdict for its first reconcile request.
                let withheld = operation.bytes().map(u32::from).sum::<u32>() % 3 == 0;
                if withheld && ledger.times_reconciled(&operation) == 0 {
                    return ledger.withhold(&operation).map(|()| None);
                }
                ledger.look_up(&operation, fence).map(Some)
            })
            .await?;
        Ok(match verdict {
            None => problem(StatusCode::SERVICE_UNAVAILABLE, "cannot say yet"),
            Some(ChargeLookup::Nothing) => did_not_happen(),
            Some(ChargeLookup::Charged(charge)) => {
                let mut response = charged(StatusCode::OK, charge.id, charge.order);
                // The status that the charge was, or should have been, answered with.
                response
                    .headers_mut()
                    .insert("idempotency-status", HeaderValue::from_static("201"));
                response
            }
        })
    }

    /// Returns the fault of a request: a hold if one is due, else the planned fault.
    fn fault(&self, order: u32, arrival: u32) -> Option<Fault> {
        let hold = self.hold_from.is_some_and(|from| order >= from)
            && !self.held.swap(true, Ordering::Relaxed);
        if hold { Some(Fault::Hold) } else { self.plan.fault(order, arrival) }
    }

    /// Returns the time that a charge takes.
    fn pace(&self) -> Duration {
        let mut random = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        times::WORK + Duration::from_millis(u64::try_from(random.below(20)).unwrap_or_default())
    }

    /// Runs a closure with the ledger, one at a time, on a thread that may block on the disk.
    async fn with_ledger<T: Send + 'static>(
        self: &Arc<Self>,
        access: impl FnOnce(&mut Ledger) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            // After a panic with the lock held, the ledger in memory is still as the file or behind
            // it.
            access(&mut this.ledger.lock().unwrap_or_else(PoisonError::into_inner))
        })
        .await
        .map_err(io::Error::other)?
    }
}

/// Returns a header's text, without the quotes of a structured field.
fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?.trim_matches('"');
    (!value.is_empty()).then(|| value.to_owned())
}

fn fence(headers: &HeaderMap) -> Result<Option<u64>, std::num::ParseIntError> {
    text(headers, "idempotency-fence").map(|fence| fence.parse()).transpose()
}

fn charged(status: StatusCode, id: u32, order: u32) -> Response<Full<Bytes>> {
    json(status, format!("{{\"charge\":{id},\"order\":{order}}}\n"))
}

/// Returns the verdict that no charge was made. The header is needed: any router answers 404 for an
/// unknown path.
fn did_not_happen() -> Response<Full<Bytes>> {
    let mut response = problem(StatusCode::NOT_FOUND, "no charge");
    let marker = HeaderValue::from_static("did-not-happen");
    response.headers_mut().insert("idempotency-outcome", marker);
    response
}

/// Returns an error response. `title` is a constant of this file and needs no escaping.
fn problem(status: StatusCode, title: &str) -> Response<Full<Bytes>> {
    json(status, format!("{{\"title\":\"{title}\"}}\n"))
}

fn json(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Prints a line to the demo and flushes it.
fn print_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

async fn input_ended() {
    let mut input = tokio::io::stdin();
    let mut scrap = [0; 64];
    while input.read(&mut scrap).await.is_ok_and(|count| count > 0) {}
}

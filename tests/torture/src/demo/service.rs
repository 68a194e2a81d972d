//! The payments service of the demo: a separate process that fails deliberately.
//!
//! - `POST /charges` with `Idempotency-Key` and `{"order": 17, …}` charges: 201. The [`Plan`] has
//!   its faults.
//! - `GET /charges/by-operation` with `Idempotency-Operation-Id` and `Idempotency-Fence` looks an
//!   operation up: 200 with the response that the charge had or should have had; 404 with
//!   `Idempotency-Outcome: did-not-happen` if there is no charge, and from then on the fence is
//!   rejected; 503 if it cannot answer now. Fence 0 is the gateway's probe, for an operation that
//!   does not exist.
//!
//! It prints `ready ADDRESS` once it listens, `rested ORDER` when a stall is over, and `holding
//! ORDER` when a request is charged and not answered, the worst instant for a kill. When its
//! standard input ends, it accepts no more requests, finishes those in progress, whose charges may
//! come late, and exits. So it does not outlive the demo either.

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
use super::plan::{Fault, Plan};
use super::times;
use crate::dice::Dice;

/// The limit of requests in progress; more are answered 503.
const MAX_WORK: u32 = 1024;

/// The limit of a request body, in bytes.
const MAX_BODY: usize = 64 * 1024;

/// Arguments of the service.
#[derive(Debug, clap::Args)]
pub(crate) struct ServiceArgs {
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// The file that charges are written to.
    #[arg(long)]
    ledger: PathBuf,
    /// Decides which payments get which fault.
    #[arg(long)]
    seed: u64,
    /// Number of payments with planned faults.
    #[arg(long)]
    payments: u16,
    /// The first request for this order or a later one is held, in place of its planned fault.
    #[arg(long)]
    hold_from: Option<u32>,
}

/// Serves until standard input ends.
pub(crate) async fn run(args: ServiceArgs) -> io::Result<()> {
    let listener = TcpListener::bind(args.listen).await?;
    let (close, closing) = watch::channel(false);
    let service = Arc::new(Service {
        ledger: Mutex::new(Ledger::open(&args.ledger)?),
        pace: Mutex::new(Dice::new(args.seed)),
        plan: Plan::deal(args.seed, args.payments),
        hold_from: args.hold_from,
        held: AtomicBool::new(false),
        closing,
        work: Arc::new(Semaphore::new(usize::try_from(MAX_WORK).map_err(io::Error::other)?)),
    });
    say(&format!("ready {}", listener.local_addr()?))?;
    let accepting = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(Arc::clone(&service).connection(stream))),
                // A client closed the connection, or descriptors are short for the moment.
                Err(_) => sleep(times::WORK).await,
            }
        }
    };
    tokio::select! {
        () = accepting => {}
        () = input_ended() => {}
    }
    close.send_replace(true);
    // Once all permits are free, no request is in progress. New requests get none from here on.
    let _ = service.work.acquire_many(MAX_WORK).await;
    Ok(())
}

#[derive(Debug)]
struct Service {
    ledger: Mutex<Ledger>,
    pace: Mutex<Dice>,
    plan: Plan,
    hold_from: Option<u32>,
    held: AtomicBool,
    closing: watch::Receiver<bool>,
    work: Arc<Semaphore>,
}

/// The reply to a request.
enum Reply {
    Answer(Response<Full<Bytes>>),
    /// The connection is closed without a response.
    None,
}

/// The body of a request for a charge; other members are ignored.
#[derive(Deserialize)]
struct Wish {
    order: u32,
}

impl Service {
    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let answer = service_fn(move |request| Arc::clone(&self).answer(request));
        // An error here is a client that disconnected, or a reply that is lost as planned.
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), answer)
            .await;
    }

    /// Executes on a separate task: hyper drops this future when the client disconnects, and a
    /// requested charge is made all the same. That is why retries are dangerous.
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> io::Result<Response<Full<Bytes>>> {
        let Ok(permit) = Arc::clone(&self.work).try_acquire_owned() else {
            let mut answer = problem(StatusCode::SERVICE_UNAVAILABLE, "busy");
            let retryable = HeaderValue::from_static("retryable");
            answer.headers_mut().insert("idempotency-outcome", retryable);
            return Ok(answer);
        };
        let work = tokio::spawn(async move {
            let reply = self.work(request).await;
            drop(permit);
            reply
        });
        match work.await.map_err(io::Error::other)?? {
            Reply::Answer(answer) => Ok(answer),
            Reply::None => Err(io::Error::other("the reply is lost")),
        }
    }

    async fn work(self: Arc<Self>, request: Request<Incoming>) -> io::Result<Reply> {
        let (head, body) = request.into_parts();
        let (key, fence) = match (text(&head.headers, "idempotency-key"), fence(&head.headers)) {
            (Some(key), Ok(fence)) => (key, fence),
            _ => return Ok(Reply::Answer(problem(StatusCode::BAD_REQUEST, "key or fence"))),
        };
        // The same key of another caller is another operation.
        let operation =
            text(&head.headers, "idempotency-operation-id").unwrap_or_else(|| key.clone());
        match (&head.method, head.uri.path()) {
            (&Method::POST, "/charges") => {
                let body = Limited::new(body, MAX_BODY).collect().await;
                let body = body.map_err(io::Error::other)?.to_bytes();
                match serde_json::from_slice(&body) {
                    Ok(Wish { order }) => self.charge(Order { order, key, operation, fence }).await,
                    Err(_) => Ok(Reply::Answer(problem(StatusCode::BAD_REQUEST, "body"))),
                }
            }
            (&Method::GET, "/charges/by-operation") => match fence {
                Some(fence) => self.look_up(operation, fence).await.map(Reply::Answer),
                None => Ok(Reply::Answer(problem(StatusCode::BAD_REQUEST, "fence"))),
            },
            _ => Ok(Reply::Answer(problem(StatusCode::NOT_FOUND, "no such path"))),
        }
    }

    async fn charge(self: Arc<Self>, wish: Order) -> io::Result<Reply> {
        let (order, began) = (wish.order, Instant::now());
        let this = Arc::clone(&self);
        let fault = self
            .on_the_books(move |books| books.arrive(order, |arrival| this.meets(order, arrival)))
            .await?;
        sleep(self.pace()).await;
        match fault {
            Some(Fault::Refuse) => {
                let mut answer = problem(StatusCode::SERVICE_UNAVAILABLE, "try again");
                // No charge was made. Without this header a 503 leaves open whether it was.
                let retryable = HeaderValue::from_static("retryable");
                answer.headers_mut().insert("idempotency-outcome", retryable);
                return Ok(Reply::Answer(answer));
            }
            Some(Fault::StallBeforeCharge) => sleep(times::STALL).await,
            _ => {}
        }
        let charge = self.on_the_books(|books| books.charge(wish)).await?;
        if began.elapsed() >= times::SLOW {
            self.on_the_books(move |books| books.slow(order)).await?;
        }
        if fault == Some(Fault::StallBeforeCharge) {
            say(&format!("rested {order}"))?;
        }
        let Some(charge) = charge else {
            let mut answer = problem(StatusCode::CONFLICT, "stale fence");
            // No charge was made and none will be: this is not an outcome to record for the key.
            let retryable = HeaderValue::from_static("retryable");
            answer.headers_mut().insert("idempotency-outcome", retryable);
            return Ok(Reply::Answer(answer));
        };
        match fault {
            Some(Fault::LoseReply) => return Ok(Reply::None),
            Some(Fault::FailAfterCharge) => {
                return Ok(Reply::Answer(problem(StatusCode::INTERNAL_SERVER_ERROR, "sorry")));
            }
            Some(Fault::StallAfterCharge) => {
                sleep(times::STALL).await;
                say(&format!("rested {order}"))?;
            }
            Some(Fault::Hold) => {
                say(&format!("holding {order}"))?;
                let mut closing = self.closing.clone();
                tokio::select! {
                    _ = closing.wait_for(|closing| *closing) => {}
                    () = sleep(times::HOLD) => {}
                }
            }
            Some(Fault::StallBeforeCharge | Fault::Refuse) | None => {}
        }
        Ok(Reply::Answer(charged(StatusCode::CREATED, charge.id, charge.order)))
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
        let became = self
            .on_the_books(move |books| {
                // One operation in three needs a second reconcile request.
                let withheld = operation.bytes().map(u32::from).sum::<u32>() % 3 == 0;
                if withheld && books.times_asked(&operation) == 0 {
                    return books.withhold(&operation).map(|()| None);
                }
                books.look_up(&operation, fence).map(Some)
            })
            .await?;
        Ok(match became {
            None => problem(StatusCode::SERVICE_UNAVAILABLE, "cannot say yet"),
            Some(ChargeLookup::Nothing) => did_not_happen(),
            Some(ChargeLookup::Charged(charge)) => {
                let mut answer = charged(StatusCode::OK, charge.id, charge.order);
                // The status that the charge was, or should have been, answered with.
                answer.headers_mut().insert("idempotency-status", HeaderValue::from_static("201"));
                answer
            }
        })
    }

    fn meets(&self, order: u32, arrival: u32) -> Option<Fault> {
        let hold = self.hold_from.is_some_and(|from| order >= from)
            && !self.held.swap(true, Ordering::Relaxed);
        if hold { Some(Fault::Hold) } else { self.plan.fault(order, arrival) }
    }

    /// The duration of a charge.
    fn pace(&self) -> Duration {
        let mut dice = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        times::WORK + Duration::from_millis(dice.below(20))
    }

    /// Runs `work` on the ledger, one at a time, on a thread that may wait for the disk.
    async fn on_the_books<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Ledger) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            // A panic under the lock leaves the ledger as it is on disk.
            work(&mut this.ledger.lock().unwrap_or_else(PoisonError::into_inner))
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

/// A bare 404 does not say that nothing happened: any router answers it for an unknown path.
fn did_not_happen() -> Response<Full<Bytes>> {
    let mut answer = problem(StatusCode::NOT_FOUND, "no charge");
    let marker = HeaderValue::from_static("did-not-happen");
    answer.headers_mut().insert("idempotency-outcome", marker);
    answer
}

/// `title` is a literal of this file: nothing in it needs escaping.
fn problem(status: StatusCode, title: &str) -> Response<Full<Bytes>> {
    json(status, format!("{{\"title\":\"{title}\"}}\n"))
}

fn json(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Prints one line for the demo, without a buffer.
fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

async fn input_ended() {
    let mut input = tokio::io::stdin();
    let mut scrap = [0; 64];
    while input.read(&mut scrap).await.is_ok_and(|count| count > 0) {}
}

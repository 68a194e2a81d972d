//! The clients of the demo. A client makes a key for each payment before the first attempt, and
//! uses it for every attempt until there is a final answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::plan::{ClientFault, Plan, Random};
use super::times;

/// The largest response that is read, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;

/// The state that all clients of one set-up share.
#[derive(Debug)]
pub(crate) struct ClientPool {
    address: SocketAddr,
    /// A prefix of keys, so that those of this run differ from those of others.
    run: String,
    payments: u32,
    plan: Plan,
    /// Begins and ends of restarts, counted together: odd while a process is down.
    restarts: AtomicU32,
    /// The order before which orders may begin.
    open: watch::Sender<u32>,
    next: AtomicU32,
    sent: AtomicU32,
    ended: AtomicU32,
}

/// A payment that has ended, as its client saw it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PaymentEnd {
    pub(crate) key: String,
    pub(crate) end: PaymentOutcome,
    /// The client's own fault.
    pub(crate) client_fault: Option<ClientFault>,
    /// True if a process was killed or restarted meanwhile.
    pub(crate) during_restart: bool,
}

/// The final answer that a client got about a payment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum PaymentOutcome {
    /// The answer has this charge.
    Paid(u32),
    /// The last answer was that the outcome is unknown, or there was no final answer.
    Unresolved,
    /// The answer is one that no correct set-up gives.
    Unexpected(String),
}

/// The meaning of a response for the payment.
#[derive(Debug)]
enum Meaning {
    Final(PaymentOutcome),
    Unknown,
    /// Retry, after this time if the response has one.
    Retry(Option<Duration>),
}

impl ClientPool {
    /// Creates clients for the orders `0..payments`, of which those below `open` may begin.
    pub(crate) fn new(
        address: SocketAddr,
        run: String,
        payments: u32,
        open: u32,
        plan: Plan,
    ) -> Self {
        let open = watch::Sender::new(open);
        let [restarts, next, sent, ended] = [(); 4].map(|()| AtomicU32::new(0));
        Self { address, run, payments, plan, restarts, open, next, sent, ended }
    }

    /// Counts the begin or the end of a restart: a process is about to be killed, or runs again.
    pub(crate) fn note_restart(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets orders below `until` begin.
    pub(crate) fn open(&self, until: u32) {
        self.open.send_modify(|open| *open = until.max(*open));
    }

    /// Returns the requests that all clients have sent so far.
    pub(crate) fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the payments that have ended so far.
    pub(crate) fn ended(&self) -> u32 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Runs one client: it makes payments one after another until all are made. A payment whose
    /// outcome is unknown is retried by a task of its own, while the client continues with the next
    /// payment.
    pub(crate) async fn client(self: Arc<Self>, mut random: Random) -> Vec<PaymentEnd> {
        let mut ends = Vec::new();
        let mut later = JoinSet::new();
        loop {
            let order = self.next.fetch_add(1, Ordering::Relaxed);
            if order >= self.payments {
                break;
            }
            // An error would mean that the sender was dropped; it is in `self`.
            let _ = self.open.subscribe().wait_for(|open| order < *open).await;
            let payment = Payment {
                key: format!("{}-{order}-{:08x}", self.run, random.number() >> 32),
                order,
                client_fault: None,
                restarts_before: self.restarts.load(Ordering::Relaxed),
                pool: Arc::clone(&self),
                random: Random::new(random.number()),
            };
            match payment.pay().await {
                Ok(ended) => ends.push(ended),
                Err(unknown) => drop(later.spawn(unknown.retry_later())),
            }
        }
        while let Some(ended) = later.join_next().await {
            ends.extend(ended);
        }
        ends
    }
}

/// A payment under way.
#[derive(Debug)]
struct Payment {
    key: String,
    order: u32,
    client_fault: Option<ClientFault>,
    /// The pool's count of restarts when the payment began.
    restarts_before: u32,
    pool: Arc<ClientPool>,
    random: Random,
}

impl Payment {
    /// Sends requests until there is a final answer. Returns the payment as an error if the answer
    /// is that the outcome is unknown.
    async fn pay(mut self) -> Result<PaymentEnd, Self> {
        let deadline = Instant::now() + times::DEADLINE;
        let mut pause = Duration::from_millis(25);
        let mut meaning = self.send_first().await;
        while Instant::now() < deadline {
            let after = match meaning {
                Meaning::Final(end) => return Ok(self.end(end)),
                Meaning::Unknown => return Err(self),
                Meaning::Retry(after) => after,
            };
            sleep(after.unwrap_or_else(|| self.jitter(pause)).min(times::PAUSE)).await;
            pause = (pause * 2).min(times::PAUSE);
            meaning = self.send().await;
        }
        Ok(self.end(PaymentOutcome::Unresolved))
    }

    /// Retries a payment whose outcome is unknown until there is a final answer.
    async fn retry_later(mut self) -> PaymentEnd {
        let deadline = Instant::now() + times::TIMEOUT;
        let mut pause = times::PAUSE / 2;
        while Instant::now() < deadline {
            sleep(self.jitter(pause)).await;
            pause = (pause * 2).min(times::LATER);
            if let Meaning::Final(end) = self.send().await {
                return self.end(end);
            }
        }
        self.end(PaymentOutcome::Unresolved)
    }

    fn end(self, end: PaymentOutcome) -> PaymentEnd {
        self.pool.ended.fetch_add(1, Ordering::Relaxed);
        let before = self.restarts_before;
        // An odd count: a process was down when the payment began.
        let during_restart =
            !before.is_multiple_of(2) || before != self.pool.restarts.load(Ordering::Relaxed);
        PaymentEnd { key: self.key, end, client_fault: self.client_fault, during_restart }
    }

    /// Sends the first request, with the client's planned fault if there is one.
    async fn send_first(&mut self) -> Meaning {
        self.client_fault = self.pool.plan.client_fault(self.order);
        match self.client_fault {
            None => self.send().await,
            Some(ClientFault::DoubleClick) => {
                let (one, other) = tokio::join!(self.send(), self.send());
                one.or(other)
            }
            Some(ClientFault::HangUp) => {
                self.pool.sent.fetch_add(1, Ordering::Relaxed);
                let soon = Duration::from_millis(self.random.below(20) as u64);
                let ClientPool { address, .. } = *self.pool;
                if post_and_hang_up(address, &self.key, &self.body(), soon).await.is_err() {
                    // The request was not sent, so the fault did not happen.
                    self.client_fault = None;
                }
                Meaning::Retry(None)
            }
        }
    }

    fn body(&self) -> String {
        format!("{{\"order\":{},\"amount\":1999}}", self.order)
    }

    /// Sends a request and returns the meaning of its response.
    async fn send(&self) -> Meaning {
        self.pool.sent.fetch_add(1, Ordering::Relaxed);
        match timeout(times::REQUEST, post(self.pool.address, &self.key, self.body())).await {
            Ok(Ok(response)) => response.meaning(),
            // Without a response the client cannot know whether it happened: it retries with the
            // same key.
            Ok(Err(_)) | Err(_) => Meaning::Retry(None),
        }
    }

    /// Returns a random time between half of `pause` and `pause`.
    fn jitter(&mut self, pause: Duration) -> Duration {
        let half = pause / 2;
        let micros = usize::try_from(half.as_micros()).unwrap_or(usize::MAX);
        half + Duration::from_micros(u64::try_from(self.random.below(micros)).unwrap_or_default())
    }
}

impl Meaning {
    /// Returns the more definite of two meanings.
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (end @ Self::Final(_), _) | (_, end @ Self::Final(_)) => end,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (retry, Self::Retry(_)) => retry,
        }
    }
}

#[derive(Debug)]
struct ServiceResponse {
    status: StatusCode,
    retry_after: Option<Duration>,
    body: Bytes,
}

#[derive(Deserialize)]
struct Paid {
    charge: u32,
}

#[derive(Deserialize)]
struct Problem {
    code: String,
}

impl ServiceResponse {
    fn meaning(&self) -> Meaning {
        match self.status.as_u16() {
            200..=299 => Meaning::Final(match serde_json::from_slice(&self.body) {
                Ok(Paid { charge }) => PaymentOutcome::Paid(charge),
                Err(error) => PaymentOutcome::Unexpected(format!(
                    "{} that names no charge: {error}",
                    self.status
                )),
            }),
            409 if self.code().as_deref() == Some("outcome-unknown") => Meaning::Unknown,
            408 | 409 | 425 | 429 | 500..=599 => Meaning::Retry(self.retry_after),
            _ => {
                let code = self.code().unwrap_or_default();
                Meaning::Final(PaymentOutcome::Unexpected(format!("{} {code}", self.status)))
            }
        }
    }

    fn code(&self) -> Option<String> {
        serde_json::from_slice(&self.body).ok().map(|Problem { code }| code)
    }
}

/// Sends a request on a new connection, so that the HTTP client never resends it on its own.
async fn post(address: SocketAddr, key: &str, body: String) -> Result<ServiceResponse, NoResponse> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Dropping this future drops the set, which ends the connection's task.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let request = Request::builder()
        .method(Method::POST)
        .uri("/charges")
        .header(HOST, address.to_string())
        .header(CONTENT_TYPE, "application/json")
        .header("idempotency-key", key)
        .header(AUTHORIZATION, "Bearer shop")
        .body(Full::<Bytes>::from(body))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body =
        Limited::new(body, MAX_RESPONSE).collect().await.map_err(NoResponse::body)?.to_bytes();
    let retry_after = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
    let retry_after = retry_after.and_then(|text| text.parse().ok()).map(Duration::from_secs);
    Ok(ServiceResponse { status: head.status, retry_after, body })
}

/// Sends a whole request, and closes the connection before the response has arrived.
async fn post_and_hang_up(
    address: SocketAddr,
    key: &str,
    body: &str,
    soon: Duration,
) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!(
        "POST /charges HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\nauthorization: Bearer shop\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    sleep(soon).await;
    Ok(())
}

/// An error of the connection. It has no details: every such error leads to a retry.
#[derive(Debug)]
struct NoResponse;

impl NoResponse {
    fn body(_: Box<dyn std::error::Error + Send + Sync>) -> Self {
        Self
    }
}

impl<E: std::error::Error> From<E> for NoResponse {
    fn from(_: E) -> Self {
        Self
    }
}

//! Clients that retry correctly: each payment has an idempotency key, made before the first
//! attempt, and every attempt sends it until the response is final.

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

use super::plan::{Plan, Slip};
use super::times;
use crate::dice::Dice;

/// The limit of a response that is read, in bytes.
const MAX_ANSWER: usize = 64 * 1024;

/// State that all clients of one setup share.
#[derive(Debug)]
pub(crate) struct ClientPool {
    address: SocketAddr,
    /// Prefix that makes the keys of this run differ from those of others.
    run: String,
    payments: u32,
    plan: Plan,
    /// Number of times that a process was about to be killed, or was running again.
    upsets: AtomicU32,
    /// The limit of the orders that may begin.
    open: watch::Sender<u32>,
    next: AtomicU32,
    sent: AtomicU32,
    ended: AtomicU32,
}

/// A payment, and its end for the client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PaymentEnd {
    pub(crate) key: String,
    pub(crate) end: PaymentOutcome,
    /// The client's mistake.
    pub(crate) slip: Option<Slip>,
    /// True if a process was killed meanwhile.
    pub(crate) upset: bool,
}

/// The end of a payment for its client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum PaymentOutcome {
    /// The response names this charge.
    Paid(u32),
    /// Every response said that the outcome is unknown, or none was final.
    Unresolved,
    /// A response that no correct setup sends.
    Unexpected(String),
}

/// Consequence of a response for the payment.
#[derive(Debug)]
enum Meaning {
    Final(PaymentOutcome),
    Unknown,
    Again(Option<Duration>),
}

impl ClientPool {
    /// Creates a pool for orders `0..payments`; those below `open` may begin.
    pub(crate) fn new(
        address: SocketAddr,
        run: String,
        payments: u32,
        open: u32,
        plan: Plan,
    ) -> Self {
        let open = watch::Sender::new(open);
        let [upsets, next, sent, ended] = [(); 4].map(|()| AtomicU32::new(0));
        Self { address, run, payments, plan, upsets, open, next, sent, ended }
    }

    /// Counts a process that is about to be killed, or runs again.
    pub(crate) fn upset(&self) {
        self.upsets.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets orders below `until` begin.
    pub(crate) fn open(&self, until: u32) {
        self.open.send_modify(|open| *open = until.max(*open));
    }

    /// Returns the number of requests sent so far, by all clients.
    pub(crate) fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the number of payments that have ended so far.
    pub(crate) fn ended(&self) -> u32 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Runs one client, which makes payments one after another until all are made. A payment whose
    /// outcome is unknown is retried on a separate task, while the client continues with others.
    pub(crate) async fn client(self: Arc<Self>, mut dice: Dice) -> Vec<PaymentEnd> {
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
                key: format!("{}-{order}-{:08x}", self.run, dice.roll() >> 32),
                order,
                slip: None,
                calm: self.upsets.load(Ordering::Relaxed),
                shop: Arc::clone(&self),
                dice: dice.split(),
            };
            match payment.pay().await {
                Ok(ended) => ends.push(ended),
                Err(unknown) => drop(later.spawn(unknown.come_back())),
            }
        }
        while let Some(ended) = later.join_next().await {
            ends.extend(ended);
        }
        ends
    }
}

/// A payment in progress.
#[derive(Debug)]
struct Payment {
    key: String,
    order: u32,
    slip: Option<Slip>,
    /// The number of upsets when the payment began.
    calm: u32,
    shop: Arc<ClientPool>,
    dice: Dice,
}

impl Payment {
    /// Retries until a response is final. Returns the payment as the error if its outcome is
    /// unknown.
    async fn pay(mut self) -> Result<PaymentEnd, Self> {
        let deadline = Instant::now() + times::DEADLINE;
        let mut pause = Duration::from_millis(25);
        let mut meaning = self.ask_first().await;
        while Instant::now() < deadline {
            let after = match meaning {
                Meaning::Final(end) => return Ok(self.end(end)),
                Meaning::Unknown => return Err(self),
                Meaning::Again(after) => after,
            };
            sleep(after.unwrap_or_else(|| self.jitter(pause)).min(times::PAUSE)).await;
            pause = (pause * 2).min(times::PAUSE);
            meaning = self.ask().await;
        }
        Ok(self.end(PaymentOutcome::Unresolved))
    }

    /// Retries at long intervals until the outcome is known.
    async fn come_back(mut self) -> PaymentEnd {
        let deadline = Instant::now() + times::TIMEOUT;
        let mut pause = times::PAUSE / 2;
        while Instant::now() < deadline {
            sleep(self.jitter(pause)).await;
            pause = (pause * 2).min(times::LATER);
            if let Meaning::Final(end) = self.ask().await {
                return self.end(end);
            }
        }
        self.end(PaymentOutcome::Unresolved)
    }

    fn end(self, end: PaymentOutcome) -> PaymentEnd {
        self.shop.ended.fetch_add(1, Ordering::Relaxed);
        // Odd while a process is down.
        let upset =
            !self.calm.is_multiple_of(2) || self.calm != self.shop.upsets.load(Ordering::Relaxed);
        PaymentEnd { key: self.key, end, slip: self.slip, upset }
    }

    /// Sends the first request, with the client's mistake if the plan has one.
    async fn ask_first(&mut self) -> Meaning {
        self.slip = self.shop.plan.slip(self.order);
        match self.slip {
            None => self.ask().await,
            Some(Slip::DoubleClick) => {
                let (one, other) = tokio::join!(self.ask(), self.ask());
                one.or(other)
            }
            Some(Slip::HangUp) => {
                self.shop.sent.fetch_add(1, Ordering::Relaxed);
                let soon = Duration::from_millis(self.dice.below(20));
                let ClientPool { address, .. } = *self.shop;
                if post_and_hang_up(address, &self.key, &self.body(), soon).await.is_err() {
                    // The request was not sent.
                    self.slip = None;
                }
                Meaning::Again(None)
            }
        }
    }

    fn body(&self) -> String {
        format!("{{\"order\":{},\"amount\":1999}}", self.order)
    }

    async fn ask(&self) -> Meaning {
        self.shop.sent.fetch_add(1, Ordering::Relaxed);
        match timeout(times::REQUEST, post(self.shop.address, &self.key, self.body())).await {
            Ok(Ok(answer)) => answer.meaning(),
            // The client cannot know whether the payment happened, so that it retries with the same
            // key.
            Ok(Err(_)) | Err(_) => Meaning::Again(None),
        }
    }

    /// Returns a random duration between half of `pause` and `pause`.
    fn jitter(&mut self, pause: Duration) -> Duration {
        let half = pause / 2;
        half + self.dice.up_to(half)
    }
}

impl Meaning {
    /// Returns the more definite of both.
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (end @ Self::Final(_), _) | (_, end @ Self::Final(_)) => end,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (again, Self::Again(_)) => again,
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
            408 | 409 | 425 | 429 | 500..=599 => Meaning::Again(self.retry_after),
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

/// One request on a separate connection, so that no library retries a request unseen.
async fn post(address: SocketAddr, key: &str, body: String) -> Result<ServiceResponse, NoAnswer> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Dropping this future ends the connection.
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
    let body = Limited::new(body, MAX_ANSWER).collect().await.map_err(NoAnswer::body)?.to_bytes();
    let retry_after = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
    let retry_after = retry_after.and_then(|text| text.parse().ok()).map(Duration::from_secs);
    Ok(ServiceResponse { status: head.status, retry_after, body })
}

/// Sends a complete request, and closes the connection before or during the response.
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

/// The connection failed. The client retries wherever it failed.
#[derive(Debug)]
struct NoAnswer;

impl NoAnswer {
    fn body(_: Box<dyn std::error::Error + Send + Sync>) -> Self {
        Self
    }
}

impl<E: std::error::Error> From<E> for NoAnswer {
    fn from(_: E) -> Self {
        Self
    }
}

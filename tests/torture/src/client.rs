//! Clients. Each requests one operation after the other, and retries it with its key at any gateway
//! until it receives a response. At random, a client sends duplicates at once, or repeats an old
//! request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::dice::Dice;
use crate::ledger::ClientResponse;
use crate::response::{EXECUTION, UpstreamResponse};
use crate::world::World;
use crate::{OnUnknownPolicy, lock};

/// Timeout of one attempt.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Time within which an operation must get a response; the gateway is down for part of it.
const OPERATION: Duration = Duration::from_secs(60);

/// Result of one attempt.
enum Reply {
    Final(ClientResponse),
    /// 409 `outcome-unknown`.
    Unknown,
    /// The client retries with the same key.
    NotYet,
    Unexpected(String),
}

/// Runs one client until the world ends.
pub(crate) async fn run(world: Arc<World>, number: u64, mut dice: Dice) {
    let mut answered: Vec<String> = Vec::new();
    let mut count = 0_u64;
    while !world.is_over() {
        if dice.once_in(4) && !answered.is_empty() {
            let old = dice.below(answered.len() as u64) as usize;
            operate(&world, &answered[old], &mut dice).await;
            continue;
        }
        count += 1;
        let key = format!("{}-{number}-{count}", world.policy());
        lock(world.ledger()).asked_for(&key);
        if dice.once_in(4) {
            let mut copies = JoinSet::new();
            for _ in 0..world.copies() {
                let (world, key, mut dice) = (world.clone(), key.clone(), dice.split());
                copies.spawn(async move { operate(&world, &key, &mut dice).await });
            }
            while copies.join_next().await.is_some() {}
        } else {
            operate(&world, &key, &mut dice).await;
        }
        if lock(world.ledger()).is_answered(&key) {
            // A bounded list of keys, some recent and some old.
            match answered.len() {
                0..200 => answered.push(key),
                full => answered[dice.below(full as u64) as usize] = key,
            }
        }
    }
}

/// Sends `key` until it has a response, or an unknown outcome that the policy makes permanent.
pub(crate) async fn operate(world: &World, key: &str, dice: &mut Dice) {
    let deadline = Instant::now() + OPERATION;
    loop {
        let answered = lock(world.ledger()).is_answered(key);
        lock(world.ledger()).counts.requests += 1;
        let reply = timeout(ATTEMPT, send(world.port(dice), key)).await;
        // A timeout or an error: the gateway is down, or was killed before it answered.
        let reply = reply.unwrap_or(Ok(Reply::NotYet)).unwrap_or(Reply::NotYet);
        if settles(world, key, reply, answered) {
            return;
        }
        if Instant::now() > deadline {
            let what = format!("has no final response after {OPERATION:?}");
            return lock(world.ledger()).violation(key, &what);
        }
        sleep(Duration::from_millis(1) + dice.up_to(Duration::from_millis(30))).await;
    }
}

/// Records the reply in the ledger. Returns whether the client is done with the key.
fn settles(world: &World, key: &str, reply: Reply, answered: bool) -> bool {
    let mut ledger = lock(world.ledger());
    match reply {
        Reply::Final(answer) => ledger.answer(key, &answer),
        Reply::Unknown => {
            ledger.unknown(key, answered);
            return world.policy() == OnUnknownPolicy::Block;
        }
        Reply::NotYet => return false,
        Reply::Unexpected(what) => ledger.violation(key, &what),
    }
    true
}

async fn send(port: u16, key: &str) -> Result<Reply, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(connection);
    let request = Request::builder()
        .method(Method::POST)
        .uri("/operations")
        .header(HOST, "torture")
        .header(AUTHORIZATION, "Bearer torture")
        .header(CONTENT_TYPE, "application/json")
        .header("idempotency-key", format!("\"{key}\""))
        .body(Full::new(Bytes::from(format!("{{\"operation\":\"{key}\"}}"))))?;
    let response = sender.send_request(request).await?;
    let (head, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    driver.abort();

    let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
    // The outcome is not durable yet, so that the gateway promises no replay.
    if header("idempotency-recorded") == Some("pending") {
        return Ok(Reply::NotYet);
    }
    if let Some(fence) = header(EXECUTION) {
        let effect = UpstreamResponse { status: head.status.as_u16(), body: body.to_vec() };
        let replayed = header("idempotency-replayed") == Some("true");
        return Ok(Reply::Final(ClientResponse { effect, fence: fence.parse().ok(), replayed }));
    }
    let body = String::from_utf8_lossy(&body);
    let code = |code: &str| body.contains(&format!("\"{code}\""));
    Ok(match head.status {
        StatusCode::CONFLICT if code("outcome-unknown") => Reply::Unknown,
        StatusCode::CONFLICT if code("in-flight") || code("superseded") => Reply::NotYet,
        // The upstream was busy or exceeded its timeout.
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => Reply::NotYet,
        status => Reply::Unexpected(format!("got {status}: {body}")),
    })
}

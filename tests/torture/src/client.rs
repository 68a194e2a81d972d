//! Clients: each asks for one operation after the other, and retries it with its key until it
//! gets an answer, from any gateway. Now and then one sends copies at once, or asks again for an old answer.

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

/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(10);

/// How long an operation may remain without an answer; the gateway is dead for some of it.
const OPERATION: Duration = Duration::from_secs(60);

/// What a request came to.
enum Reply {
    Final(ClientResponse),
    /// 409 `outcome-unknown`.
    Unknown,
    /// To be sent again.
    NotYet,
    Unexpected(String),
}

/// One client, until the world ends.
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
            // A bounded memory of keys, some recent and some old.
            match answered.len() {
                0..200 => answered.push(key),
                full => answered[dice.below(full as u64) as usize] = key,
            }
        }
    }
}

/// Sends `key` until it is settled: answered, or unknown where that is for ever.
pub(crate) async fn operate(world: &World, key: &str, dice: &mut Dice) {
    let deadline = Instant::now() + OPERATION;
    loop {
        let answered = lock(world.ledger()).is_answered(key);
        lock(world.ledger()).counts.requests += 1;
        let reply = timeout(ATTEMPT, send(world.port(dice), key)).await;
        // A time-out or an error: the gateway is dead, or was killed before it answered.
        let reply = reply.unwrap_or(Ok(Reply::NotYet)).unwrap_or(Reply::NotYet);
        if settles(world, key, reply, answered) {
            return;
        }
        if Instant::now() > deadline {
            let what = format!("not settled after {OPERATION:?}");
            return lock(world.ledger()).violation(key, &what);
        }
        sleep(Duration::from_millis(1) + dice.up_to(30)).await;
    }
}

/// Tells the judge; whether there is no more to be done for the key.
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
    // Not durable yet: the gateway says so, and promises nothing.
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
        // The upstream was busy, or its time was up.
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => Reply::NotYet,
        status => Reply::Unexpected(format!("got {status}: {body}")),
    })
}

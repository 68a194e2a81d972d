//! Client that requests one transfer from the bank.

use std::time::Duration;

use bytes::Bytes;
use hapax_bank::Transfer;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Timeout of one attempt.
const ATTEMPT: Duration = Duration::from_secs(8);

/// Integration by which the request enters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Door {
    Handler,
    Function,
}

/// A final response, which every retry must get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

/// Result of an attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Reply {
    Final(Answer),
    /// The client retries: the bank is not reachable, or the outcome is not known yet.
    NotYet(Option<StatusCode>),
    Unexpected(Answer),
}

pub(crate) async fn ask(port: u16, door: Door, asked: &Transfer) -> Reply {
    let Ok(Ok(answer)) = timeout(ATTEMPT, send(port, door, asked)).await else {
        return Reply::NotYet(None);
    };
    match answer.status.as_u16() {
        201 | 402 => Reply::Final(answer),
        409 | 503 => Reply::NotYet(Some(answer.status)),
        _ => Reply::Unexpected(answer),
    }
}

type Fault = Box<dyn std::error::Error + Send + Sync>;

async fn send(port: u16, door: Door, asked: &Transfer) -> Result<Answer, Fault> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(connection);
    let path = match door {
        Door::Handler => "/transfers",
        Door::Function => "/calls",
    };
    let request = Request::post(path)
        .header(HOST, "bank")
        .header(AUTHORIZATION, "Bearer customer")
        .header(CONTENT_TYPE, "application/json")
        .header("idempotency-key", &asked.reference)
        .body(Full::new(Bytes::from(serde_json::to_vec(asked)?)))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    driver.abort();
    Ok(Answer { status: head.status, body })
}

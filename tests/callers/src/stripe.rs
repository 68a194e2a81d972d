//! A server in Stripe's manner: it keeps the answer of each key, errors too, and replays it.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use http::StatusCode;
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::effects::EffectFile;
use crate::fault::CallFault;
use crate::http::{Reply, ServiceRequest};
use crate::service::{STALL, answer, status};
use crate::{CallsError, PlantedCallBug, ServeArgs, failed};

const IN_USE: &str =
    r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use","message":"in use"}}"#;
const REUSED: &str = r#"{"error":{"type":"idempotency_error","message":"other parameters"}}"#;
const LOCKED: &str =
    r#"{"error":{"type":"invalid_request_error","code":"lock_timeout","message":"locked"}}"#;

struct Stripe {
    effects: EffectFile,
    in_use: Mutex<HashSet<String>>,
    /// Effects before this process, if it has forgotten their keys.
    forgotten: usize,
}

pub(crate) async fn serve(args: ServeArgs) -> Result<(), CallsError> {
    let effects = EffectFile::open(&args).map_err(failed("opening the effects"))?;
    let forgets = args.plant == Some(PlantedCallBug::ForgetKeys);
    let forgotten = if forgets { effects.count() } else { 0 };
    let stripe = Arc::new(Stripe { effects, in_use: Mutex::default(), forgotten });
    crate::http::serve(args.port, move |request| {
        let stripe = Arc::clone(&stripe);
        async move { stripe.charge(&request).await.unwrap_or(Reply::Drop) }
    })
    .await
}

impl Stripe {
    async fn charge(&self, request: &ServiceRequest) -> io::Result<Reply> {
        let (name, Some(key)) = (request.body.as_str(), request.header("idempotency-key")) else {
            return Ok(Reply::of(StatusCode::BAD_REQUEST, &[], "expected a key"));
        };
        // A key is that of its token: under another one it is a new operation.
        let token = request.header("authorization").and_then(|it| it.split(' ').next_back());
        let key = &*format!("{}/{key}", token.unwrap_or("none"));
        if let Some(reply) = self.replay(name, key) {
            return Ok(reply);
        }
        if !self.lock(|keys| keys.insert(key.to_owned())) {
            return Ok(Reply::of(StatusCode::CONFLICT, &[], IN_USE));
        }
        // Its effect may have ended between the two looks.
        let reply = match self.replay(name, key) {
            Some(reply) => Ok(reply),
            None => self.execute(name, key).await,
        };
        self.lock(|keys| keys.remove(key));
        reply
    }

    fn lock<T>(&self, then: impl FnOnce(&mut HashSet<String>) -> T) -> T {
        then(&mut self.in_use.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn replay(&self, name: &str, key: &str) -> Option<Reply> {
        let found = self.effects.find(key).filter(|effect| effect.number > self.forgotten)?;
        if found.name != name {
            return Some(Reply::of(StatusCode::BAD_REQUEST, &[], REUSED));
        }
        Some(Reply::Answer(answer(&found, &[("idempotent-replayed", "true")])))
    }

    async fn execute(&self, name: &str, key: &str) -> io::Result<Reply> {
        let fault = block_in_place(|| self.effects.fault(name))?;
        if let Some(reply) = fault.and_then(before) {
            return Ok(reply);
        }
        if fault == Some(CallFault::Stall) {
            sleep(STALL).await;
        }
        let status = match fault {
            Some(CallFault::ErrorAfter) => 500,
            Some(CallFault::ShouldNotRetry) => 503,
            _ => status(name),
        };
        let added = block_in_place(|| self.effects.add(name, key, 1, status))?;
        let Some(effect) = added else { return Ok(Reply::Drop) };
        if fault == Some(CallFault::StallAfter) {
            sleep(STALL).await;
        }
        Ok(match fault {
            Some(CallFault::DropAfter) => Reply::Drop,
            Some(CallFault::CutAnswer) => Reply::Cut(answer(&effect, &[])),
            Some(CallFault::ShouldNotRetry) => {
                Reply::Answer(answer(&effect, &[("stripe-should-retry", "false")]))
            }
            _ => Reply::Answer(answer(&effect, &[])),
        })
    }
}

/// Returns the reply of a fault after which there is no effect, and which is not kept.
fn before(fault: CallFault) -> Option<Reply> {
    Some(match fault {
        CallFault::Conflict => Reply::of(StatusCode::CONFLICT, &[], IN_USE),
        CallFault::LockTimeout => Reply::of(StatusCode::TOO_MANY_REQUESTS, &[], LOCKED),
        CallFault::TooManyRequests => {
            Reply::of(StatusCode::TOO_MANY_REQUESTS, &[("retry-after", "1")], "busy")
        }
        CallFault::ShouldRetry => {
            Reply::of(StatusCode::BAD_REQUEST, &[("stripe-should-retry", "true")], "again")
        }
        CallFault::Unavailable => {
            Reply::of(StatusCode::SERVICE_UNAVAILABLE, &[("retry-after", "0")], "away")
        }
        CallFault::Drop => Reply::Drop,
        _ => return None,
    })
}

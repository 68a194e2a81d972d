//! The service behind the gateway: it executes every request that it gets, and answers reconcile
//! requests.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::effects::{Effect, EffectFile};
use crate::fault::CallFault;
use crate::http::{Reply, ServiceRequest, response};
use crate::{CallsError, PlantedCallBug, ServeArgs, failed, number};

/// Time for which the service stalls: longer than the gateway waits.
pub(crate) const STALL: Duration = Duration::from_millis(2_500);

/// The gateway's `--upstream-timeout`.
pub(crate) const GATEWAY_WAITS: &str = "1s";

pub(crate) async fn serve(args: ServeArgs) -> Result<(), CallsError> {
    let effects = Arc::new(EffectFile::open(&args).map_err(failed("opening the effects"))?);
    let plant = args.plant;
    crate::http::serve(args.port, move |request| {
        let effects = Arc::clone(&effects);
        async move {
            let replied = match request.method {
                Method::GET => outcome(&effects, &request, plant),
                _ => pay(&effects, &request).await,
            };
            // Without a record of what happened there is no answer.
            replied.unwrap_or(Reply::Drop)
        }
    })
    .await
}

async fn pay(effects: &EffectFile, request: &ServiceRequest) -> std::io::Result<Reply> {
    let (id, fence) = (request.header("idempotency-operation-id"), fence(request));
    let (name, Some(id), Some(fence)) = (request.body.as_str(), id, fence) else {
        return Ok(Reply::of(StatusCode::BAD_REQUEST, &[], "expected a request of the gateway"));
    };
    let fault = block_in_place(|| effects.fault(name))?;
    if let Some(reply) = fault.and_then(before) {
        return Ok(reply);
    }
    if fault == Some(CallFault::Stall) {
        sleep(STALL).await;
    }
    let Some(effect) = block_in_place(|| effects.add(name, id, fence, status(name)))? else {
        let retryable = [("idempotency-outcome", "retryable")];
        return Ok(Reply::of(StatusCode::SERVICE_UNAVAILABLE, &retryable, "the fence is rejected"));
    };
    if fault == Some(CallFault::StallAfter) {
        sleep(STALL).await;
    }
    Ok(match fault {
        Some(CallFault::ErrorAfter) => {
            Reply::of(StatusCode::INTERNAL_SERVER_ERROR, &[("retry-after", "0")], "failed late")
        }
        Some(CallFault::DropAfter) => Reply::Drop,
        Some(CallFault::CutAnswer) => Reply::Cut(answer(&effect, &[])),
        _ => Reply::Answer(answer(&effect, &[])),
    })
}

/// Returns the reply of a fault after which there is no effect.
fn before(fault: CallFault) -> Option<Reply> {
    let retryable = ("idempotency-outcome", "retryable");
    let (now, soon) = (("retry-after", "0"), ("retry-after", "1"));
    Some(match fault {
        CallFault::Conflict => Reply::of(StatusCode::CONFLICT, &[now, retryable], "locked"),
        CallFault::TooEarly => Reply::of(StatusCode::TOO_EARLY, &[now], "early"),
        CallFault::TooManyRequests => Reply::of(StatusCode::TOO_MANY_REQUESTS, &[soon], "busy"),
        CallFault::Error => Reply::of(StatusCode::INTERNAL_SERVER_ERROR, &[soon], "failed"),
        CallFault::Unavailable => Reply::of(StatusCode::SERVICE_UNAVAILABLE, &[soon], "away"),
        CallFault::Declined => {
            Reply::of(StatusCode::SERVICE_UNAVAILABLE, &[now, retryable], "overloaded")
        }
        CallFault::Drop => Reply::Drop,
        _ => return None,
    })
}

fn outcome(
    effects: &EffectFile,
    request: &ServiceRequest,
    plant: Option<PlantedCallBug>,
) -> std::io::Result<Reply> {
    let (Some(id), Some(fence)) = (request.header("idempotency-operation-id"), fence(request))
    else {
        return Ok(Reply::of(StatusCode::BAD_REQUEST, &[], "expected a reconcile request"));
    };
    let did_not_happen = [("idempotency-outcome", "did-not-happen")];
    let denied = || Reply::of(StatusCode::NOT_FOUND, &did_not_happen, "");
    match plant {
        // The gateway probes the URL with a fence that no execution has.
        _ if fence == 0 => return Ok(denied()),
        Some(PlantedCallBug::DenyEffects) => return Ok(denied()),
        Some(PlantedCallBug::CannotSay) => {
            return Ok(Reply::of(StatusCode::SERVICE_UNAVAILABLE, &[], ""));
        }
        _ => {}
    }
    Ok(match block_in_place(|| effects.reconcile(id, fence))? {
        None => denied(),
        Some(effect) => {
            let status = effect.status.to_string();
            let mut response = answer(&effect, &[("idempotency-status", &status)]);
            *response.status_mut() = StatusCode::OK;
            Reply::Answer(response)
        }
    })
}

fn fence(request: &ServiceRequest) -> Option<u64> {
    request.header("idempotency-fence")?.parse().ok()
}

/// Returns the status of an operation's answer.
pub(crate) fn status(name: &str) -> u16 {
    match number(name).unwrap_or_default() % 8 {
        0 => 402,
        1 => 200,
        _ => 201,
    }
}

pub(crate) fn answer(effect: &Effect, headers: &[(&'static str, &str)]) -> http::Response<String> {
    let status = StatusCode::from_u16(effect.status).unwrap_or(StatusCode::BAD_GATEWAY);
    response(status, headers, &effect.body())
}

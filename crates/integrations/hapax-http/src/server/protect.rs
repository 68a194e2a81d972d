//! A request with a key, from its body to its response.
//!
//! This code runs on the client's connection, which may drop it at any await. Before the claim
//! there is nothing to undo. During the claim the engine releases a lease whose claim was dropped.
//! Once there is a lease, the execution is on a task of its own.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::exchange::Replay;
use hapax_core::machine::Verdict;
use hapax_core::{Claim, ClaimError, Key, Lease, Reconciliation, Scope, StoreError};
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body::SizeHint;
use tower_service::Service;
use tracing::Instrument;

use super::collect::{Collected, collect};
use super::concurrency::ConcurrencyPermit;
use super::describe::DescribedHttpRequest;
use super::execute::{
    BufferedRequest, ExecutionLabel, NotStarted, RequestExecution, catch, cut_off, outcome_of,
    pending,
};
use super::layer::IdempotencyLayer;
use super::observe::RequestEvent;
use super::policy::{
    CompletionOutage, RETRY_AFTER, ReconcileRequest, ReconciledResponse, RouteOptions, RoutePolicy,
    StoreOutage,
};
use super::response_info::{ResponseInfo, ResponseSource};
use super::service::{AdmittedRequest, draining};
use crate::body::{Body, BoxError, WithoutTrailers, erase};
use crate::classify::is_grpc;
use crate::error_format::ErrorFormat;
use crate::fingerprint::HttpRequest;
use crate::header::{
    self, IDEMPOTENCY_EXPIRES, IDEMPOTENCY_PROTECTED, IDEMPOTENCY_RECORDED, IDEMPOTENCY_REPLAYED,
    is_protocol_header, is_sent_upstream, retain,
};
use crate::length::{self, DeclaredLength};
use crate::problem::{Code, Problem, retry_after};
use crate::stored_response::{FullResponse, StoredResponse};

/// Time that a request may wait for memory for its body. Handlers that hang may own that memory,
/// and each request that waits occupies a connection.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The end of a problem's detail that holds for now. It covers this attempt only: another one with
/// the same key may have been executed.
const NOTHING_EXECUTED: &str = "This attempt executed nothing: retry with the same key.";

pub(super) async fn protect<S, Q, B>(
    layer: Arc<IdempotencyLayer>,
    admitted: AdmittedRequest,
    mut inner: S,
    mut parts: Parts,
    body: Q,
) -> Result<Response<Body>, S::Error>
where
    S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    Q: http_body::Body<Data = Bytes> + Send + 'static,
    Q::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let AdmittedRequest { policy, error_format, key, scope, permit } = admitted;

    let claimed = {
        let claiming = async {
            let (body, trailers) = read(&layer, &policy, &parts.headers, body).await?;
            if parts.version == Version::HTTP_2 {
                // If a client resets a stream without an error (RFC 9113, 8.1), its body ends like
                // a complete one. The server drops the request of such a stream at the next await.
                // This await is before the claim, so that half a request claims nothing.
                tokio::task::yield_now().await;
            }
            let concurrency = take_permit(&layer, &policy, &scope, &key)?;
            let target = policy.options.target.as_ref().map(|target| target(&parts));
            let request = HttpRequest {
                scheme: &policy.options.fingerprint,
                method: &parts.method,
                uri: target.as_ref().unwrap_or(&parts.uri),
                headers: &parts.headers,
                body: &body,
            };
            let engine = &layer.engine;
            let names = policy.scope.names();
            let route = &*policy.options.name;
            let described = DescribedHttpRequest {
                request: &request,
                engine,
                key: &key,
                parts: &parts,
                scope: names,
                route,
            };
            let mut claim = engine.claim(&scope, &key, &described, &policy.options.policy).await;
            while let Ok(Claim::Reconcile(reconciliation)) = claim {
                layer.observe(&policy, RequestEvent::ReconcileStarted);
                let fence = reconciliation.fence();
                claim = reconcile(&policy, &key, &parts, reconciliation, &request).await;
                if let Ok(Claim::Execute(lease)) = &claim {
                    tracing::info!(
                        route = &*policy.options.name,
                        id = %engine.operation_id(&scope, &key),
                        did_not_happen = %fence,
                        fence = %lease.fence(),
                        "the reconcile hook allows an execution"
                    );
                }
            }
            Ok((claim, concurrency, body, trailers))
        };
        tokio::select! {
            // A finished claim gets its response or, if the drain's grace ended, is released; its
            // lease does not lapse.
            biased;
            claimed = claiming => claimed,
            () = permit.gate().stopping() => Err(draining()),
        }
    };
    let (claim, concurrency, body, trailers) = match claimed {
        Ok(claimed) => claimed,
        Err(problem) => return Ok(layer.reject(&policy, error_format, &problem)),
    };
    let permit = match concurrency {
        Some(concurrency) => permit.with(concurrency),
        None => permit,
    };
    if trailers.as_ref().is_some_and(|trailers| !trailers.is_empty()) {
        // HTTP/1.1 would forward no trailers after a `Content-Length`.
        parts.headers = retain(&parts.headers, |name, _| *name != CONTENT_LENGTH);
    }
    let received = BufferedRequest { parts, body, trailers };
    match decide(&layer, &policy, error_format, claim) {
        ClaimDecision::Respond(mut response) => {
            let by = response
                .extensions()
                .get()
                .map_or(ResponseSource::Replay, |it: &ResponseInfo| it.by);
            let operation = Some(layer.engine.operation_id(&scope, &key));
            response.extensions_mut().insert(ResponseInfo { operation, by });
            Ok(response)
        }
        // There is no await after the claim: the lease cannot be dropped in between.
        ClaimDecision::Execute(lease) => {
            let operation = layer.engine.operation_id(&scope, &key);
            let by = ResponseSource::Execution { fence: lease.fence(), attempt: lease.attempt() };
            let label = ExecutionLabel::new(operation, &received.parts);
            let execution = RequestExecution { layer, policy, error_format, permit, label };
            let mut response = detach(execution, inner, received, lease).await?;
            let operation = Some(operation);
            let by = match response.extensions_mut().remove::<NotStarted>() {
                Some(NotStarted) => ResponseSource::Rejection,
                None => by,
            };
            response.extensions_mut().insert(ResponseInfo { operation, by });
            Ok(response)
        }
        ClaimDecision::Unprotected if permit.gate().is_stopping() => {
            Ok(layer.reject(&policy, error_format, &draining()))
        }
        ClaimDecision::Unprotected => {
            layer.observe(&policy, RequestEvent::Unprotected);
            let mut response = tokio::select! {
                biased;
                response = inner.call(received.request()) => response?.map(|body| {
                    let body = erase(WithoutTrailers { body, drop: is_protocol_header });
                    Body::resumed(Bytes::new(), body)
                }),
                () = permit.gate().stopping() => {
                    return Ok(layer.reject(&policy, error_format, &cut_off()));
                }
            };
            header::strip(response.headers_mut());
            response.headers_mut().insert(IDEMPOTENCY_PROTECTED, HeaderValue::from_static("false"));
            Ok(response)
        }
    }
}

async fn read<Q>(
    layer: &IdempotencyLayer,
    policy: &RoutePolicy,
    headers: &HeaderMap,
    body: Q,
) -> Result<(Bytes, Option<HeaderMap>), Problem>
where
    Q: http_body::Body<Data = Bytes> + Send + 'static,
    Q::Error: Into<BoxError>,
{
    let limit = policy.options.max_request_body;
    let mut body = erase(WithoutTrailers { body, drop: is_sent_upstream });
    let requests = &layer.memory.requests;
    match collect(&mut body, Some(headers), limit, requests, Some(BODY_TIMEOUT)).await {
        Collected::Whole { body, trailers, reservation } => Ok((reservation.hold(body), trailers)),
        Collected::MemoryFull => {
            let detail =
                format!("The server has no memory for the request's body now. {NOTHING_EXECUTED}");
            Err(Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER))
        }
        Collected::TooLarge { .. } => {
            let detail = format!("A request with a key has at most {limit} bytes of body.");
            Err(Problem::new(Code::BodyTooLarge, detail))
        }
        Collected::Broken(error) if is_timed_out(&*error) => {
            let detail = format!("The request body arrived too slowly. {NOTHING_EXECUTED}");
            Err(Problem::new(Code::RequestTimeout, detail))
        }
        Collected::Broken(error) => {
            tracing::debug!(error, "a request body broke off");
            Err(Problem::new(Code::MalformedRequest, "The request body broke off."))
        }
    }
}

/// Returns whether a body failed because its client was too slow: with an [`io::Error`] of the kind
/// [`TimedOut`](io::ErrorKind::TimedOut), or because of one.
fn is_timed_out(error: &(dyn Error + 'static)) -> bool {
    let mut error = Some(error);
    while let Some(cause) = error {
        let io = cause.downcast_ref::<io::Error>();
        if io.is_some_and(|io| io.kind() == io::ErrorKind::TimedOut) {
            return true;
        }
        error = cause.source();
    }
    false
}

/// Returns a permit for the key among the caller's keys in flight; `None` without a limit.
fn take_permit(
    layer: &IdempotencyLayer,
    policy: &RoutePolicy,
    scope: &Scope,
    key: &Key,
) -> Result<Option<ConcurrencyPermit>, Problem> {
    let RouteOptions { name, max_in_flight_per_scope, .. } = &policy.options;
    let Some(limit) = *max_in_flight_per_scope else { return Ok(None) };
    let permit = layer.concurrency.enter((name, scope), key, limit).map(Some);
    permit.ok_or_else(|| {
        let detail = format!("This caller has {limit} keys in flight. {NOTHING_EXECUTED}");
        Problem::new(Code::TooManyInFlight, detail).retry_after(RETRY_AFTER)
    })
}

/// Calls the hook. If this is dropped, the reconciliation lapses, and a later claim begins another.
async fn reconcile(
    policy: &RoutePolicy,
    key: &Key,
    parts: &Parts,
    reconciliation: Reconciliation,
    retry: &HttpRequest<'_>,
) -> Result<Claim, ClaimError> {
    let options = &policy.options;
    let (Some(hook), Some(timing)) = (&options.reconcile, options.policy.hook) else {
        return reconciliation.conclude(Verdict::CannotSay, retry).await;
    };
    let request = ReconcileRequest {
        fence: reconciliation.fence(),
        id: reconciliation.id(),
        attempt: reconciliation.attempt(),
        key: key.clone(),
        request: parts.clone(),
    };
    // One future has all of it, so that a panic of the call is treated like one of its future.
    let verdict = catch(async { hook.reconcile(request).await });
    let verdict = match tokio::time::timeout(timing.timeout, verdict).await {
        Ok(Ok(Verdict::Happened(ReconciledResponse { response, trailers }))) => {
            happened(policy, parts, response, trailers)
        }
        Ok(Ok(Verdict::DidNotHappen)) => Verdict::DidNotHappen,
        Ok(Ok(Verdict::CannotSay)) => Verdict::CannotSay,
        Ok(Err(_)) | Err(_) => {
            let fence = reconciliation.fence();
            tracing::warn!(%fence, "the reconcile hook panicked or timed out");
            Verdict::CannotSay
        }
    };
    reconciliation.conclude(verdict, retry).await
}

/// Returns the verdict for the response that a hook found. It is *cannot say* if the body's length
/// differs from the declared one.
fn happened(
    policy: &RoutePolicy,
    retry: &Parts,
    response: Response<Bytes>,
    trailers: Option<HeaderMap>,
) -> Verdict {
    if length::describes_body(&retry.method, response.status()) {
        let hint = SizeHint::new();
        let declared = DeclaredLength::new(response.headers(), &hint);
        let checked = declared.and_then(|declared| declared.check_end(response.body().len()));
        if let Err(error) = checked {
            tracing::warn!(%error, "the response of the reconcile hook is not valid");
            return Verdict::CannotSay;
        }
    }
    let mut whole = FullResponse::of(&response, trailers.as_ref(), policy.options.cookies);
    if is_grpc(&retry.headers) {
        whole = whole.for_grpc();
    }
    Verdict::Happened(outcome_of(whole))
}

enum ClaimDecision {
    Respond(Response<Body>),
    Execute(Lease),
    Unprotected,
}

fn decide(
    layer: &IdempotencyLayer,
    policy: &RoutePolicy,
    error_format: ErrorFormat,
    claim: Result<Claim, ClaimError>,
) -> ClaimDecision {
    let problem = match claim {
        Ok(Claim::Execute(lease)) => return ClaimDecision::Execute(lease),
        Ok(Claim::Replay(replay)) => match replayed(layer, policy, &replay) {
            Ok(response) => {
                layer.observe(policy, RequestEvent::Replayed { expires_in: replay.expires_in });
                return ClaimDecision::Respond(response);
            }
            Err(problem) => problem,
        },
        Ok(Claim::InFlight { elapsed, remaining }) => {
            Problem::new(Code::InFlight, "The first request with this key has no outcome yet.")
                .retry_after(retry_after(elapsed, remaining))
        }
        Ok(Claim::Mismatch) => Problem::new(
            Code::KeyReused,
            "A request that differs in method, target or content came with this key before.",
        ),
        Ok(Claim::Unknown { reconcile_in }) => {
            let problem = unknown();
            // Without a time, an operator has to decide, and a retry does not help.
            match reconcile_in {
                Some(reconcile_in) => problem.retry_after(reconcile_in),
                None => problem,
            }
        }
        Ok(Claim::Reconcile(_)) => unknown(),
        Err(error) => match outage(layer, policy, &error) {
            Some(problem) => problem,
            None => return ClaimDecision::Unprotected,
        },
    };
    ClaimDecision::Respond(layer.reject(policy, error_format, &problem))
}

fn unknown() -> Problem {
    let detail = "An earlier request with this key may have taken effect. It is not executed \
         again until that is known.";
    Problem::new(Code::OutcomeUnknown, detail)
}

/// Returns the problem, or `None` if the route executes without a record. That is only allowed if
/// the store was unavailable before it returned anything: a record that cannot be read, or that was
/// read before the store became unavailable, may be that of a first execution.
fn outage(layer: &IdempotencyLayer, policy: &RoutePolicy, error: &ClaimError) -> Option<Problem> {
    let unavailable = matches!(
        error,
        ClaimError::Overloaded
            | ClaimError::Store(StoreError::Unavailable(_) | StoreError::Ambiguous(_))
    );
    // While the store is unavailable, every request would log the same error.
    let due = if unavailable { layer.outage_log.due() } else { Some(0) };
    if let Some(left_out) = due {
        let error = error as &dyn Error;
        tracing::warn!(error, left_out, "no claim could be made");
    }
    if unavailable && policy.options.store_outage == StoreOutage::Open {
        return None;
    }
    let detail =
        format!("It is unknown now whether this request was executed before. {NOTHING_EXECUTED}");
    Some(Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_AFTER))
}

/// Returns the stored response, or the problem for one that cannot be replayed.
fn replayed(
    layer: &IdempotencyLayer,
    policy: &RoutePolicy,
    replay: &Replay,
) -> Result<Response<Body>, Problem> {
    if replay.deferred && policy.options.completion_outage == CompletionOutage::Withhold {
        return Err(pending());
    }
    let FullResponse { status, headers, body, trailers } = match StoredResponse::from_outcome(
        &replay.outcome,
    ) {
        Ok(StoredResponse::Whole(whole)) => whole,
        Ok(StoredResponse::NotRetained { status }) => {
            let detail =
                "The request took effect. Its response was too large to store, or was streamed.";
            return Err(Problem::new(Code::ResponseNotRetained, detail).original_status(status));
        }
        Err(error) => {
            tracing::error!(%error, fence = %replay.fence, "an outcome cannot be replayed");
            let detail = "The request took effect. Its record has no HTTP response.";
            return Err(Problem::new(Code::ResponseNotRetained, detail));
        }
    };
    let Some(body) = layer.memory.answers.hold_now(body) else {
        let detail = format!("The server has no memory for the response now. {NOTHING_EXECUTED}");
        return Err(Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER));
    };
    let mut response = Response::new(Body::whole(body, trailers));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    if let Some(until) = replay.expires_at.filter(|_| policy.options.expires) {
        response.headers_mut().insert(IDEMPOTENCY_EXPIRES, header::date(until));
    }
    if replay.deferred {
        let pending = HeaderValue::from_static("pending");
        response.headers_mut().insert(IDEMPOTENCY_RECORDED, pending);
    }
    Ok(response)
}

/// Executes on a task of its own, and waits for the response as long as the client does.
async fn detach<S, B>(
    execution: RequestExecution,
    inner: S,
    received: BufferedRequest,
    lease: Lease,
) -> Result<Response<Body>, S::Error>
where
    S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let (layer, policy, error_format) =
        (Arc::clone(&execution.layer), Arc::clone(&execution.policy), execution.error_format);
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let task = async move {
        // If the client is gone, the response is dropped; its outcome was recorded.
        drop(sender.send(execution.run(lease, inner, received).await));
    };
    tokio::spawn(task.in_current_span());
    receiver.await.unwrap_or_else(|_| {
        // The task ends without a response only when the runtime shuts down.
        let problem = Problem::new(Code::HandlerFailed, "The server stopped during the execution.");
        Ok(layer.reject(&policy, error_format, &problem))
    })
}

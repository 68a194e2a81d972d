//! Requests with a key, from the body to the response.
//!
//! Everything here runs on the client's connection and may be dropped at any await. Before the
//! claim there is nothing to undo. During the claim, the engine releases a lease that has no
//! receiver. With the lease, the execution continues on a task.

use std::error::Error;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::exchange::Replay;
use hapax_core::machine::Verdict;
use hapax_core::{
    Claim, ClaimError, DetachSwitch, Fingerprint, Key, Lease, OperationId, Reconciliation, Scope,
    StoreError,
};
use http::header::{AUTHORIZATION, CONTENT_LENGTH};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version};
use http_body::SizeHint;
use tower_service::Service;

use super::collect::{Collected, collect};
use super::concurrency::ConcurrencyPermit;
use super::describe::{DescribedHttpRequest, original_target};
use super::execute::{
    BufferedRequest, ExecutionLabel, NotBegun, RequestExecution, cut_off, keep, pending,
};
use super::layer::IdempotencyLayer;
use super::observe::RequestEvent;
use super::policy::{
    CompletionOutage, RETRY_AFTER, Reconcile, ReconcileRequest, ReconciledResponse, RouteOptions,
    RoutePolicy, StoreOutage,
};
use super::request_names;
use super::response_info::{ResponseInfo, ResponseSource};
use super::service::{AdmittedRequest, draining};
use crate::body::{Body, BoxError, WithoutTrailers, erase};
use crate::classify::is_grpc;
use crate::error_format::ErrorFormat;
use crate::fingerprint::HttpRequest;
use crate::header::{
    self, IDEMPOTENCY_EXPIRES, IDEMPOTENCY_OPERATION_ID, IDEMPOTENCY_PROTECTED,
    IDEMPOTENCY_RECORDED, IDEMPOTENCY_REPLAYED, is_protocol_header, is_sent_upstream, retain,
};
use crate::length::{self, DeclaredLength};
use crate::problem::{Code, Problem, retry_after};
use crate::stored_response::{FullResponse, StoredResponse};

/// Time for which a request may wait for the memory of its body. The memory may belong to handlers
/// that hang, and every waiting request occupies a connection.
const BODY_WAIT: Duration = Duration::from_secs(30);

/// Statement of temporary rejections. It is about this attempt only: another one with the same key
/// may have been executed.
const NOTHING: &str = "This attempt executed nothing: retry with the same key.";

/// Answers a request with a key. The future must be awaited by
/// [`detach_on_drop`](hapax_core::Idempotency::detach_on_drop) with `detach`.
pub(super) async fn protect<S, Q, B>(
    layer: Arc<IdempotencyLayer>,
    ticket: AdmittedRequest,
    mut inner: S,
    mut parts: Parts,
    body: Q,
    detach: DetachSwitch,
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
    let AdmittedRequest { policy, error_format, key, scope, operation, permit } = ticket;
    request_names::fill(&layer.engine, &parts, policy.scope.scope_parts(), &key, operation);

    let claimed = {
        let claiming = async {
            let (body, trailers) = read(&layer, &policy, &parts.headers, body).await?;
            if parts.version == Version::HTTP_2 {
                // A stream that its client reset without an error (RFC 9113, 8.1) ends its body as
                // a complete one does. The server drops the request of a reset stream at its next
                // wait: this is one, before anything is claimed for half a request.
                tokio::task::yield_now().await;
            }
            let concurrency = take_permit(&layer, &policy, &scope, &key)?;
            let target = policy.options.target.as_ref().map(|target| target(&parts));
            let original = original_target(&parts).map(|it| target.as_ref().unwrap_or(it));
            let request = HttpRequest {
                scheme: &policy.options.fingerprint,
                method: &parts.method,
                uri: target.as_ref().unwrap_or(&parts.uri),
                headers: &parts.headers,
                body: &body,
            };
            let engine = &layer.engine;
            let route = &*policy.options.name;
            let described = DescribedHttpRequest {
                request,
                original,
                engine,
                key: &key,
                parts: &parts,
                scope: policy.scope.scope_parts(),
                route,
                computed: OnceLock::new(),
                hook: policy.options.hook_name.as_deref(),
            };
            let mut claim = engine.claim(&scope, &key, &described, &policy.options.policy).await;
            while let Ok(Claim::Reconcile(question)) = claim {
                layer.observe(&policy, RequestEvent::ReconcileStarted);
                let fence = question.fence();
                // Boxed, since it is rare and large.
                claim = Box::pin(ask(&policy, &key, &parts, question, &described)).await;
                if let Ok(Claim::Execute(lease)) = &claim {
                    tracing::info!(
                        route = &*policy.options.name,
                        id = %operation,
                        did_not_happen = %fence,
                        fence = %lease.fence(),
                        "the reconcile hook allows an execution"
                    );
                }
            }
            Ok((claim, concurrency, described.computed.into_inner(), body, trailers))
        };
        tokio::select! {
            // A claim that is done is answered or, at the end of a drain, released: it does not
            // lapse.
            biased;
            claimed = claiming => claimed,
            () = permit.gate().stopping() => Err(draining()),
        }
    };
    let (claim, concurrency, fingerprint, body, trailers) = match claimed {
        Ok(claimed) => claimed,
        Err(problem) => return Ok(layer.reject(&policy, error_format, &problem)),
    };
    let permit = match concurrency {
        Some(concurrency) => permit.with(concurrency),
        None => permit,
    };
    if trailers.as_ref().is_some_and(|trailers| !trailers.is_empty()) {
        // HTTP/1.1 would forward no trailers after a length.
        retain(&mut parts.headers, |name| *name != CONTENT_LENGTH);
    }
    let received = BufferedRequest { parts, body, trailers };
    let has_secret = layer.names_by_secret();
    let is_claimed = may_be_claimed(&claim);
    match settle(&layer, &policy, error_format, claim) {
        ClaimDecision::Respond(mut response) => {
            let by = response
                .extensions()
                .get()
                .map_or(ResponseSource::Replay, |it: &ResponseInfo| it.by);
            add_names(&mut response, operation, by, has_secret && is_claimed);
            Ok(response)
        }
        // No await since the claim, so it cannot be dropped in between.
        ClaimDecision::Execute(lease) => {
            if let Some(fingerprint) = fingerprint {
                note_caller(&layer, &policy, &received.parts, &key, &fingerprint, operation);
            }
            let by = ResponseSource::Execution { fence: lease.fence(), attempt: lease.attempt() };
            let named = ExecutionLabel::new(operation, &received.parts, &policy.options);
            let work = RequestExecution { layer, policy, error_format, permit, named };
            // The outcome is recorded even if the client has gone.
            detach.turn_on();
            let mut response = work.run(lease, inner, received).await?;
            let by = match response.extensions_mut().remove::<NotBegun>() {
                Some(NotBegun) => ResponseSource::Rejection,
                None => by,
            };
            add_names(&mut response, operation, by, has_secret);
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
                () = permit.gate().stopping() => return Ok(layer.reject(&policy, error_format, &cut_off())),
            };
            header::strip(response.headers_mut());
            response.headers_mut().insert(IDEMPOTENCY_PROTECTED, HeaderValue::from_static("false"));
            Ok(response)
        }
    }
}

/// Adds the names of its operation to a response after a claim. The client gets the id only where there is a
/// secret: without one it is a plain hash of caller and key, by which they could be guessed.
pub(super) fn add_names(
    response: &mut Response<Body>,
    operation: OperationId,
    by: ResponseSource,
    to_client: bool,
) {
    if to_client {
        let id = header::operation_id(operation);
        response.headers_mut().insert(IDEMPOTENCY_OPERATION_ID, id);
    }
    response.extensions_mut().insert(ResponseInfo { operation: Some(operation), by });
}

/// Returns whether there may be a claim of the operation, by this request or an earlier one.
const fn may_be_claimed(claim: &Result<Claim, ClaimError>) -> bool {
    !matches!(
        claim,
        Err(ClaimError::Quarantined { .. }
            | ClaimError::Overloaded
            | ClaimError::Store(StoreError::Unavailable(_)))
    )
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
    match collect(&mut body, Some(headers), limit, requests, Some(BODY_WAIT)).await {
        Collected::Whole { body, trailers, reservation } => Ok((reservation.hold(body), trailers)),
        Collected::MemoryFull => {
            let detail = format!("There is no memory for the request's body now. {NOTHING}");
            Err(Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER))
        }
        Collected::TooLarge { .. } => {
            let detail = format!(
                "A request with a key has at most {limit} bytes of body here: send a smaller one, or raise the \
                 setting `max_request_body` of the route."
            );
            Err(Problem::new(Code::BodyTooLarge, detail))
        }
        Collected::Broken(error) if is_timed_out(&*error) => {
            let detail = format!("The request body arrived too slowly. {NOTHING}");
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

/// Takes a permit among the caller's keys in flight; `None` without a limit.
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
        let detail = format!("This caller has {limit} keys in flight. {NOTHING}");
        Problem::new(Code::TooManyInFlight, detail).retry_after(RETRY_AFTER)
    })
}

/// Counts an execution whose key and request a recent one of another caller had, and warns where the caller is a token.
fn note_caller(
    layer: &IdempotencyLayer,
    policy: &RoutePolicy,
    request: &Parts,
    key: &Key,
    fingerprint: &Fingerprint,
    operation: OperationId,
) {
    let route = &policy.options.name;
    if !layer.recent.note(route, key, fingerprint, operation) {
        return;
    }
    layer.observe(policy, RequestEvent::OtherCaller);
    let is_scope = policy.scope.scope_parts().contains(&AUTHORIZATION.into());
    let token = request.headers.get(AUTHORIZATION).filter(|_| is_scope);
    let is_bearer = token.is_some_and(|it| {
        it.as_bytes().get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer "))
    });
    if is_bearer && let Some(left_out) = layer.callers_log.due() {
        tracing::warn!(
            route = &**route,
            left_out,
            "a key and request executed for two callers, whose names are their tokens: if a client renewed its token \
             between two tries, both had an effect. Name the caller by a claim of the token, as scope = jwt:CLAIM, or by \
             forward authorisation (auth_scope)"
        );
    }
}

/// Calls the hook. If the future is dropped, a later claim reconciles after the timeout.
async fn ask(
    policy: &RoutePolicy,
    key: &Key,
    parts: &Parts,
    question: Reconciliation,
    request: &DescribedHttpRequest<'_>,
) -> Result<Claim, ClaimError> {
    let options = &policy.options;
    let (Some(reconcile), Some(hook)) = (&options.reconcile, options.policy.hook) else {
        return question.conclude(Verdict::CannotSay, request).await;
    };
    let doubt = ReconcileRequest {
        fence: question.fence(),
        id: question.id(),
        attempt: question.attempt(),
        key: key.clone(),
        request: parts.clone(),
    };
    let verdict = verdict(policy, &**reconcile, doubt);
    question.reconcile(verdict, hook.timeout, request).await
}

/// Calls a hook and returns its verdict, with the response as it is stored.
pub(super) async fn verdict(
    policy: &RoutePolicy,
    hook: &dyn Reconcile,
    undecided: ReconcileRequest,
) -> Verdict {
    let (method, grpc) = (undecided.request.method.clone(), is_grpc(&undecided.request.headers));
    match hook.reconcile(undecided).await {
        Verdict::Happened(ReconciledResponse { response, trailers }) => {
            happened(policy, &method, grpc, response, trailers)
        }
        Verdict::DidNotHappen => Verdict::DidNotHappen,
        Verdict::CannotSay => Verdict::CannotSay,
    }
}

/// Returns the verdict of a hook's response. A response whose length differs from the declared one
/// is no answer.
fn happened(
    policy: &RoutePolicy,
    method: &Method,
    grpc: bool,
    response: Response<Bytes>,
    trailers: Option<HeaderMap>,
) -> Verdict {
    if length::describes_body(method, response.status()) {
        let hint = SizeHint::new();
        let announced = DeclaredLength::new(response.headers(), &hint);
        let checked = announced.and_then(|announced| announced.check_end(response.body().len()));
        if let Err(error) = checked {
            tracing::warn!(%error, "the reconcile hook's response has another length than declared");
            return Verdict::CannotSay;
        }
    }
    let mut whole = FullResponse::of(&response, trailers.as_ref(), policy.options.cookies);
    if grpc {
        whole = whole.for_grpc();
    }
    Verdict::Happened(keep(whole))
}

enum ClaimDecision {
    Respond(Response<Body>),
    Execute(Lease),
    Unprotected,
}

fn settle(
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
            // Without it an operator has to decide, and a retry does not help.
            match reconcile_in {
                Some(reconcile_in) => problem.retry_after(reconcile_in),
                None => problem,
            }
        }
        Ok(Claim::Reconcile(_)) => unknown(),
        Err(ClaimError::Quarantined { retry_in }) => {
            let detail = format!(
                "The store may have lost the record of an earlier request with this key. {NOTHING}"
            );
            Problem::new(Code::Quarantined, detail).retry_after(retry_in)
        }
        Err(error) => match outage(layer, policy, &error) {
            Some(problem) => problem,
            None => return ClaimDecision::Unprotected,
        },
    };
    ClaimDecision::Respond(layer.reject(policy, error_format, &problem))
}

fn unknown() -> Problem {
    let detail = "An earlier request with this key may have taken effect. It does not execute again before that is \
         known.";
    Problem::new(Code::OutcomeUnknown, detail)
}

/// Returns the rejection, or `None` if the route executes without a record. That is only for a
/// store that was unavailable from the start: a record that cannot be read, or that the store
/// returned before it became unavailable, may be that of a first execution.
fn outage(layer: &IdempotencyLayer, policy: &RoutePolicy, error: &ClaimError) -> Option<Problem> {
    let outage_log = matches!(
        error,
        ClaimError::Overloaded
            | ClaimError::Store(StoreError::Unavailable(_) | StoreError::Ambiguous(_))
    );
    // During an outage every request would have its own line, with the same error.
    let due = if outage_log { layer.outage_log.due() } else { Some(0) };
    if let Some(left_out) = due {
        let error = error as &dyn Error;
        tracing::warn!(
            error,
            left_out,
            "the store did not answer a claim: the request was rejected, or executes unprotected"
        );
    }
    if outage_log && policy.options.store_outage == StoreOutage::Open {
        return None;
    }
    let detail = format!(
        "The store did not answer, so it is unknown whether this request was made before. {NOTHING}"
    );
    Some(Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_AFTER))
}

/// Returns the response of a replay, or the reason why there is none.
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
            let detail = "The request took effect. Its response was streamed, or larger than the setting \
                          `max_response_body` of the route.";
            return Err(Problem::new(Code::ResponseNotRetained, detail).original_status(status));
        }
        Err(error) => {
            tracing::error!(%error, fence = %replay.fence, "an outcome cannot be replayed");
            let detail = "The request took effect. Its stored outcome is no HTTP response.";
            return Err(Problem::new(Code::ResponseNotRetained, detail));
        }
    };
    let Some(body) = layer.memory.answers.hold_now(body) else {
        let detail = format!("There is no memory for the response now. {NOTHING}");
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

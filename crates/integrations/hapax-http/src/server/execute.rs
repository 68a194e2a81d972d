//! Executions of handlers, from the claim to the outcome. They continue if their client has gone.

use std::error::Error;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::transaction::TxHandle;
use hapax_core::{
    Execution, ExecutionEnd, ExecutionResult, Lease, OperationId, OperationPanicked, Outcome,
    Timestamp,
};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, response};
use tokio::time::Instant;
use tower_service::Service;

use super::budget::{Reservation, SMALL};
use super::collect::{Collected, collect};
use super::drain::DrainPermit;
use super::handle::{ExecutionHandle, HandlerOverride};
use super::layer::IdempotencyLayer;
use super::observe::{RecordStatus, RequestEvent};
use super::policy::{CompletionOutage, RETRY_AFTER, RouteOptions, RoutePolicy};
use super::redirect::RequestTarget;
use super::service::draining;
use super::transaction::{HandlerErrorExtension, Recorded, rolled_back};
use crate::body::{Body, BoxError, Erased, WithoutTrailers, erase};
use crate::classify::{
    ClassifiedResponse, HeaderOverride, OutcomeClass, classify_grpc, is_grpc, is_grpc_ok,
    is_grpc_web, is_redirect,
};
use crate::error_format::ErrorFormat;
use crate::header::{
    self, IDEMPOTENCY_EXPIRES, IDEMPOTENCY_RECORDED, IDEMPOTENCY_REPLAYED, is_protocol_header,
    retain,
};
use crate::length;
use crate::problem::{Code, Problem};
use crate::stored_response::{FullResponse, StoredResponse};

/// An execution of a handler, with its policy and its client's format.
pub(super) struct RequestExecution {
    pub(super) layer: Arc<IdempotencyLayer>,
    pub(super) policy: Arc<RoutePolicy>,
    pub(super) error_format: ErrorFormat,
    /// Dropped last: a drain waits until the outcome is written, or deferred.
    pub(super) permit: DrainPermit,
    pub(super) named: ExecutionLabel,
}

/// The request of an execution without its key: its name in logs, and its target.
pub(super) struct ExecutionLabel {
    pub(super) id: OperationId,
    method: Method,
    target: RequestTarget,
}

impl ExecutionLabel {
    pub(super) fn new(id: OperationId, request: &Parts, options: &RouteOptions) -> Self {
        let target = RequestTarget::new(request, options.target.as_ref());
        Self { id, method: request.method.clone(), target }
    }
}

/// The response of a handler.
pub(super) struct HandlerResponse {
    pub(super) head: response::Parts,
    /// The part of the body in memory.
    read: Bytes,
    rest: Rest,
    /// Memory for the response, and for its copies.
    reservations: [Reservation; 2],
}

impl HandlerResponse {
    /// Returns the error with which its handler failed.
    pub(super) fn failed_by(&self) -> Option<&HandlerErrorExtension> {
        self.head.extensions.get()
    }

    pub(super) fn log_failure(&self) {
        if let Some(HandlerErrorExtension(error)) = self.failed_by() {
            tracing::error!(error = &**error as &dyn Error, "a handler failed");
        }
    }
}

enum Rest {
    Trailers(Option<HeaderMap>),
    /// The body is too large, or a stream: the rest is still to come.
    Coming(Erased),
}

/// The response broke off.
struct Broken;

/// The end of an execution, as its response is classified.
pub(super) struct Recording {
    pub(super) class: OutcomeClass,
    pub(super) retention: Option<Duration>,
    pub(super) kept: Option<Outcome>,
    /// Whether the class is retryable because the response is a redirect.
    pub(super) is_redirect: bool,
    /// The part of the redirect by which its request is answered again.
    pub(super) redirect: Option<Outcome>,
    /// Whether the handler's writes in a transaction commit with it, if it is final; `None` if the
    /// response does not show whether it is a rejection.
    pub(super) commits: Option<bool>,
}

pub(super) enum ExecutionReply {
    Handler(HandlerResponse),
    Problem(Problem),
}

/// The class of a response, and what decided it.
struct Classified {
    class: OutcomeClass,
    retention: Option<Duration>,
    /// Whether it is a redirect, and none of the handler, the response and the route decided otherwise.
    is_redirect: bool,
}

/// Result of one call of the handler.
pub(super) enum HandlerResult<E> {
    Response(Recording, HandlerResponse),
    /// The service's own error.
    Failed(E),
    /// No response, or not all of one.
    Problem(Problem),
    /// The handler was not called: time was up before.
    NotBegun,
}

/// A request, read to its end.
#[derive(Clone)]
pub(super) struct BufferedRequest {
    pub(super) parts: Parts,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

impl BufferedRequest {
    pub(super) fn request(self) -> Request<Body> {
        Request::from_parts(self.parts, Body::whole(self.body, self.trailers))
    }
}

/// A mark on the response of a request that was claimed and not executed.
#[derive(Clone, Copy)]
pub(super) struct NotBegun;

impl RequestExecution {
    pub(super) async fn run<S, B>(
        self,
        lease: Lease,
        mut inner: S,
        mut received: BufferedRequest,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let number = lease.attempt();
        let mut execution = match self.policy.options.transactions.clone() {
            Some(backend) => Execution::in_transactions(lease, backend),
            None => Execution::new(lease),
        };
        if self.permit.gate().is_stopping() {
            // It would be cut off at once.
            return Ok(Box::pin(self.not_begun(execution)).await);
        }
        let began = Instant::now();
        loop {
            let run = execution.begin_run();
            let again = run.is_some().then(|| Box::new(received.clone()));
            let mut request = received.request();
            if let Some(run) = &run {
                request.extensions_mut().insert(run.clone());
            }
            let attempt = self.attempt(&execution, &mut inner, request).await;
            let took = began.elapsed();
            let has_tx = run.as_ref().is_some_and(TxHandle::is_taken);
            let (class, end, reply) = match attempt {
                HandlerResult::Response(recording, given) => {
                    let (class, end, reply) = self.judge_transaction(has_tx, recording, given);
                    (class, end, Ok(reply))
                }
                HandlerResult::Problem(problem) => {
                    (OutcomeClass::Unknown, UNKNOWN, Ok(ExecutionReply::Problem(problem)))
                }
                HandlerResult::NotBegun => return Ok(Box::pin(self.not_begun(execution)).await),
                HandlerResult::Failed(error) => (OutcomeClass::Unknown, UNKNOWN, Err(error)),
            };
            if class == OutcomeClass::Unknown {
                let reason = match &end {
                    ExecutionEnd::Abandon { seen: Some(_) } => "its response leaves it unknown",
                    _ => "it gave no whole response",
                };
                tracing::warn!(
                    operation = %self.named.id, route = &*self.policy.options.name,
                    attempt = number, reason, "an execution ended and its outcome is unknown"
                );
            }
            let recorded = match execution.end(run, end).await {
                ExecutionResult::Rerun(next) => {
                    let ready = self.ready_again(&next, &mut inner).await;
                    match (ready, again) {
                        (Ok(true), Some(request)) => {
                            (execution, received) = (next, *request);
                            continue;
                        }
                        (Ok(_), _) => return Ok(Box::pin(self.not_begun(next)).await),
                        (Err(failed), _) => {
                            // If the store does not accept the release, it is deferred.
                            let _ = Box::pin(next.end(None, ExecutionEnd::Release)).await;
                            return failed.map_or_else(|| Ok(self.reject(&rolled_back())), Err);
                        }
                    }
                }
                result => Recorded::of(class, result),
            };
            let Recorded { class, status, until, problem } = recorded;
            let event = RequestEvent::Executed { class, recorded: status, attempt: number, took };
            self.layer.observe(&self.policy, event);
            let reply = match problem {
                Some(problem) => ExecutionReply::Problem(problem),
                None => reply?,
            };
            return Ok(self.respond(class, status, until, reply));
        }
    }

    fn reject(&self, problem: &Problem) -> Response<Body> {
        self.layer.reject(&self.policy, self.error_format, problem)
    }

    /// Releases an execution that a drain ended before the handler was called.
    async fn not_begun(&self, execution: Execution) -> Response<Body> {
        // If the store does not accept the release, it is deferred.
        let _ = execution.end(None, ExecutionEnd::Release).await;
        let mut response = self.reject(&draining());
        response.extensions_mut().insert(NotBegun);
        response
    }

    /// Calls the handler and reads its response, until a drain ends.
    async fn attempt<S, B>(
        &self,
        execution: &Execution,
        inner: &mut S,
        mut request: Request<Body>,
    ) -> HandlerResult<S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let lease = execution.lease();
        let handle =
            ExecutionHandle::new(self.named.id, lease.handle(), lease.checkpoint().cloned());
        request.extensions_mut().insert(handle.clone());
        let begun = AtomicBool::new(false);
        // A panic in `call`, in a body or in a route's function counts like one in the handler.
        let mut operation = pin!(execution.attempt(async {
            begun.store(true, Ordering::Relaxed);
            let response = inner.call(request).await?;
            let received = self.receive(response).await;
            Ok(received.map(|given| self.judge(handle.handler_override(), given)))
        }));
        let given = tokio::select! {
            // A response that is there when the drain ends is used.
            biased;
            given = &mut operation => Some(given),
            () = self.permit.gate().stopping() => None,
        };
        HandlerResult::Problem(match given {
            Some(Ok(Ok(Ok((recording, given))))) => {
                return HandlerResult::Response(recording, given);
            }
            Some(Ok(Err(error))) => return HandlerResult::Failed(error),
            Some(Ok(Ok(Err(Broken)))) => Problem::new(
                Code::UpstreamBroken,
                "The response broke off: the request may have taken effect.",
            ),
            Some(Err(OperationPanicked)) => handler_failed(),
            None if !begun.load(Ordering::Relaxed) => return HandlerResult::NotBegun,
            None => cut_off(),
        })
    }

    /// Waits until the service is ready to be called again; false if a drain ends before. An error
    /// is the service's own, or `None` for a panic.
    async fn ready_again<S: Service<Request<Body>>>(
        &self,
        execution: &Execution,
        inner: &mut S,
    ) -> Result<bool, Option<S::Error>> {
        let ready = execution.attempt(poll_fn(|cx| inner.poll_ready(cx)));
        tokio::select! {
            biased;
            () = self.permit.gate().stopping() => Ok(false),
            ready = ready => match ready {
                Ok(Ok(())) => Ok(true),
                Ok(Err(error)) => Err(Some(error)),
                Err(OperationPanicked) => Err(None),
            },
        }
    }

    /// Reads a response as far as it is stored.
    async fn receive<B>(&self, response: Response<B>) -> Result<HandlerResponse, Broken>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let options = &self.policy.options;
        let (head, body) = response.into_parts();
        // Headers from the handler to this layer are not for clients, in trailers either.
        let mut body = erase(WithoutTrailers { body, drop: is_protocol_header });
        if options.stream || is_event_stream(&head.headers) {
            let rest = Rest::Coming(body);
            return Ok(HandlerResponse {
                head,
                read: Bytes::new(),
                rest,
                reservations: [Reservation::none(), Reservation::none()],
            });
        }
        let (limit, memory) = (options.max_response_body, &self.layer.memory);
        let headers = length::describes_body(&self.named.method, head.status);
        let headers = headers.then_some(&head.headers);
        let gathered = collect(&mut body, headers, limit, &memory.responses, None).await;
        let (read, rest, reservation) = match gathered {
            Collected::Whole { body, trailers, reservation } => {
                (body, Rest::Trailers(trailers), reservation)
            }
            Collected::TooLarge { read, reservation } => (read, Rest::Coming(body), reservation),
            // This reservation waits without a limit.
            Collected::MemoryFull => return Err(Broken),
            Collected::Broken(error) => {
                let ExecutionLabel { id, method, target } = &self.named;
                let path = target.uri.path();
                tracing::warn!(error, %method, path, %id, "a response broke off");
                return Err(Broken);
            }
        };
        let copied = matches!(rest, Rest::Trailers(_)) && read.len() > SMALL;
        let copies = match copied {
            true => {
                memory.recording.reserve(read.len(), None).await.unwrap_or_else(Reservation::none)
            }
            false => Reservation::none(),
        };
        Ok(HandlerResponse { head, read, rest, reservations: [reservation, copies] })
    }

    /// Returns the class of a response for its key, and the response as the client gets it.
    fn judge(
        &self,
        overrides: HandlerOverride,
        given: HandlerResponse,
    ) -> (Recording, HandlerResponse) {
        let HandlerResponse { mut head, read, rest, reservations } = given;
        let trailers = match &rest {
            Rest::Trailers(trailers) => Some(trailers.as_ref()),
            Rest::Coming(_) => None,
        };
        let commits = overrides.commits.or_else(|| is_good(&head, trailers));
        let (ending, mut head) = match &rest {
            Rest::Trailers(trailers) => {
                let no_length = length::excludes_length(head.status, trailers.as_ref());
                // Read whole, the response is framed anew: chunks would contradict its length.
                retain(&mut head.headers, |name| {
                    *name != TRANSFER_ENCODING && !(no_length && *name == CONTENT_LENGTH)
                });
                let classified = self.classify(overrides, &head, Some(trailers.as_ref()));
                let Classified { class, retention, is_redirect } = classified;
                let by_none = head.extensions.get::<ClassifiedResponse>().is_some();
                let response = Response::from_parts(head, read.clone());
                let cookies = self.policy.options.cookies;
                // A response that no handler returned shows no end of the operation.
                let is_kept = match class {
                    OutcomeClass::Final => true,
                    OutcomeClass::Unknown => !by_none,
                    OutcomeClass::Retryable => false,
                };
                let kept =
                    is_kept.then(|| keep(FullResponse::of(&response, trailers.as_ref(), cookies)));
                let head = response.into_parts().0;
                let redirect = is_redirect.then(|| self.named.target.redirect(&head)).flatten();
                (Recording { class, retention, kept, is_redirect, redirect, commits }, head)
            }
            Rest::Coming(_) => {
                let classified = self.classify(overrides, &head, None);
                let Classified { class, retention, is_redirect } = classified;
                let redirect = is_redirect.then(|| self.named.target.redirect(&head)).flatten();
                let kept = (class == OutcomeClass::Final).then(|| {
                    self.layer.observe(&self.policy, RequestEvent::NotRetained);
                    StoredResponse::NotRetained { status: head.status }.outcome()
                });
                (Recording { class, retention, kept, is_redirect, redirect, commits }, head)
            }
        };
        header::strip(&mut head.headers);
        if let Some(ClassifiedResponse(class)) = head.extensions.get() {
            self.error_format.mark(&mut head.headers, *class);
        }
        head.headers.insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("false"));
        (ending, HandlerResponse { head, read, rest, reservations })
    }

    /// Classifies in the order of [`crate::classify`]. `trailers`: those of a response that was
    /// read to its end.
    fn classify(
        &self,
        overrides: HandlerOverride,
        head: &response::Parts,
        trailers: Option<Option<&HeaderMap>>,
    ) -> Classified {
        let options = &self.policy.options;
        let by_response = match head.extensions.get::<ClassifiedResponse>() {
            Some(ClassifiedResponse(class)) => {
                HeaderOverride { class: Some(*class), ..HeaderOverride::default() }
            }
            None => HeaderOverride::from_headers(&head.headers),
        };
        for _ in 0..by_response.invalid {
            self.layer.observe(&self.policy, RequestEvent::InvalidOverride);
        }
        let on_unknown = options.policy.terms.on_unknown;
        let by_grpc = || {
            let trailers = trailers.filter(|_| is_grpc(&head.headers))?;
            Some(classify_grpc(&head.headers, trailers, on_unknown))
        };
        let chosen = overrides
            .class
            .or(by_response.class)
            .or_else(|| options.classify.as_ref()?(head))
            .or_else(by_grpc)
            .or_else(|| options.statuses.class(head.status));
        // A handler whose writes are to commit has executed the request.
        let is_chosen = chosen.is_some() || overrides.commits == Some(true);
        let is_redirect = !is_chosen && is_redirect(head.status, &head.headers);
        let class = match chosen {
            Some(class) => class,
            None if is_redirect => OutcomeClass::Retryable,
            None => options.profile.classify(head.status, on_unknown),
        };
        let retention = overrides.retention.or(by_response.retention);
        Classified { class, retention, is_redirect }
    }

    /// Returns the client's response, once the outcome is recorded, or known not to be.
    fn respond(
        &self,
        class: OutcomeClass,
        recorded: RecordStatus,
        until: Option<Timestamp>,
        reply: ExecutionReply,
    ) -> Response<Body> {
        let withhold = class == OutcomeClass::Final
            && self.policy.options.completion_outage == CompletionOutage::Withhold;
        let problem = match (recorded, reply) {
            (RecordStatus::Lost, _) => Problem::new(
                Code::Superseded,
                "Another execution of this request took over. Retry for its outcome.",
            ),
            (_, ExecutionReply::Problem(problem)) => problem,
            (RecordStatus::Pending, ExecutionReply::Handler(_)) if withhold => pending(),
            (_, ExecutionReply::Handler(mut given)) => {
                if recorded == RecordStatus::Pending {
                    let pending = HeaderValue::from_static("pending");
                    given.head.headers.insert(IDEMPOTENCY_RECORDED, pending);
                }
                if let Some(until) = until.filter(|_| self.policy.options.expires) {
                    given.head.headers.insert(IDEMPOTENCY_EXPIRES, header::date(until));
                }
                match self.deliver(class, given) {
                    Ok(response) => return response,
                    Err(problem) => problem,
                }
            }
        };
        self.reject(&problem)
    }

    /// Moves a response from the memory of what is recorded to that of what clients read, without
    /// waiting.
    fn deliver(
        &self,
        class: OutcomeClass,
        given: HandlerResponse,
    ) -> Result<Response<Body>, Problem> {
        let HandlerResponse { head, read, rest, reservations } = given;
        let held = self.layer.memory.answers.hold_now(read);
        drop(reservations);
        let body = match (held, rest) {
            (Some(read), Rest::Trailers(trailers)) => Body::whole(read, trailers),
            (Some(read), Rest::Coming(body)) => Body::resumed(read, body),
            (None, rest) => return Err(no_memory(class, &rest, head.status)),
        };
        Ok(Response::from_parts(head, body))
    }
}

/// Returns the problem for a response without memory, because clients read slowly. Its outcome is
/// recorded.
fn no_memory(class: OutcomeClass, rest: &Rest, status: StatusCode) -> Problem {
    match (class, rest) {
        (OutcomeClass::Retryable, _) => {
            let detail = "There is no memory now for the response, which said that nothing happened: \
                          retry with the same key.";
            Problem::new(Code::Overloaded, detail)
        }
        // A retry would get the same.
        (OutcomeClass::Final, Rest::Coming(_)) => Problem::new(
            Code::ResponseNotRetained,
            "This request was executed just now, and will not be again. Its response is too large to \
             store, and there was no memory to send it.",
        )
        .original_status(status),
        (OutcomeClass::Final | OutcomeClass::Unknown, _) => Problem::new(
            Code::OutcomePending,
            "The request was executed. There is no memory for its response now.",
        ),
    }
    .retry_after(RETRY_AFTER)
}

/// Returns the problem for an execution whose outcome is not in the store yet, if it is withheld.
pub(super) fn pending() -> Problem {
    let detail = "The request was executed. The store has not accepted its outcome yet: retry with the same key.";
    Problem::new(Code::OutcomePending, detail).retry_after(RETRY_AFTER)
}

/// The end of an execution without a whole response.
const UNKNOWN: ExecutionEnd = ExecutionEnd::Abandon { seen: None };

/// Returns the outcome of a response, within the limit of a record.
pub(super) fn keep(whole: FullResponse) -> Outcome {
    let status = whole.status;
    let kept = StoredResponse::Whole(whole).outcome();
    if kept.bytes().len() <= hapax_core::codec::MAX_OUTCOME {
        return kept;
    }
    StoredResponse::NotRetained { status }.outcome()
}

/// Returns the problem for a panic.
pub(super) fn handler_failed() -> Problem {
    let detail = "The handler panicked: the request may have taken effect.";
    Problem::new(Code::HandlerFailed, detail)
}

/// Returns the problem for a handler that was stopped at the end of a drain.
pub(super) fn cut_off() -> Problem {
    let detail =
        "The server is shutting down and could not wait: the request may have taken effect.";
    Problem::new(Code::UpstreamTimeout, detail)
}

/// Returns whether a response states success, as far as it is known. gRPC-Web states it in the
/// body, which is not parsed.
fn is_good(head: &response::Parts, trailers: Option<Option<&HeaderMap>>) -> Option<bool> {
    if is_grpc_web(&head.headers) {
        None
    } else if is_grpc(&head.headers) {
        Some(is_grpc_ok(&head.headers, trailers?))
    } else {
        Some(head.status.is_success() || head.status.is_redirection())
    }
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let media = kind.split(|byte| *byte == b';').next().unwrap_or_default();
    media.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

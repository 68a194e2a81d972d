//! Executions, from the claim to the outcome. They run on tasks that are never cancelled.

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{FinishError, Lease, OperationId, Outcome, Timestamp};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, response};
use tokio::time::Instant;
use tower_service::Service;

use super::budget::{Reservation, SMALL};
use super::collect::{Collected, collect};
use super::drain::DrainPermit;
use super::handle::{ExecutionHandle, HandlerOverride};
use super::layer::IdempotencyLayer;
use super::observe::{RecordStatus, RequestEvent};
use super::policy::{CompletionOutage, RETRY_AFTER, RoutePolicy};
use super::service::draining;
use super::transaction::HandlerErrorExtension;
use crate::body::{Body, BoxError, Erased, WithoutTrailers, erase};
use crate::classify::{
    ClassifiedResponse, HeaderOverride, OutcomeClass, classify_grpc, is_grpc, is_grpc_ok,
    is_grpc_web,
};
use crate::error_format::ErrorFormat;
use crate::header::{
    self, IDEMPOTENCY_EXPIRES, IDEMPOTENCY_RECORDED, IDEMPOTENCY_REPLAYED, is_protocol_header,
    retain,
};
use crate::length;
use crate::problem::{Code, Problem};
use crate::stored_response::{FullResponse, StoredResponse};

/// The context of one execution.
pub(super) struct RequestExecution {
    pub(super) layer: Arc<IdempotencyLayer>,
    pub(super) policy: Arc<RoutePolicy>,
    pub(super) error_format: ErrorFormat,
    /// Dropped last, so that a drain waits until the outcome is stored or its write is deferred.
    pub(super) permit: DrainPermit,
    pub(super) label: ExecutionLabel,
}

/// The name of an execution in logs, where its key must not appear.
pub(super) struct ExecutionLabel {
    id: OperationId,
    method: Method,
    uri: Uri,
}

impl ExecutionLabel {
    pub(super) fn new(id: OperationId, request: &Parts) -> Self {
        Self { id, method: request.method.clone(), uri: request.uri.clone() }
    }
}

/// A handler's response.
pub(super) struct HandlerResponse {
    pub(super) head: response::Parts,
    /// The part of the body that is in memory.
    read: Bytes,
    rest: Rest,
    /// Reservations of the memory for responses, and for the copies that are made while recording.
    reservations: [Reservation; 2],
}

impl HandlerResponse {
    /// Returns the error that the handler failed with.
    pub(super) fn handler_error(&self) -> Option<&HandlerErrorExtension> {
        self.head.extensions.get()
    }

    pub(super) fn log_failure(&self) {
        if let Some(HandlerErrorExtension(error)) = self.handler_error() {
            tracing::error!(error = &**error as &dyn Error, "a handler failed");
        }
    }
}

enum Rest {
    Trailers(Option<HeaderMap>),
    /// The unread rest of a body that is too large, or a stream.
    Unread(Erased),
}

/// The response broke off.
struct Broken;

/// The data to record about an execution.
pub(super) struct Recording {
    pub(super) class: OutcomeClass,
    pub(super) retention: Option<Duration>,
    pub(super) outcome: Option<Outcome>,
    /// True if the handler's transaction commits with a final response, false if it is rolled back;
    /// `None` if the response does not show whether it is a success.
    pub(super) commits: Option<bool>,
}

pub(super) enum ExecutionReply {
    Handler(HandlerResponse),
    Problem(Problem),
}

/// The result of one call of the handler.
pub(super) enum HandlerResult<E> {
    Response(Recording, HandlerResponse),
    /// The service returned an error.
    Failed(E),
    /// There is no complete response.
    Problem(Problem),
    /// The handler was not called: the drain's grace ended before.
    NotStarted,
}

/// A request whose body was read to its end.
pub(super) struct BufferedRequest {
    pub(super) parts: Parts,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

impl BufferedRequest {
    pub(super) fn request(self) -> Request<Body> {
        Request::from_parts(self.parts, Body::whole(self.body, self.trailers))
    }

    /// Returns a copy of the request.
    pub(super) fn copy(&self) -> Request<Body> {
        let Self { parts, body, trailers } = self;
        Request::from_parts(parts.clone(), Body::whole(body.clone(), trailers.clone()))
    }
}

/// A response extension: the request was claimed and not executed.
#[derive(Clone, Copy)]
pub(super) struct NotStarted;

impl RequestExecution {
    pub(super) async fn run<S, B>(
        self,
        lease: Lease,
        mut inner: S,
        received: BufferedRequest,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if self.permit.gate().is_stopping() {
            // The execution would be cut off at once.
            return Ok(self.not_started(lease).await);
        }
        if let Some(database) = self.policy.options.transactions.clone() {
            return self.run_in(&database, lease, inner, received).await;
        }
        let began = Instant::now();
        let attempt = self.attempt(&lease, &mut inner, received.request()).await;
        let took = began.elapsed();
        let (recording, reply) = match attempt {
            HandlerResult::Response(recording, response) => {
                response.log_failure();
                (recording, ExecutionReply::Handler(response))
            }
            HandlerResult::Problem(problem) => {
                (Recording::unknown(), ExecutionReply::Problem(problem))
            }
            HandlerResult::NotStarted => return Ok(self.not_started(lease).await),
            HandlerResult::Failed(error) => {
                self.record(lease, Recording::unknown(), took).await;
                return Err(error);
            }
        };
        let class = recording.class;
        let (recorded, until) = self.record(lease, recording, took).await;
        Ok(self.respond(class, recorded, until, reply))
    }

    /// Releases the lease and rejects the request: the drain's grace ended before the handler was
    /// called.
    pub(super) async fn not_started(&self, lease: Lease) -> Response<Body> {
        // If the store does not accept the release, its write is deferred.
        let _ = lease.release().await;
        let mut response = self.layer.reject(&self.policy, self.error_format, &draining());
        response.extensions_mut().insert(NotStarted);
        response
    }

    /// Calls the handler and reads its response, until the drain's grace ends.
    pub(super) async fn attempt<S, B>(
        &self,
        lease: &Lease,
        inner: &mut S,
        mut request: Request<Body>,
    ) -> HandlerResult<S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let execution =
            ExecutionHandle::new(self.label.id, lease.handle(), lease.checkpoint().cloned());
        request.extensions_mut().insert(execution.clone());
        // One future has all of it, so that a panic in `call`, in a body or in a route's function
        // is treated like one in a handler.
        let started = AtomicBool::new(false);
        let call = catch(async {
            started.store(true, Ordering::Relaxed);
            let response = inner.call(request).await?;
            Ok(match self.receive(response).await {
                Ok(response) => Ok(self.evaluate(execution.handler_override(), response)),
                Err(broken) => Err(broken),
            })
        });
        let result = tokio::select! {
            // A response that is ready when the grace ends is not discarded.
            biased;
            result = lease.keep_alive(call) => Some(result),
            () = self.permit.gate().stopping() => None,
        };
        let problem = match result {
            Some(Ok(Ok(Ok((recording, response))))) => {
                return HandlerResult::Response(recording, response);
            }
            Some(Ok(Err(error))) => return HandlerResult::Failed(error),
            Some(Ok(Ok(Err(Broken)))) => Problem::new(
                Code::UpstreamBroken,
                "The response broke off: the request may have taken effect.",
            ),
            Some(Err(Panicked)) => Problem::new(
                Code::HandlerFailed,
                "The handler panicked: the request may have taken effect.",
            ),
            None if !started.load(Ordering::Relaxed) => return HandlerResult::NotStarted,
            None => cut_off(),
        };
        HandlerResult::Problem(problem)
    }

    /// Reads the part of a response that is stored. A stream is not read.
    async fn receive<B>(&self, response: Response<B>) -> Result<HandlerResponse, Broken>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let options = &self.policy.options;
        let (head, body) = response.into_parts();
        // Protocol headers are for this layer, not for clients, also as trailers.
        let mut body = erase(WithoutTrailers { body, drop: is_protocol_header });
        if options.stream || is_event_stream(&head.headers) {
            let rest = Rest::Unread(body);
            return Ok(HandlerResponse {
                head,
                read: Bytes::new(),
                rest,
                reservations: [Reservation::none(), Reservation::none()],
            });
        }
        let (limit, memory) = (options.max_response_body, &self.layer.memory);
        let headers = length::describes_body(&self.label.method, head.status);
        let headers = headers.then_some(&head.headers);
        let collected = collect(&mut body, headers, limit, &memory.responses, None).await;
        let (read, rest, reservation) = match collected {
            Collected::Whole { body, trailers, reservation } => {
                (body, Rest::Trailers(trailers), reservation)
            }
            Collected::TooLarge { read, reservation } => (read, Rest::Unread(body), reservation),
            // Without a timeout, `collect` waits until there is memory.
            Collected::MemoryFull => return Err(Broken),
            Collected::Broken(error) => {
                let ExecutionLabel { id, method, uri } = &self.label;
                let path = uri.path();
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

    /// Returns the record that a response leads to, and the response as the client receives it.
    fn evaluate(
        &self,
        overrides: HandlerOverride,
        response: HandlerResponse,
    ) -> (Recording, HandlerResponse) {
        let HandlerResponse { mut head, read, rest, reservations } = response;
        let trailers = match &rest {
            Rest::Trailers(trailers) => Some(trailers.as_ref()),
            Rest::Unread(_) => None,
        };
        let commits = overrides.commits.or_else(|| is_success(&head, trailers));
        let (recording, mut head) = match &rest {
            Rest::Trailers(trailers) => {
                let no_length = length::excludes_length(head.status, trailers.as_ref());
                // A body that was read to its end has a length now, which `Transfer-Encoding` would
                // contradict.
                head.headers = retain(&head.headers, |name, _| {
                    *name != TRANSFER_ENCODING && !(no_length && *name == CONTENT_LENGTH)
                });
                let (class, retention) = self.classify(overrides, &head, Some(trailers.as_ref()));
                let response = Response::from_parts(head, read.clone());
                let cookies = self.policy.options.cookies;
                let outcome = (class != OutcomeClass::Retryable)
                    .then(|| outcome_of(FullResponse::of(&response, trailers.as_ref(), cookies)));
                (Recording { class, retention, outcome, commits }, response.into_parts().0)
            }
            Rest::Unread(_) => {
                let (class, retention) = self.classify(overrides, &head, None);
                let outcome = (class == OutcomeClass::Final).then(|| {
                    self.layer.observe(&self.policy, RequestEvent::NotRetained);
                    StoredResponse::NotRetained { status: head.status }.outcome()
                });
                (Recording { class, retention, outcome, commits }, head)
            }
        };
        header::strip(&mut head.headers);
        if let Some(ClassifiedResponse(class)) = head.extensions.get() {
            self.error_format.mark(&mut head.headers, *class);
        }
        head.headers.insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("false"));
        (recording, HandlerResponse { head, read, rest, reservations })
    }

    /// Returns the class, found in the order that [`crate::classify`] documents, and the retention.
    /// `trailers` are `None` unless the response was read to its end.
    fn classify(
        &self,
        overrides: HandlerOverride,
        head: &response::Parts,
        trailers: Option<Option<&HeaderMap>>,
    ) -> (OutcomeClass, Option<Duration>) {
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
        let class = overrides
            .class
            .or(by_response.class)
            .or_else(|| options.classify.as_ref()?(head))
            .or_else(by_grpc)
            .or_else(|| options.statuses.class(head.status))
            .unwrap_or_else(|| options.profile.classify(head.status, on_unknown));
        (class, overrides.retention.or(by_response.retention))
    }

    /// Writes the outcome. Returns also the time at which a final outcome expires, if it is known
    /// and there is one.
    async fn record(
        &self,
        lease: Lease,
        recording: Recording,
        took: Duration,
    ) -> (RecordStatus, Option<Timestamp>) {
        let Recording { class, retention, outcome, .. } = recording;
        let reason = match &outcome {
            Some(_) => "the response does not decide it",
            None => "there is no complete response",
        };
        let attempt = lease.attempt();
        if class == OutcomeClass::Unknown {
            tracing::warn!(
                operation = %self.label.id, route = &*self.policy.options.name, attempt, reason,
                "an execution ended and its outcome is unknown"
            );
        }
        let finished = match (class, outcome) {
            (OutcomeClass::Final, Some(outcome)) => lease.complete(outcome, retention).await,
            (OutcomeClass::Retryable, _) => lease.release().await.map(|()| None),
            // A final recording always has an outcome; without one there is nothing to replay.
            (OutcomeClass::Final | OutcomeClass::Unknown, response) => {
                lease.abandon(response).await.map(|()| None)
            }
        };
        let (recorded, until) = match finished {
            Ok(until) => (RecordStatus::Stored, until),
            Err(FinishError::Pending) => (RecordStatus::Pending, None),
            Err(_) => (RecordStatus::Lost, None),
        };
        self.layer.observe(&self.policy, RequestEvent::Executed { class, recorded, attempt, took });
        (recorded, until)
    }

    /// Returns the client's response, after the outcome was recorded or found not to be.
    pub(super) fn respond(
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
                "Another execution of this request took over. Retry with the same key for its \
                 outcome.",
            ),
            (_, ExecutionReply::Problem(problem)) => problem,
            (RecordStatus::Pending, ExecutionReply::Handler(_)) if withhold => pending(),
            (_, ExecutionReply::Handler(mut response)) => {
                if recorded == RecordStatus::Pending {
                    let pending = HeaderValue::from_static("pending");
                    response.head.headers.insert(IDEMPOTENCY_RECORDED, pending);
                }
                if let Some(until) = until.filter(|_| self.policy.options.expires) {
                    response.head.headers.insert(IDEMPOTENCY_EXPIRES, header::date(until));
                }
                match self.deliver(class, response) {
                    Ok(response) => return response,
                    Err(problem) => problem,
                }
            }
        };
        self.layer.reject(&self.policy, self.error_format, &problem)
    }

    /// Moves a response from the memory for responses to the memory for clients, without waiting.
    fn deliver(
        &self,
        class: OutcomeClass,
        response: HandlerResponse,
    ) -> Result<Response<Body>, Problem> {
        let HandlerResponse { head, read, rest, reservations } = response;
        let held = self.layer.memory.answers.hold_now(read);
        drop(reservations);
        let body = match (held, rest) {
            (Some(read), Rest::Trailers(trailers)) => Body::whole(read, trailers),
            (Some(read), Rest::Unread(body)) => Body::resumed(read, body),
            (None, rest) => return Err(no_memory(class, &rest, head.status)),
        };
        Ok(Response::from_parts(head, body))
    }
}

/// Returns the problem for a response that finds no memory because clients read slowly. Its outcome
/// is recorded.
fn no_memory(class: OutcomeClass, rest: &Rest, status: StatusCode) -> Problem {
    match (class, rest) {
        (OutcomeClass::Retryable, _) => {
            let detail = "The server has no memory for the response, which reported that nothing \
                          happened: retry with the same key.";
            Problem::new(Code::Overloaded, detail)
        }
        // A retry would get the same.
        (OutcomeClass::Final, Rest::Unread(_)) => Problem::new(
            Code::ResponseNotRetained,
            "This attempt executed the request; no retry will. Its response is too large to store, \
             and the server had no memory to send it.",
        )
        .original_status(status),
        (OutcomeClass::Final | OutcomeClass::Unknown, _) => Problem::new(
            Code::OutcomePending,
            "The request was executed. The server has no memory for its response now: retry with \
             the same key.",
        ),
    }
    .retry_after(RETRY_AFTER)
}

/// Returns the problem for an execution whose outcome is not stored yet, on routes that withhold
/// it.
pub(super) fn pending() -> Problem {
    let detail = "The request was executed. The store has not accepted its outcome yet.";
    Problem::new(Code::OutcomePending, detail).retry_after(RETRY_AFTER)
}

impl Recording {
    pub(super) const fn unknown() -> Self {
        Self { class: OutcomeClass::Unknown, retention: None, outcome: None, commits: None }
    }
}

/// Returns the outcome to store for a complete response. A response that exceeds the size of a
/// record is stored by its status only.
pub(super) fn outcome_of(whole: FullResponse) -> Outcome {
    let status = whole.status;
    let outcome = StoredResponse::Whole(whole).outcome();
    if outcome.bytes().len() <= hapax_core::codec::MAX_OUTCOME {
        return outcome;
    }
    StoredResponse::NotRetained { status }.outcome()
}

/// Returns the problem for a request whose handler was stopped at the end of a drain.
pub(super) fn cut_off() -> Problem {
    let detail =
        "The server shut down before the handler returned: the request may have taken effect.";
    Problem::new(Code::UpstreamTimeout, detail)
}

/// Returns whether a response is a success; `None` if that is not known. gRPC-Web has its status in
/// the body, which is not parsed.
fn is_success(head: &response::Parts, trailers: Option<Option<&HeaderMap>>) -> Option<bool> {
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

/// A future panicked. The panic hook received its message.
pub(super) struct Panicked;

/// Polls a future that may panic. After a panic the future is not polled again, only dropped.
pub(super) async fn catch<F: Future>(future: F) -> Result<F::Output, Panicked> {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(_) => Poll::Ready(Err(Panicked)),
    })
    .await
}

//! An execution, from the claim to its outcome, on a task that nobody cancels.

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

/// What holds around an execution.
pub(super) struct RequestExecution {
    pub(super) layer: Arc<IdempotencyLayer>,
    pub(super) policy: Arc<RoutePolicy>,
    pub(super) error_format: ErrorFormat,
    /// Given up last: a drain waits until the outcome is written, or held back.
    pub(super) permit: DrainPermit,
    pub(super) named: ExecutionLabel,
}

/// How an execution is named in logs: its key must not be there.
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

/// What a handler gave.
pub(super) struct HandlerResponse {
    pub(super) head: response::Parts,
    /// What is in memory of the body.
    read: Bytes,
    rest: Rest,
    /// Of the memory for responses, and for their copies.
    reservations: [Reservation; 2],
}

impl HandlerResponse {
    /// The error that its handler failed by.
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
    /// Too large, or a stream: the rest is still to come.
    Coming(Erased),
}

/// The response broke off.
struct Broken;

/// What is to be recorded.
pub(super) struct Recording {
    pub(super) class: OutcomeClass,
    pub(super) retention: Option<Duration>,
    pub(super) kept: Option<Outcome>,
    /// Whether what the handler wrote in a transaction commits with it, if it is final; `None` if
    /// the response does not tell whether it is a refusal.
    pub(super) commits: Option<bool>,
}

pub(super) enum ExecutionReply {
    Handler(HandlerResponse),
    Problem(Problem),
}

/// What one call of the handler came to.
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
pub(super) struct BufferedRequest {
    pub(super) parts: Parts,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

impl BufferedRequest {
    pub(super) fn request(self) -> Request<Body> {
        Request::from_parts(self.parts, Body::whole(self.body, self.trailers))
    }

    /// The same once more.
    pub(super) fn copy(&self) -> Request<Body> {
        let Self { parts, body, trailers } = self;
        Request::from_parts(parts.clone(), Body::whole(body.clone(), trailers.clone()))
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
        received: BufferedRequest,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if self.permit.gate().is_stopping() {
            // It would be cut off at once.
            return Ok(self.not_begun(lease).await);
        }
        if let Some(database) = self.policy.options.transactions.clone() {
            return self.run_in(&database, lease, inner, received).await;
        }
        let began = Instant::now();
        let attempt = self.attempt(&lease, &mut inner, received.request()).await;
        let took = began.elapsed();
        let (ending, answer) = match attempt {
            HandlerResult::Response(ending, given) => {
                given.log_failure();
                (ending, ExecutionReply::Handler(given))
            }
            HandlerResult::Problem(problem) => {
                (Recording::unknown(), ExecutionReply::Problem(problem))
            }
            HandlerResult::NotBegun => return Ok(self.not_begun(lease).await),
            HandlerResult::Failed(error) => {
                self.record(lease, Recording::unknown(), took).await;
                return Err(error);
            }
        };
        let class = ending.class;
        let (recorded, until) = self.record(lease, ending, took).await;
        Ok(self.answer(class, recorded, until, answer))
    }

    /// Time was up before the handler was called.
    pub(super) async fn not_begun(&self, lease: Lease) -> Response<Body> {
        // If the store does not take the release, it is held back.
        let _ = lease.release().await;
        let mut response = self.layer.reject(&self.policy, self.error_format, &draining());
        response.extensions_mut().insert(NotBegun);
        response
    }

    /// Calls the handler and reads its response, until time is up.
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
            ExecutionHandle::new(self.named.id, lease.handle(), lease.checkpoint().cloned());
        request.extensions_mut().insert(execution.clone());
        // In one future, so that a panic in `call`, in a body or in a route's function counts like
        // one in a handler.
        let begun = AtomicBool::new(false);
        let work = catch(async {
            begun.store(true, Ordering::Relaxed);
            let response = inner.call(request).await?;
            Ok(match self.receive(response).await {
                Ok(given) => Ok(self.judge(execution.handler_override(), given)),
                Err(broken) => Err(broken),
            })
        });
        let given = tokio::select! {
            // An answer that is there when time is up is not thrown away.
            biased;
            given = lease.keep_alive(work) => Some(given),
            () = self.permit.gate().stopping() => None,
        };
        let problem = match given {
            Some(Ok(Ok(Ok((ending, given))))) => return HandlerResult::Response(ending, given),
            Some(Ok(Err(error))) => return HandlerResult::Failed(error),
            Some(Ok(Ok(Err(Broken)))) => Problem::new(
                Code::UpstreamBroken,
                "The response broke off: the request may have taken effect.",
            ),
            Some(Err(Panicked)) => Problem::new(
                Code::HandlerFailed,
                "The handler failed in the middle: the request may have taken effect.",
            ),
            None if !begun.load(Ordering::Relaxed) => return HandlerResult::NotBegun,
            None => cut_off(),
        };
        HandlerResult::Problem(problem)
    }

    /// Reads a response as far as it is to be kept.
    async fn receive<B>(&self, response: Response<B>) -> Result<HandlerResponse, Broken>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let options = &self.policy.options;
        let (head, body) = response.into_parts();
        // What a handler says to this layer is not for clients, in trailers either.
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
        let headers = length::is_of_the_body(&self.named.method, head.status);
        let headers = headers.then_some(&head.headers);
        let gathered = collect(&mut body, headers, limit, &memory.responses, None).await;
        let (read, rest, reservation) = match gathered {
            Collected::Whole { body, trailers, reservation } => {
                (body, Rest::Trailers(trailers), reservation)
            }
            Collected::TooLarge { read, reservation } => (read, Rest::Coming(body), reservation),
            // It waits as long as it takes.
            Collected::MemoryFull => return Err(Broken),
            Collected::Broken(error) => {
                let ExecutionLabel { id, method, uri } = &self.named;
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

    /// What a response means for its key; and the response as the client gets it.
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
                let no_length = length::must_go(head.status, trailers.as_ref());
                // Read whole, it is framed anew: chunks would contradict the length it has now.
                head.headers = retain(&head.headers, |name, _| {
                    *name != TRANSFER_ENCODING && !(no_length && *name == CONTENT_LENGTH)
                });
                let (class, retention) = self.classify(overrides, &head, Some(trailers.as_ref()));
                let response = Response::from_parts(head, read.clone());
                let cookies = self.policy.options.cookies;
                let kept = (class != OutcomeClass::Retryable)
                    .then(|| keep(FullResponse::of(&response, trailers.as_ref(), cookies)));
                (Recording { class, retention, kept, commits }, response.into_parts().0)
            }
            Rest::Coming(_) => {
                let (class, retention) = self.classify(overrides, &head, None);
                let kept = (class == OutcomeClass::Final).then(|| {
                    self.layer.observe(&self.policy, RequestEvent::NotRetained);
                    StoredResponse::NotRetained { status: head.status }.outcome()
                });
                (Recording { class, retention, kept, commits }, head)
            }
        };
        header::strip(&mut head.headers);
        if let Some(ClassifiedResponse(class)) = head.extensions.get() {
            self.error_format.mark(&mut head.headers, *class);
        }
        head.headers.insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("false"));
        (ending, HandlerResponse { head, read, rest, reservations })
    }

    /// In the order that [`crate::classify`] gives. `trailers`: of a response read to its end.
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

    /// Also until when a final outcome is kept, where that is known and not for ever.
    async fn record(
        &self,
        lease: Lease,
        ending: Recording,
        took: Duration,
    ) -> (RecordStatus, Option<Timestamp>) {
        let Recording { class, retention, kept, .. } = ending;
        let reason = match &kept {
            Some(_) => "its response leaves it unknown",
            None => "it gave no whole response",
        };
        let attempt = lease.attempt();
        if class == OutcomeClass::Unknown {
            tracing::warn!(
                operation = %self.named.id, route = &*self.policy.options.name, attempt, reason,
                "an execution ended and its outcome is unknown"
            );
        }
        let finished = match (class, kept) {
            (OutcomeClass::Final, Some(outcome)) => lease.complete(outcome, retention).await,
            (OutcomeClass::Retryable, _) => lease.release().await.map(|()| None),
            // What is final has something that is kept; without it, nobody could be answered.
            (OutcomeClass::Final | OutcomeClass::Unknown, seen) => {
                lease.abandon(seen).await.map(|()| None)
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

    /// The answer, once its outcome is recorded, or known not to be.
    pub(super) fn answer(
        &self,
        class: OutcomeClass,
        recorded: RecordStatus,
        until: Option<Timestamp>,
        answer: ExecutionReply,
    ) -> Response<Body> {
        let withhold = class == OutcomeClass::Final
            && self.policy.options.completion_outage == CompletionOutage::Withhold;
        let problem = match (recorded, answer) {
            (RecordStatus::Lost, _) => Problem::new(
                Code::Superseded,
                "Another execution of this request took over. Ask again for its outcome.",
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
        self.layer.reject(&self.policy, self.error_format, &problem)
    }

    /// From the memory for what is recorded to that for what clients read, without waiting.
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
            (None, rest) => return Err(no_room(class, &rest, head.status)),
        };
        Ok(Response::from_parts(head, body))
    }
}

/// Clients read so slowly that there is no room for an answer. It is recorded all the same.
fn no_room(class: OutcomeClass, rest: &Rest, status: StatusCode) -> Problem {
    match (class, rest) {
        (OutcomeClass::Retryable, _) => {
            let detail = "There is no room now for the answer, which said that nothing happened: ask \
                          again with the same key.";
            Problem::new(Code::Overloaded, detail)
        }
        // A retry would hear the same.
        (OutcomeClass::Final, Rest::Coming(_)) => Problem::new(
            Code::ResponseNotRetained,
            "This request was executed just now, and will not be again. Its response is too large to \
             keep, and there was no room to send it.",
        )
        .original_status(status),
        (OutcomeClass::Final | OutcomeClass::Unknown, _) => Problem::new(
            Code::OutcomePending,
            "The request was executed. There is no room for its answer now.",
        ),
    }
    .retry_after(RETRY_AFTER)
}

/// The answer to an execution whose outcome is not in the store yet, where it is withheld.
pub(super) fn pending() -> Problem {
    let detail = "The request was executed. Its outcome is on its way to the store.";
    Problem::new(Code::OutcomePending, detail).retry_after(RETRY_AFTER)
}

impl Recording {
    pub(super) const fn unknown() -> Self {
        Self { class: OutcomeClass::Unknown, retention: None, kept: None, commits: None }
    }
}

/// What is kept of a response that is at hand. A record holds no more than so much.
pub(super) fn keep(whole: FullResponse) -> Outcome {
    let status = whole.status;
    let kept = StoredResponse::Whole(whole).outcome();
    if kept.bytes().len() <= hapax_core::codec::MAX_OUTCOME {
        return kept;
    }
    StoredResponse::NotRetained { status }.outcome()
}

/// What a client hears whose handler was stopped at the end of a drain.
pub(super) fn cut_off() -> Problem {
    let detail =
        "The server is shutting down and could not wait: the request may have taken effect.";
    Problem::new(Code::UpstreamTimeout, detail)
}

/// Whether a response says that all went well, as far as it is known. gRPC-Web says it in its body,
/// which is not looked into.
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

/// A future panicked. Its own message went to the panic hook.
pub(super) struct Panicked;

/// Runs a future that may panic. After a panic it is not polled again, only dropped.
pub(super) async fn catch<F: Future>(future: F) -> Result<F::Output, Panicked> {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(_) => Poll::Ready(Err(Panicked)),
    })
    .await
}

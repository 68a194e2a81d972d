//! An execution, from the claim to its outcome, on a task that nobody cancels.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hapax::{FinishError, Lease, Outcome};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, response};
use http_body::Body as _;
use tokio::time::Instant;
use tower_service::Service;

use super::execution::{Execution, Said};
use super::gate::Pass;
use super::gather::{Gathered, gather};
use super::layer::IdempotencyLayer;
use super::observe::{Event, Recorded};
use super::policy::{COME_BACK, CompletionOutage, RoutePolicy};
use crate::body::{Body, BoxError, erase};
use crate::classify::{Class, Classified, Override, classify_grpc, is_grpc};
use crate::header::{self, IDEMPOTENCY_RECORDED, IDEMPOTENCY_REPLAYED, retain};
use crate::problem::{Code, Problem};
use crate::stored::{Stored, Whole};

/// What holds around an execution.
pub(super) struct Work {
    pub(super) layer: Arc<IdempotencyLayer>,
    pub(super) policy: Arc<RoutePolicy>,
    /// Given up last: a drain waits until the outcome is written, or held back.
    pub(super) pass: Pass,
}

/// What a handler gave.
enum Given {
    Whole {
        response: Response<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// Too large, or a stream: the rest is still to come.
    Unkept {
        response: Response<Body>,
    },
    /// The response broke off.
    Broken,
}

/// What is to be recorded.
struct Ending {
    class: Class,
    retention: Option<Duration>,
    kept: Option<Outcome>,
}

enum Answer {
    Response(Response<Body>),
    Problem(Problem),
}

impl Work {
    pub(super) async fn run<S, B>(
        self,
        lease: Lease,
        mut inner: S,
        mut request: Request<Body>,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let execution = Execution::new(lease.handle(), lease.checkpoint().cloned());
        request.extensions_mut().insert(execution.clone());
        let began = Instant::now();
        // In one future, so that a panic in `call` or in a body counts like one in a handler.
        let work = catch(async {
            let response = inner.call(request).await?;
            Ok(self.receive(response).await)
        });
        let given = tokio::select! {
            given = lease.keep_alive(work) => Some(given),
            () = self.pass.gate().stopping() => None,
        };
        let took = began.elapsed();
        let problem = match given {
            Some(Ok(Ok(Given::Whole { response, trailers }))) => {
                let (ending, response) = self.whole(execution.said(), response, trailers);
                return Ok(self.answer(lease, ending, took, Answer::Response(response)).await);
            }
            Some(Ok(Ok(Given::Unkept { response }))) => {
                let (ending, response) = self.unkept(execution.said(), response);
                return Ok(self.answer(lease, ending, took, Answer::Response(response)).await);
            }
            Some(Ok(Err(error))) => {
                self.record(lease, Ending::unknown(), took).await;
                return Err(error);
            }
            Some(Ok(Ok(Given::Broken))) => Problem::new(
                Code::UpstreamBroken,
                "The response broke off: the request may have taken effect.",
            ),
            Some(Err(Panicked)) => Problem::new(
                Code::HandlerFailed,
                "The handler failed in the middle: the request may have taken effect.",
            ),
            None => cut_off(),
        };
        Ok(self.answer(lease, Ending::unknown(), took, Answer::Problem(problem)).await)
    }

    /// Reads a response as far as it is to be kept.
    async fn receive<B>(&self, response: Response<B>) -> Given
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let options = &self.policy.options;
        let (head, body) = response.into_parts();
        let mut body = erase(body);
        if options.stream || is_event_stream(&head.headers) {
            let response = Response::from_parts(head, Body::resumed(Bytes::new(), body));
            return Given::Unkept { response };
        }
        let limit = options.max_response_body;
        let share = self.layer.memory.responses.share(body.size_hint(), limit).await;
        match gather(&mut body, limit).await {
            Gathered::Whole { body, trailers } => {
                let response = Response::from_parts(head, share.hold(body));
                Given::Whole { response, trailers }
            }
            Gathered::TooLarge { read } => {
                let body = Body::resumed(share.hold(read), body);
                Given::Unkept { response: Response::from_parts(head, body) }
            }
            Gathered::Broken(error) => {
                tracing::warn!(error, "a response broke off");
                Given::Broken
            }
        }
    }

    fn whole(
        &self,
        said: Said,
        mut response: Response<Bytes>,
        trailers: Option<HeaderMap>,
    ) -> (Ending, Response<Body>) {
        // A length that is not the body's would break off this answer and every replay of it.
        let length = response.body().len().to_string();
        if response.status() != StatusCode::NOT_MODIFIED {
            *response.headers_mut() = retain(response.headers(), |name, value| {
                *name != CONTENT_LENGTH || value.as_bytes() == length.as_bytes()
            });
        }
        let (head, body) = response.into_parts();
        let (class, retention) = self.classify(said, &head, Some(trailers.as_ref()));
        let response = Response::from_parts(head, body);
        let kept =
            (class != Class::Retryable).then(|| keep(&self.policy, &response, trailers.as_ref()));
        let (head, body) = response.into_parts();
        let body = Body::whole(body, trailers);
        let ending = Ending { class, retention, kept };
        (ending, first(Response::from_parts(head, body)))
    }

    fn unkept(&self, said: Said, response: Response<Body>) -> (Ending, Response<Body>) {
        let (head, body) = response.into_parts();
        let (class, retention) = self.classify(said, &head, None);
        let kept = (class == Class::Final).then(|| {
            self.layer.observe(&self.policy, Event::NotRetained);
            Stored::NotRetained { status: head.status }.outcome()
        });
        (Ending { class, retention, kept }, first(Response::from_parts(head, body)))
    }

    /// In the order that [`crate::classify`] gives. `trailers`: of a response read to its end.
    fn classify(
        &self,
        said: Said,
        head: &response::Parts,
        trailers: Option<Option<&HeaderMap>>,
    ) -> (Class, Option<Duration>) {
        let options = &self.policy.options;
        let by_response = match head.extensions.get::<Classified>() {
            Some(Classified(class)) => Override { class: Some(*class), ..Override::default() },
            None => Override::from_headers(&head.headers),
        };
        for _ in 0..by_response.invalid {
            self.layer.observe(&self.policy, Event::InvalidOverride);
        }
        let by_grpc = || {
            let trailers = trailers.filter(|_| is_grpc(&head.headers))?;
            Some(classify_grpc(&head.headers, trailers))
        };
        let class = said
            .class
            .or(by_response.class)
            .or_else(|| options.classify.as_ref()?(head))
            .or_else(by_grpc)
            .unwrap_or_else(|| options.profile.classify(head.status));
        (class, said.retention.or(by_response.retention))
    }

    async fn record(&self, lease: Lease, ending: Ending, took: Duration) -> Recorded {
        let Ending { class, retention, kept } = ending;
        let attempt = lease.attempt();
        let finished = match (class, kept) {
            (Class::Final, Some(outcome)) => lease.complete(outcome, retention).await,
            (Class::Retryable, _) => lease.release().await,
            // What is final has something that is kept; without it, nobody could be answered.
            (Class::Final | Class::Unknown, seen) => lease.abandon(seen).await,
        };
        let recorded = match finished {
            Ok(()) => Recorded::Stored,
            Err(FinishError::Pending) => Recorded::Pending,
            Err(_) => Recorded::Lost,
        };
        self.layer.observe(&self.policy, Event::Executed { class, recorded, attempt, took });
        recorded
    }

    /// Records the outcome; only then is there an answer.
    async fn answer(
        &self,
        lease: Lease,
        ending: Ending,
        took: Duration,
        answer: Answer,
    ) -> Response<Body> {
        let withhold = ending.class == Class::Final
            && self.policy.options.completion_outage == CompletionOutage::Withhold;
        let problem = match (self.record(lease, ending, took).await, answer) {
            (Recorded::Stored, Answer::Response(response)) => return response,
            (Recorded::Pending, Answer::Response(mut response)) if !withhold => {
                let pending = HeaderValue::from_static("pending");
                response.headers_mut().insert(IDEMPOTENCY_RECORDED, pending);
                return response;
            }
            (Recorded::Pending, Answer::Response(_)) => Problem::new(
                Code::OutcomePending,
                "The request was executed. Its outcome is on its way to the store.",
            )
            .retry_after(COME_BACK),
            (Recorded::Lost, _) => Problem::new(
                Code::Superseded,
                "Another execution of this request took over. Ask again for its outcome.",
            ),
            (Recorded::Stored | Recorded::Pending, Answer::Problem(problem)) => problem,
        };
        self.layer.refuse(&self.policy, &problem)
    }
}

impl Ending {
    const fn unknown() -> Self {
        Self { class: Class::Unknown, retention: None, kept: None }
    }
}

/// What is kept of a response that is at hand. A record holds no more than so much.
pub(super) fn keep(
    policy: &RoutePolicy,
    response: &Response<Bytes>,
    trailers: Option<&HeaderMap>,
) -> Outcome {
    let whole = Whole::of(response, trailers, policy.options.cookies);
    let kept = Stored::Whole(whole).outcome();
    if kept.bytes().len() <= hapax::codec::MAX_OUTCOME {
        return kept;
    }
    Stored::NotRetained { status: response.status() }.outcome()
}

/// What a client hears whose handler was stopped at the end of a drain.
pub(super) fn cut_off() -> Problem {
    let detail =
        "The server is shutting down and could not wait: the request may have taken effect.";
    Problem::new(Code::UpstreamTimeout, detail)
}

/// Marks the answer of the execution itself.
fn first(mut response: Response<Body>) -> Response<Body> {
    header::strip(response.headers_mut());
    response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("false"));
    response
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

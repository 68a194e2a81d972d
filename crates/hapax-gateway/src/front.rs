//! The service in front of the layer: what concerns the connection, before anything is claimed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::header::IDEMPOTENCY_KEY;
use hapax_http::manner::Manner;
use hapax_http::problem::{Code, DocsUrl, Problem, sentence};
use hapax_http::server::IdempotencyService;
use hapax_http::{Body, BoxError};
use http::header::{CONNECTION, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};
use tower_service::Service;

use crate::auth::{Auth, Refused};
use crate::guard::{Heads, http2};
use crate::metrics::Metrics;
use crate::proxy::headers::drop_own;
use crate::proxy::tunnel::Switch;
use crate::proxy::{Peer, Proxy};
use crate::work::{Phase, Work};

/// One for all connections.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) service: IdempotencyService<Proxy>,
    pub(crate) auth: Option<Arc<Auth>>,
    pub(crate) work: Work,
    pub(crate) methods: Vec<Method>,
    pub(crate) stall: Duration,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) metrics: Arc<Metrics>,
}

/// The connection that a request came by.
#[derive(Debug)]
pub(crate) struct Link {
    /// What its guard says of HTTP/1 requests.
    pub(crate) heads: Option<Arc<Heads>>,
    pub(crate) peer: Peer,
    /// Where it can leave HTTP.
    pub(crate) switch: Option<Switch>,
}

impl Front {
    /// Answers a request that came by `link`.
    pub(crate) async fn answer(
        self: Arc<Self>,
        link: Arc<Link>,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let in_hand = self.work.take();
        let manner = Manner::of(request.headers(), None);
        let mut response = match self.serve(&link, request).await {
            Ok(response) => response,
            Err(refused) => {
                let mut response = self.refuse(&manner, &refused);
                if refused.code() == Code::MalformedRequest {
                    close(&mut response, &link);
                }
                response
            }
        };
        if self.is_ending() {
            close(&mut response, &link);
        }
        response.map(|body| in_hand.until_sent(body))
    }

    /// Answers a request for which there was no place.
    pub(crate) fn overloaded(&self, request: &Request<Incoming>) -> Response<Body> {
        let detail = "Too many requests are under way. Nothing was executed.";
        let problem = Problem::new(Code::Overloaded, detail).retry_after(Duration::from_secs(1));
        self.refuse(&Manner::of(request.headers(), None), &problem)
    }

    fn refuse(&self, manner: &Manner, problem: &Problem) -> Response<Body> {
        self.metrics.refused(problem.code());
        manner.refuse(problem, self.docs.as_ref()).map(Body::from)
    }

    async fn serve(
        &self,
        link: &Link,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Problem> {
        let (mut parts, body) = self.admit(link, request)?.into_parts();
        if let Some(auth) = &self.auth {
            auth.drop_given(&mut parts.headers);
            if self.may_be_protected(&parts) {
                match auth.ask(&parts, link.peer).await {
                    Ok(given) => parts.headers.extend(given),
                    Err(Refused::Denied(answer)) => return Ok(answer),
                    Err(Refused::Malformed(detail)) => {
                        return Err(Problem::new(Code::MalformedRequest, detail));
                    }
                    // The question may have been cut off.
                    Err(Refused::Unavailable) if self.is_ending() => return Err(draining()),
                    Err(Refused::Unavailable) => return Err(auth_unavailable()),
                }
            }
        }
        parts.extensions.insert(link.peer);
        if let Some(switch) = &link.switch {
            parts.extensions.insert(switch.clone());
        }
        // A clone is ready: neither the layer nor the proxy has anything to wait for.
        match self.service.clone().call(Request::from_parts(parts, body)).await {
            Ok(response) => Ok(response),
            Err(never) => match never {},
        }
    }

    /// Whether the layer could claim or replay for this request: it does so for no other.
    fn may_be_protected(&self, parts: &Parts) -> bool {
        parts.headers.contains_key(IDEMPOTENCY_KEY) && self.methods.contains(&parts.method)
    }

    fn is_ending(&self) -> bool {
        self.work.phase() > Phase::Serving
    }

    fn admit(&self, link: &Link, request: Request<Incoming>) -> Result<Request<Body>, Problem> {
        let (mut parts, incoming) = request.into_parts();
        let refusal = match &link.heads {
            Some(heads) => heads.refusal(),
            None => http2::settle(&mut parts).err(),
        };
        if let Some(refusal) = refusal {
            return Err(Problem::new(Code::MalformedRequest, sentence(&refusal.to_string())));
        }
        if self.is_ending() {
            return Err(draining());
        }
        // What the layer keeps whole in memory must come at a pace; everything else streams.
        let kept = self.may_be_protected(&parts);
        let body = Patient::new(incoming, self.stall, kept).under(self.auth.clone());
        Ok(Request::from_parts(parts, Body::new(body)))
    }
}

fn draining() -> Problem {
    Problem::new(Code::Draining, "This server is shutting down; another one may answer.")
        .retry_after(Duration::from_secs(1))
}

fn auth_unavailable() -> Problem {
    let detail = "Whether this request is allowed cannot be told now. Nothing was executed.";
    Problem::new(Code::AuthUnavailable, detail).retry_after(Duration::from_secs(1))
}

/// Says that it is the connection's last answer. HTTP/2 says so by a frame, and a connection that
/// leaves HTTP has no next one.
fn close(response: &mut Response<Body>, link: &Link) {
    if link.peer.http2 || response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return;
    }
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// A client's body that fails when its client is silent for too long, or, where it takes up memory,
/// slower than [`PACE`] on the whole. Of its trailers it hands on none that are named like ours, or
/// like what only an auth answer may say.
pub(crate) struct Patient {
    body: Incoming,
    patience: Duration,
    paced: bool,
    auth: Option<Arc<Auth>>,
    received: usize,
    /// How long it waited for the client, in all.
    waited: Duration,
    /// Since when, and until when, it waits for the client now. Whether the client could have sent
    /// more while nobody read is not for it to answer for.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// Bytes a second. While a body is read, its whole share of memory is taken; a client that sends
/// a byte now and then would hold it for ever.
const PACE: usize = 8 * 1024;

impl Patient {
    /// Fails after a silence of `patience`; `paced`: or where it is too slow.
    pub(crate) const fn new(body: Incoming, patience: Duration, paced: bool) -> Self {
        let waited = Duration::ZERO;
        Self { body, patience, paced, auth: None, received: 0, waited, waiting: None }
    }

    /// Without trailers that are `auth`'s to set.
    fn under(self, auth: Option<Arc<Auth>>) -> Self {
        Self { auth, ..self }
    }

    /// How long it may be silent now.
    fn silence(&self) -> Duration {
        if !self.paced {
            return self.patience;
        }
        let due = Duration::from_secs_f64(self.received as f64 / PACE as f64);
        self.patience.min((self.patience + due).saturating_sub(self.waited))
    }
}

impl http_body::Body for Patient {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(mut frame) = Pin::new(&mut this.body).poll_frame(cx) {
            if let Some((since, _)) = this.waiting.take() {
                this.waited += since.elapsed();
            }
            if let Some(Ok(frame)) = &mut frame {
                this.received += frame.data_ref().map_or(0, Bytes::len);
                if let Some(trailers) = frame.trailers_mut() {
                    drop_own(trailers, false);
                    if let Some(auth) = &this.auth {
                        auth.drop_given(trailers);
                    }
                }
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let silence = this.silence();
        let begin = || (Instant::now(), Box::pin(sleep(silence)));
        let (_, timer) = this.waiting.get_or_insert_with(begin);
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the client sends too slowly".into())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

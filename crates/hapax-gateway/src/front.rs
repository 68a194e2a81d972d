//! The service in front of the layer: what concerns the connection, before anything is claimed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::header::IDEMPOTENCY_KEY;
use hapax_http::problem::{Code, DocsUrl, Problem, sentence};
use hapax_http::server::IdempotencyService;
use hapax_http::{Body, BoxError};
use http::header::{CONNECTION, HeaderValue};
use http::{Method, Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};
use tower_service::Service;

use crate::guard::Heads;
use crate::metrics::Metrics;
use crate::proxy::headers::drop_own;
use crate::proxy::{Peer, Proxy};
use crate::work::{Phase, Work};

/// One for all connections.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) service: IdempotencyService<Proxy>,
    pub(crate) work: Work,
    pub(crate) methods: Vec<Method>,
    pub(crate) stall: Duration,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Front {
    /// Answers a request of the connection that `heads` tells of.
    pub(crate) async fn answer(
        self: Arc<Self>,
        heads: Arc<Heads>,
        peer: Peer,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let in_hand = self.work.take();
        let mut response = match self.admit(&heads, request) {
            Ok(mut request) => {
                request.extensions_mut().insert(peer);
                // A clone is ready: neither the layer nor the proxy has anything to wait for.
                match self.service.clone().call(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                }
            }
            Err(refused) => {
                self.metrics.refused(refused.code());
                let mut response = refused.response(self.docs.as_ref()).map(Body::from);
                if refused.code() == Code::MalformedRequest {
                    close(&mut response);
                }
                response
            }
        };
        if self.work.phase() > Phase::Serving {
            close(&mut response);
        }
        response.map(|body| in_hand.until_sent(body))
    }

    fn admit(&self, heads: &Heads, request: Request<Incoming>) -> Result<Request<Body>, Problem> {
        if let Some(refusal) = heads.refusal() {
            return Err(Problem::new(Code::MalformedRequest, sentence(&refusal.to_string())));
        }
        if self.work.phase() > Phase::Serving {
            let problem = Problem::new(
                Code::Draining,
                "This server is shutting down; another one may answer.",
            );
            return Err(problem.retry_after(Duration::from_secs(1)));
        }
        let (parts, incoming) = request.into_parts();
        // What the layer keeps whole in memory must come at a pace; everything else streams.
        let kept =
            parts.headers.contains_key(IDEMPOTENCY_KEY) && self.methods.contains(&parts.method);
        let body = Patient::new(incoming, self.stall, kept);
        Ok(Request::from_parts(parts, Body::new(body)))
    }
}

fn close(response: &mut Response<Body>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// A client's body that fails when its client is silent for too long, or, where it takes up memory,
/// slower than [`PACE`] on the whole. Of its trailers it hands on none that are named like ours.
pub(crate) struct Patient {
    body: Incoming,
    patience: Duration,
    paced: bool,
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
        Self { body, patience, paced, received: 0, waited: Duration::ZERO, waiting: None }
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

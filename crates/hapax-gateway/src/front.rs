//! The service in front of the layer: what concerns the connection, before anything is claimed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::header::IDEMPOTENCY_KEY;
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::IdempotencyService;
use hapax_http::{Body, BoxError};
use http::header::{CONNECTION, HeaderValue};
use http::{Method, Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep, timeout};
use tower_service::Service;

use crate::guard::Heads;
use crate::memory::{Gathered, Memory, need};
use crate::proxy::{Peer, Proxy};
use crate::work::{Phase, Work};

/// One for all connections.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) service: IdempotencyService<Proxy>,
    pub(crate) work: Work,
    pub(crate) memory: Memory,
    pub(crate) methods: Vec<Method>,
    pub(crate) max_request_body: usize,
    pub(crate) stall: Duration,
    pub(crate) docs: Option<DocsUrl>,
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
        let mut response = match self.admit(&heads, request).await {
            Ok(mut request) => {
                request.extensions_mut().insert(peer);
                // A clone is ready: neither the layer nor the proxy has anything to wait for.
                match self.service.clone().call(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                }
            }
            Err(refused) => {
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

    async fn admit(
        &self,
        heads: &Heads,
        request: Request<Incoming>,
    ) -> Result<Request<Body>, Problem> {
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
        let body = Patient { body: incoming, patience: self.stall, waiting: None };
        // What the layer keeps whole in memory needs room; everything else streams.
        let kept =
            parts.headers.contains_key(IDEMPOTENCY_KEY) && self.methods.contains(&parts.method);
        let hint = http_body::Body::size_hint(&body);
        let fits = hint.lower() <= self.max_request_body as u64;
        let body = if kept && fits && !http_body::Body::is_end_stream(&body) {
            let need = need(&hint, self.max_request_body);
            let Ok(Some(share)) = timeout(self.stall, self.memory.share(need)).await else {
                let problem = Problem::new(
                    Code::Overloaded,
                    "Too many request bodies are held in memory. Nothing was executed.",
                );
                return Err(problem.retry_after(Duration::from_secs(1)));
            };
            Body::new(Gathered::new(body, self.max_request_body, share))
        } else {
            Body::new(body)
        };
        Ok(Request::from_parts(parts, body))
    }
}

fn sentence(clause: &str) -> String {
    let mut letters = clause.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).chain(['.']).collect()
}

fn close(response: &mut Response<Body>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// A client's body that fails when its client is silent for too long.
struct Patient {
    body: Incoming,
    patience: Duration,
    /// Set while it waits for the client.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for Patient {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.waiting = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let patience = this.patience;
        let timer = this.waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the client stopped in the middle of a body".into())));
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

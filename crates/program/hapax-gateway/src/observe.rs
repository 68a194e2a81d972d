//! Observation: requests pass through unchanged, and the results that protection would have had are
//! counted.
//!
//! A request is forwarded as on an unprotected route. In addition a *shadow* of it, with its head
//! and a copy of its body, passes through the same layer as a protected request, over a separate
//! engine. Where the layer would execute it, the shadow waits for the response to the real request,
//! and records it. So the same code decides. Its only results are counts.
//!
//! 1. *The store is not used.* Under observation, duplicates are executed. A record of an observed
//!    request ("this key is done, and this is its one outcome") would be wrong, and would be
//!    replayed once the route is protected; its claim would block requests that other gateways
//!    protect; and an unavailable store must not matter here. So observation uses a separate store
//!    in memory.
//! 2. *Protection begins without records.* When a route becomes protected, its keys are new. The
//!    retry of a request that was observed executes, as it did before. All guarantees hold from the
//!    first protected request on.
//! 3. *Its memory is bounded*, for records and for copies of bodies; requests without memory are
//!    counted as not measured. The records are lost with the process and are not shared, so it may
//!    count too few replays, never too many.
//! 4. *A client that disconnects* ends its request, as without a gateway. A protected request would
//!    have continued, most likely to a regular end, and is counted as such.
//! 5. *No other server is called*: neither the auth URL, whose response could not be used, nor the
//!    reconcile URL.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hapax_core::{InFlight, OnUnknown};
use hapax_http::classify::ClassifiedResponse;
use hapax_http::problem::Code;
use hapax_http::server::{
    IdempotencyLayer, IdempotencyService, KeyRule, Observer, RequestEvent, RequestNamesSlot,
    RouteOptions, RoutePolicy,
};
use hapax_http::{Body, BoxError};
use hapax_proxy::{GuardedBody, InspectedBody};
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tower::ServiceExt as _;
use tower_layer::Layer;
use tower_service::Service;

use crate::context::RequestContext;
use crate::metrics::{ObservedResult, RouteCounts};
use crate::own_headers::remove_reserved;
use crate::proxy::Proxy;

/// Bytes of a permit for copies of bodies.
pub(crate) const UNIT: usize = 1024;

/// While a copy is read, it exists twice.
const TIMES: usize = 2;

/// A route that is observed.
#[derive(Clone, Debug)]
pub(crate) struct ObservedRoute {
    shadow: IdempotencyService<ShadowUpstream>,
    policy: Arc<RoutePolicy>,
    proxy: Proxy,
    budget: Arc<Semaphore>,
    counts: Arc<RouteCounts>,
}

/// Returns `options` with rejection instead of waiting, and `block` instead of reconciling:
/// observation delays no request and calls no other server.
pub(crate) fn options(mut options: RouteOptions) -> RouteOptions {
    options.policy.in_flight = InFlight::Reject;
    options.policy.hook = None;
    options.reconcile = None;
    if options.policy.terms.on_unknown == OnUnknown::Reconcile {
        options.policy.terms.on_unknown = OnUnknown::Block;
    }
    options
}

impl ObservedRoute {
    /// Creates an observed route. `layer` runs over the engine for observation; `policy` has the
    /// result of [`options`]; `waits` and `asks` are true if the configured policy waits or
    /// reconciles, which `policy` no longer contains.
    pub(crate) fn new(
        layer: &IdempotencyLayer,
        policy: Arc<RoutePolicy>,
        proxy: Proxy,
        budget: Arc<Semaphore>,
        counts: Arc<RouteCounts>,
        (waits, asks): (bool, bool),
    ) -> Self {
        let observer = Arc::new(ShadowObserver { counts: Arc::clone(&counts), waits, asks });
        let shadow = layer.clone().observer(observer).layer(ShadowUpstream);
        Self { shadow, policy, proxy, budget, counts }
    }

    /// Returns the policy that would apply.
    pub(crate) const fn policy(&self) -> &Arc<RoutePolicy> {
        &self.policy
    }

    /// Forwards a request that protection would reject before the layer.
    pub(crate) async fn forward_rejected(
        &self,
        code: Code,
        request: Request<Body>,
    ) -> Response<Body> {
        self.counts.would_reject(code);
        self.proxy.forward(request, false).await
    }

    /// Forwards a request, and observes it.
    ///
    /// Dropping the future ends the request, and the shadow records a regular end.
    pub(crate) async fn call(&self, request: Request<Body>) -> Response<Body> {
        let options = self.policy.options();
        let has_key = request.headers().contains_key(&options.key_header);
        let concerned = options.methods.contains(request.method())
            && (has_key || options.key == KeyRule::Required);
        if !concerned {
            return self.proxy.forward(request, false).await;
        }
        let (parts, body) = request.into_parts();
        let (answer, answered) = oneshot::channel();
        let mut shadow = parts.clone();
        // The store of the observation has other names.
        shadow.extensions.remove::<RequestNamesSlot>();
        if let Some(context) = shadow.extensions.get_mut::<RequestContext>() {
            context.shadow = Some(Arc::new(Mutex::new(Some(answered))));
        }
        let limit = if has_key { options.max_request_body } else { 0 };
        let (observed, bytes, share) = (self.clone(), BytesMut::new(), None);
        let mut copy = CopySlot(Some(BodyCopy { observed, head: shadow, bytes, limit, share }));
        if body.is_end_stream() {
            // An empty body is never read.
            copy.finish(None);
        }
        let inspect = move |frame: Inspected<'_>, is_end| copy.inspect(frame, is_end);
        let body = Body::new(InspectedBody::new(body, inspect));
        let response = self.proxy.forward(Request::from_parts(parts, body), true).await;
        let (mut head, body) = response.into_parts();
        let (end, ended) = oneshot::channel();
        let real_response = RealResponse {
            status: head.status,
            headers: head.headers.clone(),
            class: head.extensions.get::<ClassifiedResponse>().cloned(),
            ended,
        };
        // The shadow may have ended already, if it was rejected.
        drop(answer.send(real_response));
        remove_reserved(&mut head.headers, false);
        let mut end = Some(end);
        let inspect = move |frame: Inspected<'_>, _| {
            if let Some(ended) = response_end(frame)
                && let Some(end) = end.take()
            {
                // The shadow may have ended already, if it was rejected.
                drop(end.send(ended));
            }
        };
        Response::from_parts(head, Body::new(InspectedBody::new(body, inspect)))
    }
}

/// A frame of a body, an error, or the end.
type Inspected<'a> = Option<&'a mut Result<Frame<Bytes>, BoxError>>;

/// The copy of a body that is being read.
struct BodyCopy {
    observed: ObservedRoute,
    head: Parts,
    bytes: BytesMut,
    limit: usize,
    share: Option<OwnedSemaphorePermit>,
}

impl BodyCopy {
    /// Adds `data` and returns true, or returns false if there is no memory. Beyond the limit only
    /// one byte is copied, which shows that the body is too large.
    fn add(&mut self, data: &[u8]) -> bool {
        let take = data.len().min((self.limit + 1).saturating_sub(self.bytes.len()));
        let have = self.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let need = ((self.bytes.len() + take) * TIMES).div_ceil(UNIT);
        if let Some(more) = need.checked_sub(have).filter(|more| *more > 0) {
            let budget = &self.observed.budget;
            let more = u32::try_from(more).ok();
            let more = more.and_then(|more| Arc::clone(budget).try_acquire_many_owned(more).ok());
            let Some(more) = more else { return false };
            match &mut self.share {
                Some(share) => share.merge(more),
                None => self.share = Some(more),
            }
        }
        self.bytes.extend_from_slice(&data[..take]);
        true
    }

    /// Starts the shadow.
    fn finish(self, trailers: Option<HeaderMap>) {
        let Self { observed, head, bytes, share, .. } = self;
        let body = GuardedBody::new(Body::whole(bytes.freeze(), trailers), share);
        tokio::spawn(observed.shadow.oneshot(Request::from_parts(head, body)));
    }
}

/// The copy of a request's body, until it is finished or without memory.
struct CopySlot(Option<BodyCopy>);

impl CopySlot {
    fn inspect(&mut self, frame: Inspected<'_>, is_end: bool) {
        match frame {
            None => self.finish(None),
            Some(Ok(frame)) => {
                if let (Some(data), Some(copy)) = (frame.data_ref(), &mut self.0)
                    && !copy.add(data)
                {
                    copy.observed.counts.would(ObservedResult::Unmeasured);
                    self.0 = None;
                }
                // A reader that has the length does not poll the end.
                if is_end || frame.is_trailers() {
                    self.finish(frame.trailers_ref().cloned());
                }
            }
            Some(Err(_)) => {}
        }
    }

    fn finish(&mut self, trailers: Option<HeaderMap>) {
        if let Some(copy) = self.0.take() {
            copy.finish(trailers);
        }
    }
}

impl Drop for CopySlot {
    fn drop(&mut self) {
        // It was not read to its end: the client broke off, or the upstream rejected the rest.
        if let Some(copy) = &self.0 {
            copy.observed.counts.would(ObservedResult::Unmeasured);
        }
    }
}

/// The receiver of the response to the real request, for its shadow.
pub(crate) type RealResponseSlot = Arc<Mutex<Option<oneshot::Receiver<RealResponse>>>>;

/// The response to the real request, without its content.
#[derive(Debug)]
pub(crate) struct RealResponse {
    status: StatusCode,
    headers: HeaderMap,
    class: Option<ClassifiedResponse>,
    ended: oneshot::Receiver<ResponseEnd>,
}

/// Ends of a response. If none is sent, the client disconnected.
#[derive(Debug)]
enum ResponseEnd {
    Whole(Option<HeaderMap>),
    Broken,
}

/// Replaces the upstream: it answers a shadow with the response to the real request, without the
/// content.
#[derive(Clone, Copy, Debug)]
struct ShadowUpstream;

impl Service<Request<Body>> for ShadowUpstream {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let context = request.extensions().get::<RequestContext>();
        let slot = context.and_then(|context| context.shadow.as_ref());
        let answered =
            slot.and_then(|slot| slot.lock().unwrap_or_else(PoisonError::into_inner).take());
        // The copy of the body is no longer needed.
        drop(request);
        Box::pin(async move {
            let Some(answered) = answered else { return Ok(Response::new(Body::empty())) };
            let Ok(real_response) = answered.await else { return Ok(Response::new(Body::empty())) };
            let mut response = Response::new(Body::new(ShadowBody(Some(real_response.ended))));
            *response.status_mut() = real_response.status;
            *response.headers_mut() = real_response.headers;
            // It describes the content, which is omitted.
            response.headers_mut().remove(CONTENT_LENGTH);
            if let Some(class) = real_response.class {
                response.extensions_mut().insert(class);
            }
            Ok(response)
        })
    }
}

/// A body without content that ends as another one does.
struct ShadowBody(Option<oneshot::Receiver<ResponseEnd>>);

impl http_body::Body for ShadowBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(ended) = &mut self.0 else { return Poll::Ready(None) };
        let end = ready!(Pin::new(ended).poll(cx));
        self.0 = None;
        Poll::Ready(match end {
            Ok(ResponseEnd::Whole(Some(trailers))) => Some(Ok(Frame::trailers(trailers))),
            Ok(ResponseEnd::Whole(None)) | Err(_) => None,
            Ok(ResponseEnd::Broken) => Some(Err("the response broke off".into())),
        })
    }
}

/// Returns the end of a response; it drops trailers that the client must not get.
fn response_end(frame: Inspected<'_>) -> Option<ResponseEnd> {
    match frame {
        None => Some(ResponseEnd::Whole(None)),
        Some(Err(_)) => Some(ResponseEnd::Broken),
        Some(Ok(frame)) => {
            let trailers = frame.trailers_mut()?;
            let end = ResponseEnd::Whole(Some(trailers.clone()));
            remove_reserved(trailers, false);
            Some(end)
        }
    }
}

/// Counts the results that protection would have had.
#[derive(Debug)]
struct ShadowObserver {
    counts: Arc<RouteCounts>,
    waits: bool,
    asks: bool,
}

impl Observer for ShadowObserver {
    fn observe(&self, _: &str, event: RequestEvent) {
        let would = match event {
            RequestEvent::Executed { .. } => ObservedResult::Execute,
            RequestEvent::Replayed { .. } => ObservedResult::Replay,
            RequestEvent::Rejected(Code::InFlight) if self.waits => ObservedResult::Wait,
            RequestEvent::Rejected(Code::OutcomeUnknown) if self.asks => ObservedResult::Reconcile,
            // The store of the observation is full.
            RequestEvent::Rejected(Code::StoreUnavailable | Code::Quarantined) => {
                ObservedResult::Unmeasured
            }
            // Its execution was already counted.
            RequestEvent::Rejected(Code::Superseded | Code::UpstreamBroken) => return,
            RequestEvent::Rejected(code) => return self.counts.would_reject(code),
            RequestEvent::OtherCaller => return self.counts.other_caller(),
            _ => return,
        };
        self.counts.would(would);
    }
}

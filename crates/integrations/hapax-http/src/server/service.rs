//! The service: admits, rejects or protects a request by its head alone.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_core::{DetachSwitch, Key, OperationId, Scope};
use http::request::Parts;
use http::{HeaderName, Method, Request, Response};
use tower_service::Service;

use super::drain::DrainPermit;
use super::future::{PanicResponse, ResponseFuture};
use super::layer::IdempotencyLayer;
use super::observe::RequestEvent;
use super::policy::{KeyRule, RETRY_AFTER, RouteOptions, RoutePolicy};
use super::protect::protect;
use crate::body::{Body, BoxError, WithoutTrailers};
use crate::error_format::ErrorFormat;
use crate::fingerprint::METHOD_OVERRIDES;
use crate::header::{self, is_sent_upstream, retain};
use crate::problem::{Code, Problem};
use crate::stored_response::named_by_connection;

/// A service behind an [`IdempotencyLayer`].
#[derive(Clone, Debug)]
pub struct IdempotencyService<S> {
    layer: Arc<IdempotencyLayer>,
    inner: S,
}

impl<S> IdempotencyService<S> {
    pub(super) const fn new(layer: Arc<IdempotencyLayer>, inner: S) -> Self {
        Self { layer, inner }
    }
}

impl<S, Q, B> Service<Request<Q>> for IdempotencyService<S>
where
    S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    Q: http_body::Body<Data = Bytes> + Send + 'static,
    Q::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // The service that is ready is called; a clone of it need not be ready.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let (mut parts, body) = request.into_parts();
        let admission = admit(&self.layer, &parts);
        // A reconcile request names an execution by its fence, with a safe method that the route
        // does not protect; it executes nothing.
        let asks = matches!(admission, Admission::Pass) && parts.method.is_safe();
        if !asks && !matches!(admission, Admission::Other) {
            retain(&mut parts.headers, |name| !is_sent_upstream(name));
        }
        match admission {
            Admission::Other => {
                let request = Request::from_parts(parts, Body::new(body));
                ResponseFuture::passing(inner.call(request))
            }
            Admission::Pass => {
                let body = Body::new(WithoutTrailers { body, drop: is_sent_upstream });
                ResponseFuture::passing(inner.call(Request::from_parts(parts, body)))
            }
            Admission::Reject(response) => ResponseFuture::rejected(response),
            Admission::Protect(admitted) => {
                let (layer, switch) = (Arc::clone(&self.layer), DetachSwitch::default());
                let panicked = PanicResponse {
                    layer: Arc::clone(&layer),
                    policy: Arc::clone(&admitted.policy),
                    error_format: admitted.error_format,
                    operation: admitted.operation,
                };
                let lease = admitted.policy.options.policy.terms.lease;
                let protected =
                    protect(Arc::clone(&layer), admitted, inner, parts, body, switch.clone());
                let protected = layer.engine.detach_on_drop(switch, lease, Box::pin(protected));
                ResponseFuture::protected(protected, panicked)
            }
        }
    }
}

enum Admission {
    /// The request has no route: it is forwarded unchanged.
    Other,
    /// The request is not protected: forwarded unchanged, except for headers that only we send to
    /// handlers.
    Pass,
    Reject(Response<Body>),
    Protect(AdmittedRequest),
}

/// A request that has a key and a scope.
pub(super) struct AdmittedRequest {
    pub(super) policy: Arc<RoutePolicy>,
    pub(super) error_format: ErrorFormat,
    pub(super) key: Key,
    pub(super) scope: Scope,
    pub(super) operation: OperationId,
    pub(super) permit: DrainPermit,
}

/// Counts a request with a key that is not protected because of its method, and warns of the first one of the route.
fn note_ignored_key(layer: &IdempotencyLayer, policy: &RoutePolicy, parts: &Parts) {
    let RouteOptions { key_header, name, .. } = &policy.options;
    if parts.method.is_safe() || !parts.headers.contains_key(key_header) {
        return;
    }
    layer.observe(policy, RequestEvent::KeyIgnored);
    // Any client can send a method that no service has.
    let is_known =
        [Method::POST, Method::PUT, Method::PATCH, Method::DELETE].contains(&parts.method);
    if is_known && !policy.key_ignored.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            method = %parts.method,
            route = %name,
            "a request with a key executes each time that it is sent, since its method is not protected: add it to \
             `methods`, or ignore this if a repetition does no harm (later ones are only counted)"
        );
    }
}

fn admit(layer: &IdempotencyLayer, parts: &Parts) -> Admission {
    let Some(policy) = layer.routes.policy(parts) else {
        return Admission::Other;
    };
    let options = &policy.options;
    let error_format = ErrorFormat::of(&parts.headers);
    let Some(permit) = layer.gate.enter() else {
        return Admission::Reject(layer.reject(&policy, error_format, &draining()));
    };
    if !options.methods.contains(&parts.method) {
        note_ignored_key(layer, &policy, parts);
        return Admission::Pass;
    }
    let identity = std::iter::once(&options.key_header).chain(policy.scope.names());
    if let Some((field, name)) = header::other_spelling(&parts.headers, identity) {
        let problem = misspelt(field, name);
        return Admission::Reject(layer.reject(&policy, error_format, &problem));
    }
    let key = match header::key_in(&parts.headers, &options.key_header, options.grammar) {
        Ok(Some(key)) => key,
        Ok(None) if options.key == KeyRule::Optional => return Admission::Pass,
        Ok(None) => {
            let (method, name) = (&parts.method, &options.key_header);
            let detail = format!("{method} requests here need an idempotency key, in `{name}`.");
            let problem = Problem::new(Code::MissingKey, detail);
            return Admission::Reject(layer.reject(&policy, error_format, &problem));
        }
        Err(error) => {
            let name = &options.key_header;
            let detail = format!("The header `{name}` has no valid idempotency key: {error}.");
            let problem = Problem::new(Code::InvalidKey, detail);
            return Admission::Reject(layer.reject(&policy, error_format, &problem));
        }
    };
    let scope = check_connection(&policy, parts).and_then(|()| policy.scope.scope(parts));
    match scope {
        Err(problem) => Admission::Reject(layer.reject(&policy, error_format, &problem)),
        Ok(scope) => {
            let operation = layer.engine.operation_id(&scope, &key);
            let admitted = AdmittedRequest { policy, error_format, key, scope, operation, permit };
            Admission::Protect(admitted)
        }
    }
}

/// A sender whose key, scope or other fingerprinted header is removed on the way would mean another
/// operation here than behind the next hop.
fn check_connection(policy: &RoutePolicy, parts: &Parts) -> Result<(), Problem> {
    let named = named_by_connection(&parts.headers);
    let counts = |name: &HeaderName| {
        *name == policy.options.key_header
            || policy.scope.names().contains(name)
            || policy.options.fingerprint.headers().contains(name)
            || METHOD_OVERRIDES.contains(name)
    };
    match named.iter().find(|name| counts(name)) {
        Some(name) => {
            let detail = format!("Connection must not name {name}.");
            Err(Problem::new(Code::MalformedRequest, detail))
        }
        None => Ok(()),
    }
}

/// Returns the problem for a header that some services would mistake for the key, or for the
/// caller's name.
fn misspelt(field: &HeaderName, name: &HeaderName) -> Problem {
    let detail = format!(
        "The header `{field}` has an underscore; `{name}` is expected, because some services take \
         one for the other."
    );
    Problem::new(Code::MalformedRequest, detail)
}

pub(super) fn draining() -> Problem {
    Problem::new(Code::Draining, "This server is shutting down; another one may answer.")
        .retry_after(RETRY_AFTER)
}

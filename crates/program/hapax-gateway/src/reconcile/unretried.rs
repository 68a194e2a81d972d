//! Reconciliation without a retry: the request is made of a record's description.
//!
//! 1. A description belongs to one execution, since it never changes under a fence. A takeover by an earlier version, or
//!    without a description, keeps the earlier one: its hook does not count, since the record does not have the lease id of
//!    the execution that it describes. Only a record that still has the fence of the description is changed, so a verdict is
//!    about the execution that was listed.
//! 2. A store has the records of several services, and a reconcile URL answers that an operation of another service did
//!    not happen. So the description names namespace, route and hook, and they must be those of a route of this gateway
//!    as it is configured now. Which processes run does not count.
//! 3. The request has exactly the headers by which the description names the caller. Credentials, which none shows,
//!    are replaced by `reconcile_authorization`, and so is a token with a claim that names the caller. If a value is missing, no request is sent: a service that finds
//!    operations by their caller would answer that it did not happen.
//! 4. A dropped future leaves the outcome unknown; a hook without a verdict is called again after its timeout.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    ClaimError, FencingToken, FingerprintScheme, Key, OnUnknown, OperationId, Reconciled,
};
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY, decode, encode};
use hapax_http::server::{
    IdempotencyLayer, ReconcileRequest, RoutePolicy, ScopePart, UnretriedRequest,
};
use hapax_operators::{CallerView, DecisionNote, OperationDescription, RecordView, StateView};
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request};

use crate::metrics::{Metrics, UnretriedResult};
use crate::snapshot::{ConfigSnapshot, CurrentConfig, Route};

/// Marks a request that stands for a retry.
#[derive(Clone, Copy, Debug)]
struct WithoutRetry;

/// Returns whether no retry causes the request.
pub(super) fn is_without_retry(undecided: &ReconcileRequest) -> bool {
    undecided.request.extensions.get::<WithoutRetry>().is_some()
}

/// Reasons for which no reconcile request is sent about an operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotRequested {
    #[error(
        "expected a record under `on_unknown` reconcile of an HTTP request, found another: an operator has to decide"
    )]
    Blocked,
    #[error(
        "expected a record that describes its request and its hook, found none: the store has no secret, the record or \
         its last execution is of an earlier version, or the description was too large; a retry of the client or an operator decides"
    )]
    NotDescribed,
    #[error(
        "expected a record of the namespace {ours:?} of this gateway, found {theirs:?}: send it to the gateway of its \
         service"
    )]
    OtherNamespace { ours: String, theirs: String },
    #[error(
        "expected the route {route:?} of the record with `on_unknown` reconcile, found none: a retry of the client or an \
         operator decides"
    )]
    NoRoute { route: String },
    #[error(
        "expected the `reconcile_url`, `key_header` and `scope` that the route {route:?} had when the operation began, \
         found others: a retry of the client or an operator decides"
    )]
    OtherHook { route: String },
    #[error(
        "expected a record that shows the whole caller, found more than four values, or one of more than 128 bytes or \
         with other characters than ASCII text: a retry of the client or an operator decides"
    )]
    HiddenCaller,
    #[error(
        "expected `reconcile_authorization`, which replaces the credentials of the caller, found none: set it to a file, \
         or to `none` if the reconcile URL needs no credentials"
    )]
    NoAuthorization,
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl NotRequested {
    /// The codes, as in metrics and in the API.
    pub(crate) const CODES: [&str; 8] = [
        "blocked",
        "not-described",
        "other-namespace",
        "no-route",
        "other-hook",
        "hidden-caller",
        "no-authorization",
        "failed",
    ];

    /// Returns the index of its code.
    pub(crate) const fn index(&self) -> usize {
        match self {
            Self::Blocked => 0,
            Self::NotDescribed => 1,
            Self::OtherNamespace { .. } => 2,
            Self::NoRoute { .. } => 3,
            Self::OtherHook { .. } => 4,
            Self::HiddenCaller => 5,
            Self::NoAuthorization => 6,
            Self::Claim(_) => 7,
        }
    }

    /// Returns its code.
    pub(crate) const fn code(&self) -> &'static str {
        Self::CODES[self.index()]
    }
}

/// Reconciles single operations without a retry.
#[derive(Debug)]
pub(crate) struct UnretriedReconciler {
    pub(crate) layer: IdempotencyLayer,
    pub(crate) current: Arc<CurrentConfig>,
    pub(crate) metrics: Arc<Metrics>,
}

/// Facts about an operation before a request.
#[derive(Debug)]
pub(crate) enum Prepared {
    /// The request that may be sent.
    Request(Box<PreparedRequest>),
    /// No request is needed.
    Known(Reconciled),
}

/// A reconcile request about one execution.
#[derive(Debug)]
pub(crate) struct PreparedRequest {
    route: Arc<Route>,
    policy: Arc<RoutePolicy>,
    /// The reconcile URL, without its query.
    pub(crate) url: String,
    id: OperationId,
    fence: FencingToken,
    key: Key,
    head: Parts,
}

impl UnretriedReconciler {
    /// Prepares a request about a record; the error is the reason for which none is sent.
    pub(crate) fn prepare(
        &self,
        id: OperationId,
        view: &RecordView,
    ) -> Result<Prepared, NotRequested> {
        match view.state {
            StateView::Unknown => {}
            StateView::InFlight => return Ok(Prepared::Known(Reconciled::InFlight)),
            StateView::Done | StateView::Released | StateView::Expired => {
                return Ok(Prepared::Known(Reconciled::Decided));
            }
        }
        let snapshot = self.current.load_full();
        let (route, described) = self.route(&snapshot, view)?;
        let (Some(policy), Ok(key)) = (route.policy(), Key::new(&described.key)) else {
            return Err(NotRequested::NotDescribed);
        };
        let head = head(route, &key, described)?;
        let url = route.unretried.as_ref().map(|unretried| unretried.url.clone());
        Ok(Prepared::Request(Box::new(PreparedRequest {
            route: Arc::clone(route),
            policy: Arc::clone(policy),
            url: url.unwrap_or_default(),
            id,
            fence: FencingToken::new(view.fence),
            key,
            head,
        })))
    }

    /// Requests the reconcile URL about an operation, at the earliest `pause` after the last request of any process. A
    /// record that is released keeps `note`.
    pub(crate) async fn request(
        &self,
        prepared: PreparedRequest,
        pause: Duration,
        note: Option<Bytes>,
    ) -> Result<Reconciled, ClaimError> {
        let PreparedRequest { route, policy, id, fence, key, head, .. } = prepared;
        let unretried = UnretriedRequest { id, fence, pause, key, request: head, note };
        let reconciled = self.layer.reconcile(&policy, unretried).await;
        let result = match &reconciled {
            Ok(Reconciled::Happened) => UnretriedResult::Happened,
            Ok(Reconciled::DidNotHappen) => UnretriedResult::DidNotHappen,
            Ok(Reconciled::CannotSay) => UnretriedResult::CannotSay,
            Ok(_) => return reconciled,
            Err(_) => UnretriedResult::Failed,
        };
        self.metrics.unretried.reconciled(result);
        if matches!(result, UnretriedResult::Happened | UnretriedResult::DidNotHappen) {
            let (route, result) = (&*route.name, result.as_str());
            tracing::info!(%id, %fence, route, result, "an operation was reconciled without a retry");
        }
        reconciled
    }

    /// Prepares and sends a request that no operator makes.
    pub(super) async fn reconcile(
        &self,
        id: OperationId,
        view: &RecordView,
        pause: Duration,
    ) -> Result<Reconciled, NotRequested> {
        let request = match self.prepare(id, view)? {
            Prepared::Request(request) => *request,
            Prepared::Known(reconciled) => return Ok(reconciled),
        };
        let note = DecisionNote::by_hook(&request.url).to_bytes();
        match self.request(request, pause, note).await? {
            Reconciled::Blocked => Err(NotRequested::Blocked),
            reconciled => Ok(reconciled),
        }
    }

    /// Returns the route whose hook decides about an operation, and its description.
    pub(super) fn route<'a>(
        &self,
        snapshot: &'a ConfigSnapshot,
        view: &'a RecordView,
    ) -> Result<(&'a Arc<Route>, &'a OperationDescription), NotRequested> {
        let scheme = FingerprintScheme::new(view.scheme.as_str());
        let is_request = scheme.is_ok_and(|scheme| scheme.of_request().starts_with("http/"));
        if !is_request || view.on_unknown != OnUnknown::Reconcile.as_str() {
            return Err(NotRequested::Blocked);
        }
        let described = view.described.as_ref().ok_or(NotRequested::NotDescribed)?;
        let OperationDescription { namespace, hook, .. } = described;
        let (Some(theirs), Some(hook)) = (namespace, hook) else {
            return Err(NotRequested::NotDescribed);
        };
        let ours = self.layer.engine().namespace().as_str();
        if theirs != ours {
            let (ours, theirs) = (ours.to_owned(), theirs.clone());
            return Err(NotRequested::OtherNamespace { ours, theirs });
        }
        let name = described.route.as_deref().unwrap_or_default();
        let routes = snapshot.reconciling(name);
        if routes.is_empty() {
            return Err(NotRequested::NoRoute { route: name.to_owned() });
        }
        let of_path = route_of_retry(snapshot, described);
        let with_unretried = routes.iter().filter_map(|it| Some((it, it.unretried.as_ref()?)));
        // Several routes may have one name and one hook. That of a retry applies, as to the retry; if the path has another
        // one by now, the one that leaves the first request the most time.
        let found = with_unretried
            .filter(|(_, unretried)| unretried.hooks.contains(hook))
            .max_by_key(|(route, unretried)| {
                (of_path.is_some_and(|it| Arc::ptr_eq(it, route)), unretried.wait)
            });
        let Some((route, unretried)) = found else {
            return Err(NotRequested::OtherHook { route: name.to_owned() });
        };
        if described.partial {
            return Err(NotRequested::HiddenCaller);
        }
        let is_of_credentials =
            |caller: &CallerView| caller.value.is_none() || is_claim(&caller.header);
        // Of a route with claims, a request without one may have credentials too.
        let has_credentials =
            !route.claims.is_empty() || described.caller.iter().any(is_of_credentials);
        if has_credentials && !unretried.replaces_credentials {
            return Err(NotRequested::NoAuthorization);
        }
        Ok((route, described))
    }
}

/// Returns the route of a retry of an operation; `None` if its path matches none.
fn route_of_retry<'a>(
    snapshot: &'a ConfigSnapshot,
    described: &OperationDescription,
) -> Option<&'a Arc<Route>> {
    let method = described.method.as_ref()?.parse().ok()?;
    snapshot.route(described.target.as_deref()?, &method).ok()
}

/// Returns the head of a request that stands for a retry: it has the key, and the caller as far as the description
/// shows it.
fn head(route: &Route, key: &Key, described: &OperationDescription) -> Result<Parts, NotRequested> {
    let method: Option<Method> = described.method.as_ref().and_then(|it| it.parse().ok());
    let mut request = Request::new(());
    *request.method_mut() = method.ok_or(NotRequested::NotDescribed)?;
    let headers = request.headers_mut();
    headers.insert(&route.key_header, key_value(route, key));
    if described.grpc {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    }
    for caller in described.caller.iter().filter(|caller| !is_claim(&caller.header)) {
        let Some(value) = &caller.value else { continue };
        let part = caller.header.parse::<HeaderName>().ok().zip(HeaderValue::from_str(value).ok());
        let (name, value) = part.ok_or(NotRequested::HiddenCaller)?;
        headers.append(name, value);
    }
    request.extensions_mut().insert(WithoutRetry);
    Ok(request.into_parts().0)
}

/// Returns whether a part of a scope is a claim of a token, which no header has.
fn is_claim(part: &str) -> bool {
    part.parse().is_ok_and(|part| matches!(part, ScopePart::Claim(_)))
}

/// Returns the value of the key header: a structured field in `Idempotency-Key`, else the bare key where it can be one.
fn key_value(route: &Route, key: &Key) -> HeaderValue {
    let text = key.as_str();
    let is_bare = || decode(text.as_bytes(), Grammar::Lenient).is_ok_and(|it| it == *key);
    let bare = HeaderValue::from_str(text).ok();
    bare.filter(|_| route.key_header != IDEMPOTENCY_KEY && is_bare()).unwrap_or_else(|| encode(key))
}

//! Policies of routes.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::{HookTiming, Verdict};
use hapax_core::store::BoxFuture;
use hapax_core::{FencingToken, Idempotency, Key, OnUnknown, OperationId, Policy, PolicyError};
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Response, Uri};

use super::scope::ScopeSource;
use super::transaction::{TransactionBackend, TxOptionsError};
use crate::classify::{OutcomeClass, Profile};
use crate::fingerprint::HttpFingerprintScheme;
use crate::header::{self, Grammar, IDEMPOTENCY_KEY};
use crate::statuses::{StatusLists, StatusOverlap};
use crate::stored_response::Cookies;

/// Rule for the key of a protected request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KeyRule {
    /// A request without a key passes through, unchanged and unprotected.
    #[default]
    Optional,
    /// A request without a key is rejected: 400 `missing-key`.
    Required,
}

/// Treatment of requests while the store is unavailable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StoreOutage {
    /// The request is rejected: 503 `store-unavailable`.
    #[default]
    Closed,
    /// The request executes unprotected, and its response has `Idempotency-Protected: false`.
    /// Rejected together with [`OnUnknown::Block`], the default.
    Open,
}

/// Response while the store is unavailable between execution and completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CompletionOutage {
    /// The response, with `Idempotency-Recorded: pending`; so have duplicates until the store
    /// accepts the outcome.
    #[default]
    Deliver,
    /// 503 `outcome-pending`, also for duplicates: an outcome that could be lost is not delivered.
    Withhold,
}

/// Function that returns a request's target.
pub type TargetFn = dyn Fn(&Parts) -> Uri + Send + Sync;

/// Function that returns a response's class, or `None`.
pub type ClassifyFn = dyn Fn(&http::response::Parts) -> Option<OutcomeClass> + Send + Sync;

/// Options of a route. Start from `RouteOptions::default()`.
#[derive(Clone)]
pub struct RouteOptions {
    /// Name of the route in metrics; of a fixed set, since each is a label. Default: empty.
    pub name: Arc<str>,
    /// Rule for keys. Default: optional.
    pub key: KeyRule,
    /// Header that carries the key. Default: `Idempotency-Key`.
    pub key_header: HeaderName,
    /// Grammar of keys. Default: lenient.
    pub grammar: Grammar,
    /// Protected methods; requests with others pass through. Default: POST and PATCH.
    pub methods: Vec<Method>,
    /// Lease, retention, unknown outcomes, duplicates in flight.
    pub policy: Policy,
    /// Hook for [`OnUnknown::Reconcile`]; `policy.hook` has its timing.
    pub reconcile: Option<Arc<dyn Reconcile>>,
    /// Name of the hook, with everything that decides whose operations it knows, such as its URL. The description of a
    /// request has a keyed hash of it ([`RoutePolicy::hook_hashes`]), so that no other hook decides about the operation
    /// without a retry. Default: none, and requests of the route are not reconciled without a retry.
    pub hook_name: Option<Arc<str>>,
    /// Parts of a request that are compared with a retry.
    pub fingerprint: HttpFingerprintScheme,
    /// The request's target as clients send it, for a layer behind a service that changes it, such as a
    /// router that strips a prefix. Default: with the feature `axum`, the target that reached the
    /// outermost `axum::Router` (`axum::extract::OriginalUri`); else the request's own target.
    pub target: Option<Arc<TargetFn>>,
    /// Table of classes by status. Default: standard.
    pub profile: Profile,
    /// Statuses whose class the route sets itself. Default: none.
    pub statuses: StatusLists,
    /// Function that classifies responses whose status does not determine their class. For `None`
    /// the lists and the profile decide.
    pub classify: Option<Arc<ClassifyFn>>,
    /// Treatment of `Set-Cookie`. Default: it is not stored.
    pub cookies: Cookies,
    /// True if responses are streamed instead of stored, so that a key is final at the headers.
    /// Default: false; `text/event-stream` is always streamed.
    pub stream: bool,
    /// True if final responses and replays have `Idempotency-Expires`, the time from which the key
    /// can be used again. Default: false.
    pub expires: bool,
    /// Largest body of a request with a key, in bytes. Default: 1 MiB.
    pub max_request_body: usize,
    /// Largest body of a stored response, in bytes. Default: 1 MiB; at most
    /// [`RouteOptions::MAX_RESPONSE_BODY`].
    pub max_response_body: usize,
    /// Number of keys of one caller that may be in flight in this process, under all routes of this
    /// name; a further one gets 429 `too-many-in-flight`. Default: unlimited.
    pub max_in_flight_per_scope: Option<NonZeroU32>,
    /// Transactions for handlers, which commit with their responses: see
    /// [`transaction`](super::transaction). Default: none. With them, [`OnUnknown::Reexecute`] fits
    /// if handlers have no other effects: a crash rolls back.
    pub transactions: Option<TransactionBackend>,
    /// Treatment of requests while the store is unavailable. Default: rejected.
    pub store_outage: StoreOutage,
    /// Response while the store is unavailable at completion. Default: the response.
    pub completion_outage: CompletionOutage,
}

impl RouteOptions {
    /// Largest response body that fits into a record together with a head, in bytes.
    pub const MAX_RESPONSE_BODY: usize = hapax_core::codec::MAX_OUTCOME - (1 << 20);
}

impl Default for RouteOptions {
    fn default() -> Self {
        Self {
            name: Arc::from(""),
            key: KeyRule::default(),
            key_header: IDEMPOTENCY_KEY,
            grammar: Grammar::default(),
            methods: vec![Method::POST, Method::PATCH],
            policy: Policy::default(),
            reconcile: None,
            hook_name: None,
            fingerprint: HttpFingerprintScheme::default(),
            target: None,
            profile: Profile::default(),
            statuses: StatusLists::default(),
            classify: None,
            cookies: Cookies::default(),
            stream: false,
            expires: false,
            max_request_body: 1 << 20,
            max_response_body: 1 << 20,
            max_in_flight_per_scope: None,
            transactions: None,
            store_outage: StoreOutage::default(),
            completion_outage: CompletionOutage::default(),
        }
    }
}

impl fmt::Debug for RouteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouteOptions")
            .field("name", &self.name)
            .field("key", &self.key)
            .field("methods", &self.methods)
            .field("policy", &self.policy)
            .field("fingerprint", &self.fingerprint.name())
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

/// Policy of a route: a scope, and options that do not contradict each other.
#[derive(Clone, Debug)]
pub struct RoutePolicy {
    pub(super) scope: ScopeSource,
    pub(super) options: RouteOptions,
    /// True once a key whose request is not protected was logged.
    pub(super) key_ignored: Arc<AtomicBool>,
}

impl RoutePolicy {
    /// Returns the policy, if its options do not contradict each other.
    ///
    /// # Errors
    /// [`RouteError`] names options that contradict each other.
    pub fn new(scope: ScopeSource, options: RouteOptions) -> Result<Self, RouteError> {
        options.policy.check()?;
        let reexecute = options.policy.terms.on_unknown == OnUnknown::Reexecute;
        if !reexecute && options.store_outage == StoreOutage::Open {
            return Err(RouteError::OpenWithoutReexecute);
        }
        match (&options.reconcile, options.policy.hook) {
            (Some(_), None) => return Err(RouteError::NoHookTiming),
            (None, Some(HookTiming { .. })) => return Err(RouteError::NoReconcile),
            _ => {}
        }
        if options.max_response_body > RouteOptions::MAX_RESPONSE_BODY {
            return Err(RouteError::LargeResponses);
        }
        if let Some(TransactionBackend { terms, .. }) = &options.transactions {
            if options.store_outage == StoreOutage::Open {
                return Err(RouteError::OpenTransactions);
            }
            if options.key == KeyRule::Optional {
                return Err(RouteError::KeylessTransactions);
            }
            terms.check()?;
        }
        if options.methods.is_empty() {
            return Err(RouteError::NoMethods);
        }
        let name = &options.key_header;
        if scope.names().contains(name) || !header::may_have_key(name) {
            return Err(RouteError::KeyHeader);
        }
        options.statuses.check()?;
        Ok(Self { scope, options, key_ignored: Arc::default() })
    }

    /// Returns the route's options.
    #[must_use]
    pub const fn options(&self) -> &RouteOptions {
        &self.options
    }

    /// Returns the hashes by which descriptions of requests name the hook ([`Idempotency::pseudonyms`]): none without a
    /// name, or if the store seals nothing, where nothing is described.
    #[must_use]
    pub fn hook_hashes(&self, engine: &Idempotency) -> Vec<String> {
        let name = self.options.hook_name.as_ref();
        name.map(|name| engine.pseudonyms(name.as_bytes())).unwrap_or_default()
    }
}

/// Errors of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// The engine's part of the policy is not valid.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// *Open* executes without a record, while *block* and *reconcile* promise that nothing
    /// executes a second time without a decision.
    #[error(
        "`open` executes without a record, which breaks the promise of `block` and `reconcile`: \
         set `reexecute`, or `closed`"
    )]
    OpenWithoutReexecute,
    /// There is a hook without timing.
    #[error("there is a reconcile hook without timing: set `policy.hook`")]
    NoHookTiming,
    /// There is timing without a hook.
    #[error("`policy.hook` has the timing of a hook, but there is no hook: set `reconcile`")]
    NoReconcile,
    /// The limit exceeds the size of a record.
    #[error("a record stores at most 63 MiB of a response: set a smaller `max_response_body`")]
    LargeResponses,
    /// A transaction commits with a record, and *open* executes without one.
    #[error(
        "`open` executes without a record, and transactions commit with one: set `closed`, or no \
         transactions"
    )]
    OpenTransactions,
    /// A transaction commits with a record, and a request without a key has none.
    #[error("transactions commit with a record: the route needs `key = required`")]
    KeylessTransactions,
    /// The options of transactions are not valid.
    #[error(transparent)]
    Transactions(#[from] TxOptionsError),
    /// No method is protected.
    #[error("no method is protected: set `methods`")]
    NoMethods,
    /// The header for the key has another meaning.
    #[error(
        "the key header must not be a scope header, nor one that describes the message, its sender \
         or its connection: choose another"
    )]
    KeyHeader,
    /// A status has two classes.
    #[error(transparent)]
    Statuses(#[from] StatusOverlap),
}

/// A request to reconcile an execution with an unknown outcome. Its `Debug` form shows no contents.
#[derive(Clone)]
pub struct ReconcileRequest {
    /// Fence of the execution. A hook that answers *did not happen* must ensure that this fence is
    /// rejected from then on.
    pub fence: FencingToken,
    /// Operation id, as in [`ExecutionHandle::id`](super::ExecutionHandle::id). Two callers may use
    /// the same key, and never have the same operation id: find the operation by this id.
    pub id: OperationId,
    /// Number of the execution within its record, from 1.
    pub attempt: u32,
    /// Key of the operation.
    pub key: Key,
    /// Head of the retry, which has the same fingerprint. Its target is the one that the layer gets:
    /// behind nested routers of axum, the extension `OriginalUri` is what the client sent. Without a retry it is what
    /// [`UnretriedRequest`](super::UnretriedRequest) has.
    pub request: Parts,
}

impl fmt::Debug for ReconcileRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconcileRequest")
            .field("fence", &self.fence)
            .field("key", &self.key)
            .field("method", &self.request.method)
            .finish_non_exhaustive()
    }
}

/// A response that a hook found. Its `Debug` form shows only status and length.
///
/// A `Content-Length` that differs from the body's length makes the verdict *cannot say*. If the
/// retry is gRPC, `grpc-*` headers become trailers, and a response without `grpc-status` is *ok*
/// (0).
pub struct ReconciledResponse {
    /// The response with its whole body.
    pub response: Response<Bytes>,
    /// Its trailers.
    pub trailers: Option<HeaderMap>,
}

impl From<Response<Bytes>> for ReconciledResponse {
    fn from(response: Response<Bytes>) -> Self {
        Self { response, trailers: None }
    }
}

impl fmt::Debug for ReconciledResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes", self.response.status(), self.response.body().len())
    }
}

/// Hook that finds out whether an execution happened. Asynchronous functions of a
/// [`ReconcileRequest`] implement it.
///
/// A call that takes longer than `policy.hook.timeout`, or panics, counts as *cannot say*.
pub trait Reconcile: Send + Sync + 'static {
    /// Returns the verdict.
    fn reconcile(
        &self,
        request: ReconcileRequest,
    ) -> BoxFuture<'static, Verdict<ReconciledResponse>>;
}

impl<F, A> Reconcile for F
where
    F: Fn(ReconcileRequest) -> A + Send + Sync + 'static,
    A: Future<Output = Verdict<ReconciledResponse>> + Send + 'static,
{
    fn reconcile(
        &self,
        request: ReconcileRequest,
    ) -> BoxFuture<'static, Verdict<ReconciledResponse>> {
        Box::pin(self(request))
    }
}

/// Time after which a client should retry, if none is computed.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

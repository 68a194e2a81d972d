//! What holds for a route.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::{HookTiming, Verdict};
use hapax_core::store::BoxFuture;
use hapax_core::{FencingToken, Key, OnUnknown, OperationId, Policy, PolicyError};
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Response, Uri};

use super::scope::ScopeSource;
use super::transaction::{TransactionBackend, TxOptionsError};
use crate::classify::{OutcomeClass, Profile};
use crate::fingerprint::HttpFingerprintScheme;
use crate::header::{self, Grammar, IDEMPOTENCY_KEY};
use crate::statuses::{StatusLists, StatusOverlap};
use crate::stored_response::Cookies;

/// Whether a protected request needs a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KeyRule {
    /// Without one it passes through, untouched and unprotected.
    #[default]
    Optional,
    /// Without one it is refused: 400 `missing-key`.
    Required,
}

/// What becomes of a request while the store is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StoreOutage {
    /// It is refused: 503 `store-unavailable`.
    #[default]
    Closed,
    /// It executes unprotected, and the answer says `Idempotency-Protected: false`. Refused together
    /// with [`OnUnknown::Block`], the default.
    Open,
}

/// What the client gets when the store goes away between execution and completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CompletionOutage {
    /// The answer, with `Idempotency-Recorded: pending`; copies that are answered before the store
    /// has it say so too.
    #[default]
    Deliver,
    /// 503 `outcome-pending`, and so for copies: an answer that could be forgotten is not given.
    Withhold,
}

/// Finds a request's target in its head.
pub type TargetFn = dyn Fn(&Parts) -> Uri + Send + Sync;

/// Finds a class in a response's head.
pub type ClassifyFn = dyn Fn(&http::response::Parts) -> Option<OutcomeClass> + Send + Sync;

/// The options of a route. Start from `RouteOptions::default()`.
#[derive(Clone)]
pub struct RouteOptions {
    /// The route's name in metrics; of a fixed set, since each is a label. Default: empty.
    pub name: Arc<str>,
    /// Whether a key is needed. Default: optional.
    pub key: KeyRule,
    /// Which header has the key, alone. Default: `Idempotency-Key`.
    pub key_header: HeaderName,
    /// Which values are keys. Default: lenient.
    pub grammar: Grammar,
    /// Protected methods; requests with others pass through. Default: POST and PATCH.
    pub methods: Vec<Method>,
    /// Lease, retention, unknown outcomes, copies in flight.
    pub policy: Policy,
    /// Who is asked under [`OnUnknown::Reconcile`]; when is said by `policy.hook`.
    pub reconcile: Option<Arc<dyn Reconcile>>,
    /// What of a request counts when it is compared with a retry.
    pub fingerprint: HttpFingerprintScheme,
    /// The request's target as clients know it, where the layer sees a shortened one: inside of a
    /// router that strips a prefix. Default: the request's own.
    pub target: Option<Arc<TargetFn>>,
    /// What a status means. Default: standard.
    pub profile: Profile,
    /// Statuses of which the route says itself what they mean. Default: none.
    pub statuses: StatusLists,
    /// What a response means, where its status does not say it; `None` leaves it to the lists and the
    /// profile.
    pub classify: Option<Arc<ClassifyFn>>,
    /// Whether `Set-Cookie` is kept and replayed. Default: it is not.
    pub cookies: Cookies,
    /// Responses are streamed, not kept: a key is final at the headers. Default: only for
    /// `text/event-stream`.
    pub stream: bool,
    /// Whether answers of what is final, and replays, say in `Idempotency-Expires` from when on
    /// the key may be used anew. Default: they do not.
    pub expires: bool,
    /// The largest body of a request with a key, in bytes. Default: 1 MiB.
    pub max_request_body: usize,
    /// The largest body of a response that is kept, in bytes. Default: 1 MiB; at most
    /// [`RouteOptions::MAX_RESPONSE_BODY`].
    pub max_response_body: usize,
    /// How many keys of one caller may be in flight in this process, under all routes of this name
    /// together; a further one gets 429 `too-many-in-flight`. Default: any number.
    pub max_in_flight_per_scope: Option<NonZeroU32>,
    /// Where handlers find transactions that commit with their responses: see
    /// [`transaction`](super::transaction). Default: nowhere. `policy.terms.on_unknown` is best
    /// [`OnUnknown::Reexecute`] with them: what died in the middle was rolled back.
    pub transactions: Option<TransactionBackend>,
    /// What becomes of a request while the store is away. Default: refused.
    pub store_outage: StoreOutage,
    /// What the client gets when the store goes away in between. Default: the answer.
    pub completion_outage: CompletionOutage,
}

impl RouteOptions {
    /// The largest response body that fits into a record together with a head, in bytes.
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

/// What holds for a route: a scope, and options that go together.
#[derive(Clone, Debug)]
pub struct RoutePolicy {
    pub(super) scope: ScopeSource,
    pub(super) options: RouteOptions,
}

impl RoutePolicy {
    /// Checks that the options go together.
    ///
    /// # Errors
    /// [`RouteError`] says what would break a promise in production.
    pub fn new(scope: ScopeSource, options: RouteOptions) -> Result<Self, RouteError> {
        options.policy.check()?;
        let reexecute = options.policy.terms.on_unknown == OnUnknown::Reexecute;
        if !reexecute && options.store_outage == StoreOutage::Open {
            return Err(RouteError::OpenWithoutReexecute);
        }
        match (&options.reconcile, options.policy.hook) {
            (Some(_), None) => return Err(RouteError::NoHookTimes),
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
        Ok(Self { scope, options })
    }

    /// The route's options.
    #[must_use]
    pub const fn options(&self) -> &RouteOptions {
        &self.options
    }
}

/// Options that do not go together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// The engine's part of the policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// *Open* executes without a record; *block* and *reconcile* promise that nothing executes a
    /// second time unasked.
    #[error(
        "`open` executes without a record, which breaks the promise of `block` and `reconcile`: \
         set `reexecute`, or `closed`"
    )]
    OpenWithoutReexecute,
    /// There is somebody to ask, but not when.
    #[error("a reconcile hook needs `policy.hook`: when it may be asked, and for how long")]
    NoHookTimes,
    /// There are times to ask at, but nobody to ask.
    #[error("`policy.hook` needs a reconcile hook to ask")]
    NoReconcile,
    /// Larger than a record may be.
    #[error("responses above 63 MiB cannot be kept")]
    LargeResponses,
    /// Without a record there is nothing for a transaction to commit with.
    #[error("`open` executes without a record, and transactions commit with one")]
    OpenTransactions,
    /// Likewise.
    #[error("transactions commit with a record: the route needs `key = required`")]
    KeylessTransactions,
    /// The terms of transactions.
    #[error(transparent)]
    Transactions(#[from] TxOptionsError),
    /// Nothing would be protected.
    #[error("no method is protected")]
    NoMethods,
    /// The header of the key means something else.
    #[error(
        "the key header cannot be a scope header, nor one that describes the message, its sender or \
         its connection"
    )]
    KeyHeader,
    /// A status with two meanings.
    #[error(transparent)]
    Statuses(#[from] StatusOverlap),
}

/// An execution that nobody knows the outcome of. Its `Debug` form shows nothing that was sent.
#[derive(Clone)]
pub struct ReconcileRequest {
    /// Its fencing token. Whoever answers *did not happen* must see to it that this fence is
    /// refused from then on.
    pub fence: FencingToken,
    /// Its operation id, as [`Execution::id`](super::ExecutionHandle::id) gave it. Two callers may have the
    /// same key, and never the same operation id: look the operation up by this.
    pub id: OperationId,
    /// Which execution of the record it is, from 1.
    pub attempt: u32,
    /// The key it had.
    pub key: Key,
    /// The head of the retry; it has the same fingerprint.
    pub request: Parts,
}

impl fmt::Debug for ReconcileRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doubt")
            .field("fence", &self.fence)
            .field("key", &self.key)
            .field("method", &self.request.method)
            .finish_non_exhaustive()
    }
}

/// A response that a hook found. Its `Debug` form shows only status and length.
///
/// A `Content-Length` that differs from the body's length makes the verdict *cannot say*. If the
/// retry is gRPC, `grpc-*` headers become trailers, and a response without `grpc-status` is *ok* (0).
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

/// Who is asked what became of an execution. Asynchronous functions of a [`ReconcileRequest`] are.
///
/// An answer that takes longer than `policy.hook.timeout`, or a panic, is *cannot say*.
pub trait Reconcile: Send + Sync + 'static {
    /// Finds out.
    fn reconcile(&self, doubt: ReconcileRequest)
    -> BoxFuture<'static, Verdict<ReconciledResponse>>;
}

impl<F, A> Reconcile for F
where
    F: Fn(ReconcileRequest) -> A + Send + Sync + 'static,
    A: Future<Output = Verdict<ReconciledResponse>> + Send + 'static,
{
    fn reconcile(
        &self,
        doubt: ReconcileRequest,
    ) -> BoxFuture<'static, Verdict<ReconciledResponse>> {
        Box::pin(self(doubt))
    }
}

/// How long a client should wait before it comes again where nothing better is known.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

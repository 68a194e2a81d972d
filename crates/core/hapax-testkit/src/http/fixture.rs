//! The interface between the scenarios and the crate that hosts them.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{InFlight, Namespace, OnUnknown};
use hapax_http::classify::Profile;
use hapax_http::fingerprint::HttpFingerprintScheme;
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY};
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, ScopePart, StoreOutage};
use hapax_http::statuses::StatusLists;
use hapax_http::stored_response::Cookies;
use http::header::AUTHORIZATION;
use http::{HeaderName, Method};

use crate::http::handler::Handler;

/// A factory of instances under test. All instances of one fixture share one store, which outlives
/// them. A service whose routers can be nested mounts one, which strips its prefix, at
/// `/mounted/payments` and at `/mounted/refunds`.
pub trait HttpFixture: Send + Sync {
    /// Returns whether the store has a secret.
    fn has_secret(&self) -> bool;

    /// Starts a process that protects `handler` under `policy`. If the process rejects the policy,
    /// the error is its message.
    fn start(&self, policy: ScenarioPolicy, handler: Handler) -> Starting<'_>;
}

/// Future of an instance that starts.
pub type Starting<'a> = BoxFuture<'a, Result<Box<dyn Instance>, String>>;

/// A process, or its replacement within the test. Dropping it ends it at once.
pub trait Instance: Send + Sync {
    /// Returns the address for clients, for HTTP/1.1 and for HTTP/2 with prior knowledge.
    fn address(&self) -> SocketAddr;

    /// Begins to drain, with the policy's grace; the future resolves when the drain has ended.
    fn drain(&self) -> BoxFuture<'static, ()>;

    /// Ends the instance as a crash does: it writes and answers nothing more. For the group
    /// `crashes`.
    fn kill(&self) -> BoxFuture<'_, ()>;

    /// Returns its connection to the store. For the group `outages`.
    fn link(&self) -> Option<&dyn StoreLink>;

    /// Begins a quarantine of all operations of its namespace, as an operator does; the future resolves once the instance
    /// applies it. For the group `quarantines`; the default is none.
    fn quarantine(&self) -> Option<BoxFuture<'_, ()>> {
        None
    }
}

/// The connection from an instance to its store.
pub trait StoreLink: Send + Sync {
    /// Makes the store unreachable from now on.
    fn cut(&self) -> BoxFuture<'_, ()>;

    /// Makes the store reachable again.
    fn mend(&self) -> BoxFuture<'_, ()>;
}

/// Configuration that a scenario needs. Start from `ScenarioPolicy::default()`: it has the defaults
/// of the contract, but short times.
#[derive(Clone)]
pub struct ScenarioPolicy {
    /// Namespace; `None` for one that no other scenario uses.
    pub namespace: Option<Namespace>,
    /// Whether protected methods need a key.
    pub key: KeyRule,
    /// Header that has the key.
    pub key_header: HeaderName,
    /// Grammar of keys.
    pub grammar: Grammar,
    /// Protected methods.
    pub methods: Vec<Method>,
    /// Source of the scope.
    pub callers: ScenarioScope,
    /// Parts of a request that count for the fingerprint.
    pub fingerprint: HttpFingerprintScheme,
    /// Duration of a lease without renewal.
    pub lease: Duration,
    /// Time for which an outcome is replayed.
    pub retention: Duration,
    /// Rule for duplicates of a request in flight.
    pub in_flight: InFlight,
    /// Limit of waiters for one key.
    pub waiters_per_key: usize,
    /// Rule for a retry of an unknown outcome.
    pub on_unknown: OnUnknown,
    /// Hook under [`OnUnknown::Reconcile`].
    pub hook: Option<Hook>,
    /// Interval at which the hook is called without a retry; zero for never. For the group `unretried`.
    pub reconcile_every: Duration,
    /// Profile, which maps statuses to outcome classes.
    pub profile: Profile,
    /// Statuses that the profile does not decide.
    pub statuses: StatusLists,
    /// Whether `Set-Cookie` is replayed.
    pub cookies: Cookies,
    /// True if every response is streamed and none is stored.
    pub stream: bool,
    /// True if responses have `Idempotency-Expires`, the time from which the key can be used anew.
    pub expires: bool,
    /// The largest body of a request with a key, in bytes.
    pub max_request_body: usize,
    /// The largest body of a response that is stored, in bytes.
    pub max_response_body: usize,
    /// Rule for requests while the store is unavailable.
    pub store_outage: StoreOutage,
    /// Rule for an outage that begins during an execution.
    pub completion_outage: CompletionOutage,
    /// Time without an answer after which the store counts as unavailable.
    pub store_timeout: Duration,
    /// URL of the documentation of rejections.
    pub docs: Option<&'static str>,
    /// The one origin whose pages may read rejections, with credentials.
    pub cors: Option<&'static str>,
    /// Time that a drain waits for requests in progress.
    pub grace: Duration,
}

/// Source of the scope.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScenarioScope {
    /// One scope for all callers.
    Shared,
    /// The values of these parts of a request.
    Parts(Vec<ScopePart>, MissingScope),
}

impl Default for ScenarioPolicy {
    fn default() -> Self {
        Self {
            namespace: None,
            key: KeyRule::Optional,
            key_header: IDEMPOTENCY_KEY,
            grammar: Grammar::Lenient,
            methods: vec![Method::POST, Method::PATCH],
            callers: ScenarioScope::Parts(vec![AUTHORIZATION.into()], MissingScope::Reject),
            fingerprint: HttpFingerprintScheme::default(),
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(3600),
            in_flight: InFlight::Reject,
            waiters_per_key: 100,
            on_unknown: OnUnknown::default(),
            hook: None,
            reconcile_every: Duration::ZERO,
            profile: Profile::Standard,
            statuses: StatusLists::default(),
            cookies: Cookies::Drop,
            stream: false,
            expires: false,
            max_request_body: 1 << 20,
            max_response_body: 1 << 20,
            store_outage: StoreOutage::Closed,
            completion_outage: CompletionOutage::Deliver,
            store_timeout: Duration::from_secs(10),
            docs: None,
            cors: None,
            grace: Duration::from_secs(10),
        }
    }
}

impl fmt::Debug for ScenarioPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy").field("lease", &self.lease).finish_non_exhaustive()
    }
}

/// A hook that decides whether the execution of a key under a fence happened.
#[derive(Clone)]
pub struct Hook(Arc<HookFn>);

type HookFn = dyn Fn(&HookRequest<'_>) -> HookVerdict + Send + Sync;

/// A request to a hook.
#[derive(Clone, Copy, Debug)]
pub struct HookRequest<'a> {
    /// The key, decoded.
    pub key: &'a str,
    /// The fence of the execution whose outcome is unknown.
    pub fence: u64,
    /// The number of this execution, from 1.
    pub attempt: u32,
    /// The operation id.
    pub operation: &'a str,
}

/// Verdict on an execution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HookVerdict {
    /// The operation happened, with this status and text as the response.
    Happened(u16, &'static str),
    /// The operation did not happen and never will.
    DidNotHappen,
    /// The hook cannot find out yet.
    CannotSay,
}

impl Hook {
    /// Returns a hook that calls this function with a decoded key and a fence.
    pub fn new(hook: impl Fn(&str, u64) -> HookVerdict + Send + Sync + 'static) -> Self {
        Self::of_request(move |asked| hook(asked.key, asked.fence))
    }

    /// Returns a hook that calls this function with the whole request.
    pub fn of_request(
        hook: impl Fn(&HookRequest<'_>) -> HookVerdict + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(hook))
    }

    /// Calls the hook.
    #[must_use]
    pub fn ask(&self, asked: &HookRequest<'_>) -> HookVerdict {
        (self.0)(asked)
    }
}

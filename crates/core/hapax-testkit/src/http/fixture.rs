//! What a host of the scenarios provides.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{InFlight, OnUnknown};
use hapax_http::classify::Profile;
use hapax_http::fingerprint::HttpFingerprintScheme;
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY};
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, StoreOutage};
use hapax_http::statuses::StatusLists;
use hapax_http::stored_response::Cookies;
use http::header::AUTHORIZATION;
use http::{HeaderName, Method};

use crate::http::handler::Handler;

/// Whoever starts what is tested. All instances of one fixture share one store, which outlives
/// them.
pub trait HttpFixture: Send + Sync {
    /// Starts a process that protects `handler` as `policy` says; the error of one that refuses
    /// to start is what it says.
    fn start(&self, policy: ScenarioPolicy, handler: Handler) -> Starting<'_>;
}

/// An instance to be.
pub type Starting<'a> = BoxFuture<'a, Result<Box<dyn Instance>, String>>;

/// A process, or what stands for one. Dropping it ends it at once.
pub trait Instance: Send + Sync {
    /// Where clients connect, in HTTP/1.1 or in HTTP/2 with prior knowledge.
    fn address(&self) -> SocketAddr;

    /// Begins to drain, with the policy's grace; the future resolves when it has ended.
    fn drain(&self) -> BoxFuture<'static, ()>;

    /// Ends it as a crash does: nothing more is written or answered. For the group `crashes`.
    fn kill(&self) -> BoxFuture<'_, ()>;

    /// Its connection to the store. For the group `outages`.
    fn link(&self) -> Option<&dyn StoreLink>;
}

/// The way from an instance to its store.
pub trait StoreLink: Send + Sync {
    /// The store cannot be reached from now on.
    fn cut(&self) -> BoxFuture<'_, ()>;

    /// It can be reached again.
    fn mend(&self) -> BoxFuture<'_, ()>;
}

/// What a scenario needs to be configured. Start from `ScenarioPolicy::default()`, which is what the
/// contract says holds where nothing is said, but for short times.
#[derive(Clone)]
pub struct ScenarioPolicy {
    /// Whether protected methods need a key.
    pub key: KeyRule,
    /// Which header has the key.
    pub key_header: HeaderName,
    /// Which values are keys.
    pub grammar: Grammar,
    /// Protected methods.
    pub methods: Vec<Method>,
    /// Whose key it is.
    pub callers: ScenarioScope,
    /// What of a request counts.
    pub fingerprint: HttpFingerprintScheme,
    /// How long a lease lasts without renewal.
    pub lease: Duration,
    /// How long an outcome is replayed.
    pub retention: Duration,
    /// Copies of a request in flight.
    pub in_flight: InFlight,
    /// How many copies of one key may wait.
    pub waiters_per_key: usize,
    /// A retry of what is unknown.
    pub on_unknown: OnUnknown,
    /// Who is asked under [`OnUnknown::Reconcile`].
    pub hook: Option<Hook>,
    /// What a status means.
    pub profile: Profile,
    /// Statuses that the profile does not decide.
    pub statuses: StatusLists,
    /// Whether `Set-Cookie` is replayed.
    pub cookies: Cookies,
    /// Whether every response is streamed, and none kept.
    pub stream: bool,
    /// Whether answers say in `Idempotency-Expires` when the key may be used anew.
    pub expires: bool,
    /// The largest body of a request with a key, in bytes.
    pub max_request_body: usize,
    /// The largest body of a response that is kept, in bytes.
    pub max_response_body: usize,
    /// While the store is away.
    pub store_outage: StoreOutage,
    /// When the store goes away in between.
    pub completion_outage: CompletionOutage,
    /// How long the store may be silent before it counts as away.
    pub store_timeout: Duration,
    /// Where refusals are documented.
    pub docs: Option<&'static str>,
    /// The one origin whose pages may read refusals, with credentials.
    pub cors: Option<&'static str>,
    /// How long a drain waits for work in hand.
    pub grace: Duration,
}

/// Whose key it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScenarioScope {
    /// Everybody's.
    Shared,
    /// The values of these headers say it.
    Headers(Vec<HeaderName>, MissingScope),
}

impl Default for ScenarioPolicy {
    fn default() -> Self {
        Self {
            key: KeyRule::Optional,
            key_header: IDEMPOTENCY_KEY,
            grammar: Grammar::Lenient,
            methods: vec![Method::POST, Method::PATCH],
            callers: ScenarioScope::Headers(vec![AUTHORIZATION], MissingScope::Reject),
            fingerprint: HttpFingerprintScheme::default(),
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(3600),
            in_flight: InFlight::Reject,
            waiters_per_key: 100,
            on_unknown: OnUnknown::default(),
            hook: None,
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

/// Says what became of the execution of a key under a fence.
#[derive(Clone)]
pub struct Hook(Arc<HookFn>);

type HookFn = dyn Fn(&HookRequest<'_>) -> HookVerdict + Send + Sync;

/// A question to a hook.
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

/// What became of an execution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HookVerdict {
    /// It happened, and was answered with this status and text.
    Happened(u16, &'static str),
    /// It did not happen and never will.
    DidNotHappen,
    /// Nobody can say yet.
    CannotSay,
}

impl Hook {
    /// Of this function of a decoded key and a fence.
    pub fn new(hook: impl Fn(&str, u64) -> HookVerdict + Send + Sync + 'static) -> Self {
        Self::of_request(move |asked| hook(asked.key, asked.fence))
    }

    /// A hook that sees the whole request.
    pub fn of_request(
        hook: impl Fn(&HookRequest<'_>) -> HookVerdict + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(hook))
    }

    /// Asks.
    #[must_use]
    pub fn ask(&self, asked: &HookRequest<'_>) -> HookVerdict {
        (self.0)(asked)
    }
}

//! The operators' API of Hapax: list, show, release and resolve idempotency keys over HTTP, and decide
//! about stuck sagas.
//!
//! The gateway serves it on its admin listener. A service that keeps its records itself, with the
//! layer of [`hapax_http`] or the engine of [`hapax_core`], mounts the same API, so that `hapax keys`
//! works on its store as well.
//!
//! 1. [`Operators::router`] is an [`axum::Router`]; every path in it needs the [`AdminToken`].
//! 2. The token is made as a file that only its owner can read. `hapax keys` finds it beside a file
//!    store and in the working directory.
//! 3. If the store is a file, its lock file contains the address of the API
//!    (`FileStore::set_admin`), where `hapax keys` finds it.
//! 4. Every decision has a reason. It is kept in the record, and in a file that is only appended to
//!    ([`Audit`]).
//! 5. [`OperatorRecords`] and [`OperatorSagas`] provide the same operations without HTTP, for programs
//!    that open a store themselves.
//!
//! It is not meant for the public network: it has no TLS and one token.
//!
//! ```
//! use std::sync::Arc;
//!
//! use hapax_core::{Idempotency, Inspect, MemoryCapacity, MemoryStore, Store, SystemClock, SystemEntropy};
//! use hapax_operators::{AdminToken, Audit, Operators};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = std::env::temp_dir().join(format!("hapax-operators-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # let path = folder.join("token");
//! let store = Arc::new(MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default()));
//! let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build()?;
//! let token = AdminToken::read_or_make(&path, &SystemEntropy)?;
//! let audit = Audit::new(folder.join("audit.jsonl"), "payments");
//! let operators = Operators::builder(engine, store as Arc<dyn Inspect>).build(token, audit);
//! let app: axum::Router = operators.router();
//! # drop(app);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok(()) }
//! ```

mod access;
mod api;
mod audit;
mod census;
mod keys;
mod log_file;
mod register;
mod sagas;
mod supervise;
mod token;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::header::AUTHORIZATION;
use axum::middleware::from_fn_with_state;
use hapax_core::{Idempotency, Inspect};
use hapax_http::server::ScopePart;
use serde_json::Value;

pub use api::{AccessHashes, NO_CALLERS, NO_HASHES, PeerAddr, QuarantineRequest, answer, error};
pub use audit::{Audit, Decider, DecisionChannel, DecisionNote, ReconcileDecision, StoreDecision};
pub use census::{Census, Undecided};
pub use keys::{
    CallerView, Decision, FindQuery, FoundRecords, ListQuery, OperationDescription, OperatorError,
    OperatorRecords, OperatorVerdict, RecordBefore, RecordList, RecordView, ResponseView,
    StateView, UndecidedGroup, UndecidedGroups, UndecidedPage, is_id_prefix, rfc3339,
};
pub use log_file::open_log;
pub use register::{
    ConsumerNaming, DifferenceSubject, MAX_QUARANTINE_DURATION, QuarantineError, QuarantineStart,
    QuarantineView, RegisterError, RegisteredUser, RouteNaming, StoreRegister, StoreUser,
    UserDifference,
};
pub use sagas::{
    DefinitionList, DefinitionView, OperatorSagas, SagaAction, SagaBefore, SagaDecisionRequest,
    SagaDecisionView, SagaDetails, SagaId, SagaList, SagaQuery, SagaStateView, SagaStepView,
    SagaSummary, StepOutcomeView, StuckView, TriesView, parse_write_id,
};
pub use supervise::{Panic, caught, supervised};
pub use token::{
    AdminToken, TokenError, is_key_open_to_others, is_open_to_others, open_secret_file,
};

/// The largest body of a request: a response of a mebibyte as base64 in JSON.
const MAX_BODY: usize = 2 << 20;

type ScopeParts = Arc<dyn Fn() -> Vec<Vec<ScopePart>> + Send + Sync>;
type Stats = Arc<dyn Fn() -> Value + Send + Sync>;

/// The operators' API on one store.
#[derive(Clone, Debug)]
pub struct Operators(Arc<OperatorsState>);

/// Settings of [`Operators`].
#[must_use = "`build` makes the API"]
pub struct OperatorsBuilder {
    engine: Idempotency,
    store: Arc<dyn Inspect>,
    store_timeout: Duration,
    scope_parts: ScopeParts,
    stats: Option<Stats>,
    census: Arc<Census>,
    user: Option<RegisteredUser>,
}

/// State of the handlers.
pub(crate) struct OperatorsState {
    pub(crate) keys: OperatorRecords,
    pub(crate) sagas: OperatorSagas,
    pub(crate) token: AdminToken,
    pub(crate) scope_parts: ScopeParts,
    pub(crate) stats: Stats,
    pub(crate) census: Arc<Census>,
    pub(crate) user: Option<RegisteredUser>,
}

impl fmt::Debug for OperatorsState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl fmt::Debug for OperatorsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorsBuilder").field("store", &self.store).finish_non_exhaustive()
    }
}

impl Operators {
    /// Returns the entry of this process in the register of its store; `None` if it has none.
    #[must_use]
    pub fn user(&self) -> Option<&RegisteredUser> {
        self.0.user.as_ref()
    }

    /// Creates a builder of the API for `store`, which must be the store of `engine`.
    pub fn builder(engine: Idempotency, store: Arc<dyn Inspect>) -> OperatorsBuilder {
        OperatorsBuilder {
            engine,
            store,
            store_timeout: Duration::from_secs(2),
            scope_parts: Arc::new(|| vec![vec![AUTHORIZATION.into()]]),
            stats: None,
            census: Arc::default(),
            user: None,
        }
    }

    /// Returns the routes of the API, below `/api`.
    pub fn router(&self) -> Router {
        self.guarded(api::routes().with_state(Arc::clone(&self.0)))
    }

    /// Returns `router` with the token required on every path.
    pub fn guarded(&self, router: Router) -> Router {
        router
            .layer(from_fn_with_state(Arc::clone(&self.0), access::guard))
            .layer(DefaultBodyLimit::max(MAX_BODY))
    }

    /// Returns the paths of the API: method, path, purpose.
    #[must_use]
    pub const fn index() -> &'static [(&'static str, &'static str, &'static str)] {
        &api::INDEX
    }

    /// Returns the census of records that wait for a decision.
    #[must_use]
    pub fn census(&self) -> &Census {
        &self.0.census
    }

    /// Returns the operations on records.
    #[must_use]
    pub fn keys(&self) -> &OperatorRecords {
        &self.0.keys
    }
}

impl OperatorsBuilder {
    /// Sets the time after which the store counts as unreachable. Default 2 s.
    pub const fn store_timeout(mut self, timeout: Duration) -> Self {
        self.store_timeout = timeout;
        self
    }

    /// Sets the parts of a request that name its caller: one list for each way in which a route names callers. A
    /// look-up by key tries all lists. Default: `Authorization` alone.
    pub fn scope_parts(
        mut self,
        parts: impl Fn() -> Vec<Vec<ScopePart>> + Send + Sync + 'static,
    ) -> Self {
        self.scope_parts = Arc::new(parts);
        self
    }

    /// Sets the JSON that `/api/stats` answers. Default: the engine's counts.
    pub fn stats(mut self, stats: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        self.stats = Some(Arc::new(stats));
        self
    }

    /// Sets the census whose [watched](Census::watch) store the engine uses. Default: a census
    /// without a watched store, which sees records only in its walks.
    pub fn census(mut self, census: Arc<Census>) -> Self {
        self.census = census;
        self
    }

    /// Sets the entry of this process in the register of the store, by which the API begins and ends quarantines.
    /// Default: none, and those paths answer 501.
    pub fn user(mut self, user: RegisteredUser) -> Self {
        self.user = Some(user);
        self
    }

    /// Builds the API, which requires `token`. Decisions are appended to `audit`. A task starts
    /// that walks through the store in the background, until the API is dropped.
    #[must_use]
    pub fn build(self, token: AdminToken, audit: Audit) -> Operators {
        let Self { engine, store, store_timeout, scope_parts, stats, census, user } = self;
        let (walking, walked) = (Arc::downgrade(&census), Arc::clone(&store));
        tokio::spawn(async move {
            let walk = || Census::run(Weak::clone(&walking), Arc::clone(&walked));
            supervised("the walk of the census", walk).await;
        });
        let keys = OperatorRecords::new(engine.clone(), store, audit, store_timeout);
        let sagas = OperatorSagas::new(engine.clone(), Arc::clone(keys.audit()), store_timeout);
        let stats =
            stats.unwrap_or_else(|| Arc::new(move || serde_json::json!({ "now": now(&engine) })));
        Operators(Arc::new(OperatorsState { keys, sagas, token, scope_parts, stats, census, user }))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns the counts of an engine as JSON.
#[must_use]
pub fn now(engine: &Idempotency) -> Value {
    let stats = engine.stats();
    serde_json::json!({
        "in_flight": stats.in_flight,
        "waiting": stats.waiting,
        "held_back": stats.deferred,
        "held_back_bytes": stats.deferred_bytes,
    })
}

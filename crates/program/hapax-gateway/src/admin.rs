//! Operators' listener.
//!
//! 1. `/healthz`, `/readyz` and `/metrics` need no token.
//! 2. The API, and the list of paths at `/`, need the token, on loopback too: otherwise any local
//!    user could act as an operator.

mod backup;
mod listener;
mod reconcile;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS,
};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hapax_core::{Quarantine, StoreError};
use hapax_operators::{
    Decider, OperatorError, Operators, PeerAddr, StoreDecision, UserDifference, answer, error,
};
use hapax_proxy::{Shutdown, ShutdownPhase};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::metrics::{Gauges, Metrics};
use crate::reconcile::UnretriedReconciler;
use crate::store::OpenStore;

/// Paths besides the API: method, path, purpose.
const PROBES: [(&str, &str, &str); 3] = [
    ("GET", "/healthz", "whether this process answers"),
    ("GET", "/readyz", "whether its store answers and it is not draining"),
    ("GET", "/metrics", "for Prometheus"),
];

/// Paths of the store: method, path, purpose.
const STORE: [(&str, &str, &str); 2] = [
    (
        "GET",
        "/api/store",
        "whether the store was emptied or replaced, and no operator confirmed it",
    ),
    (
        "POST",
        "/api/store/confirm",
        r#"{"confirm": true, "reason": "…"}: the store was emptied or replaced on purpose, and new keys may execute"#,
    ),
];

/// State of the admin listener.
#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) engine: hapax_core::Idempotency,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) shutdown: Shutdown,
    /// The store and its counters.
    pub(crate) opened: OpenStore,
    /// Whether the last call of the store succeeded.
    pub(crate) store_up: AtomicBool,
    pub(crate) reconciler: Arc<UnretriedReconciler>,
    pub(crate) ended: EndedTask,
}

/// A task that has ended by a panic, and without which no request is served.
pub(crate) type EndedTask = Arc<OnceLock<&'static str>>;

/// The running admin listener, from the start of the gateway on.
///
/// Until [`open`](Self::open) it answers probes only: the process runs and is not ready.
#[derive(Debug)]
pub(crate) struct AdminServer {
    task: JoinHandle<()>,
    app: watch::Sender<Router>,
}

impl AdminServer {
    /// Accepts connections until `shutdown` closes. The caller aborts the task, or awaits it.
    pub(crate) fn begin(listener: TcpListener, shutdown: Shutdown) -> Self {
        let (app, current) = watch::channel(before_the_store());
        Self { task: tokio::spawn(listener::serve(listener, current, shutdown)), app }
    }

    /// Serves all paths from the next request on, on open connections as well.
    pub(crate) fn open(self, admin: Arc<Admin>, operators: &Operators) -> JoinHandle<()> {
        drop(self.app.send_replace(app(admin, operators)));
        self.task
    }

    pub(crate) fn abort(&self) {
        self.task.abort();
    }
}

/// Returns the routes while the store is not open yet.
fn before_the_store() -> Router {
    let away = (StatusCode::SERVICE_UNAVAILABLE, "the store was not reached yet\n");
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .fallback(move || async move { away })
        .layer(map_response(async |response: Response| secured(response)))
}

/// Returns the routes of a gateway with an open store.
fn app(admin: Arc<Admin>, operators: &Operators) -> Router {
    let guarded = Router::new()
        .route("/", get(|| async { index() }))
        .route(STORE[0].1, get(store))
        .route(STORE[1].1, post(confirm))
        .with_state((Arc::clone(&admin), operators.clone()));
    let guarded = guarded
        .merge(backup::routes(&admin.opened))
        .merge(reconcile::routes(&admin.reconciler, operators));
    let guarded = operators.guarded(guarded);
    let probes = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .layer(map_response(async |response: Response| secured(response)))
        .with_state((admin, operators.clone()));
    guarded.merge(operators.router()).merge(probes)
}

/// Adds the fields that keep a browser from storing or embedding a response.
fn secured(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'"));
    response
}

fn index() -> String {
    let lines = PROBES
        .iter()
        .chain(Operators::index())
        .chain(&STORE)
        .chain([&backup::INDEX, &reconcile::INDEX]);
    lines.fold("hapax gateway\n\n".to_owned(), |text, (method, path, about)| {
        text + &format!("{method:<4} {path:<24} {about}\n")
    })
}

impl Admin {
    /// Returns the JSON of `/api/stats`.
    pub(crate) fn stats(&self) -> Value {
        let mut now = hapax_operators::now(&self.engine);
        now["requests"] = self.shutdown.active_requests().into();
        now["store_up"] = self.store_up.load(Ordering::Relaxed).into();
        json!({ "now": now, "since_start": self.metrics.totals() })
    }
}

/// Returns whether new keys are rejected because the store was emptied or replaced.
async fn store(State((admin, _)): Shared) -> Json<Value> {
    Json(json!({ "replaced": admin.opened.is_replaced() }))
}

/// Body of a confirmation; an empty request confirms nothing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Confirm {
    confirm: bool,
    reason: String,
    #[serde(default)]
    who: Option<String>,
}

/// Accepts an emptied or replaced store. The response contains whether it was one.
async fn confirm(
    State((admin, operators)): Shared,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<Confirm>, JsonRejection>,
) -> Response {
    let bad = |message: &str| error(StatusCode::BAD_REQUEST, "bad-request", message);
    let Confirm { reason, who, .. } = match body {
        Ok(Json(sure @ Confirm { confirm: true, .. })) => sure,
        Ok(Json(_)) => return bad("`confirm` has to be true"),
        Err(rejected) => return bad(&rejected.body_text()),
    };
    let replaced = admin.opened.is_replaced();
    let audit = operators.keys().audit();
    let decider = Decider::by_api(who, peer);
    let opened = admin.opened.clone();
    let confirm = async move {
        opened.confirm().await.map_err(|error| OperatorError::Store(StoreError::unavailable(error)))
    };
    let confirmed = audit.decide(StoreDecision::Confirmed, &reason, decider, confirm).await;
    answer(confirmed.map(|()| json!({ "replaced": replaced })))
}

type Shared = State<(Arc<Admin>, Operators)>;

/// Returns what `/readyz` says in quarantines: the routes only if none of them is of all routes.
fn in_quarantine(quarantines: &[Quarantine]) -> Option<String> {
    let last = |of_route: bool| {
        let these = quarantines.iter().filter(|it| it.route.is_some() == of_route);
        these.map(|it| it.until).max()
    };
    let (until, routes) = match last(false) {
        Some(until) => (until, String::new()),
        None => {
            let names: BTreeSet<_> =
                quarantines.iter().filter_map(|it| it.route.as_deref()).collect();
            let names: Vec<_> = names.into_iter().collect();
            (last(true)?, format!(" on the routes {}", names.join(", ")))
        }
    };
    Some(format!(
        "ready, but in quarantine: keys without a record do not execute until {until}{routes}: see `hapax store quarantine \
         list`\n"
    ))
}

/// Returns the difference from another gateway for which this one executes no key without a record.
fn refused(admin: &Admin, operators: &Operators) -> Option<UserDifference> {
    let difference = operators.user()?.difference()?;
    admin.engine.quarantines().pauses().then_some(difference)
}

async fn ready(State((admin, operators)): Shared) -> Response {
    if admin.shutdown.phase() > ShutdownPhase::Serving {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response();
    }
    if let Some(ended) = admin.ended.get() {
        let text = format!("{ended} has ended by a bug: restart this process\n");
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    let up = operators.keys().store_answers().await;
    admin.store_up.store(up, Ordering::Relaxed);
    if !up {
        (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer\n").into_response()
    } else if admin.opened.is_replaced() {
        // Another gateway would reject the same keys, and requests without keys are still served.
        "ready, but the store was emptied or replaced: see `hapax store confirm`\n".into_response()
    } else if let Some(difference) = refused(&admin, &operators) {
        // Other gateways serve these keys.
        let text = format!("keys without a record do not execute: {difference}\n");
        (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
    } else if let Some(text) = in_quarantine(&admin.engine.quarantines().in_force()) {
        // Another gateway would reject the same keys, and requests without keys are still served.
        text.into_response()
    } else if admin.engine.quarantines().pauses() {
        "ready, but the register of the store was not written, for a reason in the log: check the store (`hapax \
         doctor`); until then keys without a record do not execute\n"
            .into_response()
    } else if !admin.metrics.calls.are_written() {
        // Another gateway could not write either, and requests without keys are still served.
        "ready, but the store did not take what was last written\n".into_response()
    } else if !admin.metrics.jwt_keys_are_up() {
        // Another gateway would use the same URL, and requests without a key are still served.
        "ready, but the keys of bearer tokens (jwt_keys) could not be fetched at the last time\n"
            .into_response()
    } else if admin.metrics.auth_is_up() {
        "ready\n".into_response()
    } else {
        // Another gateway would use the same auth URL, and requests that need no authorisation are
        // still served.
        "ready, but the auth URL did not answer when last asked\n".into_response()
    }
}

async fn metrics(State((admin, operators)): Shared) -> Response {
    let gauges = Gauges {
        engine: admin.engine.stats(),
        requests: admin.shutdown.active_requests(),
        store_up: operators.keys().store_answers().await,
        undecided: operators.census().undecided(),
        quarantines: admin.engine.quarantines().in_force(),
    };
    admin.store_up.store(gauges.store_up, Ordering::Relaxed);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(CONTENT_TYPE, kind)], admin.metrics.render(gauges, &admin.opened)).into_response()
}

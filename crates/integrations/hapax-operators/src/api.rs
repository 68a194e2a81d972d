//! The HTTP handlers of the API. Requests and responses are JSON.

mod quarantine;
mod sagas;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{ConnectInfo, FromRequestParts, Path, Query, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hapax_core::{ClaimError, Key, StoreError};
use hapax_http::server::ScopePart;
use serde::{Deserialize, Serialize};
use serde_json::json;

pub use quarantine::QuarantineRequest;

use crate::OperatorsState;
use crate::audit::Decider;
use crate::keys::{Decision, FindQuery, ListQuery, OperatorError, OperatorVerdict, StateView};
use crate::register::QuarantineError;

type Api = State<Arc<OperatorsState>>;

/// Calls of the API: method, path, purpose.
pub(crate) const INDEX: [(&str, &str, &str); 23] = [
    ("GET", "/api/stats", "what is in progress, and what was counted"),
    (
        "GET",
        "/api/keys",
        "records: ?state=in-flight|done|unknown|released|expired &limit=N &after=ID &caller=HASH",
    ),
    ("GET", "/api/keys/count", "the records that wait for a decision, by route, reason and minute"),
    (
        "GET",
        "/api/keys/undecided",
        "a part of a walk over the records whose outcome is unknown: ?from=NEXT, of the part before",
    ),
    (
        "GET",
        "/api/keys/ID",
        "one record; here and below, ID is the first 8 digits of its id or more",
    ),
    ("POST", "/api/keys/lookup", r#"{"key": "…", "scope": "…"}: the record of a key"#),
    (
        "POST",
        "/api/keys/find",
        r#"{"key": "…"}: a step of a search for the records of a key, of all callers; also "since_seconds", "path" and "route"; the next step has the "next" of this one as "from""#,
    ),
    (
        "POST",
        "/api/keys/hash",
        r#"{"key": "…", "scope": "…"}: the hashes by which the access log names a key and a caller"#,
    ),
    (
        "POST",
        "/api/callers/hash",
        r#"{"value": "…"}: the hash by which records name the caller with this value of a scope header"#,
    ),
    (
        "POST",
        "/api/keys/ID/release",
        r#"{"fence": N, "reason": "…"}: releases the record: the next request executes; with "force": true also a record in flight, with "forget": true also a finished one, with "any_kind": true also one that is not of an HTTP request"#,
    ),
    (
        "POST",
        "/api/keys/ID/resolve",
        r#"{"fence": N, "reason": "…", "outcome": "happened", "status": 201, "body": "…"}, or "did-not-happen""#,
    ),
    sagas::INDEX[0],
    sagas::INDEX[1],
    sagas::INDEX[2],
    sagas::INDEX[3],
    sagas::INDEX[4],
    sagas::INDEX[5],
    sagas::INDEX[6],
    sagas::INDEX[7],
    sagas::INDEX[8],
    quarantine::INDEX[0],
    quarantine::INDEX[1],
    quarantine::INDEX[2],
];

/// The error of a search by caller in a store that seals nothing.
pub const NO_CALLERS: &str =
    "records contain callers only if a secret seals them: set --secret-file";

/// The error of a request for hashes in a store that seals nothing.
pub const NO_HASHES: &str = "expected a store with a secret that seals, found none: its access log contains no hashes; find the line by its path, \
     operation id or request id";

pub(crate) fn routes() -> Router<Arc<OperatorsState>> {
    let api = Router::new()
        .route("/", get(index))
        .route("/stats", get(stats))
        .route("/keys", get(list))
        .route("/keys/count", get(count))
        .route("/keys/undecided", get(undecided))
        .route("/keys/lookup", post(lookup))
        .route("/keys/find", post(find))
        .route("/keys/hash", post(hash))
        .route("/callers/hash", post(caller_hash))
        .route("/keys/{id}", get(show))
        .route("/keys/{id}/release", post(release))
        .route("/keys/{id}/resolve", post(resolve))
        .merge(sagas::routes())
        .merge(quarantine::routes())
        .fallback(|| async {
            error(StatusCode::NOT_FOUND, "not-found", "GET /api lists the paths")
        });
    Router::new().nest("/api", api).route("/api/", get(index))
}

/// The hashes by which the access log names a key and a caller.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AccessHashes {
    /// The hash of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_hash: Option<String>,
    /// The hash of the caller: of each value of its scope, separated by commas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller_hash: Option<String>,
}

/// Returns an error as a response of the API.
#[must_use]
pub fn error(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(json!({ "code": code, "error": message }))).into_response()
}

async fn index() -> Response {
    let line = |(method, path, about): &(&str, &str, &str)| json!({ "method": method, "path": path, "about": about });
    Json(json!({ "api": INDEX.iter().map(line).collect::<Vec<_>>() })).into_response()
}

async fn stats(State(shared): Api) -> Response {
    Json((shared.stats)()).into_response()
}

async fn list(State(shared): Api, list: Result<Query<ListQuery>, QueryRejection>) -> Response {
    match list {
        Err(rejected) => error(StatusCode::BAD_REQUEST, "bad-request", &rejected.body_text()),
        Ok(Query(ListQuery { caller: Some(hash), .. })) if !is_hash(&hash) => {
            let message = "`caller` is a hash of 12 hexadecimal digits: POST /api/callers/hash gives that \
                           of a value";
            error(StatusCode::BAD_REQUEST, "bad-request", message)
        }
        // All of them are known, the oldest first; a page from an id on is for who wants another order.
        Ok(Query(list @ ListQuery { state: Some(StateView::Unknown), after: None, .. })) => {
            answer(Ok(shared.keys.known(&shared.census, &list)))
        }
        Ok(Query(list)) => answer(shared.keys.list(list).await),
    }
}

async fn count(State(shared): Api) -> Response {
    Json(shared.census.groups()).into_response()
}

/// The position of a walk.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WalkQuery {
    #[serde(default)]
    from: Option<String>,
}

async fn undecided(State(shared): Api, walk: Result<Query<WalkQuery>, QueryRejection>) -> Response {
    match walk {
        Err(rejected) => error(StatusCode::BAD_REQUEST, "bad-request", &rejected.body_text()),
        Ok(Query(WalkQuery { from })) => answer(shared.keys.undecided(from.as_deref()).await),
    }
}

fn is_hash(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

async fn show(State(shared): Api, Path(id): Path<String>) -> Response {
    let shown = async { shared.keys.show(&shared.keys.whole_id(&id).await?).await };
    answer(shown.await)
}

async fn find(State(shared): Api, body: Result<Json<FindQuery>, JsonRejection>) -> Response {
    match body {
        Ok(Json(query)) => answer(shared.keys.find(&query).await),
        Err(rejected) => bad_body(&rejected),
    }
}

/// A key and a caller, either of which may be missing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HashRequest {
    #[serde(default)]
    key: Option<String>,
    #[serde(default)]
    scope: Option<ScopeText>,
}

async fn hash(State(shared): Api, body: Result<Json<HashRequest>, JsonRejection>) -> Response {
    let HashRequest { key, scope } = match body {
        Ok(Json(request)) => request,
        Err(rejected) => return bad_body(&rejected),
    };
    if key.is_none() && scope.is_none() {
        let message = "expected a `key` or a `scope`, found neither";
        return error(StatusCode::BAD_REQUEST, "bad-request", message);
    }
    if !shared.keys.seals() {
        return error(StatusCode::BAD_REQUEST, "no-secret", NO_HASHES);
    }
    let key = match key.as_deref().map(Key::new).transpose() {
        Ok(key) => key,
        Err(invalid) => {
            return error(StatusCode::BAD_REQUEST, "bad-request", &invalid.to_string());
        }
    };
    let caller_hash = match &scope {
        None => None,
        // In the order of the first route whose parts fit.
        Some(_) => match scopes(&shared, &scope).as_deref() {
            Some([values, ..]) => shared.keys.scope_hash(values),
            _ => return bad_scope(),
        },
    };
    let key_hash = key.and_then(|key| shared.keys.key_hash(&key));
    Json(AccessHashes { key_hash, caller_hash }).into_response()
}

/// A value of a scope header. It is in the body so that no proxy logs it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CallerValue {
    value: String,
}

async fn caller_hash(
    State(shared): Api,
    body: Result<Json<CallerValue>, JsonRejection>,
) -> Response {
    let CallerValue { value } = match body {
        Ok(Json(caller)) => caller,
        Err(rejected) => return bad_body(&rejected),
    };
    match shared.keys.caller_hash(&value) {
        Some(hash) => Json(json!({ "hash": hash })).into_response(),
        None => error(StatusCode::BAD_REQUEST, "no-secret", NO_CALLERS),
    }
}

/// The key to look up. It is in the body so that no proxy logs key or scope.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lookup {
    key: String,
    /// The value of the one scope header, or the values of all scope headers by name.
    #[serde(default)]
    scope: Option<ScopeText>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ScopeText {
    Value(String),
    Headers(Vec<(String, String)>),
}

async fn lookup(State(shared): Api, body: Result<Json<Lookup>, JsonRejection>) -> Response {
    let Lookup { key, scope } = match body {
        Ok(Json(lookup)) => lookup,
        Err(rejected) => return bad_body(&rejected),
    };
    let key = match Key::new(&key) {
        Ok(key) => key,
        Err(invalid) => {
            return error(StatusCode::BAD_REQUEST, "bad-request", &invalid.to_string());
        }
    };
    let Some(scopes) = scopes(&shared, &scope) else { return bad_scope() };
    let mut shown = Err(OperatorError::NotFound);
    for scope in scopes {
        shown = shared.keys.show(&shared.keys.id(&scope, &key)).await;
        if !matches!(shown, Err(OperatorError::NotFound)) {
            break;
        }
    }
    answer(shown)
}

/// The values of parts of a request that form a scope.
type ScopeValues = Vec<(ScopePart, HeaderValue)>;

/// Returns the scopes that a request may mean; `None` if its `scope` cannot be read.
fn scopes(shared: &OperatorsState, scope: &Option<ScopeText>) -> Option<Vec<ScopeValues>> {
    // Routes may name callers by different headers: what is meant is what there is a record of.
    let named_by = (shared.scope_parts)();
    let of_now = named_by.iter().filter_map(|parts| in_order(parts, scope));
    // It may be of a scope that held before.
    let scopes: Vec<_> = of_now.chain(as_given(scope)).collect();
    (!scopes.is_empty()).then_some(scopes)
}

fn bad_scope() -> Response {
    let message = "`scope` is the value of the header, cookie or claim that names the caller, or a list of \
                   [header, value], with cookie:NAME for a cookie and jwt:CLAIM for a claim";
    error(StatusCode::BAD_REQUEST, "bad-request", message)
}

/// Returns the parts in the order of the request; `None` unless the request gives names and values.
fn as_given(scope: &Option<ScopeText>) -> Option<ScopeValues> {
    let Some(ScopeText::Headers(given)) = scope else { return None };
    let parse = |(name, value): &(String, String)| {
        let part = name.parse().ok()?;
        Some((part, HeaderValue::from_bytes(value.as_bytes()).ok()?))
    };
    given.iter().map(parse).collect()
}

/// Returns the parts in the order of `parts`; `None` if the request does not fit them.
fn in_order(parts: &[ScopePart], scope: &Option<ScopeText>) -> Option<ScopeValues> {
    let given = match scope {
        None => return Some(Vec::new()),
        Some(ScopeText::Value(value)) => {
            let [part] = parts else { return None };
            return Some(vec![(part.clone(), HeaderValue::from_bytes(value.as_bytes()).ok()?)]);
        }
        Some(ScopeText::Headers(given)) => given,
    };
    let mut left = given.len();
    let mut found = Vec::new();
    for part in parts {
        for (_, value) in given.iter().filter(|(it, _)| it.parse() == Ok(part.clone())) {
            found.push((part.clone(), HeaderValue::from_bytes(value.as_bytes()).ok()?));
            left -= 1;
        }
    }
    (left == 0).then_some(found)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Release {
    fence: u64,
    reason: String,
    #[serde(default)]
    who: Option<String>,
    #[serde(default)]
    any_kind: bool,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    forget: bool,
}

async fn release(
    State(shared): Api,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<Release>, JsonRejection>,
) -> Response {
    let Release { fence, reason, who, any_kind, force, forget } = match body {
        Ok(Json(release)) => release,
        Err(rejected) => return bad_body(&rejected),
    };
    let decision = Decision {
        fence,
        force,
        forget,
        any_kind,
        reason,
        who,
        outcome: OperatorVerdict::DidNotHappen,
        status: None,
        headers: Vec::new(),
        body: None,
        body_base64: None,
    };
    decide(&shared, &id, peer, decision).await
}

async fn resolve(
    State(shared): Api,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<Decision>, JsonRejection>,
) -> Response {
    match body {
        Ok(Json(decision)) => decide(&shared, &id, peer, decision).await,
        Err(rejected) => bad_body(&rejected),
    }
}

/// The address of the peer, if the server provides it
/// ([`ConnectInfo`](axum::extract::ConnectInfo)).
#[derive(Clone, Copy, Debug)]
pub struct PeerAddr(pub Option<SocketAddr>);

impl<S: Sync> FromRequestParts<S> for PeerAddr {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get().map(|ConnectInfo(peer)| *peer)))
    }
}

async fn decide(
    shared: &OperatorsState,
    id: &str,
    peer: Option<SocketAddr>,
    decision: Decision,
) -> Response {
    let decider = Decider::by_api(decision.who.clone(), peer);
    let decided = async {
        // The decision names the fence that was seen. Fences of different records may be equal, but seldom are: digits
        // that now lead to another record most likely decide nothing.
        let id = shared.keys.whole_id(id).await?;
        let was = shared.keys.resolve(&id, decision, decider).await?;
        Ok(json!({ "id": id.to_string(), "was": was }))
    };
    answer(decided.await)
}

/// Returns a result as a response of the API.
pub fn answer<T: serde::Serialize>(result: Result<T, OperatorError>) -> Response {
    let refused = match result {
        Ok(value) => return Json(value).into_response(),
        Err(refused) => refused,
    };
    let status = match &refused {
        OperatorError::NotFound
        | OperatorError::NoId
        | OperatorError::NoSaga
        | OperatorError::Quarantine(QuarantineError::NotFound { .. }) => StatusCode::NOT_FOUND,
        OperatorError::InFlight
        | OperatorError::MayExecute { .. }
        | OperatorError::Released { .. }
        | OperatorError::Done { .. }
        | OperatorError::Changed { .. }
        | OperatorError::OtherKind { .. }
        | OperatorError::Saga
        | OperatorError::SeveralIds { .. }
        | OperatorError::SeveralSagas
        | OperatorError::SagaEnded
        | OperatorError::SagaChanged
        | OperatorError::SagaMismatch(_)
        | OperatorError::SagaTooLarge
        | OperatorError::Contended => StatusCode::CONFLICT,
        OperatorError::Invalid(_)
        | OperatorError::NoSecret
        | OperatorError::NotHttp { .. }
        | OperatorError::Quarantine(_) => StatusCode::BAD_REQUEST,
        OperatorError::NoSchedule => StatusCode::NOT_IMPLEMENTED,
        OperatorError::SagaUnreadable
        | OperatorError::HiddenIds(_)
        | OperatorError::Store(StoreError::Corrupt(_))
        | OperatorError::Engine(ClaimError::Store(StoreError::Corrupt(_))) => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
        OperatorError::SagaNotWoken
        | OperatorError::Store(_)
        | OperatorError::Engine(_)
        | OperatorError::Audit(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut problem = json!({ "code": refused.code(), "error": refused.to_string() });
    if let OperatorError::MayExecute { until, .. } = &refused {
        problem["may_execute_until"] = json!(until);
    }
    if let OperatorError::SeveralIds { ids, .. } = &refused {
        problem["ids"] = json!(ids);
    }
    (status, Json(problem)).into_response()
}

fn bad_body(rejected: &JsonRejection) -> Response {
    error(StatusCode::BAD_REQUEST, "bad-request", &rejected.body_text())
}

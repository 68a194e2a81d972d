//! The HTTP handlers of sagas.

use std::net::SocketAddr;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hapax_core::Key;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::{Api, PeerAddr, ScopeText, answer, bad_body, bad_scope, error, scopes};
use crate::OperatorsState;
use crate::audit::Decider;
use crate::keys::{OperatorError, OperatorVerdict};
use crate::sagas::{
    SagaAction, SagaDecisionRequest, SagaId, SagaQuery, SagaStateView, parse_write_id,
};

/// Calls about sagas: method, path, purpose.
pub(super) const INDEX: [(&str, &str, &str); 9] = [
    (
        "GET",
        "/api/sagas",
        "unfinished sagas: ?state=stuck|parked|running|overdue &definition=NAME &limit=N &after=ID",
    ),
    (
        "GET",
        "/api/sagas/ID",
        "one saga, with its steps and decisions; of an unfinished one the first 8 digits of the id suffice",
    ),
    (
        "POST",
        "/api/sagas/lookup",
        r#"{"definition": "…", "key": "…", "scope": "…"}: the saga of a key"#,
    ),
    (
        "POST",
        "/api/sagas/ID/retry",
        r#"{"write_id": "…", "reason": "…"}: the stuck step, undo or flow gets new tries"#,
    ),
    (
        "POST",
        "/api/sagas/ID/resolve",
        r#"{"write_id": "…", "reason": "…", "outcome": "happened", "result": JSON}: the stuck step happened, with this result; or "outcome": "did-not-happen", without a result: it is tried again under its key; while a try may still take effect only with "force": true"#,
    ),
    (
        "POST",
        "/api/sagas/ID/skip",
        r#"{"write_id": "…", "reason": "…"}: the stuck undo is skipped"#,
    ),
    (
        "POST",
        "/api/sagas/ID/abort",
        r#"{"write_id": "…", "reason": "…"}: the saga fails, and what happened is undone; a start that no process has accepted ends, or is removed if its key has another input"#,
    ),
    (
        "GET",
        "/api/saga-definitions",
        "definitions with unfinished sagas: how many, and for how long the first has been due",
    ),
    ("GET", "/api/saga-metrics", "counts of unfinished sagas for Prometheus, up to a minute old"),
];

pub(super) fn routes() -> Router<std::sync::Arc<OperatorsState>> {
    Router::new()
        .route("/sagas", get(list))
        .route("/sagas/lookup", post(lookup))
        .route("/sagas/{id}", get(show))
        .route("/sagas/{id}/retry", post(retry))
        .route("/sagas/{id}/resolve", post(resolve))
        .route("/sagas/{id}/skip", post(skip))
        .route("/sagas/{id}/abort", post(abort))
        .route("/saga-definitions", get(definitions))
        .route("/saga-metrics", get(metrics))
}

async fn list(State(shared): Api, query: Result<Query<SagaQuery>, QueryRejection>) -> Response {
    match query {
        Err(rejected) => bad_request(&rejected.body_text()),
        Ok(Query(SagaQuery { state: Some(SagaStateView::Ended), .. })) => bad_request(
            "expected the state `stuck`, `parked`, `running` or `overdue`, found `ended`: ended sagas are not listed; show one by its id",
        ),
        Ok(Query(query)) => answer(shared.sagas.list(query).await),
    }
}

async fn show(State(shared): Api, Path(id): Path<String>) -> Response {
    let found = match SagaId::parse(&id) {
        Some(id) => Ok(id),
        None if SagaId::is_prefix(&id) => shared.sagas.find(&id).await,
        None => return bad_id(),
    };
    match found {
        Ok(id) => answer(shared.sagas.show(&id).await),
        Err(error) => answer::<()>(Err(error)),
    }
}

/// The key of a saga to look up. It is in the body so that no proxy logs key or scope.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SagaLookup {
    definition: String,
    key: String,
    #[serde(default)]
    scope: Option<ScopeText>,
}

async fn lookup(State(shared): Api, body: Result<Json<SagaLookup>, JsonRejection>) -> Response {
    let SagaLookup { definition, key, scope } = match body {
        Ok(Json(lookup)) => lookup,
        Err(rejected) => return bad_body(&rejected),
    };
    let key = match Key::new(&key) {
        Ok(key) => key,
        Err(invalid) => return bad_request(&invalid.to_string()),
    };
    let Some(scopes) = scopes(&shared, &scope) else { return bad_scope() };
    let mut shown = Err(OperatorError::NoSaga);
    for scope in scopes {
        shown = shared.sagas.show(&shared.sagas.id(&definition, &scope, &key)).await;
        if !matches!(shown, Err(OperatorError::NoSaga)) {
            break;
        }
    }
    answer(shown)
}

async fn definitions(State(shared): Api) -> Response {
    answer(shared.sagas.definitions().await)
}

async fn metrics(State(shared): Api) -> Response {
    match shared.sagas.metrics().await {
        Ok(text) => {
            ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
        Err(error) => answer::<()>(Err(error)),
    }
}

/// A decision without a result.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Decide {
    write_id: String,
    reason: String,
    #[serde(default)]
    who: Option<String>,
}

/// A decision about a step's outcome.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResolveStep {
    write_id: String,
    reason: String,
    #[serde(default)]
    who: Option<String>,
    outcome: OperatorVerdict,
    #[serde(default)]
    force: bool,
    /// `Some(Value::Null)` for a `null` in the request.
    #[serde(default, deserialize_with = "present")]
    result: Option<Value>,
}

fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

async fn retry(
    State(shared): Api,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<Decide>, JsonRejection>,
) -> Response {
    decide(&shared, &id, peer, body, SagaAction::Retry).await
}

async fn skip(
    State(shared): Api,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<Decide>, JsonRejection>,
) -> Response {
    decide(&shared, &id, peer, body, SagaAction::Skip).await
}

async fn abort(
    State(shared): Api,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<Decide>, JsonRejection>,
) -> Response {
    decide(&shared, &id, peer, body, SagaAction::Abort).await
}

async fn resolve(
    State(shared): Api,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<ResolveStep>, JsonRejection>,
) -> Response {
    let ResolveStep { write_id, reason, who, outcome, force, result } = match body {
        Ok(Json(resolve)) => resolve,
        Err(rejected) => return bad_body(&rejected),
    };
    let action = match (outcome, result) {
        (OperatorVerdict::Happened, Some(result)) => SagaAction::Happened(result),
        (OperatorVerdict::DidNotHappen, None) => SagaAction::DidNotHappen { force },
        (OperatorVerdict::Happened, None) => {
            return bad_request(
                "expected the `result` of a step that happened, found none: add it as JSON",
            );
        }
        (OperatorVerdict::DidNotHappen, Some(_)) => {
            return bad_request("expected no `result` with `did-not-happen`: remove it");
        }
    };
    let body = Ok(Json(Decide { write_id, reason, who }));
    decide(&shared, &id, peer, body, action).await
}

async fn decide(
    shared: &OperatorsState,
    id: &str,
    peer: Option<SocketAddr>,
    body: Result<Json<Decide>, JsonRejection>,
    action: SagaAction,
) -> Response {
    let Decide { write_id, reason, who } = match body {
        Ok(Json(decide)) => decide,
        Err(rejected) => return bad_body(&rejected),
    };
    let Some(id) = SagaId::parse(id) else { return bad_id() };
    let Some(write_id) = parse_write_id(&write_id) else {
        return bad_request(
            "expected a `write_id` of 32 hexadecimal digits, found another text: copy it from `GET /api/sagas/ID`",
        );
    };
    let request = SagaDecisionRequest { write_id, action, reason };
    let decided = shared.sagas.decide(&id, request, Decider::by_api(who, peer)).await;
    answer(decided.map(|was| json!({ "id": id.to_string(), "was": was })))
}

fn bad_id() -> Response {
    bad_request(
        "expected an id of 64 hexadecimal digits in the path, of a rejected start with a hyphen and 32 more, found another text: copy it from the list",
    )
}

fn bad_request(message: &str) -> Response {
    error(StatusCode::BAD_REQUEST, "bad-request", message)
}

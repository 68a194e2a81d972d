//! The HTTP handlers of sagas.

use std::net::SocketAddr;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use hapax_core::OperationId;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::{Api, PeerAddr, answer, bad_body, bad_id, error};
use crate::OperatorsState;
use crate::audit::Decider;
use crate::keys::OperatorVerdict;
use crate::sagas::{SagaAction, SagaDecisionRequest, SagaQuery, SagaStateView, parse_write_id};

/// Calls about sagas: method, path, purpose.
pub(super) const INDEX: [(&str, &str, &str); 7] = [
    (
        "GET",
        "/api/sagas",
        "unfinished sagas: ?state=stuck|parked|running|overdue &definition=NAME &limit=N &after=ID",
    ),
    ("GET", "/api/sagas/ID", "one saga, with its steps and decisions"),
    (
        "POST",
        "/api/sagas/ID/retry",
        r#"{"write_id": "…", "reason": "…"}: the stuck step or undo is tried again"#,
    ),
    (
        "POST",
        "/api/sagas/ID/resolve",
        r#"{"write_id": "…", "reason": "…", "outcome": "happened", "result": JSON}: the stuck step gets this result; with "did-not-happen" it is tried again under its key"#,
    ),
    (
        "POST",
        "/api/sagas/ID/skip",
        r#"{"write_id": "…", "reason": "…"}: the stuck undo is skipped"#,
    ),
    (
        "POST",
        "/api/sagas/ID/abort",
        r#"{"write_id": "…", "reason": "…"}: the saga fails, and what happened is undone"#,
    ),
    ("GET", "/api/saga-definitions", "definitions with unfinished sagas, and their numbers"),
];

pub(super) fn routes() -> Router<std::sync::Arc<OperatorsState>> {
    Router::new()
        .route("/sagas", get(list))
        .route("/sagas/{id}", get(show))
        .route("/sagas/{id}/retry", post(retry))
        .route("/sagas/{id}/resolve", post(resolve))
        .route("/sagas/{id}/skip", post(skip))
        .route("/sagas/{id}/abort", post(abort))
        .route("/saga-definitions", get(definitions))
}

async fn list(State(shared): Api, query: Result<Query<SagaQuery>, QueryRejection>) -> Response {
    match query {
        Err(rejected) => bad_request(&rejected.body_text()),
        Ok(Query(SagaQuery { state: Some(SagaStateView::Ended), .. })) => bad_request(
            "expected `stuck`, `parked`, `running` or `overdue`: ended sagas are not listed",
        ),
        Ok(Query(query)) => answer(shared.sagas.list(query).await),
    }
}

async fn show(State(shared): Api, Path(id): Path<String>) -> Response {
    match OperationId::from_hex(&id) {
        None => bad_id(),
        Some(id) => answer(shared.sagas.show(&id).await),
    }
}

async fn definitions(State(shared): Api) -> Response {
    answer(shared.sagas.definitions().await)
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
    let ResolveStep { write_id, reason, who, outcome, result } = match body {
        Ok(Json(resolve)) => resolve,
        Err(rejected) => return bad_body(&rejected),
    };
    let action = match (outcome, result) {
        (OperatorVerdict::Happened, Some(result)) => SagaAction::Happened(result),
        (OperatorVerdict::DidNotHappen, None) => SagaAction::DidNotHappen,
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
    let Some(id) = OperationId::from_hex(id) else { return bad_id() };
    let Some(write_id) = parse_write_id(&write_id) else {
        return bad_request("expected a `write_id` of 32 hexadecimal digits, as the saga shows it");
    };
    let request = SagaDecisionRequest { write_id, action, reason };
    let decided = shared.sagas.decide(&id, request, Decider::by_api(who, peer)).await;
    answer(decided.map(|was| json!({ "id": id.to_string(), "was": was })))
}

fn bad_request(message: &str) -> Response {
    error(StatusCode::BAD_REQUEST, "bad-request", message)
}

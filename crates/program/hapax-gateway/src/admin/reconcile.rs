//! `POST /api/keys/ID/reconcile`: requests the reconcile URL about an undecided record.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax_core::Reconciled;
use hapax_operators::{
    Decider, OperatorError, Operators, PeerAddr, ReconcileDecision, answer, error,
};
use serde::Deserialize;
use serde_json::json;

use crate::reconcile::{NotRequested, Prepared, UnretriedReconciler};

/// Line of the index: method, path, purpose.
pub(super) const INDEX: (&str, &str, &str) = (
    "POST",
    "/api/keys/ID/reconcile",
    r#"{"who": "…"} or {}: requests the reconcile URL about an undecided record, without a retry of its client"#,
);

type ReconcileState = (Arc<UnretriedReconciler>, Operators);

/// Returns the route. The caller protects it with the token.
pub(super) fn routes(reconciler: &Arc<UnretriedReconciler>, operators: &Operators) -> Router {
    let state = (Arc::clone(reconciler), operators.clone());
    Router::new().route("/api/keys/{id}/reconcile", post(reconcile)).with_state(state)
}

/// Body of a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReconcileBody {
    /// The operator.
    #[serde(default)]
    who: Option<String>,
}

/// Reconciles the record as it is now. A request to the reconcile URL has two lines in the audit file; it continues if the
/// caller disconnects.
async fn reconcile(
    State((reconciler, operators)): State<ReconcileState>,
    Path(id): Path<String>,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<ReconcileBody>, JsonRejection>,
) -> Response {
    let who = match body {
        Ok(Json(ReconcileBody { who })) => who,
        Err(rejected) => {
            return error(StatusCode::BAD_REQUEST, "bad-request", &rejected.body_text());
        }
    };
    let id = match operators.keys().whole_id(&id).await {
        Ok(id) => id,
        Err(error) => return answer::<()>(Err(error)),
    };
    let view = match operators.keys().show(&id).await {
        Ok(view) => view,
        // 404 means that there is no such path, as at a service that is no gateway.
        Err(OperatorError::NotFound) => return result(Reconciled::Decided),
        Err(error) => return answer::<()>(Err(error)),
    };
    let request = match reconciler.prepare(id, &view) {
        Ok(Prepared::Request(request)) => *request,
        Ok(Prepared::Known(reconciled)) => return result(reconciled),
        Err(reason) => return not_requested(&reason),
    };
    let (url, decider) = (request.url.clone(), Decider::by_api(who, peer));
    let about = ReconcileDecision { id, fence: view.fence, url, decider };
    let send = async move |note| {
        // Boxed, since it is large.
        Box::pin(reconciler.request(request, Duration::ZERO, note)).await
    };
    match operators.keys().audit().reconcile(about, send).await {
        Ok(reconciled) => result(reconciled),
        Err(error) => answer::<()>(Err(error)),
    }
}

fn result(reconciled: Reconciled) -> Response {
    let mut found = json!({ "result": reconciled.as_str() });
    match reconciled {
        Reconciled::Blocked => return not_requested(&NotRequested::Blocked),
        Reconciled::NotYet { retry_in } => {
            found["retry_in_seconds"] = retry_in.as_secs_f64().ceil().into();
        }
        _ => {}
    }
    Json(found).into_response()
}

fn not_requested(reason: &NotRequested) -> Response {
    let (code, because) = (reason.code(), reason.to_string());
    Json(json!({ "result": "not-requested", "reason": code, "because": because })).into_response()
}

//! `POST /api/keys/ID/reconcile`: requests the reconcile URL about an undecided record.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax_core::{OperationId, Reconciled};
use hapax_operators::{OperatorError, Operators, answer, error};
use serde_json::json;

use crate::reconcile::{NotRequested, UnretriedReconciler};

/// Line of the index: method, path, purpose.
pub(super) const INDEX: (&str, &str, &str) = (
    "POST",
    "/api/keys/ID/reconcile",
    "{}: requests the reconcile URL about an undecided record, without a retry of its client",
);

type ReconcileState = (Arc<UnretriedReconciler>, Operators);

/// Returns the route. The caller protects it with the token.
pub(super) fn routes(reconciler: &Arc<UnretriedReconciler>, operators: &Operators) -> Router {
    let state = (Arc::clone(reconciler), operators.clone());
    Router::new().route("/api/keys/{id}/reconcile", post(reconcile)).with_state(state)
}

/// Reconciles the record as it is now. If the future is dropped, a later call requests the URL again.
async fn reconcile(
    State((reconciler, operators)): State<ReconcileState>,
    Path(id): Path<String>,
) -> Response {
    let Some(id) = OperationId::from_hex(&id) else {
        let message = "expected an id of 64 hexadecimal digits in the path, found another text";
        return error(StatusCode::BAD_REQUEST, "bad-request", message);
    };
    let view = match operators.keys().show(&id).await {
        Ok(view) => view,
        // 404 means that there is no such path, as at a service that is no gateway.
        Err(OperatorError::NotFound) => {
            return Json(json!({ "result": "decided" })).into_response();
        }
        Err(error) => return answer::<()>(Err(error)),
    };
    // Boxed, since it is large.
    let reconciled = Box::pin(reconciler.reconcile(id, &view, Duration::ZERO)).await;
    let result = match reconciled {
        Ok(Reconciled::Happened) => json!({ "result": "happened" }),
        Ok(Reconciled::DidNotHappen) => json!({ "result": "did-not-happen" }),
        Ok(Reconciled::CannotSay) => json!({ "result": "cannot-say" }),
        Ok(Reconciled::NotYet { retry_in }) => {
            json!({ "result": "not-yet", "retry_in_seconds": retry_in.as_secs_f64().ceil() })
        }
        Ok(Reconciled::InFlight) => json!({ "result": "in-flight" }),
        Ok(Reconciled::Decided) => json!({ "result": "decided" }),
        Ok(Reconciled::Blocked) => not_requested(&NotRequested::Blocked),
        Err(NotRequested::Claim(error)) => {
            return answer::<()>(Err(OperatorError::Engine(error)));
        }
        Err(reason) => not_requested(&reason),
    };
    Json(result).into_response()
}

fn not_requested(reason: &NotRequested) -> serde_json::Value {
    let (code, because) = (reason.code(), reason.to_string());
    json!({ "result": "not-requested", "reason": code, "because": because })
}

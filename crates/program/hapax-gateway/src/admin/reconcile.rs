//! `POST /api/keys/ID/reconcile`: asks the reconcile URL about an undecided record.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax_core::OperationId;
use hapax_http::server::Reconciled;
use hapax_operators::{OperatorError, Operators, answer, error};
use serde_json::json;

use crate::reconcile::{BackgroundReconciler, Unreconcilable};

/// Line of the index: method, path, purpose.
pub(super) const INDEX: (&str, &str, &str) = (
    "POST",
    "/api/keys/ID/reconcile",
    "{}: requests the reconcile URL about an undecided record, as a retry would",
);

type ReconcileState = (Arc<BackgroundReconciler>, Operators);

/// Returns the route. The caller protects it with the token.
pub(super) fn routes(reconciler: &Arc<BackgroundReconciler>, operators: &Operators) -> Router {
    let state = (Arc::clone(reconciler), operators.clone());
    Router::new().route("/api/keys/{id}/reconcile", post(reconcile)).with_state(state)
}

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
        Err(error) => return answer::<()>(Err(error)),
    };
    let result = match reconciler.reconcile_one(&view).await {
        Ok(Reconciled::Happened) => json!({ "result": "happened" }),
        Ok(Reconciled::DidNotHappen) => json!({ "result": "did-not-happen" }),
        Ok(Reconciled::CannotSay) => json!({ "result": "cannot-say" }),
        Ok(Reconciled::NotYet { retry_in }) => {
            json!({ "result": "not-yet", "retry_in_seconds": retry_in.as_secs_f64().ceil() })
        }
        Ok(Reconciled::InFlight) => json!({ "result": "in-flight" }),
        Ok(Reconciled::Decided) => json!({ "result": "decided" }),
        Ok(Reconciled::Blocked) => {
            return refused(&Unreconcilable::NoHook);
        }
        Err(Unreconcilable::Claim(error)) => {
            return answer::<()>(Err(OperatorError::Engine(error)));
        }
        Err(error) => return refused(&error),
    };
    Json(result).into_response()
}

fn refused(reason: &Unreconcilable) -> Response {
    error(StatusCode::CONFLICT, "not-reconcilable", &reason.to_string())
}

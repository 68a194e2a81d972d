//! The handlers of quarantines.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use hapax_core::Namespace;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Api, PeerAddr, answer, bad_body, error};
use crate::audit::Decider;
use crate::keys::OperatorError;
use crate::register::{QuarantineStart, QuarantineView, RegisteredUser};
use crate::{OperatorsState, StoreDecision};

pub(super) const INDEX: [(&str, &str, &str); 3] = [
    (
        "GET",
        "/api/quarantines",
        "quarantines of the store, and the processes that have not confirmed one",
    ),
    (
        "POST",
        "/api/quarantines",
        r#"{"namespace": "…", "seconds": 1 to 86400, "reason": "…"}: keys without a record do not execute; with "route": "…" only those of a route"#,
    ),
    (
        "POST",
        "/api/quarantines/end",
        r#"{"namespace": "…", "reason": "…"}: ends a quarantine, with "route": "…" that of a route"#,
    ),
];

pub(super) fn routes() -> Router<Arc<OperatorsState>> {
    Router::new().route("/quarantines", get(list).post(begin)).route("/quarantines/end", post(end))
}

/// Body of a decision about a quarantine.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuarantineRequest {
    /// The namespace.
    pub namespace: String,
    /// The route that the quarantine is limited to.
    #[serde(default)]
    pub route: Option<String>,
    /// The duration in seconds, 1 to 86,400; `/quarantines/end` ignores it.
    #[serde(default)]
    pub seconds: u64,
    /// True if the namespace may be one that no process has used.
    #[serde(default)]
    pub any_namespace: bool,
    /// The reason.
    pub reason: String,
    /// The operator.
    #[serde(default)]
    pub who: Option<String>,
}

async fn list(State(shared): Api) -> Response {
    let user = match user(&shared) {
        Ok(user) => user,
        Err(response) => return response,
    };
    answer(listed(user).await)
}

async fn begin(
    State(shared): Api,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<QuarantineRequest>, JsonRejection>,
) -> Response {
    let (user, namespace, asked) = match asked(&shared, body) {
        Ok(asked) => asked,
        Err(response) => return response,
    };
    let decider = Decider::by_api(asked.who, peer);
    let start = QuarantineStart {
        namespace,
        route: asked.route,
        duration: Duration::from_secs(asked.seconds),
        any_namespace: asked.any_namespace,
        reason: asked.reason.clone(),
        who: decider.who.clone(),
    };
    let decision = StoreDecision::begin(&start);
    let of_task = user.clone();
    let begin = async move { Ok(of_task.begin_quarantine(&start).await?) };
    let begun = shared.keys.audit().decide(decision, &asked.reason, decider, begin).await;
    match begun {
        Ok(id) => answer(listed(user).await.map(|mut listed| {
            listed["id"] = json!(id);
            listed
        })),
        Err(error) => answer::<()>(Err(error)),
    }
}

async fn end(
    State(shared): Api,
    PeerAddr(peer): PeerAddr,
    body: Result<Json<QuarantineRequest>, JsonRejection>,
) -> Response {
    let (user, namespace, asked) = match asked(&shared, body) {
        Ok(asked) => asked,
        Err(response) => return response,
    };
    let decider = Decider::by_api(asked.who, peer);
    let decision = StoreDecision::end(&namespace, asked.route.as_deref());
    let (of_task, route) = (user.clone(), asked.route);
    let end = async move { Ok(of_task.end_quarantine(&namespace, route.as_deref()).await?) };
    let ended = shared.keys.audit().decide(decision, &asked.reason, decider, end).await;
    match ended {
        Ok(()) => answer(listed(user).await),
        Err(error) => answer::<()>(Err(error)),
    }
}

async fn listed(user: &RegisteredUser) -> Result<serde_json::Value, OperatorError> {
    let quarantines: Vec<QuarantineView> = user.quarantines().await?;
    Ok(json!({ "quarantines": quarantines }))
}

#[allow(clippy::result_large_err, reason = "an error is a response, as in every handler")]
fn user(shared: &OperatorsState) -> Result<&RegisteredUser, Response> {
    shared.user.as_ref().ok_or_else(|| {
        let message = "expected a process that is in the register of its store, found one that is not: pass the store by \
                       --store, or add its entry with OperatorsBuilder::user";
        error(StatusCode::NOT_IMPLEMENTED, "no-register", message)
    })
}

#[allow(clippy::result_large_err, reason = "an error is a response, as in every handler")]
fn asked(
    shared: &OperatorsState,
    body: Result<Json<QuarantineRequest>, JsonRejection>,
) -> Result<(&RegisteredUser, Namespace, QuarantineRequest), Response> {
    let user = user(shared)?;
    let Json(asked) = body.map_err(|rejected| bad_body(&rejected))?;
    let namespace = Namespace::new(&asked.namespace)
        .map_err(|invalid| error(StatusCode::BAD_REQUEST, "bad-request", &invalid.to_string()))?;
    Ok((user, namespace, asked))
}

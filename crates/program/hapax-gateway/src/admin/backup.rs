//! `POST /api/backup`: a consistent copy of a `file:` store while it is in use.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax_file::{FileStore, OpenError};
use hapax_operators::error;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Semaphore;

use crate::store::OpenStore;

/// Line of the index: method, path, purpose.
pub(super) const INDEX: (&str, &str, &str) =
    ("POST", "/api/backup", r#"{"path": "/…"}: writes a copy of a file: store to a new file"#);

/// Returns the route. The caller protects it with the token.
pub(super) fn routes(opened: &OpenStore) -> Router {
    let backups = Backups { store: opened.file(), permits: Arc::new(Semaphore::new(1)) };
    Router::new().route("/api/backup", post(backup)).with_state(backups)
}

/// State of the route.
#[derive(Clone, Debug)]
struct Backups {
    /// The store; `None` if it is not a file.
    store: Option<Arc<FileStore>>,
    /// The permit for one backup at a time, because two could have the same path.
    permits: Arc<Semaphore>,
}

/// A path on the gateway's machine.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct To {
    path: PathBuf,
}

async fn backup(State(backups): State<Backups>, body: Result<Json<To>, JsonRejection>) -> Response {
    let bad = |reason: &str| error(StatusCode::BAD_REQUEST, "bad-request", reason);
    let path = match body {
        Ok(Json(To { path })) => path,
        Err(rejected) => return bad(&rejected.body_text()),
    };
    let Some(store) = backups.store else {
        return bad("this gateway's store is no `file:` store: back it up with its server's tools");
    };
    if !path.is_absolute() {
        return bad("`path` is relative: name a new file on the gateway's machine, from `/` on");
    }
    let Ok(place) = backups.permits.try_acquire_owned() else {
        let reason = "another backup is being written: wait until it is finished";
        return error(StatusCode::CONFLICT, "backup-under-way", reason);
    };
    // A separate task keeps the permit until the file is finished, even if the client disconnects
    // and this future is dropped.
    let written = tokio::spawn(async move {
        let written = store.backup(&path).await;
        drop(place);
        let path = path.display();
        match &written {
            Ok(records) => tracing::info!(%path, records, "a backup was written"),
            Err(error) => tracing::warn!(%path, %error, "a backup was not written"),
        }
        written
    });
    match written.await {
        Ok(Ok(records)) => Json(json!({ "records": records })).into_response(),
        Ok(Err(failed)) if is_misnamed(&failed) => bad(&failed.to_string()),
        Ok(Err(failed)) => failure(&failed.to_string()),
        Err(_) => failure("the gateway is ending"),
    }
}

fn failure(reason: &str) -> Response {
    error(StatusCode::INTERNAL_SERVER_ERROR, "backup-failed", reason)
}

/// Returns whether the path of the request is unusable for a new file.
fn is_misnamed(error: &OpenError) -> bool {
    use ErrorKind::{AlreadyExists, IsADirectory, NotFound, PermissionDenied};
    let OpenError::Io { source, .. } = error else { return false };
    matches!(source.kind(), AlreadyExists | IsADirectory | NotFound | PermissionDenied)
}

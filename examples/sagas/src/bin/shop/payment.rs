//! The payment service: charges and refunds.

use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax::SqlxTx;
use hapax::prelude::*;
use hapax_sagas_examples::ProgramError;
use serde_json::{Value, json};

use crate::effects;

pub(crate) async fn run(address: &str, database: &str) -> Result<(), ProgramError> {
    let routes = Router::new()
        .route("/orders/{order}/charge", post(charge))
        .route("/orders/{order}/refund", post(refund));
    effects::run(address, database, routes).await
}

async fn charge(
    Path(order): Path<String>,
    mut tx: SqlxTx,
    Json((card, _cents)): Json<(String, u64)>,
) -> Result<Response, HandlerError> {
    if effects::lock(&mut tx, &order).await? {
        return Ok(effects::reject("the order is closed"));
    }
    if card == "expired" {
        return Ok(effects::reject("the card is declined"));
    }
    effects::add(&mut tx, &order, "charge").await?;
    Ok(Json(json!(format!("charge-{order}"))).into_response())
}

async fn refund(Path(order): Path<String>, mut tx: SqlxTx) -> Result<Json<Value>, HandlerError> {
    effects::undo(&mut tx, &order, ["charge", "refund"]).await?;
    Ok(Json(Value::Null))
}

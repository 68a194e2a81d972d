//! The stock: reserves, frees and ships articles.

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
        .route("/orders/{order}/reservation", post(reserve))
        .route("/orders/{order}/freed", post(free))
        .route("/orders/{order}/parcel", post(ship));
    effects::run(address, database, routes).await
}

async fn reserve(
    Path(order): Path<String>,
    mut tx: SqlxTx,
    Json(article): Json<String>,
) -> Result<Response, HandlerError> {
    if effects::lock(&mut tx, &order).await? {
        return Ok(effects::reject("the order is closed"));
    }
    if article == "unicorn" {
        return Ok(effects::reject("sold out"));
    }
    effects::add(&mut tx, &order, "reserve").await?;
    Ok(Json(json!(format!("place of the {article}"))).into_response())
}

async fn free(Path(order): Path<String>, mut tx: SqlxTx) -> Result<Json<Value>, HandlerError> {
    effects::undo(&mut tx, &order, ["reserve", "free"]).await?;
    Ok(Json(Value::Null))
}

async fn ship(
    Path(order): Path<String>,
    mut tx: SqlxTx,
    Json(article): Json<String>,
) -> Result<Response, HandlerError> {
    if effects::lock(&mut tx, &order).await? {
        return Ok(effects::reject("the order is closed"));
    }
    if article == "vase" {
        return Ok(effects::reject("it is broken"));
    }
    effects::add(&mut tx, &order, "ship").await?;
    Ok(Json(json!(format!("parcel-{order}"))).into_response())
}

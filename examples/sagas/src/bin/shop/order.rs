//! The order service: each order is a saga.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::{Json, serve};
use hapax::prelude::*;
use hapax::saga::routes::{SagaOutcome, SagaRoutes};
use hapax::saga::{StepContext, StepEffect, StepError, UndoError};
use hapax_sagas_examples::{ProgramError, Remote, retries, shutdown};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::TcpListener;

/// Time for which both services honor keys: the retention of their layers.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Lease: time after which the sagas of a process that died are continued.
const CRASH: Duration = Duration::from_secs(2);

/// The services that the steps call.
pub(crate) struct Systems {
    stock: Remote,
    payment: Remote,
}

impl Systems {
    pub(crate) fn new(stock: &str, payment: &str) -> Self {
        Self { stock: Remote::new(stock), payment: Remote::new(payment) }
    }
}

/// A request of an order. Both services know the order by its id.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) id: String,
    pub(crate) article: String,
    pub(crate) card: String,
    pub(crate) cents: u64,
}

async fn reserve(at: StepContext<Systems>, order: Order) -> Result<String, StepError<String>> {
    let path = format!("/orders/{}/reservation", order.id);
    text(at.stock.step(&path, at.key().as_str(), &order.article).await?)
}

// Right whether or not the article was reserved, and no reservation is possible after it.
async fn free(
    at: StepContext<Systems>,
    order: Order,
    _: StepEffect<String>,
) -> Result<(), UndoError> {
    let path = format!("/orders/{}/freed", order.id);
    undone(at.stock.step(&path, at.key().as_str(), &()).await)
}

async fn charge(at: StepContext<Systems>, order: Order) -> Result<String, StepError<String>> {
    let path = format!("/orders/{}/charge", order.id);
    text(at.payment.step(&path, at.key().as_str(), &(order.card, order.cents)).await?)
}

// The same: the payment service refunds what it charged, and charges nothing after that.
async fn refund(
    at: StepContext<Systems>,
    order: Order,
    _: StepEffect<String>,
) -> Result<(), UndoError> {
    let path = format!("/orders/{}/refund", order.id);
    undone(at.payment.step(&path, at.key().as_str(), &()).await)
}

async fn ship(at: StepContext<Systems>, order: Order) -> Result<String, StepError<String>> {
    let path = format!("/orders/{}/parcel", order.id);
    text(at.stock.step(&path, at.key().as_str(), &order.article).await?)
}

fn text(answer: serde_json::Value) -> Result<String, StepError<String>> {
    serde_json::from_value(answer).map_err(StepError::unknown)
}

fn undone(result: Result<serde_json::Value, StepError<String>>) -> Result<(), UndoError> {
    match result {
        Ok(_) => Ok(()),
        // Tried again, within a day; then an operator has to decide.
        Err(StepError::Rejected(reason)) => Err(reason.into()),
        Err(StepError::NotSent(error) | StepError::Unknown(error)) => Err(error.into()),
        Err(other) => Err(format!("{other:?}").into()),
    }
}

fn definition(systems: Systems) -> Result<Saga<Order, String, String>, ProgramError> {
    let mut saga = Saga::define("order", 1, systems);
    let reserve = saga.keyed("reserve", DAY, reserve).retry(retries()).undo_retry(retries());
    let reserve = reserve.undo(free);
    let charge = saga.keyed("charge", DAY, charge).retry(retries()).undo_retry(retries());
    let charge = charge.undo(refund);
    let ship = saga.keyed("ship", DAY, ship).retry(retries()).no_undo();
    Ok(saga.flow(move |op, order: Order| async move {
        op.run(reserve, order.clone()).await?;
        op.run(charge, order.clone()).await?;
        op.run(ship, order).await
    })?)
}

pub(crate) async fn run(address: &str, file: &str, systems: Systems) -> Result<(), ProgramError> {
    let order = definition(systems)?;
    let store = FileStore::open(FileOptions::new(file))?;
    let engine = Idempotency::builder(store).build()?;
    let sagas = Sagas::builder(engine.clone()).register(&order).lease(CRASH).build()?;
    let answer = |end| match end {
        SagaOutcome::Done(parcel) => (StatusCode::CREATED, Json(json!(parcel))).into_response(),
        SagaOutcome::Undone(error) => (StatusCode::CONFLICT, Json(json!(error))).into_response(),
        SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
    };
    let routes = SagaRoutes::builder(sagas.clone(), order, "/orders", answer).build()?;
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let driving = tokio::spawn(async move { sagas.run(shutdown(), Duration::from_secs(10)).await });
    serve(listener, routes.router()).with_graceful_shutdown(shutdown()).await?;
    driving.await?;
    engine.drain().await;
    Ok(())
}

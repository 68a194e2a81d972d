//! A shop whose orders are sagas over HTTP: reserve, charge, wait for the approval of a large order,
//! ship. The systems that it calls are functions of this program, which take a second each.
//!
//!     cargo run -p hapax-saga --features axum --example orders
//!
//! The store is the process's memory, so that an order ends with it: use a file, PostgreSQL or Redis.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use hapax_core::{Idempotency, MemoryStore};
use hapax_saga::routes::{SagaOutcome, SagaRoutes};
use hapax_saga::{Saga, Sagas, StepContext, StepEffect, StepError, UndoError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::sleep;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Clients of the systems that the steps call.
struct Systems {
    bank: &'static str,
}

#[derive(Clone, Serialize, Deserialize)]
struct Order {
    article: String,
    cents: u64,
}

#[derive(Serialize, Deserialize)]
enum Rejection {
    SoldOut,
    Declined,
    NotApproved,
}

async fn reserve(at: StepContext<Systems>, article: String) -> Result<u32, StepError<Rejection>> {
    call("warehouse", "reserve", &at).await;
    if article == "none" { Err(StepError::Rejected(Rejection::SoldOut)) } else { Ok(17) }
}

async fn free(
    at: StepContext<Systems>,
    _article: String,
    _place: StepEffect<u32>,
) -> Result<(), UndoError> {
    call("warehouse", "free", &at).await;
    Ok(())
}

async fn charge(at: StepContext<Systems>, cents: u64) -> Result<String, StepError<Rejection>> {
    call(at.bank, "charge", &at).await;
    if cents == 13 {
        Err(StepError::Rejected(Rejection::Declined))
    } else {
        Ok(format!("ch_{cents}"))
    }
}

async fn refund(
    at: StepContext<Systems>,
    _cents: u64,
    charge: StepEffect<String>,
) -> Result<(), UndoError> {
    match charge {
        StepEffect::Happened(id) => call(at.bank, &format!("refund {id}"), &at).await,
        // It may be on its way: the bank rejects the key of the charge from now on.
        StepEffect::Unknown => call(at.bank, "void the key of the charge", &at).await,
    }
    Ok(())
}

async fn ship(at: StepContext<Systems>, place: u32) -> Result<String, StepError<Rejection>> {
    call("carrier", "ship", &at).await;
    Ok(format!("parcel-{place}"))
}

/// Stands for a call to another system, which has one effect for each key.
async fn call(system: &str, what: &str, at: &StepContext<Systems>) {
    println!("{system}: {what}, key {}, try {}", at.key().as_str(), at.number());
    sleep(Duration::from_secs(1)).await;
}

fn definition() -> Result<Saga<Order, Value, Rejection>, Box<dyn Error>> {
    let mut order = Saga::define("place-order", 1, Systems { bank: "bank" });
    let reserve = order.keyed("reserve", DAY, reserve).undo(free);
    let charge = order.keyed("charge", DAY, charge).undo(refund);
    let ship = order.keyed("ship", DAY, ship).no_undo();
    let flow = move |op: hapax_saga::FlowContext, order: Order| async move {
        let place = op.run(reserve, order.article).await?;
        let charge = op.run(charge, order.cents).await?;
        if order.cents > 100_000 {
            let approved = op.signal::<bool>("approval", 3 * DAY).await;
            if approved != Some(true) {
                return Err(Rejection::NotApproved);
            }
        }
        let parcel = op.run(ship, place).await?;
        Ok(json!({ "charge": charge, "parcel": parcel }))
    };
    Ok(order.flow(flow)?)
}

#[tokio::main]
async fn main() -> ExitCode {
    let Err(error) = run().await else { return ExitCode::SUCCESS };
    // A `main` that returns the error prints its `Debug` form.
    let causes = std::iter::successors(Some(&*error), |error| (*error).source());
    let text: Vec<_> = causes.map(ToString::to_string).collect();
    eprintln!("orders: {}", text.join(": "));
    ExitCode::FAILURE
}

async fn run() -> Result<(), Box<dyn Error>> {
    let place_order = definition()?;
    let engine = Idempotency::builder(MemoryStore::default()).build()?;
    let sagas = Sagas::builder(engine).register(&place_order).build()?;

    let answer = |end| match end {
        SagaOutcome::Done(order) => (StatusCode::CREATED, Json(order)).into_response(),
        SagaOutcome::Undone(error) => {
            (StatusCode::CONFLICT, Json(json!({ "error": error }))).into_response()
        }
        SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
    };
    let orders = SagaRoutes::builder(sagas.clone(), place_order, "/orders", answer)
        .allow_cancel()
        .build()?;
    let app = axum::Router::new().merge(orders.router());
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("orders on http://127.0.0.1:3000/orders");

    let ended = || async {
        let _ = tokio::signal::ctrl_c().await;
    };
    // It parks the sagas, and waits until the store has what it was sent.
    let driving = sagas.run(ended(), Duration::from_secs(30));
    let serving = axum::serve(listener, app).with_graceful_shutdown(ended());
    let (is_stored, served) = tokio::join!(driving, serving.into_future());
    if !is_stored {
        eprintln!("some writes are not stored: their sagas are resumed when their leases lapse");
    }
    Ok(served?)
}

//! Payments of which each waits for an approval. Another system sends the approval as a signed webhook:
//! hours later, twice, or never.
//!
//! ```text
//! APPROVAL_SECRET=whsec_… approval 127.0.0.1:3000 /var/lib/payments.db http://127.0.0.1:3001 259200
//! curl -i 127.0.0.1:3000/payments -H 'Idempotency-Key: p-1' -H 'Prefer: respond-async' --json 250000
//! ```
//!
//! The arguments are an address, a file, a bank that honors idempotency keys, and the time for an
//! approval in seconds. A webhook has the headers of Standard Webhooks, and the body
//! `{"payment": "p-1", "approved": true}`; it is posted to `/approvals`.
//!
//! 1. The amount is held at the bank, and released if there is no approval.
//! 2. The saga is parked until the signal arrives. A restart of the process changes nothing.
//! 3. A delivery is verified, and handled once for each delivery id. The first signal counts, so that a
//!    rejection after an approval has no effect.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::post;
use axum::{Json, Router};
use hapax::http::server::RoutePolicy;
use hapax::prelude::*;
use hapax::saga::routes::{SagaOutcome, SagaRoutes};
use hapax::saga::{SignalError, StepContext, StepEffect, StepError, UndoError};
use hapax_sagas_examples::{ProgramError, Remote, argument, exit, retries, shutdown};
use hapax_webhooks::WebhookLayer;
use serde::{Deserialize, Serialize};
use serde_json::json;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

type Payment = Saga<u64, (), NotPaid>;

/// Reasons for which a payment is undone.
#[derive(Debug, Serialize, Deserialize)]
enum NotPaid {
    /// The bank rejected it.
    Declined(String),
    /// The approver rejected it.
    NotApproved,
    /// The approver decided nothing in time.
    TimedOut,
}

/// The body of a webhook.
#[derive(Deserialize)]
struct Approval {
    payment: String,
    approved: bool,
}

async fn call(at: &StepContext<Remote>, path: &str, cents: u64) -> Result<(), StepError<NotPaid>> {
    let answer = at.step(path, at.key().as_str(), &cents).await;
    answer.map(drop).map_err(|error| error.map_rejected(NotPaid::Declined))
}

async fn hold(at: StepContext<Remote>, cents: u64) -> Result<(), StepError<NotPaid>> {
    call(&at, "/holds", cents).await
}

async fn release(at: StepContext<Remote>, cents: u64, _: StepEffect<()>) -> Result<(), UndoError> {
    call(&at, "/releases", cents).await.map_err(|error| format!("{error:?}").into())
}

async fn pay(at: StepContext<Remote>, cents: u64) -> Result<(), StepError<NotPaid>> {
    call(&at, "/payments", cents).await
}

fn definition(bank: Remote, within: Duration) -> Result<Payment, ProgramError> {
    let mut saga = Saga::define("payment", 1, bank);
    let hold = saga.keyed("hold", DAY, hold).retry(retries()).undo(release);
    let pay = saga.keyed("pay", DAY, pay).retry(retries()).no_undo();
    Ok(saga.flow(move |op, cents: u64| async move {
        op.run(hold, cents).await?;
        match op.signal::<bool>("approval", within).await {
            Some(true) => op.run(pay, cents).await,
            Some(false) => Err(NotPaid::NotApproved),
            None => Err(NotPaid::TimedOut),
        }
    })?)
}

/// Handles a webhook that was verified. An error of the store becomes a 503, and the sender repeats
/// the delivery.
async fn approve(
    State((sagas, payment)): State<(Sagas, Payment)>,
    Json(approval): Json<Approval>,
) -> StatusCode {
    let signalled = async {
        let Ok(key) = approval.payment.parse() else { return Ok(StatusCode::NOT_FOUND) };
        // All payments are in one scope: that of `SagaRoutes` below.
        let Some(started) = sagas.find(&payment, &Scope::shared(), &key).await? else {
            return Ok(StatusCode::NOT_FOUND);
        };
        match started.signal("approval", &approval.approved).await {
            // A payment that has ended needs no decision: the sender does not repeat the delivery.
            Ok(_) | Err(SignalError::Ended) => Ok(StatusCode::NO_CONTENT),
            Err(error) => Err(ProgramError::from(error)),
        }
    };
    signalled.await.unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
}

#[tokio::main]
async fn main() -> ExitCode {
    exit(run().await)
}

async fn run() -> Result<ExitCode, ProgramError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let listener = tokio::net::TcpListener::bind(argument(1, "an address")?).await?;
    let store = Arc::new(FileStore::open(FileOptions::new(argument(2, "a file")?))?);
    let bank = Remote::new(argument(3, "the URL of a bank")?);
    let within = Duration::from_secs(argument(4, "seconds")?.parse()?);
    let secret = std::env::var("APPROVAL_SECRET")?;

    let engine = Idempotency::builder(store).build()?;
    let payment = definition(bank, within)?;
    let sagas = Sagas::builder(engine.clone()).register(&payment).build()?;
    let answer = |end| match end {
        SagaOutcome::Done(()) => (StatusCode::CREATED, Json(json!("paid"))).into_response(),
        SagaOutcome::Undone(reason) => (StatusCode::CONFLICT, Json(json!(reason))).into_response(),
        SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
    };
    let payments = SagaRoutes::builder(sagas.clone(), payment.clone(), "/payments", answer)
        .scope(ScopeSource::shared())
        .build()?;

    let webhooks = WebhookLayer::standard("approvals").secret(secret).build()?;
    let mut options = webhooks.route_options();
    // A signal may be sent again: the first counts.
    options.policy.terms.on_unknown = OnUnknown::Reexecute;
    let policy = RoutePolicy::new(hapax_webhooks::scope(), options)?;
    let approvals = Router::new()
        .route("/approvals", post(approve))
        .layer(IdempotencyLayer::new(engine.clone(), policy))
        .layer(webhooks)
        .with_state((sagas.clone(), payment));

    println!("listening on {}", listener.local_addr()?);
    let driving = tokio::spawn(async move { sagas.run(shutdown(), Duration::from_secs(10)).await });
    axum::serve(listener, payments.router().merge(approvals))
        .with_graceful_shutdown(shutdown())
        .await?;
    driving.await?;
    engine.drain().await;
    Ok(ExitCode::SUCCESS)
}

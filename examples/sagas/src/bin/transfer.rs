//! Transfers to other banks. The ledger is in the database of the records, so that its lines commit
//! with the log of the saga; the clearing house is another system, and honors keys.
//!
//! ```text
//! transfer 127.0.0.1:3000 postgres://me@127.0.0.1/bank http://127.0.0.1:3001
//! curl -i 127.0.0.1:3000/transfers -H 'Authorization: Bearer me' -H 'Idempotency-Key: t-1' \
//!     --json '{"reference": "t-1", "account": 1, "iban": "DE02120300000000202051", "cents": 1999}'
//! ```
//!
//! 1. `debit` takes the amount from the account. It is a step of the kind `within`: account, ledger and
//!    log change together or not at all, wherever the process is killed, without a key.
//! 2. `send` calls the clearing house under the key of the step.
//! 3. `book` marks the line in the ledger as sent. If the clearing house rejects the transfer, the undo
//!    of `debit` returns the amount, in one transaction with the log as well.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::{Json, serve};
use hapax::prelude::*;
use hapax::saga::routes::{SagaOutcome, SagaRoutes};
use hapax::saga::{StepContext, StepEffect, StepError, UndoError};
use hapax::transaction::{TransactionBackend, Tx};
use hapax_sagas_examples::{ProgramError, Remote, argument, exit, retries, shutdown};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{PgPool, Postgres, Transaction};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Lease: time after which the sagas of a process that died are continued. It is longer than any
/// transaction of a step.
const CRASH: Duration = Duration::from_secs(2);

/// Ten accounts with 100,000 each. Money is in cents.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS accounts (
        id bigint PRIMARY KEY, balance bigint NOT NULL CHECK (balance >= 0));
    INSERT INTO accounts SELECT id, 10000000 FROM generate_series(1, 10) id ON CONFLICT DO NOTHING;
    CREATE TABLE IF NOT EXISTS ledger (
        reference text NOT NULL, account bigint NOT NULL, cents bigint NOT NULL,
        entry text NOT NULL)";

type PgTransaction = Transaction<'static, Postgres>;

#[derive(Clone, Serialize, Deserialize)]
struct Transfer {
    reference: String,
    account: i64,
    iban: String,
    cents: i64,
}

#[derive(Debug, Serialize, Deserialize)]
enum NotTransferred {
    InsufficientFunds,
    Rejected(String),
}

async fn debit(
    at: StepContext<Remote>,
    transfer: Transfer,
) -> Result<(), StepError<NotTransferred>> {
    let mut tx: Tx<PgTransaction> = at.tx().await?;
    let is_covered =
        change(&mut tx, &transfer, -transfer.cents).await.map_err(StepError::not_sent)?;
    if !is_covered {
        return Err(StepError::Rejected(NotTransferred::InsufficientFunds));
    }
    line(&mut tx, &transfer, "debit").await.map_err(StepError::not_sent)
}

async fn credit(
    at: StepContext<Remote>,
    transfer: Transfer,
    _: StepEffect<()>,
) -> Result<(), UndoError> {
    let mut tx: Tx<PgTransaction> =
        at.tx().await.map_err(|_: StepError<NotTransferred>| "no transaction began")?;
    change(&mut tx, &transfer, transfer.cents).await?;
    Ok(line(&mut tx, &transfer, "returned").await?)
}

async fn send(
    at: StepContext<Remote>,
    transfer: Transfer,
) -> Result<Value, StepError<NotTransferred>> {
    let receipt = at.step("/transfers", at.key().as_str(), &transfer).await;
    receipt.map_err(|error| error.map_rejected(NotTransferred::Rejected))
}

// Only if an operator aborts: a transfer that the clearing house rejected has no effect.
async fn recall(
    at: StepContext<Remote>,
    transfer: Transfer,
    _: StepEffect<Value>,
) -> Result<(), UndoError> {
    match at.step("/recalls", at.key().as_str(), &transfer).await {
        Ok(_) => Ok(()),
        Err(StepError::Rejected(reason)) => Err(reason.into()),
        Err(StepError::NotSent(error) | StepError::Unknown(error)) => Err(error.into()),
        Err(other) => Err(format!("{other:?}").into()),
    }
}

async fn book(
    at: StepContext<Remote>,
    transfer: Transfer,
) -> Result<(), StepError<NotTransferred>> {
    let mut tx: Tx<PgTransaction> = at.tx().await?;
    line(&mut tx, &transfer, "sent").await.map_err(StepError::not_sent)
}

/// Changes the balance of an account. Returns false if it does not cover the amount.
async fn change(
    tx: &mut PgTransaction,
    transfer: &Transfer,
    cents: i64,
) -> Result<bool, sqlx::Error> {
    let text = "UPDATE accounts SET balance = balance + $2 WHERE id = $1 AND balance + $2 >= 0";
    let changed = sqlx::query(text).bind(transfer.account).bind(cents).execute(&mut **tx).await?;
    Ok(changed.rows_affected() == 1)
}

/// Adds a line to the ledger. No constraint prevents a second one.
async fn line(tx: &mut PgTransaction, transfer: &Transfer, entry: &str) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO ledger VALUES ($1, $2, $3, $4)")
        .bind(&transfer.reference)
        .bind(transfer.account)
        .bind(transfer.cents)
        .bind(entry)
        .execute(&mut **tx)
        .await
        .map(drop)
}

fn definition(clearing: Remote) -> Result<Saga<Transfer, (), NotTransferred>, ProgramError> {
    let mut saga = Saga::define("transfer", 1, clearing);
    let debit = saga.within("debit", debit).retry(retries()).undo_retry(retries()).undo(credit);
    let send = saga.keyed("send", DAY, send).retry(retries()).undo(recall);
    let book = saga.within("book", book).retry(retries()).no_undo();
    Ok(saga.flow(move |op, transfer: Transfer| async move {
        op.run(debit, transfer.clone()).await?;
        op.run(send, transfer.clone()).await?;
        op.run(book, transfer).await
    })?)
}

#[tokio::main]
async fn main() -> ExitCode {
    exit(run().await)
}

async fn run() -> Result<ExitCode, ProgramError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let listener = tokio::net::TcpListener::bind(argument(1, "an address")?).await?;
    let pool = PgPool::connect(&argument(2, "a database")?).await?;
    let clearing = Remote::new(argument(3, "the URL of the clearing house")?);
    sqlx::raw_sql(TABLES).execute(&pool).await?;

    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let database = Arc::new(SqlxTransactions::new(Arc::clone(&store), pool));
    let transactions = TransactionBackend::new(database);
    let engine = Idempotency::builder(store).namespace("transfers").build()?;
    let transfer = definition(clearing)?;
    let sagas = Sagas::builder(engine.clone())
        .register(&transfer)
        .transactions(&transactions)
        .lease(CRASH)
        .build()?;
    let answer = |end| match end {
        SagaOutcome::Done(()) => (StatusCode::CREATED, Json(json!("sent"))).into_response(),
        SagaOutcome::Undone(reason) => (StatusCode::CONFLICT, Json(json!(reason))).into_response(),
        SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
    };
    let routes = SagaRoutes::builder(sagas.clone(), transfer, "/transfers", answer).build()?;
    println!("listening on {}", listener.local_addr()?);
    let driving = tokio::spawn(async move { sagas.run(shutdown(), Duration::from_secs(10)).await });
    serve(listener, routes.router()).with_graceful_shutdown(shutdown()).await?;
    driving.await?;
    engine.drain().await;
    Ok(ExitCode::SUCCESS)
}

//! A bank. A transfer changes two accounts and writes a line in the ledger, in one transaction with
//! the answer that a retry gets: however often it is asked for, and whatever dies in between, it
//! happens once, and the answer is there if and only if the money has moved.
//!
//! - [`transfer`] is plain SQL on a transaction, and knows nothing of keys.
//! - [`transfer_once`] is that as a function that is called with a key.
//! - [`app`] is that as a handler in axum.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax_core::transaction::{
    LostRace, OperationError, Receipt, TransactError, TransactionBackend, Transactions,
};
use hapax_core::{Idempotency, Key, Policy, Scope};
use hapax_http::axum::{HandlerError, InTransaction};
use hapax_http::server::{
    IdempotencyLayer, KeyRule, MissingScope, RouteError, RouteOptions, RoutePolicy, ScopeSource,
};
use hapax_postgres::PgTx;
use serde::{Deserialize, Serialize};
use tokio_postgres::{Client, Error};

/// The bank's tables. Money is in cents.
pub const TABLES: &str = "
CREATE TABLE IF NOT EXISTS accounts (
    id      bigint PRIMARY KEY,
    balance bigint NOT NULL CHECK (balance >= 0),
    version bigint NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS ledger (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    reference text NOT NULL,
    sender    bigint NOT NULL REFERENCES accounts,
    receiver  bigint NOT NULL REFERENCES accounts,
    amount    bigint NOT NULL
)";

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Transfer {
    /// What the customer calls it; comes back in the ledger.
    pub reference: String,
    /// Whose account it leaves.
    pub sender: i64,
    /// Whose account it enters.
    pub receiver: i64,
    /// In cents.
    pub amount: i64,
}

/// It is done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TransferReceipt {
    /// The line in the ledger.
    pub line: i64,
    /// What the sender has left, in cents.
    pub left: i64,
}

/// It is not, and asking again changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Declined {
    /// There is no such account, or it is twice the same.
    NoAccount,
    /// Not a sum that can be moved: nothing, less than that, or more than the receiver can have.
    BadAmount,
    /// The sender has less.
    InsufficientFunds,
}

/// Why a transfer did not work out.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The database.
    #[error(transparent)]
    Database(#[from] Error),
    /// An account was changed since it was read: the whole is done again.
    #[error(transparent)]
    Changed(#[from] LostRace),
}

/// Moves money. Accounts are read without locks, and written if they are still of the version that
/// was read; in order of their numbers, so that two transfers cannot wait for each other.
///
/// # Errors
/// [`TransferError`]; the transaction must be rolled back.
pub async fn transfer(
    tx: &Client,
    asked: &Transfer,
) -> Result<Result<TransferReceipt, Declined>, TransferError> {
    let Transfer { reference, sender, receiver, amount } = asked;
    // Else who sends less than nothing takes it from the receiver.
    if *amount <= 0 {
        return Ok(Err(Declined::BadAmount));
    }
    let read = "SELECT id, balance, version FROM accounts WHERE id IN ($1, $2) ORDER BY id";
    let rows = tx.query(read, &[sender, receiver]).await?;
    let [_, _] = &rows[..] else { return Ok(Err(Declined::NoAccount)) };
    let mut left = 0;
    for row in rows {
        let (id, balance, version): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
        let change = if id == *sender { -amount } else { *amount };
        let after = match balance.checked_add(change) {
            None => return Ok(Err(Declined::BadAmount)),
            Some(after) if after < 0 => return Ok(Err(Declined::InsufficientFunds)),
            Some(after) => after,
        };
        if id == *sender {
            left = after;
        }
        let write = "UPDATE accounts SET balance = balance + $1, version = version + 1
            WHERE id = $2 AND version = $3";
        if tx.execute(write, &[&change, &id, &version]).await? == 0 {
            return Err(LostRace.into());
        }
    }
    let line = "INSERT INTO ledger (reference, sender, receiver, amount) VALUES ($1, $2, $3, $4)
        RETURNING id";
    let line = tx.query_one(line, &[reference, sender, receiver, amount]).await?.get(0);
    Ok(Ok(TransferReceipt { line, left }))
}

/// What it takes to serve.
#[derive(Debug)]
pub struct Bank<D: ?Sized> {
    /// Keeps the records, in the database that the accounts are in.
    pub engine: Idempotency,
    /// Transactions in that database.
    pub backend: TransactionBackend<D>,
    /// Lease, retention, and the rest.
    pub policy: Policy,
}

/// A transfer for `customer`, once for each key.
///
/// # Errors
/// [`TransactError::Rejected`] is the bank's no, the same each time; after any other error, call
/// again with the same key.
pub async fn transfer_once<D: Transactions<Tx = PgTx>>(
    bank: &Bank<D>,
    customer: &Scope,
    key: &Key,
    asked: Transfer,
) -> Result<Receipt<TransferReceipt>, TransactError<Declined>> {
    let request = asked.clone();
    let work = move |tx: hapax_core::transaction::Tx<PgTx>, _| {
        // It may run more than once.
        let asked = asked.clone();
        async move { transfer(&tx, &asked).await?.map_err(OperationError::Rejected) }
    };
    bank.engine.transact(&bank.backend, (customer, key), &request, &bank.policy, work).await
}

/// The handler: the transaction is the layer's, which commits it with the response, or not.
async fn handle(
    InTransaction(tx): InTransaction<PgTx>,
    Json(asked): Json<Transfer>,
) -> Result<Response, HandlerError> {
    Ok(match transfer(&tx, &asked).await? {
        Ok(receipt) => (StatusCode::CREATED, Json(receipt)).into_response(),
        // Final as well, and rolled back: the first account may have been written.
        Err(declined) => (StatusCode::PAYMENT_REQUIRED, Json(declined)).into_response(),
    })
}

/// Calls the function. A service of its own has no layer around it.
async fn call<D: Transactions<Tx = PgTx>>(
    State(bank): State<Arc<Bank<D>>>,
    headers: HeaderMap,
    Json(asked): Json<Transfer>,
) -> Response {
    let key = headers.get("idempotency-key").and_then(|value| value.to_str().ok());
    let Some(key) = key.and_then(|key| Key::new(key).ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    // Whoever does not say who they are would share their keys with all others who do not.
    let Some(customer) = headers.get(AUTHORIZATION) else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    let customer = Scope::of([("customer", customer.as_bytes())]);
    match transfer_once(&bank, &customer, &key, asked).await {
        Ok(answer) => (StatusCode::CREATED, Json(answer.value)).into_response(),
        Err(TransactError::Rejected { error, .. }) => {
            (StatusCode::PAYMENT_REQUIRED, Json(error)).into_response()
        }
        Err(TransactError::KeyReused) => StatusCode::UNPROCESSABLE_ENTITY.into_response(),
        Err(TransactError::InFlight { .. }) => StatusCode::CONFLICT.into_response(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// `POST /transfers` is the handler in its layer, `POST /calls` the function.
///
/// # Errors
/// [`RouteError`]: the policy does not hold together.
pub fn app<D: Transactions<Tx = PgTx>>(bank: Arc<Bank<D>>) -> Result<Router, RouteError> {
    let caller = ScopeSource::headers([AUTHORIZATION], MissingScope::Reject);
    let options = RouteOptions {
        key: KeyRule::Required,
        policy: bank.policy,
        transactions: Some(bank.backend.any()),
        ..RouteOptions::default()
    };
    let layer = IdempotencyLayer::new(bank.engine.clone(), RoutePolicy::new(caller, options)?);
    let transfers = Router::new().route("/transfers", post(handle)).layer(layer);
    Ok(transfers.route("/calls", post(call::<D>)).with_state(bank))
}

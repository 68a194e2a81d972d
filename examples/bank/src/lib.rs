//! A bank. A transfer changes two accounts and writes a line in the ledger, in one transaction with
//! the outcome that a retry gets. However often it is requested, and even if a process crashes,
//! it happens once, and its outcome is stored if and only if the money has moved.
//!
//! - [`transfer`] is plain SQL on a transaction, without keys.
//! - [`transfer_once`] wraps it in a function that is called with a key.
//! - [`app`] serves it as an axum handler and as that function.

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

/// Tables of the bank. Money is in cents.
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

/// A request to transfer money.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Transfer {
    /// The customer's name for the transfer, which the ledger repeats.
    pub reference: String,
    /// Account that pays.
    pub sender: i64,
    /// Account that receives.
    pub receiver: i64,
    /// Amount in cents.
    pub amount: i64,
}

/// Receipt of a transfer that happened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TransferReceipt {
    /// Id of its line in the ledger.
    pub line: i64,
    /// Balance of the sender after the transfer, in cents.
    pub left: i64,
}

/// Reasons for which the bank declines a transfer. A retry gets the same reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Declined {
    /// An account does not exist, or both are the same.
    NoAccount,
    /// The amount is zero, negative, or more than the receiver's account can have.
    BadAmount,
    /// The sender's balance is too small.
    InsufficientFunds,
}

/// Errors of a transfer that was not decided.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The database failed.
    #[error(transparent)]
    Database(#[from] Error),
    /// An account was changed after it was read; the whole transfer is executed again.
    #[error(transparent)]
    Changed(#[from] LostRace),
}

/// Moves money. Reads the accounts without locks, and writes them only if their versions are still
/// those that were read. Writes in order of account numbers, so that two transfers cannot wait for
/// each other.
///
/// # Errors
/// [`TransferError`] if the database fails; the transaction then rolls back.
pub async fn transfer(
    tx: &Client,
    asked: &Transfer,
) -> Result<Result<TransferReceipt, Declined>, TransferError> {
    let Transfer { reference, sender, receiver, amount } = asked;
    // A negative amount would take money from the receiver.
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

/// Parts that the bank needs to serve requests.
#[derive(Debug)]
pub struct Bank<D: ?Sized> {
    /// Engine whose store has the records, in the database of the accounts.
    pub engine: Idempotency,
    /// Transactions in that database.
    pub backend: TransactionBackend<D>,
    /// Policy of a transfer: lease, retention, and the rest.
    pub policy: Policy,
}

/// Transfers money for `customer`, once for each key.
///
/// # Errors
/// [`TransactError::Rejected`] is the bank's decision to decline, which is replayed. After any
/// other error, call again with the same key.
pub async fn transfer_once<D: Transactions<Tx = PgTx>>(
    bank: &Bank<D>,
    customer: &Scope,
    key: &Key,
    asked: Transfer,
) -> Result<Receipt<TransferReceipt>, TransactError<Declined>> {
    let request = asked.clone();
    let work = move |tx: hapax_core::transaction::Tx<PgTx>, _| {
        // The engine may call this more than once.
        let asked = asked.clone();
        async move { transfer(&tx, &asked).await?.map_err(OperationError::Rejected) }
    };
    bank.engine.transact(&bank.backend, (customer, key), &request, &bank.policy, work).await
}

/// Handles a transfer. The layer owns the transaction, and commits it with the response or rolls it
/// back.
async fn handle(
    InTransaction(tx): InTransaction<PgTx>,
    Json(asked): Json<Transfer>,
) -> Result<Response, HandlerError> {
    Ok(match transfer(&tx, &asked).await? {
        Ok(receipt) => (StatusCode::CREATED, Json(receipt)).into_response(),
        // This response is final too, but rolled back: the first account may have been written.
        Err(declined) => (StatusCode::PAYMENT_REQUIRED, Json(declined)).into_response(),
    })
}

/// Handles a transfer by calling the function, without a layer.
async fn call<D: Transactions<Tx = PgTx>>(
    State(bank): State<Arc<Bank<D>>>,
    headers: HeaderMap,
    Json(asked): Json<Transfer>,
) -> Response {
    let key = headers.get("idempotency-key").and_then(|value| value.to_str().ok());
    let Some(key) = key.and_then(|key| Key::new(key).ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    // Customers without a name would share one scope, and so their keys.
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

/// Returns the routes: `POST /transfers` is the handler in its layer, `POST /calls` the function.
///
/// # Errors
/// [`RouteError`] if the options of the route contradict each other.
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

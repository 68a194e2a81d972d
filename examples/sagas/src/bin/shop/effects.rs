//! The effects of a service on orders, and the layer that honors keys. Each effect is a row; no
//! constraint prevents a second one, so that the table shows what the keys prevent.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, serve};
use hapax::http::server::{KeyRule, RouteOptions};
use hapax::prelude::*;
use hapax::transaction::TransactionBackend;
use hapax_sagas_examples::ProgramError;
use sqlx::{PgConnection, PgPool};
use tokio::net::TcpListener;

/// Lease: time for which a request whose process died blocks the next try. It is longer than any
/// transaction.
const CRASH: Duration = Duration::from_secs(1);

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, is_closed boolean NOT NULL);
    CREATE TABLE IF NOT EXISTS effects (order_id text NOT NULL, effect text NOT NULL)";

/// Serves `routes`, each under idempotency keys, in transactions on a database.
pub(crate) async fn run(address: &str, database: &str, routes: Router) -> Result<(), ProgramError> {
    let pool = PgPool::connect(database).await?;
    sqlx::raw_sql(TABLES).execute(&pool).await?;
    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let database = Arc::new(SqlxTransactions::new(Arc::clone(&store), pool));
    let mut options = RouteOptions {
        key: KeyRule::Required,
        transactions: Some(TransactionBackend::new(database).any()),
        ..RouteOptions::default()
    };
    options.policy.terms.lease = CRASH;
    options.policy.terms.on_unknown = OnUnknown::Reexecute; // what did not commit was rolled back
    let layer = IdempotencyLayer::builder(store).namespace("shop").options(options).build()?;
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let ending = layer.clone().drain_on_signal(Duration::from_secs(25));
    Ok(serve(listener, routes.layer(layer)).with_graceful_shutdown(ending).await?)
}

/// Locks an order until the transaction ends. Returns whether an undo has closed it: then no step may
/// have an effect on it any more.
pub(crate) async fn lock(tx: &mut PgConnection, order: &str) -> Result<bool, sqlx::Error> {
    let text = "INSERT INTO orders VALUES ($1, false)
        ON CONFLICT (id) DO UPDATE SET is_closed = orders.is_closed RETURNING is_closed";
    sqlx::query_scalar(text).bind(order).fetch_one(tx).await
}

/// Adds an effect.
pub(crate) async fn add(
    tx: &mut PgConnection,
    order: &str,
    effect: &str,
) -> Result<(), sqlx::Error> {
    let text = "INSERT INTO effects VALUES ($1, $2)";
    sqlx::query(text).bind(order).bind(effect).execute(tx).await.map(drop)
}

/// Undoes an effect, whether or not it is known to have happened: closes the order, so that a late
/// call of the step has no effect, and adds `undo` for each `effect` that happened.
pub(crate) async fn undo(
    tx: &mut PgConnection,
    order: &str,
    [effect, undo]: [&str; 2],
) -> Result<(), sqlx::Error> {
    lock(tx, order).await?;
    let close = "UPDATE orders SET is_closed = true WHERE id = $1";
    sqlx::query(close).bind(order).execute(&mut *tx).await?;
    let add = "INSERT INTO effects SELECT order_id, $3 FROM effects
        WHERE order_id = $1 AND effect = $2";
    sqlx::query(add).bind(order).bind(effect).bind(undo).execute(tx).await.map(drop)
}

/// Rejects a step: it has no effect, now or later.
pub(crate) fn reject(reason: &str) -> Response {
    (StatusCode::CONFLICT, Json(reason)).into_response()
}

//! A transfer that commits in one transaction with its record, by sqlx.
//!
//!     cargo run -p hapax --features axum,sqlx --example transaction -- postgres://app@127.0.0.1/bank
//!     curl -i 127.0.0.1:3000/transfers -H 'Authorization: Bearer me' -H 'Idempotency-Key: t-1' -d ''

use std::sync::Arc;
use std::time::Duration;

use axum::{Router, http::StatusCode, routing::post};
use hapax::prelude::*;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS accounts (id int PRIMARY KEY, balance bigint);
    INSERT INTO accounts VALUES (1, 1000), (2, 1000) ON CONFLICT DO NOTHING";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("expected the URL of a database")?;
    let pool = sqlx::PgPool::connect(&url).await?;
    sqlx::raw_sql(TABLE).execute(&pool).await?;
    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let layer = IdempotencyLayer::builder(Arc::clone(&store))
        .namespace("orders")
        .transactions(SqlxTransactions::new(store, pool))
        .on_unknown(OnUnknown::Reexecute) // what did not commit was rolled back
        .build()?;
    let app = Router::new().route("/transfers", post(transfer)).layer(layer.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    let ending = layer.drain_on_signal(Duration::from_secs(25));
    axum::serve(listener, app).with_graceful_shutdown(ending).await?;
    Ok(())
}

async fn transfer(mut tx: SqlxTx) -> Result<StatusCode, HandlerError> {
    sqlx::query("UPDATE accounts SET balance = balance - 100 WHERE id = 1")
        .execute(&mut *tx)
        .await?;
    sqlx::query("UPDATE accounts SET balance = balance + 100 WHERE id = 2")
        .execute(&mut *tx)
        .await?;
    Ok(StatusCode::CREATED)
}

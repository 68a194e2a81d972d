//! An order service: the order, the message that reports it and the response commit together, and a
//! relay publishes the message.
//!
//! ```text
//! order_service postgres://app@127.0.0.1/app nats://127.0.0.1:4222 127.0.0.1:3000
//! curl 127.0.0.1:3000/orders -H 'Authorization: Bearer me' -H 'Idempotency-Key: o-1' \
//!     --json '{"customer": "c-1", "item": "book"}'
//! ```

use std::sync::Arc;
use std::time::Duration;

use axum::{Json, Router, http::StatusCode, routing::post};
use hapax::messages::{Relay, RelayLimits};
use hapax::postgres_messages::{Connections, PgOutbox};
use hapax::prelude::*;
use hapax_messages_examples::{AnyError, argument, shutdown};
use hapax_nats::NatsSink;

/// Lease: time for which a process that crashed blocks its requests and its shards of the outbox.
const LEASE: Duration = Duration::from_secs(5);

#[derive(serde::Deserialize, serde::Serialize)]
struct Order {
    customer: String,
    item: String,
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let pool = sqlx::PgPool::connect(&argument(1, "a database")?).await?;
    let sink = NatsSink::connect(&argument(2, "a broker")?).await?;
    let listener = tokio::net::TcpListener::bind(argument(3, "an address")?).await?;

    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let layer = IdempotencyLayer::builder(Arc::clone(&store))
        .namespace("orders")
        .transactions(SqlxTransactions::new(store, pool.clone()))
        .on_unknown(OnUnknown::Reexecute) // what did not commit was rolled back
        .lease(LEASE)
        .build()?;
    let app = Router::new().route("/orders", post(order)).layer(layer.clone());

    let outbox = PgOutbox::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    // Every instance of the service runs a relay: they share the outbox.
    let engine = layer.engine().clone();
    let limits = RelayLimits { lease: LEASE, ..RelayLimits::default() };
    let relay = Relay::new("orders", Arc::new(outbox), Arc::new(sink), engine.clone(), limits)?;
    let relaying = tokio::spawn(relay.run(shutdown()));

    println!("listening on {}", listener.local_addr()?);
    let ending = layer.drain_on_signal(Duration::from_secs(25));
    axum::serve(listener, app).with_graceful_shutdown(ending).await?;
    relaying.await?;
    engine.drain().await; // the relay's leases of shards are released
    Ok(())
}

async fn order(
    mut tx: SqlxTx,
    Json(order): Json<Order>,
) -> Result<(StatusCode, String), HandlerError> {
    let insert = "INSERT INTO orders (customer, item) VALUES ($1, $2) RETURNING id";
    let id: i64 = sqlx::query_scalar(insert)
        .bind(&order.customer)
        .bind(&order.item)
        .fetch_one(&mut *tx)
        .await?;
    let message = serde_json::json!({ "order": id, "customer": order.customer });
    sqlx::query("SELECT hapax_outbox_put_text('orders.created', $1, $2, $3)")
        .bind(message.to_string())
        .bind(&order.customer) // messages of one customer stay in order
        .bind(format!("order-{id}"))
        .execute(&mut *tx)
        .await?;
    Ok((StatusCode::CREATED, id.to_string()))
}

//! An axum service whose POST requests may be retried.
//!
//!     cargo run -p hapax --features axum,file --example axum
//!     curl -i 127.0.0.1:3000/orders -H 'Authorization: Bearer me' -H 'Idempotency-Key: o-1' -d ''

use std::time::Duration;

use axum::{Router, routing::post};
use hapax::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = FileStore::open(FileOptions::new("orders.db"))?;
    let layer = IdempotencyLayer::builder(store).build()?;
    let app = Router::new().route("/orders", post(|| async { "ordered" })).layer(layer.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    // At SIGTERM the drain waits for requests in progress and for deferred outcomes.
    let ending = layer.drain_on_signal(Duration::from_secs(25));
    axum::serve(listener, app).with_graceful_shutdown(ending).await?;
    Ok(())
}

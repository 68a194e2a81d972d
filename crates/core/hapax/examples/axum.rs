//! An axum service whose POST requests may be retried.
//!
//!     cargo run -p hapax --features axum,file --example axum
//!     curl -i 127.0.0.1:3000/orders -H 'Authorization: Bearer me' -H 'Idempotency-Key: o-1' -d ''

use axum::{Router, routing::post};
use hapax::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = FileStore::open(FileOptions::new("orders.db"))?;
    let layer = IdempotencyLayer::builder(store).build()?;
    let app = Router::new().route("/orders", post(|| async { "ordered" })).layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

//! A service with its own file of records and the operators' API.
//!
//! ```text
//! cargo run -p hapax-operators --example service
//! curl -i 127.0.0.1:3000/payments -H 'Authorization: Bearer me' -H 'Idempotency-Key: p-1' -d 100
//! curl -i 127.0.0.1:3000/payments -H 'Authorization: Bearer me' -H 'Idempotency-Key: p-1' -d 100
//! hapax keys list --state unknown --store file:payments.db
//! hapax keys resolve p-1 --scope 'Bearer me' --store file:payments.db \
//!     --outcome happened --status 201 --reason 'the bank has it'
//! curl -i 127.0.0.1:3000/payments -H 'Authorization: Bearer me' -H 'Idempotency-Key: p-1' -d 100
//! ```
//!
//! The second request gets 409, because the reply of the bank to the first one was lost.
//! `hapax keys` finds the address of the API in the lock file and the token in a file next to the
//! store.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::routing::post;
use hapax_core::{Idempotency, Inspect, OnUnknown, Store, SystemEntropy};
use hapax_file::{FileOptions, FileStore};
use hapax_http::server::{
    IdempotencyLayer, KeyRule, MissingScope, RouteOptions, RoutePolicy, ScopeSource,
};
use hapax_operators::{AdminToken, Audit, Census, Operators};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = Path::new("payments.db");
    let store = Arc::new(FileStore::open(FileOptions::new(path))?);
    let census = Arc::new(Census::default());
    let watched = census.watch(Arc::clone(&store) as Arc<dyn Store>);
    let engine = Idempotency::builder(watched).build()?;

    let token = AdminToken::read_or_make(&AdminToken::default_path(Some(path)), &SystemEntropy)?;
    let audit = Audit::new(Audit::default_path(Some(path)), "the payments service");
    let operators = Operators::builder(engine.clone(), Arc::clone(&store) as Arc<dyn Inspect>)
        .census(census)
        .build(token, audit);
    let admin = TcpListener::bind("127.0.0.1:9090").await?;
    // Into the lock of the file, where `hapax keys` looks for it.
    store.set_admin(Some(admin.local_addr()?))?;
    println!("operators: http://{}/api", admin.local_addr()?);
    let api = operators.router().into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(admin, api).await });

    let caller = ScopeSource::headers([AUTHORIZATION], MissingScope::Reject);
    let mut options = RouteOptions { key: KeyRule::Required, ..RouteOptions::default() };
    options.policy.terms.on_unknown = OnUnknown::Block;
    let layer = IdempotencyLayer::new(engine, RoutePolicy::new(caller, options)?);
    let app = Router::new().route("/payments", post(pay)).layer(layer.clone());
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("payments: http://{}/payments", listener.local_addr()?);
    let ending = layer.drain_on_signal(Duration::from_secs(25));
    Ok(axum::serve(listener, app).with_graceful_shutdown(ending).await?)
}

/// Charges, and does not get to know whether it worked.
async fn pay(amount: String) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("the bank did not answer about {amount}\n"))
}

//! Servers that are measured. Handlers do nothing: every response is the same 200 bytes.
//!
//!     cost-server axum ADDRESS
//!     cost-server layer ADDRESS memory|file|redis|postgres [PATH|URL]
//!     cost-server idempotent ADDRESS memory|redis [URL]
//!     cost-server axum-idempotent ADDRESS
//!     cost-server proxy ADDRESS UPSTREAM
//!
//! All run on `#[tokio::main]`, as the documentation of each crate has it: one worker where the
//! process is pinned to one core.

mod layers;
mod proxy;

use std::process::ExitCode;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::post;
use hapax_bench_cost::{Any, wire};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> ExitCode {
    hapax_bench_cost::exit(run().await)
}

async fn run() -> Result<(), Any> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let address = words.get(1).ok_or("a case and an address are needed")?;
    let listener = TcpListener::bind(address).await?;
    let app = match (words[0], &words[2..]) {
        ("axum", []) => service(),
        ("layer", ["memory"]) => layers::memory(service())?,
        ("layer", ["file", path]) => layers::file(service(), path)?,
        ("layer", ["redis", url]) => layers::redis(service(), url).await?,
        ("layer", ["postgres", url]) => layers::postgres(service(), url).await?,
        ("idempotent", ["memory"]) => layers::idempotent_memory(service())?,
        ("idempotent", ["redis", url]) => layers::idempotent_redis(service(), url).await?,
        ("axum-idempotent", []) => layers::axum_idempotent(service()),
        ("proxy", [upstream]) => return proxy::run(listener, upstream).await,
        _ => return Err("no such case: see the head of main.rs".into()),
    };
    axum::serve(listener, app).await?;
    Ok(())
}

/// Returns the service that is protected.
fn service() -> Router {
    Router::new().route(wire::PATH, post(answer))
}

async fn answer() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], wire::ANSWER)
}

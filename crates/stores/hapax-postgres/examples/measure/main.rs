//! Measures the store against one statement per request, in one run on one server.
//!
//! `cargo run --release -p hapax-postgres --example measure -- rates [SECONDS]`
//! `cargo run --release -p hapax-postgres --example measure -- ratios [ROUNDS]`
//! `cargo run --release -p hapax-postgres --example measure -- purge [KEYS]`
//! `cargo run --release -p hapax-postgres --example measure -- indexes [KEYS]`
//! `cargo run --release -p hapax-postgres --example measure -- schedule [ENTRIES]`
//!
//! Starts its own server, which syncs as in production. Only ratios within a run are meaningful;
//! the absolute numbers depend on the machine and its other load.

mod indexes;
mod plain;
mod purge;
mod rates;
mod schedule;
mod work;

use std::error::Error;

use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |default: u64| arguments.get(1).map_or(Ok(default), |text| text.parse());
    match arguments.first().map(String::as_str) {
        Some("rates") => rates::measure(number(5)?).await,
        Some("ratios") => rates::ratios(number(15)?.max(1)).await,
        Some("purge") => purge::measure(number(1_000_000)?).await,
        Some("indexes") => indexes::measure(number(200_000)?).await,
        Some("schedule") => schedule::measure(number(1_000_000)?.max(1)).await,
        _ => Err("one of: rates, ratios, purge, indexes, schedule".into()),
    }
}

async fn server() -> PostgresServer {
    let options = PostgresServerOptions::new()
        .set("fsync", "on")
        .set("shared_buffers", "256MB")
        .set("max_connections", "200")
        .set("max_wal_size", "4GB");
    PostgresServer::start_with(options).await
}

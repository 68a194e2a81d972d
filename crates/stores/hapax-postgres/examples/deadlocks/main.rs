//! Searches for deadlocks: several processes, few keys, one server, for a given time.
//!
//! `cargo run --release -p hapax-postgres --example deadlocks -- MINUTES PROCESSES`
//!
//! Starts its own server. Fails at the first swap that is rejected, and if the server counted a
//! deadlock.

mod scramble;

use std::error::Error;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hapax_postgres::PostgresStore;
use hapax_testkit::servers::PostgresServer;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Keys that all processes write.
const KEYS: u64 = 32;

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [role, url, number, seconds] if role == "one-of-them" => {
            one(url, number.parse()?, Duration::from_secs(seconds.parse()?)).await?;
            Ok(ExitCode::SUCCESS)
        }
        [] => hunt(10.0, 4).await,
        [minutes] => hunt(minutes.parse()?, 4).await,
        [minutes, processes, ..] => hunt(minutes.parse()?, processes.parse()?).await,
    }
}

async fn hunt(minutes: f64, processes: u64) -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    let server = PostgresServer::start().await;
    let url = server.url("postgres");
    let seconds = (minutes * 60.0).ceil().to_string();
    println!("{processes} processes on {KEYS} keys for {seconds} s");
    let mut running = JoinSet::new();
    for number in 0..processes {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["one-of-them", &url, &number.to_string(), &seconds]);
        let child = command.stdin(Stdio::null()).kill_on_drop(true).spawn()?;
        running.spawn(async move { child.wait_with_output().await });
    }
    let mut failed = 0;
    while let Some(ended) = running.join_next().await {
        failed += u32::from(!ended??.status.success());
    }
    let count = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'";
    let deadlocks = server.sql("postgres", count).await;
    println!("{deadlocks} deadlocks, {failed} processes failed");
    let good = deadlocks == "0" && failed == 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One process: two stores, one of them with two lanes.
async fn one(url: &str, number: u64, time: Duration) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut stores = Vec::new();
    for lanes in [1, 2] {
        // Small batches, so that many are in progress with the same keys.
        let options: hapax_postgres::PostgresOptions = url.parse()?;
        let options = options.lanes(lanes).batch(8).timeout(Duration::from_secs(20));
        stores.push(Arc::new(PostgresStore::connect(options).await?));
    }
    let stored = scramble::scramble(&stores, KEYS, number << 32, Instant::now() + time).await?;
    let met: u64 = stores.iter().map(|store| store.stats().alone).sum();
    println!("process {number}: {stored} swaps stored, {met} met a lock");
    for store in &stores {
        store.close().await;
    }
    Ok(())
}

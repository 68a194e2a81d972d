//! Requests per second, and the latency of claims.

use std::sync::Arc;
use std::time::Duration;

use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;

use crate::Outcome;
use crate::plain::Pool;
use crate::work::{Measured, OfStore, Server, Until, drive};

const RETENTION: Duration = Duration::from_secs(86_400);

/// Number of rounds. Measurements alternate, so that other load on the machine affects all alike.
const ROUNDS: u64 = 3;

pub(crate) async fn measure(seconds: u64) -> Outcome<()> {
    let server = crate::server().await;
    let url = server.url("postgres");
    drop(PostgresStore::connect(url.parse()?).await?);
    println!(
        "Server time is what the server's processes compute for one request: unlike the rest it"
    );
    println!("depends little on what else the machine does.");
    println!(
        "{:<44} {:>8} {:>8} {:>10} {:>10} {:>11}",
        "", "callers", "req/s", "claim p50", "p99", "server time"
    );
    for _ in 0..ROUNDS {
        for callers in [1, 16, 64] {
            for prepared in [false, true] {
                for connections in [1, 16, 64] {
                    if connections > callers {
                        continue;
                    }
                    let pool = Pool::new(&server, connections as usize, prepared).await?;
                    let name = format!(
                        "one statement per request, {connections} conn.{}",
                        if prepared { ", prepared" } else { "" }
                    );
                    run(&server, &name, Arc::new(pool), callers, seconds).await?;
                }
                for lanes in [1, 2, 4] {
                    if lanes > callers as usize {
                        continue;
                    }
                    let options: PostgresOptions = url.parse()?;
                    let store =
                        PostgresStore::connect(options.lanes(lanes).prepare(prepared)).await?;
                    let store = Arc::new(store);
                    let name =
                        format!("store, {lanes} lanes{}", if prepared { ", prepared" } else { "" });
                    let of_store = Arc::new(OfStore(Arc::clone(&store)));
                    run(&server, &name, of_store, callers, seconds).await?;
                    let stats = store.stats();
                    println!("    {:.1} swaps a batch", stats.swaps as f64 / stats.batches as f64);
                    store.close().await;
                }
            }
        }
        server.sql("postgres", "TRUNCATE hapax_cells").await;
    }
    Ok(())
}

/// Measures the cost of the store for a single caller, and its gain for many, relative to one
/// statement per request over as many connections as callers. Runs alternate, and only the ratio
/// within each pair is used.
pub(crate) async fn ratios(rounds: u64) -> Outcome<()> {
    let server = crate::server().await;
    let url = server.url("postgres");
    for prepared in [false, true] {
        let options: PostgresOptions = url.parse()?;
        let store = Arc::new(PostgresStore::connect(options.prepare(prepared)).await?);
        for callers in [1, 64] {
            let pool = Arc::new(Pool::new(&server, callers as usize, prepared).await?);
            let mut ratios = Vec::new();
            for _ in 0..rounds {
                let until = Until::Seconds(1);
                let plain =
                    drive(Arc::clone(&pool), callers, fresh(), RETENTION, until).await?.rate();
                let of_store = Arc::new(OfStore(Arc::clone(&store)));
                let stored = drive(of_store, callers, fresh(), RETENTION, until).await?.rate();
                ratios.push(stored / plain);
            }
            ratios.sort_by(f64::total_cmp);
            let shown: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
            println!(
                "{callers:>3} callers{}: {:.2} times the requests, median of {}",
                if prepared { ", prepared" } else { "" },
                ratios[ratios.len() / 2],
                shown.join(" ")
            );
        }
    }
    Ok(())
}

async fn run<S: Server>(
    postgres: &PostgresServer,
    name: &str,
    server: Arc<S>,
    callers: u64,
    seconds: u64,
) -> Outcome<()> {
    let before = postgres.cpu_time();
    // Each run has its own keys.
    let mut measured: Measured =
        drive(server, callers, fresh(), RETENTION, Until::Seconds(seconds)).await?;
    let computed = postgres.cpu_time().saturating_sub(before);
    println!(
        "{name:<44} {callers:>8} {:>8.0} {:>8.2}ms {:>8.2}ms {:>9.0}µs",
        measured.rate(),
        measured.claim(0.5).as_secs_f64() * 1e3,
        measured.claim(0.99).as_secs_f64() * 1e3,
        computed.as_secs_f64() * 1e6 / measured.requests as f64
    );
    Ok(())
}

fn fresh() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness keys repeat between runs, which is an error then.
    hapax_core::Entropy::fill(&hapax_core::SystemEntropy, &mut bytes).ok();
    u64::from_be_bytes(bytes)
}

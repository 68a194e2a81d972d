//! Cost of purging for claims, and the size of the table after it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Store;
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;
use tokio::time::sleep;

use crate::Outcome;
use crate::work::{OfStore, Until, drive};

/// Short, so that a run of minutes replaces the table several times over.
const RETENTION: Duration = Duration::from_secs(15);

const CALLERS: u64 = 64;

pub(crate) async fn measure(keys: u64) -> Outcome<()> {
    let server = crate::server().await;
    let options: PostgresOptions = server.url("postgres").parse()?;
    let store = Arc::new(PostgresStore::connect(options).await?);
    let purged = Arc::new(PostgresStore::connect(server.url("postgres").parse()?).await?);
    println!("without purging, then with, {keys} keys each, kept for {RETENTION:?}");
    for purging in [false, true] {
        server.sql("postgres", "TRUNCATE hapax_cells").await;
        server.sql("postgres", "SELECT pg_stat_reset()").await;
        let purge = async {
            if !purging {
                return std::future::pending().await;
            }
            loop {
                let limit = NonZeroU32::MIN.saturating_add(9_999);
                // As the gateway does.
                let more = purged.reap(limit).await.is_ok_and(|reaped| reaped.more);
                sleep(Duration::from_millis(if more { 50 } else { 1_000 })).await;
            }
        };
        let work = drive(
            Arc::new(OfStore(Arc::clone(&store))),
            CALLERS,
            u64::from(purging) + 1,
            RETENTION,
            Until::Requests(keys),
        );
        let mut measured = tokio::select! {
            measured = work => measured?,
            () = purge => return Ok(()),
        };
        println!(
            "{}: {:.0} requests/s, claim p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms",
            if purging { "purging" } else { "not purging" },
            measured.rate(),
            measured.claim(0.5).as_secs_f64() * 1e3,
            measured.claim(0.99).as_secs_f64() * 1e3,
            measured.claim(0.999).as_secs_f64() * 1e3,
        );
        look(&server).await;
    }
    println!("{} removed while it ran", purged.stats().removed);
    Ok(())
}

async fn look(server: &PostgresServer) {
    // The statistics are updated with a delay.
    sleep(Duration::from_secs(2)).await;
    let text = "SELECT 'rows ' || (SELECT count(*) FROM hapax_cells)
        || ', updates that left the indexes alone ' || n_tup_hot_upd * 100 / n_tup_upd
        || ' %, table ' || pg_size_pretty(pg_table_size(relid))
        || ', indexes ' || pg_size_pretty(pg_indexes_size(relid))
        || ', dead rows ' || n_dead_tup || ', autovacuums ' || autovacuum_count
        FROM pg_stat_user_tables WHERE relname = 'hapax_cells' AND n_tup_upd > 0";
    println!("    {}", server.sql("postgres", text).await);
}

//! Comparison of indexes for finding expired records, and their cost.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Store;
use hapax_postgres::PostgresStore;
use hapax_testkit::servers::PostgresServer;
use tokio::time::{Instant, sleep};

use crate::Outcome;
use crate::work::{OfStore, Until, drive};

/// Retention of a record: a record claimed in one round expires in the next.
const RETENTION: Duration = Duration::from_secs(3);

/// Number of times that the table is replaced.
const TURNS: u64 = 4;

/// Names, the replacement of the index on `sweep_at`, and the condition that finds expired records.
const SCHEMES: [(&str, &str, &str); 4] = [
    ("b-tree on sweep_at, which completions leave alone", "", ""),
    (
        "b-tree on due_at, which completions change",
        "CREATE INDEX due ON hapax_cells (due_at)",
        "due_at <= now",
    ),
    (
        "BRIN on the time of the claim",
        "CREATE INDEX due ON hapax_cells USING brin (fence) WITH (pages_per_range = 16)",
        "fence <= now - 8000000 AND due_at <= now",
    ),
    ("none", "", "due_at <= now"),
];

pub(crate) async fn measure(keys: u64) -> Outcome<()> {
    for (name, index, due) in SCHEMES {
        let server = crate::server().await;
        let store = Arc::new(PostgresStore::connect(server.url("postgres").parse()?).await?);
        if !due.is_empty() {
            server.sql("postgres", "DROP INDEX hapax_cells_sweep").await;
        }
        if !index.is_empty() {
            server.sql("postgres", index).await;
        }
        println!("{name}");
        for turn in 0..TURNS {
            let until = Until::Requests(keys / TURNS);
            let work = drive(Arc::new(OfStore(Arc::clone(&store))), 64, turn + 1, RETENTION, until);
            let rate = work.await?.rate();
            // The records claimed first have expired; the last have not, so that some must be
            // skipped.
            sleep(RETENTION).await;
            let (removed, took, longest) = purge(&server, &store, due).await?;
            println!(
                "    {rate:>6.0} requests/s; {removed} purged in {:.2} s, at most {:.0} ms at a time; {}",
                took.as_secs_f64(),
                longest.as_secs_f64() * 1e3,
                sizes(&server).await
            );
            server.sql("postgres", "VACUUM ANALYZE hapax_cells").await;
        }
    }
    Ok(())
}

/// Removes expired records, five hundred at a time.
async fn purge(
    server: &PostgresServer,
    store: &PostgresStore,
    due: &str,
) -> Outcome<(u64, Duration, Duration)> {
    let (begun, mut removed, mut longest) = (Instant::now(), 0, Duration::ZERO);
    let (client, driver) =
        tokio_postgres::connect(&server.url("postgres"), tokio_postgres::NoTls).await?;
    tokio::spawn(driver);
    let text = format!(
        "WITH gone AS (
            DELETE FROM hapax_cells WHERE key = ANY (ARRAY(
                SELECT key FROM hapax_cells
                CROSS JOIN (SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::int8 AS now) c
                WHERE {due} LIMIT 500 FOR UPDATE OF hapax_cells SKIP LOCKED
            )) RETURNING 1
        ) SELECT count(*) FROM gone"
    );
    loop {
        let before = Instant::now();
        let some = if due.is_empty() {
            let limit = NonZeroU32::MIN.saturating_add(499);
            i64::from(store.reap(limit).await?.removed)
        } else {
            client.query_one(&text, &[]).await?.try_get(0)?
        };
        longest = longest.max(before.elapsed());
        removed += some.unsigned_abs();
        if some == 0 {
            return Ok((removed, begun.elapsed(), longest));
        }
    }
}

async fn sizes(server: &PostgresServer) -> String {
    // The statistics are updated with a delay.
    sleep(Duration::from_secs(1)).await;
    let text = "SELECT n_tup_hot_upd * 100 / n_tup_upd || ' % HOT, table '
        || pg_size_pretty(pg_table_size(relid)) || ', indexes '
        || pg_size_pretty(pg_indexes_size(relid))
        FROM pg_stat_user_tables WHERE relname = 'hapax_cells' AND n_tup_upd > 0";
    server.sql("postgres", text).await
}

//! The plans of statements.

use hapax_core::Store as _;
use hapax_core::store::Swapped;
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};

use super::support::{claim, complete, connect, expect_stored, scans};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn swaps_read_by_the_index_of_a_table_that_was_empty() {
    // The statistics stay those of an empty table.
    let options = PostgresServerOptions::new().set("autovacuum", "off");
    let server = PostgresServer::start_with(options).await;
    connect(&server).await.close().await;
    let before = scans(&server, "hapax_cells").await;
    let store = connect(&server).await;
    for of in 0..20 {
        let claimed = claim(of);
        expect_stored(&*store, &claimed).await;
        expect_stored(&*store, &complete(&claimed, of + 1_000, b"done")).await;
        let mut again = claim(of);
        again.write_id = claim(of + 2_000).write_id;
        assert!(matches!(store.swap(again).await.unwrap(), Swapped::Conflict(_)));
    }
    store.close().await;
    let after = scans(&server, "hapax_cells").await;
    assert_eq!(after.0, before.0);
    assert!(after.1 > before.1 + 60, "{before:?}, {after:?}");
}

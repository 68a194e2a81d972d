//! Histories of many callers while the server ends connections and its processes crash.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use hapax_testkit::faults::FaultProxy;
use hapax_testkit::storm::{Storm, StormCounts};
use hapax_testkit::suite::server::{OPERATIONS, ServerFixture, run_history};
use tokio::time::sleep;

use super::faults::TERMINATE;
use super::suite::Postgres;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_server_that_ends_connections_and_crashes() {
    let server = Postgres::start().await;
    let proxy = FaultProxy::before(server.address(), 15).await.unwrap();
    let ended = AtomicU32::new(0);
    let harm = async {
        loop {
            sleep(Duration::from_millis(120)).await;
            server.0.crash();
            ended.fetch_add(1, Relaxed);
            sleep(Duration::from_millis(400)).await;
            // A server rejects connections while it recovers from a crash.
            let told = server.0.try_sql("postgres", TERMINATE).await;
            ended.fetch_add(u32::from(told.is_ok()), Relaxed);
        }
    };
    let enough = |sum: &StormCounts| ended.load(Relaxed) > 2 && sum.ambiguous > 5;
    let sum = run_history(Storm::of(OPERATIONS, 15), &server, &proxy, harm, enough).await;
    assert!(sum.stored > 200, "{sum:?}");
}

//! What is due goes away, without being in anybody's way.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Stamp, Swap};
use hapax_core::{RecordState, Store};
use hapax_postgres::PostgresStore;
use hapax_testkit::servers::PostgresServer;
use hapax_testkit::suite::wait;
use tokio::task::JoinSet;

use super::support::{claim, complete, connect, expect_stored, load, write_id};

const MANY: NonZeroU32 = NonZeroU32::new(10_000).unwrap();
const SHORT: Duration = Duration::from_millis(50);

/// Kept for a moment, due at once after that.
fn short_lived(of: u64) -> Swap {
    let mut swap = claim(of);
    swap.draft.keep = Some(SHORT);
    swap.draft.record.terms.lease = Duration::ZERO;
    swap
}

async fn put(store: &Arc<PostgresStore>, swaps: impl Iterator<Item = Swap>) {
    let mut callers = JoinSet::new();
    for swap in swaps {
        let store = Arc::clone(store);
        callers.spawn(async move { expect_stored(&*store, &swap).await });
    }
    callers.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_purge_goes_by_chunks_and_takes_all_that_is_due() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    put(&store, (0..1_300).map(short_lived)).await;
    put(&store, (2_000..2_100).map(claim)).await;
    wait(&*store, SHORT).await;
    let before = server.sql("postgres", "SELECT txid_current()").await.parse::<u64>().unwrap();
    let reaped = store.reap(MANY).await.unwrap();
    assert_eq!((reaped.removed, reaped.more), (1_300, false));
    let after = server.sql("postgres", "SELECT txid_current()").await.parse::<u64>().unwrap();
    // Five hundred at a time, in transactions of their own.
    assert!((3..20).contains(&(after - before)), "{before} {after}");
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_cells").await, "100");
    assert_eq!(store.reap(MANY).await.unwrap().removed, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_and_completions_leave_the_indexes_alone() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    for of in 0..400 {
        let mut claimed = claim(of);
        // Kept for ever while it is in flight, every second one.
        if of % 2 == 0 {
            claimed.draft.keep = None;
        }
        expect_stored(&*store, &claimed).await;
        expect_stored(&*store, &complete(&claimed, of + 1_000, b"yes")).await;
    }
    let updates = "SELECT n_tup_hot_upd * 100 / n_tup_upd FROM pg_stat_user_tables
        WHERE relname = 'hapax_cells' AND n_tup_upd = 400";
    // The statistics come late.
    let share = loop {
        if let Ok(share) = server.sql("postgres", updates).await.parse::<u32>() {
            break share;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(share > 40, "{share} % of updates leave the indexes alone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_record_with_a_later_deadline_is_purged_when_it_is_due() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    // Entered as due soon, and then kept: for a day, for ever, and for a moment.
    let entered: Vec<Swap> = (0..3).map(short_lived).collect();
    put(&store, entered.iter().cloned()).await;
    for (swap, keep) in entered.iter().zip([Some(Duration::from_secs(86_400)), None, Some(SHORT)]) {
        let mut next = complete(swap, u64::from_be_bytes([9; 8]), b"yes");
        next.draft.keep = keep;
        next.write_id = write_id(u64::from(swap.id.as_bytes()[0]) + 500);
        expect_stored(&*store, &next).await;
    }
    wait(&*store, SHORT).await;
    let reaped = store.reap(MANY).await.unwrap();
    assert_eq!((reaped.removed, reaped.more), (1, false));
    // The sweep does not meet them again before their time.
    let met = "SELECT count(*) FROM hapax_cells
        WHERE sweep_at <= (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 10000000";
    assert_eq!(server.sql("postgres", met).await, "0");
    assert!(load(&*store, 0).await.is_some() && load(&*store, 1).await.is_some());
    // An operator ends the one that was kept for ever: it is found again.
    let stored = load(&*store, 1).await.unwrap();
    let mut last = short_lived(1);
    last.expected = Some(stored.write_id);
    last.write_id = write_id(777);
    last.draft.stamp = Stamp::Keep;
    last.draft.record.state = RecordState::Released;
    expect_stored(&*store, &last).await;
    wait(&*store, SHORT).await;
    assert_eq!(store.reap(MANY).await.unwrap().removed, 1);
    assert!(load(&*store, 1).await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn several_processes_purge_at_once() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    put(&store, (0..1_000).map(short_lived)).await;
    wait(&*store, SHORT).await;
    let mut purging = JoinSet::new();
    for _ in 0..4 {
        let store = connect(&server).await;
        purging.spawn(async move {
            let mut removed = 0;
            loop {
                let reaped = store.reap(NonZeroU32::new(40).unwrap()).await.unwrap();
                removed += reaped.removed;
                if !reaped.more {
                    return removed;
                }
            }
        });
    }
    // None is removed twice; what one had locked when another looked, the first has removed.
    assert_eq!(purging.join_all().await.into_iter().sum::<u32>(), 1_000);
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_cells").await, "0");
}

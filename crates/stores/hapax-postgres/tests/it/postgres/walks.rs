//! Walks over the blocks of the table.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::store::{Cursor, StoredRecord};
use hapax_core::{Inspect, OperationId, RecordState, StoreError};
use hapax_postgres::PostgresStore;
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};

use super::support::{claim, complete, connect, expect_stored};

/// A length that the server stores outside of the row.
const LONG: usize = 40_000;

/// Returns the ids of the visited records, in their order, and the lengths of their outcomes.
async fn walk(store: &PostgresStore, since: Option<Duration>) -> Vec<(OperationId, usize)> {
    let (mut visited, mut place) = (Vec::new(), Some(Cursor::default()));
    while let Some(from) = place {
        let mut visit = |id: &OperationId, stored: &Result<StoredRecord, StoreError>, _| {
            let RecordState::Done(outcome) = &stored.as_ref().unwrap().record.state else {
                panic!("expected a finished record, found {stored:?}");
            };
            visited.push((*id, outcome.bytes().len()));
        };
        place = store.scan_all(from, NonZeroU32::MIN, since, &mut visit).await.unwrap().next;
    }
    visited
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_walk_begins_with_the_last_blocks_and_leaves_out_earlier_records() {
    let server = PostgresServer::start_with(PostgresServerOptions::new()).await;
    let store = connect(&server).await;
    assert_eq!(walk(&store, None).await, []);
    let mut written = Vec::new();
    for of in 0..200 {
        let claimed = claim(of);
        let length = if of % 50 == 0 { LONG } else { 300 };
        expect_stored(&*store, &claimed).await;
        expect_stored(&*store, &complete(&claimed, of + 1_000, &vec![b'x'; length])).await;
        written.push((claimed.id, length));
    }
    let all = walk(&store, None).await;
    let (first, last) = (written[0], written[199]);
    let position = |of| all.iter().position(|it| *it == of).unwrap();
    assert!(position(last) < 20, "{}", position(last));
    assert!(position(first) >= 180, "{}", position(first));
    let sorted = |mut records: Vec<_>| {
        records.sort_unstable();
        records
    };
    assert_eq!(sorted(all), sorted(written.clone()));
    assert_eq!(sorted(walk(&store, Some(Duration::from_hours(1))).await), sorted(written));
    assert_eq!(walk(&store, Some(Duration::ZERO)).await, []);
    store.close().await;
}

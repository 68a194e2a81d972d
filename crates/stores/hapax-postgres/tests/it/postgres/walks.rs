//! Walks over the blocks of the table.

use std::collections::HashSet;
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
    // Vacuuming would let later records fill earlier blocks.
    let options = PostgresServerOptions::new().set("autovacuum", "off");
    let server = PostgresServer::start_with(options).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_walk_visits_blocks_that_are_added_meanwhile_and_ends_from_any_position() {
    let options = PostgresServerOptions::new().set("autovacuum", "off");
    let server = PostgresServer::start_with(options).await;
    let store = connect(&server).await;
    for of in 0..40 {
        expect_stored(&*store, &claim(of)).await;
    }
    let (mut ids, mut place, mut file) = (HashSet::new(), Some(Cursor::default()), None);
    let mut steps = 0;
    while let Some(from) = place {
        let mut visit = |id: &OperationId, _: &Result<StoredRecord, StoreError>, _| {
            ids.insert(*id);
        };
        place = store.scan_all(from, NonZeroU32::MIN, None, &mut visit).await.unwrap().next;
        file = file.or_else(|| Some(place.as_ref()?.as_bytes()[..8].to_vec()));
        if steps == 0 {
            for of in 40..80 {
                expect_stored(&*store, &claim(of)).await;
            }
        }
        steps += 1;
    }
    // A block that was read already may have taken some of the later ones.
    assert!((0..40).all(|of| ids.contains(&claim(of).id)) && ids.len() > 70, "{}", ids.len());

    for numbers in [[0, -1, 0], [0, i64::MIN, 5], [0, i64::MAX, i64::MAX], [9, 3, 1_000_000]] {
        let numbers = numbers.map(i64::to_be_bytes).concat();
        let mut place = Some(Cursor::new([file.clone().unwrap(), numbers].concat()));
        let mut steps = 0;
        while let Some(from) = place {
            let mut visit = |_: &OperationId, _: &Result<StoredRecord, StoreError>, _| {};
            place = store.scan_all(from, NonZeroU32::MIN, None, &mut visit).await.unwrap().next;
            steps += 1;
            assert!(steps < 1_000);
        }
    }
    store.close().await;
}

//! Rules of paging through a store.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::store::{Cursor, Draft, Stamp, StoredRecord};
use hapax_core::{Inspect, OperationId, Outcome, Record, RecordState};

use super::{Bench, StoreFixture};

/// A page of an empty store has no records and no successor.
pub async fn an_empty_store_has_an_empty_page<F: StoreFixture>(fixture: &F)
where
    F::Store: Inspect,
{
    let bench = Bench::open(fixture).await;
    let page = page(&bench, None, 10).await;
    assert!(page.0.is_empty() && !page.1, "{page:?}");
    let (key, stored) = bench.put(bench.draft()).await;
    assert_eq!(self::page(&bench, None, 10).await, (vec![(key, stored)], false));
}

/// Pages of any size, one after the other, have every record once, in ascending order of key.
pub async fn pages_have_every_record_once_in_order<F: StoreFixture>(fixture: &F)
where
    F::Store: Inspect,
{
    let bench = Bench::open(fixture).await;
    let mut all = Vec::new();
    for _ in 0..60 {
        all.push(bench.put(bench.draft()).await);
    }
    all.sort_by_key(|(key, _)| *key);
    for limit in [1, 7, 59, 60, 61, 1_000] {
        let mut found: Vec<(OperationId, StoredRecord)> = Vec::new();
        loop {
            let after = found.last().map(|(key, _)| *key);
            let (records, more) = page(&bench, after, limit).await;
            assert!(records.len() <= limit as usize, "{} cells of {limit}", records.len());
            assert!(!(records.is_empty() && more), "an empty page that is not the last");
            found.extend(records);
            assert!(found.len() <= all.len(), "pages of {limit} have a record twice");
            if !more {
                break;
            }
        }
        assert!(found == all, "pages of {limit} hold other cells than were written");
    }
}

/// `after` can be an absent key, and is not on the page.
pub async fn a_page_begins_after_a_key<F: StoreFixture>(fixture: &F)
where
    F::Store: Inspect,
{
    let bench = Bench::open(fixture).await;
    let at = |first: u8, last: u8| {
        let mut bytes = [first; 32];
        bytes[31] = last;
        OperationId::from_bytes(bytes)
    };
    let keys = [at(0, 0), at(3, 9), at(3, 10), at(127, 0), at(128, 255), at(255, 255)];
    for key in keys {
        bench.stored(&bench.swap(key, None, bench.draft())).await;
    }
    for (after, rest) in
        [(at(0, 0), 1), (at(0, 1), 1), (at(3, 9), 2), (at(127, 255), 4), (at(255, 255), 6)]
    {
        let found: Vec<_> = page(&bench, Some(after), 10).await.0;
        assert!(found.iter().map(|(key, _)| key).eq(&keys[rest..]), "after {after}: {found:?}");
    }
}

/// An expired record is on its page until it is reaped.
pub async fn pages_include_expired_records<F: StoreFixture>(fixture: &F)
where
    F::Store: Inspect,
{
    const KEEP: Duration = Duration::from_millis(50);
    let bench = Bench::open(fixture).await;
    let (key, stored) = bench.put(Draft { keep: Some(KEEP), ..bench.draft() }).await;
    bench.pass(KEEP).await;
    assert_eq!(page(&bench, None, 10).await, (vec![(key, stored)], false));
}

/// A walk in steps of any size visits every record that is unknown or whose lease lapsed, and one over
/// all records every one, also where it may leave out those of an earlier time. It visits every record
/// unchanged.
pub async fn a_walk_visits_every_undecided_record<F: StoreFixture>(fixture: &F)
where
    F::Store: Inspect,
{
    const LAPSES: Duration = Duration::from_millis(50);
    let bench = Bench::open(fixture).await;
    let (mut all, mut undecided) = (BTreeMap::new(), BTreeSet::new());
    for number in 0..60 {
        let claim = bench.swap(bench.key(), None, Draft { lease: LAPSES, ..bench.draft() });
        bench.stored(&claim).await;
        let state = match number % 4 {
            0 => RecordState::Unknown { seen: None, reconciling: false },
            1 => RecordState::Done(Outcome::new("suite/1", vec![b'x'; 700])),
            2 => RecordState::Released,
            _ => RecordState::InFlight,
        };
        if state != RecordState::InFlight {
            let record = Record { state, ..claim.draft.record.clone() };
            let end = Draft { record, lease: Duration::ZERO, ..bench.draft() };
            let end = Draft { stamp: Stamp::Keep, ..end };
            bench.stored(&bench.swap(claim.id, Some(claim.write_id), end)).await;
        }
        if matches!(number % 4, 0 | 3) {
            undecided.insert(claim.id);
        }
        all.insert(claim.id, bench.record(&claim.id).await);
    }
    bench.pass(LAPSES).await;
    for limit in [1, 7, 1_000] {
        let found = walk(&bench, limit, Walk::Undecided).await;
        let missed: Vec<_> = undecided.iter().filter(|key| !found.contains_key(key)).collect();
        assert!(missed.is_empty(), "a walk in steps of {limit} misses {missed:?}");
        for (key, stored) in &found {
            assert_eq!(Some(stored), all.get(key), "a walk in steps of {limit}");
        }
        for since in [None, Some(Duration::from_hours(1))] {
            let found = walk(&bench, limit, Walk::All(since)).await;
            assert!(found == all, "a walk over all records since {since:?}, in steps of {limit}");
        }
    }
}

#[derive(Clone, Copy)]
enum Walk {
    Undecided,
    /// Over all of at most so long ago.
    All(Option<Duration>),
}

/// Returns the records that a walk visits.
async fn walk<F: StoreFixture>(
    bench: &Bench<'_, F>,
    limit: u32,
    walk: Walk,
) -> BTreeMap<OperationId, StoredRecord>
where
    F::Store: Inspect,
{
    let mut found = BTreeMap::new();
    let mut place = Some(Cursor::default());
    let mut steps = 0;
    while let Some(from) = place {
        steps += 1;
        assert!(steps < 10_000, "a walk in steps of {limit} does not end");
        let mut visit = |key: &OperationId, stored: &Result<StoredRecord, _>, _| {
            if let Ok(stored) = stored {
                found.insert(*key, stored.clone());
            }
        };
        let limit = NonZeroU32::new(limit).unwrap();
        let step = match walk {
            Walk::All(since) => bench.store.scan_all(from.clone(), limit, since, &mut visit),
            Walk::Undecided => bench.store.scan(from.clone(), limit, &mut visit),
        };
        place = match step.await {
            Ok(scanned) => scanned.next,
            // A store with faults; the step is repeated.
            Err(_) => Some(from),
        };
    }
    found
}

async fn page<F: StoreFixture>(
    bench: &Bench<'_, F>,
    after: Option<OperationId>,
    limit: u32,
) -> (Vec<(OperationId, StoredRecord)>, bool)
where
    F::Store: Inspect,
{
    let mut last = None;
    for _ in 0..200 {
        match bench.store.page(after, NonZeroU32::new(limit).unwrap()).await {
            Ok(page) => {
                let readable = |(key, stored): (_, Result<_, _>)| (key, stored.unwrap());
                return (page.records.into_iter().map(readable).collect(), page.more);
            }
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("200 calls of page failed: {last:?}")
}

//! Rules of successive swaps.

use std::time::Duration;

use hapax_core::store::{Draft, Snapshot, Stamp};
use hapax_core::{FingerprintScheme, OnUnknown, OperationId, Outcome, Record, RecordState, Terms};

use super::bench::LEASE;
use super::{Bench, StoreFixture};

/// If nothing was written, `load` finds no record, and returns the time.
pub async fn an_absent_record_loads_as_absent<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let seen = bench.load(&bench.key()).await;
    assert_eq!(seen.stored, None);
    assert!(seen.now.as_micros() > 0, "a store's clock counts from 1970: {seen:?}");
}

/// A swap that expects no record writes where there is none, and stamps what it wrote.
pub async fn a_swap_that_expects_no_record_creates_one<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let swap = bench.swap(bench.key(), None, bench.draft());
    let stamped = bench.stored(&swap).await;
    let stored = bench.record(&swap.id).await;
    assert_eq!(stored.write_id, swap.write_id);
    assert_eq!(stored.record, swap.draft.record);
    assert_eq!((stored.fence, stored.lease_until), (stamped.fence, stamped.lease_until));
}

/// A swap that expects the present write id replaces the whole record.
pub async fn a_swap_replaces_what_it_expected<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let first = bench.swap(bench.key(), None, bench.draft());
    bench.stored(&first).await;
    let second = bench.swap(first.id, Some(first.write_id), bench.done(&first.draft, b"yes"));
    bench.stored(&second).await;
    let stored = bench.record(&first.id).await;
    assert_eq!((stored.write_id, stored.record), (second.write_id, second.draft.record));
}

/// A record where none was expected, none where one was expected, or another write id: conflict.
pub async fn a_swap_that_expected_something_else_changes_nothing<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let absent = bench.swap(bench.key(), Some(bench.write_id()), bench.draft());
    assert_eq!(bench.refused(&absent).await.stored, None);
    assert_eq!(bench.load(&absent.id).await.stored, None);

    let (key, stored) = bench.put(bench.draft()).await;
    for expected in [None, Some(bench.write_id())] {
        let seen = bench.refused(&bench.swap(key, expected, bench.draft())).await;
        assert_eq!(seen.stored.as_ref(), Some(&stored));
        assert_eq!(bench.record(&key).await, stored);
    }
}

/// A conflict returns the same record as `load`.
pub async fn a_conflict_returns_the_same_record_as_a_load<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let draft = bench.draft();
    let (key, stored) = bench.put(bench.done(&draft, &bench.bytes(300))).await;
    let Snapshot { now, stored: found } = bench.refused(&bench.swap(key, None, draft)).await;
    assert_eq!(found, Some(stored));
    let later = bench.load(&key).await;
    assert!(later.now >= now, "the store's clock went from {now:?} back to {:?}", later.now);
    assert_eq!(later.stored, found);
}

/// A swap that was stored already is stored, even if another swap was rejected in between; nothing
/// is written anew.
pub async fn the_same_swap_again_is_stored_and_changes_nothing<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let claim = bench.swap(bench.key(), None, bench.draft());
    let complete = bench.swap(claim.id, Some(claim.write_id), bench.done(&claim.draft, b"yes"));
    for swap in [claim, complete] {
        let first = bench.stored(&swap).await;
        let stored = bench.record(&swap.id).await;
        bench.refused(&bench.swap(swap.id, Some(bench.write_id()), bench.draft())).await;
        bench.pass(Duration::from_millis(5)).await;
        let again = bench.stored(&swap).await;
        assert_eq!((again.fence, again.lease_until), (first.fence, first.lease_until));
        assert!(again.now > first.now, "a repeated swap must return the present time");
        assert_eq!(bench.record(&swap.id).await, stored, "a repeated swap wrote again");
    }
}

/// If another swap replaced what it wrote, a repeated swap is a conflict.
pub async fn a_repeated_swap_is_a_conflict_after_a_later_write<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let first = bench.swap(bench.key(), None, bench.draft());
    bench.stored(&first).await;
    let second = bench.swap(first.id, Some(first.write_id), bench.draft());
    bench.stored(&second).await;
    let stored = bench.record(&first.id).await;
    assert_eq!(bench.refused(&first).await.stored.as_ref(), Some(&stored));
    bench.stored(&second).await;
    assert_eq!(bench.record(&first.id).await, stored);
}

/// A conflict leaves no trace: the same swap is stored once the write id that it expects is there.
pub async fn a_conflicting_swap_may_be_stored_later<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let first = bench.swap(bench.key(), None, bench.draft());
    let second = bench.swap(first.id, Some(first.write_id), bench.draft());
    assert_eq!(bench.refused(&second).await.stored, None);
    bench.stored(&first).await;
    bench.stored(&second).await;
    assert_eq!(bench.record(&first.id).await.write_id, second.write_id);
}

/// Keys that differ in a single bit, at any position, have separate records.
pub async fn keys_that_differ_in_one_bit_have_separate_records<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let base = *bench.key().as_bytes();
    let mut swaps = Vec::new();
    for bit in [0, 7, 8, 100, 128, 248, 255] {
        let mut bytes = base;
        bytes[bit / 8] ^= 1 << (bit % 8);
        let swap = bench.swap(OperationId::from_bytes(bytes), None, bench.draft());
        bench.stored(&swap).await;
        swaps.push(swap);
    }
    for swap in swaps {
        assert_eq!(bench.record(&swap.id).await.write_id, swap.write_id);
    }
    assert_eq!(bench.load(&OperationId::from_bytes(base)).await.stored, None);
}

/// Every state, policy and optional part is read as it was written, both by `load` and by a
/// conflict.
pub async fn every_state_is_read_as_written<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let outcome = Outcome::new("x".repeat(Outcome::MAX_FORMAT), (0..=255).collect::<Vec<u8>>());
    let nothing = Outcome::new("", Vec::new());
    let states = [
        RecordState::InFlight,
        RecordState::Released,
        RecordState::Done(outcome.clone()),
        RecordState::Done(nothing.clone()),
        RecordState::Unknown { seen: None, reconciling: false },
        RecordState::Unknown { seen: None, reconciling: true },
        RecordState::Unknown { seen: Some(outcome), reconciling: true },
        RecordState::Unknown { seen: Some(nothing), reconciling: false },
    ];
    for state in states {
        for on_unknown in [OnUnknown::Reexecute, OnUnknown::Reconcile, OnUnknown::Block] {
            let draft = unusual(&bench, state.clone(), on_unknown);
            let (key, stored) = bench.put(draft.clone()).await;
            assert_eq!(stored.record, draft.record);
            let seen = bench.refused(&bench.swap(key, None, bench.draft())).await;
            assert_eq!(seen.stored, Some(stored));
        }
    }
}

fn unusual<F: StoreFixture>(
    bench: &Bench<'_, F>,
    state: RecordState,
    on_unknown: OnUnknown,
) -> Draft {
    let lease = LEASE + Duration::from_micros(bench.below(1_000_000));
    let checkpoint = match bench.below(3) {
        0 => None,
        1 => Some(bytes::Bytes::new()),
        _ => Some(bench.bytes(1_000).into()),
    };
    let record = Record {
        scheme: FingerprintScheme::new("\u{e9}\0;".repeat(bench.below(900) as usize)).unwrap(),
        generation: bench.lease_id(),
        attempt: u32::MAX - bench.below(2) as u32,
        terms: Terms { lease, retention: 3 * lease, on_unknown },
        checkpoint,
        state,
        ..bench.draft().record
    };
    Draft { record, stamp: Stamp::NextFence, lease, keep: Some(3 * lease) }
}

/// A record of 2 MiB with every byte value is read as it was written.
pub async fn large_records_are_read_as_written<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let mut draft = bench.draft();
    draft.record.checkpoint = Some(bench.bytes(64 << 10).into());
    let draft = bench.done(&draft, &bench.bytes(2 << 20));
    let (key, stored) = bench.put(draft.clone()).await;
    assert!(stored.record == draft.record, "2 MiB are changed after a load");
    let seen = bench.refused(&bench.swap(key, None, bench.draft())).await;
    assert!(seen.stored == Some(stored), "2 MiB are changed in a conflict");
}

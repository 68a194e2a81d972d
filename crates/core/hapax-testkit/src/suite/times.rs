//! Rules of fences, deadlines, expiry and reaping.

use std::time::Duration;

use hapax_core::RecordState;
use hapax_core::store::{Draft, Stamp};

use super::bench::{LEASE, LONG};
use super::{Bench, StoreFixture};

/// A retention that is short enough to wait for, and long enough for a write and a load.
const KEEP: Duration = Duration::from_millis(200);

/// Each [`Stamp::NextFence`] gives a larger fence than the last, and none below the clock's time
/// before the write.
pub async fn new_executions_get_larger_fences<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let before = bench.load(&bench.key()).await.now;
    let (key, mut stored) = bench.put(bench.draft()).await;
    assert!(stored.fence.get() >= before.as_micros(), "a fence before its time: {stored:?}");
    for _ in 0..20 {
        let swap = bench.swap(key, Some(stored.write_id), bench.draft());
        let stamped = bench.stored(&swap).await;
        assert!(stamped.fence > stored.fence, "{:?} follows {:?}", stamped.fence, stored.fence);
        stored = bench.record(&key).await;
        assert_eq!(stored.fence, stamped.fence);
    }
}

/// [`Stamp::Keep`] leaves the fence as it is.
pub async fn other_writes_keep_the_fence<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let draft = bench.draft();
    let (key, stored) = bench.put(draft.clone()).await;
    let renewal =
        bench.swap(key, Some(stored.write_id), Draft { stamp: Stamp::Keep, ..draft.clone() });
    assert_eq!(bench.stored(&renewal).await.fence, stored.fence);
    let complete = bench.swap(key, Some(renewal.write_id), bench.done(&draft, b"yes"));
    assert_eq!(bench.stored(&complete).await.fence, stored.fence);
    assert_eq!(bench.record(&key).await.fence, stored.fence);
}

/// The execution after a release gets a larger fence than the one before it.
pub async fn a_fence_survives_a_release<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let draft = bench.draft();
    let (key, stored) = bench.put(draft.clone()).await;
    let mut released =
        Draft { stamp: Stamp::Keep, lease: Duration::ZERO, keep: Some(LEASE), ..draft };
    released.record.state = RecordState::Released;
    let released = bench.swap(key, Some(stored.write_id), released);
    assert_eq!(bench.stored(&released).await.fence, stored.fence);
    let next = bench.swap(key, Some(released.write_id), bench.draft());
    assert!(bench.stored(&next).await.fence > stored.fence);
}

/// Lease and retention are added to the store's clock at the moment of the write.
pub async fn deadlines_count_from_the_stores_clock<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let swap = bench.swap(bench.key(), None, bench.draft());
    let before = bench.load(&swap.id).await.now;
    let stamped = bench.stored(&swap).await;
    let stored = bench.record(&swap.id).await;
    let keep = stored.keep_until.expect("it has an end");
    assert!(before.after(LEASE) <= stamped.lease_until, "{before:?} {stamped:?}");
    assert!(stamped.lease_until <= stamped.now.after(LEASE), "{stamped:?}");
    assert_eq!(keep.since(stamped.lease_until), LONG - LEASE);

    let none = Draft { lease: Duration::ZERO, keep: Some(Duration::ZERO), ..bench.draft() };
    let swap = bench.swap(bench.key(), None, none);
    let stamped = bench.stored(&swap).await;
    assert!(stamped.lease_until <= stamped.now, "no lease lapses at once: {stamped:?}");
    let seen = bench.load(&swap.id).await;
    let keep = seen.stored.and_then(|stored| stored.keep_until);
    assert_eq!(keep, Some(stamped.lease_until));
}

/// A record without a retention has no `keep_until`; a later write can add one, or remove it.
pub async fn a_record_without_retention_has_no_keep_until<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let draft = bench.draft();
    let (key, mut stored) = bench.put(Draft { keep: None, ..draft.clone() }).await;
    assert_eq!(stored.keep_until, None);
    for keep in [Some(LONG), None] {
        let draft = Draft { keep, stamp: Stamp::Keep, ..draft.clone() };
        bench.stored(&bench.swap(key, Some(stored.write_id), draft)).await;
        stored = bench.record(&key).await;
        assert_eq!(stored.keep_until.is_some(), keep.is_some());
    }
}

/// A deadline beyond the largest time becomes that largest time, never one in the past.
pub async fn very_long_durations_do_not_overflow<F: StoreFixture>(fixture: &F) {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);
    let bench = Bench::open(fixture).await;
    for immense in [CENTURY, Duration::from_micros(u64::MAX), Duration::MAX] {
        let draft = Draft { lease: immense, keep: Some(immense), ..bench.draft() };
        let (key, stored) = bench.put(draft).await;
        let now = bench.load(&key).await.now;
        let almost = now.after(CENTURY - Duration::from_secs(86_400));
        assert!(stored.lease_until >= almost, "a lease of {immense:?} ends at {stored:?}");
        assert!(stored.keep_until.is_none_or(|until| until >= almost), "{immense:?}: {stored:?}");
        bench.reap_all().await;
        assert_eq!(bench.record(&key).await, stored);
    }
}

/// An expired record is still there, with its write id, and can only be replaced by a swap that
/// expects it.
pub async fn an_expired_record_stays_until_it_is_reaped<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let (key, stored) = bench.put(Draft { keep: Some(KEEP), ..bench.draft() }).await;
    bench.pass(KEEP).await;
    let seen = bench.load(&key).await;
    assert!(stored.keep_until.is_some_and(|until| until <= seen.now), "{seen:?}");
    assert_eq!(seen.stored.as_ref(), Some(&stored));
    let seen = bench.refused(&bench.swap(key, None, bench.draft())).await;
    assert_eq!(seen.stored.as_ref(), Some(&stored));
    bench.stored(&bench.swap(key, Some(stored.write_id), bench.draft())).await;
}

/// A record is reaped no sooner than a lease (that of its terms) after it expires, and then it is
/// absent.
pub async fn a_record_is_reaped_one_lease_after_it_expires<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    // The draft's own lease, of zero, must not be taken for the one in its terms.
    let draft = Draft { lease: Duration::ZERO, keep: Some(KEEP), ..bench.draft() };
    let (key, stored) = bench.put(draft).await;
    let due = stored.keep_until.expect("it has an end").after(LEASE);
    bench.pass(KEEP).await;
    bench.reap_all().await;
    let seen = bench.load(&key).await;
    assert!(seen.now < due, "{KEEP:?} took longer than {LEASE:?}: a machine too busy to test on");
    assert_eq!(seen.stored, Some(stored), "reaped before its time");

    bench.pass(due.since(seen.now)).await;
    assert!(bench.reaps_away(&key).await, "due, and still there");
    let anew = bench.swap(key, None, bench.draft());
    bench.stored(&anew).await;
}

/// A write sets a new time at which a record is due, later or sooner.
pub async fn reaping_uses_the_deadline_of_the_last_write<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    // Long enough for a write to arrive in time on a bad network.
    let soon = Duration::from_secs(1);
    let short = |mut draft: Draft| {
        draft.record.terms.lease = soon;
        Draft { keep: Some(soon), ..draft }
    };
    let (later, write_id) = bench.put_unseen(short(bench.draft())).await;
    bench.stored(&bench.swap(later, Some(write_id), bench.draft())).await;
    let (sooner, write_id) = bench.put_unseen(bench.draft()).await;
    bench.stored(&bench.swap(sooner, Some(write_id), short(bench.draft()))).await;
    bench.pass(2 * soon).await;
    assert!(bench.reaps_away(&sooner).await, "kept by an older deadline");
    assert!(bench.load(&later).await.stored.is_some(), "reaped by an older deadline");
}

/// A record without a retention is never reaped, however long ago its lease ended.
pub async fn a_record_without_retention_is_never_reaped<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let mut draft = Draft { lease: Duration::ZERO, keep: None, ..bench.draft() };
    draft.record.terms.lease = Duration::from_millis(1);
    draft.record.terms.retention = Duration::from_millis(1);
    let (key, stored) = bench.put(draft).await;
    bench.pass(KEEP).await;
    bench.reap_all().await;
    assert_eq!(bench.record(&key).await, stored);
}

/// A call removes at most `limit` records, and returns whether there may be more.
pub async fn reaping_stops_at_its_limit<F: StoreFixture>(fixture: &F) {
    const CELLS: u32 = 7;
    let bench = Bench::open(fixture).await;
    let (kept, _) = bench.put(bench.draft()).await;
    let mut keys = Vec::new();
    for _ in 0..CELLS {
        let mut draft = Draft { keep: Some(KEEP), ..bench.draft() };
        draft.record.terms.lease = Duration::ZERO;
        keys.push(bench.put_unseen(draft).await.0);
    }
    bench.pass(KEEP).await;
    let mut removed = 0;
    loop {
        let reaped = bench.reap(2).await;
        removed += reaped.removed;
        let mut left = 0;
        for key in &keys {
            left += u32::from(bench.load(key).await.stored.is_some());
        }
        let calls = bench.reaps();
        if !F::REAPS_AUTOMATICALLY {
            assert!(CELLS - left <= 2 * calls, "{left} of {CELLS} left after {calls} calls");
        }
        if left == 0 {
            break;
        }
        // A failed call may be in progress, and reaps what this one leaves out.
        let sure = !F::REAPS_AUTOMATICALLY && !bench.reaps_failed();
        assert!(reaped.more || !sure, "{left} records are due, but `more` is false");
        assert!(calls <= 200, "reap returned `more`, but removed nothing");
    }
    assert!(removed <= CELLS, "{removed} of {CELLS} cells removed");
    bench.reap_all().await;
    assert!(bench.load(&kept).await.stored.is_some());
}

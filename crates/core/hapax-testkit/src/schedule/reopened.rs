//! Rules of entries that survive the process.

use std::slice::from_ref;
use std::time::Duration;

use hapax_core::schedule::{MAX_NOTE, NewEntry, Schedule};

use super::{ReopenFixture, ScheduleBench};
use crate::suite::bench::LONG;

/// After the store was opened again, every entry is there as it was, and due at its time.
pub async fn entries_survive_reopening<F: ReopenFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let mut bench = ScheduleBench::open(fixture).await;
    let large = NewEntry { note: bench.bytes(MAX_NOTE).into(), ..bench.entry("a", LONG) };
    bench.insert(&large).await;
    let due = bench.scheduled("b", Duration::ZERO).await;
    let postponed = bench.scheduled("b", Duration::ZERO).await;
    let mut postponed = bench.postponed(postponed.key, Some(postponed.due), LONG).await;
    for round in 1..=3 {
        let (all, queues) = (bench.all().await, bench.queues().await);
        bench = bench.reopened().await;
        assert!(bench.all().await == all, "round {round}: other entries");
        let reply = bench.due(&["a", "b"], 10).await;
        assert_eq!(reply.entries, from_ref(&due), "round {round}");
        let counted = bench.queues().await;
        assert!(
            counted.iter().map(|found| found.entries).eq(queues.iter().map(|found| found.entries)),
            "round {round}: {counted:?}, not {queues:?}"
        );
        // An entry that was inserted before stays as it is.
        bench.insert(&NewEntry { key: large.key, ..bench.entry("b", Duration::ZERO) }).await;
        assert!(bench.all().await == all, "round {round}: inserted again");
        postponed = bench.postponed(postponed.key, Some(postponed.due), LONG * round).await;
    }
}

/// After the store was opened again, an entry that was removed before is absent.
pub async fn removed_entries_stay_removed_after_reopening<F: ReopenFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let mut bench = ScheduleBench::open(fixture).await;
    let removed = bench.scheduled("a", Duration::ZERO).await;
    let kept = bench.scheduled("b", LONG).await;
    bench.remove(removed.key).await;
    bench = bench.reopened().await;
    assert_eq!(bench.all().await, from_ref(&kept));
    let reply = bench.due(&["a", "b"], 10).await;
    assert_eq!(reply.entries, []);
    reply.expect_next(kept.due);
    assert!(!bench.postpone(removed.key, None, Duration::ZERO).await.result);
    bench.remove(kept.key).await;
    bench = bench.reopened().await;
    assert_eq!(bench.all().await, []);
    assert_eq!(bench.queues().await, []);
}

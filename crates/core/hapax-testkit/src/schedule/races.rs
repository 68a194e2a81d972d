//! Rules of concurrent callers.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hapax_core::schedule::{NewEntry, Schedule};
use tokio::sync::Barrier;
use tokio::task::{JoinSet, yield_now};

use super::ScheduleBench;
use super::bench::{Called, insert, is_same, postpone};
use crate::suite::StoreFixture;
use crate::suite::bench::LONG;

/// Number of concurrent callers.
const CALLERS: u32 = 16;

/// Makes all calls at the same moment, each on a separate task; returns the results in order.
async fn at_once<T, C>(calls: impl IntoIterator<Item = C>) -> Vec<T>
where
    T: Send + 'static,
    C: Future<Output = T> + Send + 'static,
{
    let calls: Vec<_> = calls.into_iter().collect();
    let barrier = Arc::new(Barrier::new(calls.len()));
    let mut tasks = JoinSet::new();
    for (at, call) in calls.into_iter().enumerate() {
        let barrier = Arc::clone(&barrier);
        tasks.spawn(async move {
            barrier.wait().await;
            (at, call.await)
        });
    }
    let mut results = tasks.join_all().await;
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// If many entries with one key are inserted at once, one is kept, whole.
pub async fn one_of_many_insertions_of_a_key_is_kept<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    for _ in 0..20 {
        let key = bench.entry_key();
        let entry = |number| NewEntry {
            key,
            ..bench.entry(["a", "b"][number as usize % 2], LONG * (number + 1))
        };
        let entries: Vec<_> = (0..CALLERS).map(entry).collect();
        let call = |entry: &NewEntry| {
            let (store, entry) = (Arc::clone(&bench.store), entry.clone());
            async move { insert(&*store, &entry).await }
        };
        let called = at_once(entries.iter().map(call)).await;
        let repeated = called.iter().any(|called| called.repeated);
        bench.settle(Called { result: (), repeated }).await;
        let found = bench.all().await;
        let [kept] = &found[..] else { panic!("expected one entry, found {found:?}") };
        let inserted = entries.iter().find(|entry| is_same(kept, entry));
        let due_in = inserted.unwrap_or_else(|| panic!("a mixture: {kept:?}")).due_in;
        let now = bench.now().await;
        assert!(kept.due <= now.after(due_in) && kept.due > now.after(due_in - LONG), "{kept:?}");
        bench.remove(key).await;
        assert_eq!(bench.queues().await, []);
    }
}

/// If many callers postpone an entry that is due at one time, exactly one of them does.
pub async fn one_of_many_postponements_is_applied<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    for _ in 0..20 {
        let entry = bench.scheduled("a", Duration::ZERO).await;
        let call = |number| {
            let (store, due_in) = (Arc::clone(&bench.store), LONG * (number + 1));
            async move { postpone(&*store, entry.key, Some(entry.due), due_in).await }
        };
        let called = at_once((0..CALLERS).map(call)).await;
        let repeated = called.iter().any(|called| called.repeated);
        bench.settle(Called { result: (), repeated }).await;
        let found = bench.found(entry.key).await;
        let now = bench.now().await;
        // The due time shows which of them was applied last.
        let applied = |number: &u32| {
            let due_in = LONG * (number + 1);
            found.due <= now.after(due_in) && found.due > now.after(due_in - LONG)
        };
        let winner = (0..CALLERS).find(applied);
        let winner = winner.unwrap_or_else(|| panic!("no caller's due time: {found:?}"));
        for (number, called) in (0..).zip(&called) {
            // A copy that was ambiguous may have been applied before the one that was answered.
            let expected = number == winner;
            assert!(
                called.result == expected || expected && called.repeated,
                "caller {number}: {called:?}, but {winner} was applied"
            );
        }
        bench.remove(entry.key).await;
    }
}

/// An entry that is being postponed is on the page of all entries, with one of its due times.
pub async fn a_postponement_in_progress_hides_no_entry<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let entry = bench.scheduled("a", LONG).await;
    let postponing = {
        let (store, key) = (Arc::clone(&bench.store), entry.key);
        tokio::spawn(async move {
            for number in 0..40 {
                postpone(&*store, key, None, LONG * (number % 3 + 1)).await;
                yield_now().await;
            }
        })
    };
    while !postponing.is_finished() {
        // The other task may be on this thread.
        yield_now().await;
        let found = bench.all().await;
        assert!(matches!(&found[..], [one] if one.key == entry.key), "{found:?}");
        let reply = bench.due(&["a"], 10).await;
        assert!(reply.entries.is_empty() && reply.next_in.is_some(), "{reply:?}");
        let queues = bench.queues().await;
        assert!(matches!(&queues[..], [one] if one.entries == 1), "{queues:?}");
    }
    postponing.await.expect("postponing ends");
}

/// An insertion whose future is dropped at any point is applied whole, or not at all, or later;
/// repeated it is applied.
pub async fn a_dropped_insertion_is_applied_completely_or_not_at_all<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    for polls in 0..24 {
        let note = bench.bytes(70_000).into();
        let entry = NewEntry { note, ..bench.entry("a", LONG) };
        let mut sent = bench.store.insert(entry.clone());
        for _ in 0..polls {
            let ready = poll_fn(|context| Poll::Ready(sent.as_mut().poll(context).is_ready()));
            if ready.await {
                break;
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        drop(sent);
        if let Some(found) = bench.find(entry.key).await {
            assert!(is_same(&found, &entry), "torn after {polls} polls: {found:?}");
        }
        bench.insert(&entry).await;
        let found = bench.found(entry.key).await;
        assert!(is_same(&found, &entry), "torn after {polls} polls: {found:?}");
        let next = bench.due(&["a"], 10).await;
        assert!(next.entries.is_empty() && next.next_in.is_some(), "{next:?}");
    }
    assert_eq!(bench.queues().await[0].entries, 24);
}

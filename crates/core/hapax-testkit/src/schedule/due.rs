//! Rules of what is due.

use std::slice::from_ref;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, Schedule};

use super::ScheduleBench;
use super::bench::{SOON, is_same};
use crate::suite::StoreFixture;
use crate::suite::bench::LONG;

/// An empty schedule has no entries and no queues; a removal and a postponement change nothing.
pub async fn an_empty_schedule_has_no_entries<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    for queues in [&[][..], &["a"], &["a", "b"]] {
        let reply = bench.due(queues, 10).await;
        assert!(reply.entries.is_empty() && reply.next_in.is_none(), "{reply:?}");
    }
    bench.remove(bench.entry_key()).await;
    assert!(!bench.postpone(bench.entry_key(), None, SOON).await.result);
    assert_eq!(bench.page(None, 10).await, (vec![], false));
    assert_eq!(bench.queues().await, []);
}

/// An entry is due `due_in` after the store's clock at its insertion, and is returned from then on,
/// not before.
pub async fn an_entry_is_due_at_its_time_and_not_before<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let later = bench.scheduled("a", LONG).await;
    let entry = bench.entry("a", SOON);
    let before = bench.now().await;
    bench.insert(&entry).await;
    let after = bench.now().await;
    let found = bench.found(entry.key).await;
    assert!(before.after(SOON) <= found.due && found.due <= after.after(SOON), "{found:?}");
    assert!(is_same(&found, &entry), "{found:?}");

    let reply = bench.due(&["a"], 10).await;
    if reply.after < found.due {
        assert!(reply.entries.is_empty(), "returned before its time: {reply:?}");
        reply.expect_next(found.due);
        bench.pass(found.due.since(reply.after)).await;
    }
    for _ in 0..2 {
        let reply = bench.due(&["a"], 10).await;
        assert_eq!(reply.entries, from_ref(&found));
        reply.expect_next(later.due);
    }

    bench.pass(Duration::from_millis(1)).await;
    let now = bench.scheduled("a", Duration::ZERO).await;
    assert_eq!(bench.due(&["a"], 10).await.entries, [found, now]);
}

/// The earliest entries are returned, in order of time, as many as the limit allows.
pub async fn due_entries_are_ordered_by_time_and_limited<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    const STEP: Duration = Duration::from_millis(10);
    let bench = ScheduleBench::open(fixture).await;
    for number in [7, 2, 9, 0, 4, 1, 8, 3, 6, 5] {
        let queue = if number % 3 == 0 { "a" } else { "b" };
        bench.insert(&bench.entry(queue, STEP * number)).await;
    }
    let later = bench.scheduled("a", LONG).await;
    bench.pass(STEP * 10).await;
    let mut all = bench.all().await;
    all.sort_by_key(|entry| entry.due);
    for limit in [1, 4, 9, 10, 11, u32::MAX] {
        let reply = bench.due(&["a", "b"], limit).await;
        let expected = &all[..10.min(limit as usize)];
        assert!(
            reply.entries.iter().map(|entry| entry.due).eq(expected.iter().map(|entry| entry.due)),
            "{limit}: {reply:?}, not {expected:?}"
        );
        match limit {
            ..10 => assert_eq!(reply.next_in, Some(Duration::ZERO), "{limit}"),
            10.. => reply.expect_next(later.due),
        }
    }
}

/// The time until the next entry is that of the first one in the given queues that was not returned:
/// zero if that is due, and none if there is no such entry.
pub async fn the_time_until_the_next_entry_is_returned<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    bench.scheduled("b", Duration::ZERO).await;
    assert_eq!(bench.due(&["a"], 10).await.next_in, None, "of another queue");
    let last = bench.scheduled("a", 2 * LONG).await;
    bench.due(&["a"], 10).await.expect_next(last.due);
    let first = bench.scheduled("a", LONG).await;
    bench.due(&["a"], 10).await.expect_next(first.due);
    bench.due(&["b", "a"], 10).await.expect_next(first.due);
    for count in 1..4 {
        bench.scheduled("a", Duration::ZERO).await;
        bench.due(&["a"], count).await.expect_next(first.due);
    }
    assert_eq!(bench.due(&["a"], 2).await.next_in, Some(Duration::ZERO));
    bench.remove(first.key).await;
    bench.due(&["a"], 10).await.expect_next(last.due);
    let sooner = bench.postponed(last.key, Some(last.due), LONG).await;
    bench.due(&["a"], 10).await.expect_next(sooner.due);
    bench.remove(last.key).await;
    assert_eq!(bench.due(&["a"], 10).await.next_in, None);
}

/// An entry is found among a thousand of another queue, all of which are due before it.
pub async fn a_thousand_due_entries_hide_no_other_queue<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let many: Vec<_> = (0..1_000).map(|_| bench.entry("many", Duration::ZERO)).collect();
    bench.insert_all(&many).await;
    let one = bench.scheduled("one", Duration::ZERO).await;
    for limit in [1, 10] {
        let reply = bench.due(&["one"], limit).await;
        assert_eq!((&reply.entries[..], reply.next_in), (from_ref(&one), None));
    }
    let reply = bench.due(&["one", "many"], 10).await;
    assert_eq!((reply.entries.len(), reply.next_in), (10, Some(Duration::ZERO)));
    let reply = bench.due(&["many", "one"], 2_000).await;
    assert_eq!((reply.entries.len(), reply.next_in), (1_001, None));
    let reply = bench.due(&["many"], 999).await;
    assert_eq!((reply.entries.len(), reply.next_in), (999, Some(Duration::ZERO)));
}

/// A queue without entries, and one that is given several times, change nothing in the reply.
pub async fn unknown_and_repeated_queues_do_no_harm<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let one = bench.scheduled("a", Duration::ZERO).await;
    bench.pass(Duration::from_millis(1)).await;
    let two = bench.scheduled("b", Duration::ZERO).await;
    let later = bench.scheduled("b", LONG).await;
    assert_eq!(bench.due(&["c"], 10).await.entries, []);
    let reply = bench.due(&["a", "c", "a", "b", "a", "b"], 2).await;
    assert_eq!(reply.entries, [one.clone(), two.clone()]);
    reply.expect_next(later.due);
    let names: Vec<_> = (0..300).map(|number| format!("queue-{number}")).collect();
    let mut names: Vec<_> = names.iter().map(String::as_str).collect();
    names.extend(["b", "a"]);
    assert_eq!(bench.due(&names, 10).await.entries, [one, two]);
}

/// Queues whose names differ in case, length or one character share no entries.
pub async fn queues_with_similar_names_are_separate<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let longest = "a".repeat(128);
    let mut names =
        ["a", "A", "a!", "aa", "a~", "!", "~", "%", "_", "a,b", "{a}", &longest[1..], &longest];
    let mut keys = Vec::<EntryKey>::new();
    for name in names {
        keys.push(bench.scheduled(name, Duration::ZERO).await.key);
    }
    for (name, key) in names.iter().zip(&keys) {
        let reply = bench.due(&[name], 100).await;
        assert_eq!((reply.keys(), reply.next_in), (vec![*key], None), "{name}");
    }
    assert_eq!(bench.due(&names, 100).await.entries.len(), names.len());
    names.sort_unstable();
    let queues = bench.queues().await;
    assert!(queues.iter().map(|found| found.queue.as_str()).eq(names), "{queues:?}");
    assert!(queues.iter().all(|found| found.entries == 1), "{queues:?}");
}

/// A due time beyond the largest time becomes that largest time, never one in the past.
pub async fn very_long_delays_do_not_overflow<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);
    let bench = ScheduleBench::open(fixture).await;
    for immense in [CENTURY, Duration::from_micros(u64::MAX), Duration::MAX] {
        let entry = bench.scheduled("a", immense).await;
        let almost = bench.now().await.after(CENTURY - Duration::from_secs(86_400));
        assert!(entry.due >= almost, "{immense:?}: due at {:?}", entry.due);
        let reply = bench.due(&["a"], 10).await;
        assert_eq!(reply.entries, []);
        assert!(reply.next_in >= Some(LONG), "{immense:?}: {reply:?}");
        // The due time that was read is the expected one.
        let sooner = bench.postponed(entry.key, Some(entry.due), SOON).await;
        let called = bench.postpone(entry.key, Some(sooner.due), immense).await;
        // After a copy that was applied, the expected due time has changed.
        assert!(called.result || called.repeated, "{immense:?} from {:?}", sooner.due);
        let again = bench.found(entry.key).await;
        assert!(again.due >= almost, "{immense:?}: postponed until {:?}", again.due);
        bench.remove(entry.key).await;
    }
}

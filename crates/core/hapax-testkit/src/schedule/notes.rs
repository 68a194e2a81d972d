//! Rules of notes.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::StoreError;
use hapax_core::schedule::{MAX_NOTE, NewEntry, Schedule};

use super::ScheduleBench;
use super::bench::is_same;
use crate::suite::StoreFixture;
use crate::suite::bench::{LONG, MAX_ATTEMPTS, pause};

/// A note of any length up to the limit, with any bytes, is read as it was inserted, also after a
/// postponement.
pub async fn notes_are_read_as_inserted<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    for length in [0, 1, 255, 4_096, 65_537, MAX_NOTE - 1, MAX_NOTE] {
        let entry =
            NewEntry { note: bench.bytes(length).into(), ..bench.entry("a", Duration::ZERO) };
        bench.insert(&entry).await;
        let found = bench.found(entry.key).await;
        assert!(is_same(&found, &entry), "a note of {length} bytes has changed");
        let due = bench.due(&["a"], 10).await;
        assert!(due.entries == [found], "a note of {length} bytes has changed");
        let postponed = bench.postponed(entry.key, None, LONG).await;
        assert!(is_same(&postponed, &entry), "a note of {length} bytes has changed");
        bench.remove(entry.key).await;
    }
}

/// A note with one byte more than the limit is an error which is not ambiguous, and inserts nothing.
pub async fn a_note_beyond_the_limit_inserts_nothing<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let note = Bytes::from(vec![b'x'; MAX_NOTE + 1]);
    let entry = NewEntry { note, ..bench.entry("a", Duration::ZERO) };
    let mut is_definite = false;
    for _ in 0..MAX_ATTEMPTS {
        match bench.store.insert(entry.clone()).await {
            Ok(()) => panic!("inserted a note of {} bytes", MAX_NOTE + 1),
            // A fault between the test and the store.
            Err(StoreError::Ambiguous(_)) => pause().await,
            Err(_) => {
                is_definite = true;
                break;
            }
        }
    }
    assert!(is_definite, "always ambiguous: callers would repeat the call for ever");
    bench.pass(Duration::from_micros(1)).await;
    assert_eq!(bench.all().await, []);
    assert_eq!(bench.queues().await, []);
    assert_eq!(bench.due(&["a"], 10).await.next_in, None);
}

//! Entries of the schedule in an image: each is as a change left it that may have been the last one,
//! and the index agrees.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule, ScheduleEntry};
use hapax_core::store::BoxFuture;
use hapax_core::{Clock, StoreError, Timestamp};
use hapax_file::FileStore;
use hapax_testkit::{ManualClock, SeededEntropy};

use crate::medium::Medium;
use crate::support::entry;

/// The state that a change leaves, and how many operations the disk had done when the change was
/// sent and when it was answered.
#[derive(Clone, Debug)]
struct Changed {
    entry: Option<ScheduleEntry>,
    sent: usize,
    acknowledged: Option<usize>,
}

/// What was sent, by key, in order.
#[derive(Default, Debug)]
pub(super) struct EntryHistory(Mutex<BTreeMap<EntryKey, Vec<Changed>>>);

impl EntryHistory {
    /// Inserts an entry; postpones it, and removes it, now and then.
    pub(super) async fn changes(
        &self,
        store: &FileStore,
        medium: &Medium,
        of: u64,
        dice: &SeededEntropy,
    ) {
        // The clock of these stores stands still.
        let at = |due_in| ManualClock::default().now().after(due_in);
        let due_in = |dice: &SeededEntropy| Duration::from_secs(dice.below(100));
        let queue = QueueName::new(["transfer/1", "transfer/2"][of as usize % 2]).unwrap();
        let size = [0, 100, 5_000, 20_000][dice.below(4) as usize];
        let note = vec![b'x'; size].into();
        let new = NewEntry { queue, note, ..entry(of, due_in(dice)) };
        let NewEntry { key, queue, note, .. } = new.clone();
        let scheduled = |due: Timestamp| {
            Some(ScheduleEntry { key, queue: queue.clone(), due, note: note.clone() })
        };
        let insert = || store.insert(new.clone());
        self.change(medium, key, scheduled(at(new.due_in)), insert).await;
        for _ in 0..dice.below(3) {
            let due_in = due_in(dice);
            let postpone = || -> BoxFuture<'_, _> {
                Box::pin(async move { store.postpone(key, None, due_in).await.map(|_| ()) })
            };
            self.change(medium, key, scheduled(at(due_in)), postpone).await;
        }
        if dice.below(2) == 0 {
            self.change(medium, key, None, || store.remove(key)).await;
        }
    }

    /// Makes a change until it is answered, and notes it.
    async fn change<'s>(
        &self,
        medium: &Medium,
        key: EntryKey,
        entry: Option<ScheduleEntry>,
        call: impl Fn() -> BoxFuture<'s, Result<(), StoreError>>,
    ) {
        let changed = Changed { entry, sent: medium.operations(), acknowledged: None };
        self.0.lock().unwrap().entry(key).or_default().push(changed);
        while let Err(error) = call().await {
            assert!(!matches!(error, StoreError::Corrupt(_)), "{error}");
            tokio::task::yield_now().await;
        }
        let acknowledged = Some(medium.operations());
        let mut keys = self.0.lock().unwrap();
        keys.get_mut(&key).unwrap().last_mut().unwrap().acknowledged = acknowledged;
    }

    /// Returns whether `found` may be what a failure after `at` operations left.
    fn allows(&self, key: &EntryKey, at: usize, found: Option<&ScheduleEntry>) -> bool {
        let keys = self.0.lock().unwrap();
        let Some(chain) = keys.get(key) else { return found.is_none() };
        let old = |changed: &Changed| changed.acknowledged.is_some_and(|when| when <= at);
        let first = chain.iter().rposition(old);
        let none = first.is_none() && found.is_none();
        none || chain[first.unwrap_or(0)..]
            .iter()
            .any(|changed| changed.sent <= at && is_left_by(changed.entry.as_ref(), found))
    }
}

/// Returns whether an entry is the one that a change left. The clock of the machine stands still, and that
/// of a store that is opened again begins with the mark of its file, a second ahead.
fn is_left_by(changed: Option<&ScheduleEntry>, found: Option<&ScheduleEntry>) -> bool {
    let ahead = |entry: &ScheduleEntry| {
        let due = entry.due.after(Duration::from_secs(1));
        ScheduleEntry { due, ..entry.clone() }
    };
    changed == found || changed.map(ahead).as_ref() == found
}

/// Compares the entries of an opened image with what was acknowledged. Moves the clock.
pub(super) async fn check(
    store: &FileStore,
    clock: &ManualClock,
    past: &[(&EntryHistory, usize)],
) -> Result<(), String> {
    let page = store.entries(None, NonZeroU32::MAX).await.map_err(|error| format!("{error:?}"))?;
    let mut found = BTreeMap::new();
    for (key, entry) in page.entries {
        found.insert(key, entry.map_err(|error| format!("{key:?}: {error:?}"))?);
    }
    if page.more {
        return Err("the entries do not fit on one page".into());
    }
    for (history, at) in past {
        let keys: Vec<_> = history.0.lock().unwrap().keys().copied().collect();
        for key in keys {
            if !history.allows(&key, *at, found.get(&key)) {
                return Err(format!("{key:?} is {:?}", found.get(&key)));
            }
        }
    }
    let is_known = |key: &&EntryKey| {
        past.iter().any(|(history, _)| history.0.lock().unwrap().contains_key(*key))
    };
    if let Some(key) = found.keys().find(|key| !is_known(key)) {
        return Err(format!("nobody inserted {key:?}"));
    }
    clock.advance(Duration::from_secs(1_000));
    let queues = ["transfer/1", "transfer/2"].map(|name| QueueName::new(name).unwrap());
    let due =
        store.due(&queues, NonZeroU32::MAX).await.map_err(|error| format!("{error:?}"))?.entries;
    let mut keys: Vec<_> = due.iter().map(|(key, _)| *key).collect();
    keys.sort_unstable();
    let agrees = keys.iter().eq(found.keys()) && due.iter().all(|(_, entry)| entry.is_ok());
    if agrees { Ok(()) } else { Err("the index has other entries than the table".into()) }
}

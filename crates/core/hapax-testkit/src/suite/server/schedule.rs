//! Schedules on servers that crash.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule, ScheduleEntry};
use hapax_core::{EntryId, OperationId};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{ServerFixture, answers_again, open};
use crate::SeededEntropy;

const LATER: Duration = Duration::from_secs(86_400);

/// The changes of an entry: it is inserted, and due at once; postponed by [`LATER`]; removed.
#[derive(Debug)]
struct Changes {
    key: EntryKey,
    /// Number of changes that were sent.
    sent: u32,
    /// Number of changes that were acknowledged.
    acknowledged: u32,
}

/// Changes of a schedule that were acknowledged survive kills of the server, and each change is applied
/// completely or not at all. A store that is a schedule too calls it; `server_suite!` does not.
pub async fn acknowledged_changes_of_a_schedule_survive_kills<F: ServerFixture>()
where
    F::Store: Schedule,
{
    let mut server = F::start().await;
    let store = Arc::new(open(&server).await);
    let queue = QueueName::new("kills").unwrap();
    let mut changes = Vec::new();
    for round in 0..5 {
        let mut callers = JoinSet::new();
        for caller in 0..16 {
            let (store, queue) = (Arc::clone(&store), queue.clone());
            callers.spawn(async move {
                let entropy = SeededEntropy::new(round << 8 | caller);
                let mut changes = Vec::new();
                while change(&*store, &queue, &entropy, &mut changes).await {}
                changes
            });
        }
        sleep(Duration::from_millis(150)).await;
        server.kill().await;
        changes.extend(callers.join_all().await.into_iter().flatten());
        server.restart().await;
        answers_again(&*store).await;
    }
    let acknowledged: u32 = changes.iter().map(|changes| changes.acknowledged).sum();
    assert!(acknowledged > 100, "{acknowledged} acknowledged: nothing was tested");

    let (found, due) = (all(&*store).await, due(&*store, &queue).await);
    let statuses = store.queues().await.unwrap();
    assert_eq!(statuses.iter().map(|status| status.entries).sum::<u64>(), found.len() as u64);
    let mut left = found.len();
    for changes in &changes {
        let entry = found.get(&changes.key);
        left -= usize::from(entry.is_some());
        let is_due = due.contains_key(&changes.key);
        let expected = match (changes.acknowledged, changes.sent) {
            (0, _) => entry.is_none() || is_due,
            (1, 1) => is_due,
            (1, _) => entry.is_some(),
            (2, 2) => entry.is_some() && !is_due,
            (2, _) => !is_due,
            _ => entry.is_none(),
        };
        assert!(expected, "{changes:?}, and the entry is {entry:?}, due: {is_due}");
        assert!(!is_due || entry.is_some(), "due, and on no page: {changes:?}");
    }
    assert_eq!(left, 0, "entries that nobody inserted");
}

/// Inserts an entry, postpones it, and removes every second one. Returns `false` after an error.
async fn change<S: Schedule>(
    store: &S,
    queue: &QueueName,
    entropy: &SeededEntropy,
    all: &mut Vec<Changes>,
) -> bool {
    let mut operation = [0; 32];
    for part in operation.chunks_mut(8) {
        part.copy_from_slice(&entropy.next().to_be_bytes());
    }
    let id = EntryId::fresh(entropy).unwrap();
    let key = EntryKey { operation: OperationId::from_bytes(operation), id };
    let removes = all.len().is_multiple_of(2);
    all.push(Changes { key, sent: 0, acknowledged: 0 });
    let changes = all.last_mut().unwrap();
    let note = Bytes::from(operation.to_vec());
    let entry = NewEntry { key, queue: queue.clone(), due_in: Duration::ZERO, note };
    for number in 1..=2 + u32::from(removes) {
        changes.sent = number;
        let changed = match number {
            1 => store.insert(entry.clone()).await.is_ok(),
            2 => match store.postpone(key, None, LATER).await {
                Ok(postponed) => {
                    assert!(postponed, "an acknowledged entry is absent: {changes:?}");
                    true
                }
                Err(_) => false,
            },
            _ => store.remove(key).await.is_ok(),
        };
        if !changed {
            return false;
        }
        changes.acknowledged = number;
    }
    true
}

async fn all<S: Schedule>(store: &S) -> BTreeMap<EntryKey, ScheduleEntry> {
    let mut all = BTreeMap::new();
    loop {
        let after = all.last_key_value().map(|(key, _)| *key);
        let page = store.entries(after, NonZeroU32::new(1_000).unwrap()).await.unwrap();
        all.extend(page.entries.into_iter().map(whole));
        if !page.more {
            return all;
        }
    }
}

/// Returns all entries that are due, and postpones them, so that the next ones are returned.
async fn due<S: Schedule>(store: &S, queue: &QueueName) -> BTreeMap<EntryKey, ScheduleEntry> {
    let mut all = BTreeMap::new();
    loop {
        let most = NonZeroU32::new(1_000).unwrap();
        let found = store.due(std::slice::from_ref(queue), most).await.unwrap();
        if found.entries.is_empty() {
            return all;
        }
        for (key, entry) in found.entries.into_iter().map(whole) {
            assert!(store.postpone(key, Some(entry.due), LATER).await.unwrap());
            all.insert(key, entry);
        }
    }
}

fn whole<E: std::fmt::Debug>(
    (key, entry): (EntryKey, Result<ScheduleEntry, E>),
) -> (EntryKey, ScheduleEntry) {
    let entry = entry.unwrap();
    assert_eq!(&entry.note[..], key.operation.as_bytes(), "{entry:?}");
    (key, entry)
}

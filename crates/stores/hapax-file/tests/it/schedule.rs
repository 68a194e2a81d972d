//! Changes of the schedule share the commits of swaps and their failures; damage to an entry is an
//! error for that entry.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{NewEntry, QueueName, Schedule};
use hapax_core::store::BoxFuture;
use hapax_core::{KeyRing, Secret, Store, StoreError};
use hapax_file::{FileOptions, FileStore, SecretSource, examine, salvage};
use hapax_testkit::SeededEntropy;
use tokio::task::JoinHandle;

use crate::faults::{open, send, send_first, until};
use crate::medium::{Fault, Lies, Medium};
use crate::support::{claim, complete, due, entries, entry, expect_stored, key, queue};

const NOW: Duration = Duration::ZERO;
const LATER: Duration = Duration::from_secs(86_400);
/// Enough for trees of branches and leaves.
const ENTRIES: u64 = 400;

/// Begins a change, and returns once `queued` requests wait behind the commit in progress.
async fn change<T: Send + 'static>(
    store: &Arc<FileStore>,
    queued: usize,
    call: impl for<'a> FnOnce(&'a FileStore) -> BoxFuture<'a, Result<T, StoreError>> + Send + 'static,
) -> JoinHandle<Result<T, StoreError>> {
    let sender = Arc::clone(store);
    let task = tokio::spawn(async move { call(&sender).await });
    until(|| store.stats().queued == queued).await;
    task
}

async fn insert(
    store: &Arc<FileStore>,
    queued: usize,
    of: u64,
) -> JoinHandle<Result<(), StoreError>> {
    change(store, queued, move |store| store.insert(entry(of, NOW))).await
}

#[tokio::test]
async fn changes_of_the_schedule_share_the_commit_of_swaps() {
    let (medium, store) = open(|options| options);
    store.insert(entry(100, LATER)).await.unwrap();
    store.insert(entry(101, LATER)).await.unwrap();
    let before = store.stats().commits;
    medium.hold();
    let first = send_first(&store, &medium, claim(0)).await;
    let mut swaps = Vec::new();
    let mut changes = Vec::new();
    for of in 1..=20 {
        swaps.push(send(&store, claim(of), 2 * of as usize - 1).await);
        changes.push(insert(&store, 2 * of as usize, of).await);
    }
    let postponed =
        change(&store, 41, |store| store.postpone(entry(100, NOW).key, None, NOW)).await;
    let removed = change(&store, 42, |store| store.remove(entry(101, NOW).key)).await;
    // Reads see what is durable only.
    assert_eq!(entries(&*store).await.0.len(), 2);
    assert_eq!(due(&*store).await.0, []);
    assert_eq!(store.queues().await.unwrap()[0].entries, 2);
    medium.release();
    first.await.unwrap().unwrap();
    for task in swaps {
        task.await.unwrap().unwrap();
    }
    for task in changes {
        task.await.unwrap().unwrap();
    }
    assert!(postponed.await.unwrap().unwrap());
    removed.await.unwrap().unwrap();
    assert_eq!(store.stats().commits - before, 2, "42 writes shared a commit");
    assert_eq!(due(&*store).await.0.len(), 21);
    assert_eq!(entries(&*store).await.0.len(), 21);
}

#[tokio::test]
async fn after_a_failed_commit_its_changes_are_ambiguous_and_queued_ones_unavailable() {
    for sync in [0, 1] {
        let (medium, store) = open(|options| options);
        store.insert(entry(7, LATER)).await.unwrap();
        medium.hold();
        let before = medium.operations();
        let first = insert(&store, 0, 1).await;
        until(|| medium.operations() > before).await;
        let behind = [
            insert(&store, 1, 2).await,
            change(&store, 2, |store| store.remove(entry(7, NOW).key)).await,
        ];
        medium.set_fault(Fault::Sync(sync));
        medium.release();
        let first = first.await.unwrap();
        assert!(matches!(first, Err(StoreError::Ambiguous(_))), "{first:?}");
        for task in behind {
            let behind = task.await.unwrap();
            assert!(matches!(behind, Err(StoreError::Unavailable(_))), "{behind:?}");
        }
        for of in [1, 2] {
            while store.insert(entry(of, NOW)).await.is_err() {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(store.stats().reopened, 1);
        let found = entries(&*store).await.0;
        let mut keys: Vec<_> = [1, 2, 7].map(|of| entry(of, NOW).key).into();
        keys.sort_unstable();
        assert!(found.iter().map(|entry| entry.key).eq(keys), "{found:?}");
        assert_eq!(due(&*store).await.0.len(), 2);
    }
}

#[tokio::test]
async fn dropped_callers_cancel_no_change() {
    let (medium, store) = open(|options| options);
    store.insert(entry(1, LATER)).await.unwrap();
    medium.hold();
    let first = send_first(&store, &medium, claim(0)).await;
    let inserting = insert(&store, 1, 2).await;
    let removing = change(&store, 2, |store| store.remove(entry(1, NOW).key)).await;
    inserting.abort();
    removing.abort();
    assert!(inserting.await.is_err() && removing.await.is_err());
    medium.release();
    first.await.unwrap().unwrap();
    store.insert(entry(3, NOW)).await.unwrap();
    let found: Vec<_> = due(&*store).await.0.iter().map(|entry| entry.key).collect();
    assert_eq!(found, [entry(2, NOW).key, entry(3, NOW).key]);
    assert_eq!(entries(&*store).await.0.len(), 2);
}

#[tokio::test]
async fn a_full_queue_rejects_insertions_before_removals() {
    let (medium, store) = open(|options| options.queue(8, 1 << 20));
    store.insert(entry(1, LATER)).await.unwrap();
    medium.hold();
    let first = send_first(&store, &medium, claim(0)).await;
    let mut tasks = Vec::new();
    for of in 1..=7 {
        tasks.push(insert(&store, of as usize, 10 + of).await);
    }
    let rejected = store.insert(entry(30, NOW)).await;
    assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "{rejected:?}");
    tasks.push(change(&store, 8, |store| store.remove(entry(1, NOW).key)).await);
    let rejected = store.postpone(entry(1, NOW).key, None, NOW).await;
    assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "{rejected:?}");
    medium.release();
    first.await.unwrap().unwrap();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(entries(&*store).await.0.len(), 7);
}

#[tokio::test]
async fn the_notes_of_insertions_count_towards_the_limit_of_the_queue() {
    let (medium, store) = open(|options| options.queue(100, 1 << 20));
    medium.hold();
    let first = send_first(&store, &medium, claim(0)).await;
    let large = |of| NewEntry { note: vec![b'x'; 500 << 10].into(), ..entry(of, NOW) };
    let waiting = change(&store, 1, move |store| store.insert(large(1))).await;
    let rejected = store.insert(large(2)).await;
    assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "{rejected:?}");
    let small = insert(&store, 2, 3).await;
    medium.release();
    for task in [waiting, small] {
        task.await.unwrap().unwrap();
    }
    first.await.unwrap().unwrap();
    assert_eq!(entries(&*store).await.0.len(), 2);
}

#[tokio::test]
async fn below_the_free_space_limit_only_insertions_are_rejected() {
    let (medium, store) = open(|options| options.min_free_bytes(1000));
    for of in [1, 2] {
        store.insert(entry(of, LATER)).await.unwrap();
    }
    medium.set_free(999);
    let rejected = store.insert(entry(3, NOW)).await;
    assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "{rejected:?}");
    // What is in the schedule already is not new.
    store.insert(entry(1, NOW)).await.unwrap();
    assert!(store.postpone(entry(1, NOW).key, None, NOW).await.unwrap());
    store.remove(entry(2, NOW).key).await.unwrap();
    medium.set_free(1000);
    store.insert(entry(3, NOW)).await.unwrap();
    assert_eq!(due(&*store).await.0.len(), 2);
}

#[tokio::test]
async fn with_the_reserve_used_up_changes_are_unavailable_and_reads_continue() {
    let (medium, store) = open(|options| options.min_free_bytes(0));
    store.insert(entry(1, NOW)).await.unwrap();
    medium.set_room(0);
    let large = |of| NewEntry { note: vec![b'x'; 1 << 20].into(), ..entry(of, NOW) };
    let mut unavailable = 0;
    for of in 10..30 {
        match store.insert(large(of)).await {
            Ok(()) => {}
            Err(StoreError::Unavailable(_)) => unavailable += 1,
            Err(StoreError::Ambiguous(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(unavailable > 0 && medium.reserved().is_none());
    medium.set_room(usize::MAX);
    while store.insert(entry(2, NOW)).await.is_err() {
        tokio::task::yield_now().await;
    }
    let found = due(&*store).await.0;
    assert!([1, 2].iter().all(|of| found.iter().any(|found| found.key == entry(*of, NOW).key)));
}

#[tokio::test]
async fn replies_with_large_notes_end_early_and_continue() {
    let (_medium, store) = open(|options| options);
    let large = |of| NewEntry { note: vec![of as u8; 700 << 10].into(), ..entry(of, NOW) };
    for of in 1..=3 {
        store.insert(large(of)).await.unwrap();
    }
    let limit = NonZeroU32::new(10).unwrap();
    let reply = store.due(&[queue()], limit).await.unwrap();
    assert_eq!((reply.entries.len(), reply.next_in), (2, Some(Duration::ZERO)));
    let page = store.entries(None, limit).await.unwrap();
    assert_eq!((page.entries.len(), page.more), (2, true), "a mebibyte, and what crosses it");
    let page = store.entries(Some(page.entries[1].0), limit).await.unwrap();
    assert_eq!((page.entries.len(), page.more), (1, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_what_is_due_reads_a_few_blocks_however_many_entries_there_are() {
    let mut reads = Vec::new();
    for count in [1_000, 20_000] {
        let medium = Medium::new(Vec::new(), Lies::None);
        let options = || FileOptions::new("in memory").secret(SecretSource::None);
        let store = FileStore::open_on(Arc::new(medium.clone()), options()).unwrap();
        let store = Arc::new(store);
        let other = QueueName::new("transfer/2").unwrap();
        let tasks: Vec<_> = (0..count)
            .map(|of| {
                let (store, queue) = (Arc::clone(&store), other.clone());
                // Half of them are in another queue and due, the others are due later.
                let entry = match of % 2 {
                    0 => NewEntry { queue, ..entry(of, NOW) },
                    _ => entry(of, LATER),
                };
                tokio::spawn(async move {
                    while store.insert(entry.clone()).await.is_err() {
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        for of in count..count + 5 {
            store.insert(entry(of, NOW)).await.unwrap();
        }
        store.close().await;
        // Without pages in memory, and with all of them checked before it is opened.
        let options = options().cache_bytes(0).check_for(Duration::MAX);
        let store = FileStore::open_on(Arc::new(medium.clone()), options).unwrap();
        let before = medium.reads();
        let found = store.due(&[queue()], NonZeroU32::new(10).unwrap()).await.unwrap();
        reads.push(medium.reads() - before);
        assert_eq!(found.entries.len(), 5);
        assert!(found.next_in.is_some_and(|next_in| next_in > Duration::from_secs(60)));
        store.close().await;
    }
    println!("blocks read: {reads:?}");
    assert!(reads.iter().all(|reads| (1..100).contains(reads)), "{reads:?}");
}

fn options(path: &Path) -> FileOptions {
    FileOptions::new(path).secret(SecretSource::None)
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    (directory, path)
}

/// A closed file whose entries are all due, and its bytes.
async fn scheduled(path: &Path) -> Vec<u8> {
    let store = Arc::new(FileStore::open(options(path)).unwrap());
    let tasks: Vec<_> = (0..ENTRIES)
        .map(|of| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.insert(entry(of, NOW)).await.unwrap() })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    store.close().await;
    std::fs::read(path).unwrap()
}

/// Flips a bit in every leaf that has `bytes`: in the index of the schedule, or in the entries.
fn damage(path: &Path, bytes: &[u8], is_index: bool) {
    let mut file = std::fs::read(path).unwrap();
    let mut damaged = 0;
    for page in file[2 * 4096..].chunks_mut(4096 + 16) {
        let holds = |bytes: &[u8]| page.windows(bytes.len()).any(|window| window == bytes);
        if page[0] == 1 && holds(bytes) && holds(b"hxn\x01") != is_index {
            page[4_000] ^= 0x40;
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    std::fs::write(path, file).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_entries_are_errors_in_the_reply_and_others_are_returned() {
    let (directory, path) = temporary();
    scheduled(&path).await;
    damage(&path, key(77).as_bytes(), false);
    let report = examine(&path).unwrap();
    assert!((1..60).contains(&report.lost_entries()), "{report:?}");
    let store = FileStore::open(options(&path)).unwrap();
    let (found, damaged) = entries(&store).await;
    assert_eq!((found.len() as u64, damaged), (report.entries, 1), "one error for the page");
    let (found, damaged) = due(&store).await;
    assert_eq!((found.len() as u64, damaged as u64), (report.entries, report.lost_entries()));
    let damaged = entry(77, NOW);
    for result in [
        store.insert(damaged.clone()).await,
        store.remove(damaged.key).await,
        store.postpone(damaged.key, None, LATER).await.map(drop),
    ] {
        assert!(matches!(result, Err(StoreError::Corrupt(_))), "{result:?}");
    }
    assert_eq!(store.stats().reopened, 0);
    store.insert(entry(1_000, NOW)).await.unwrap();
    store.close().await;

    let new = directory.path().join("new.db");
    let salvaged = salvage(&path, &new).unwrap();
    assert_eq!(salvaged.expected_entries, ENTRIES + 1);
    assert_eq!(salvaged.entries, report.entries + 1);
    let store = FileStore::open(options(&new).verify(true)).unwrap();
    let (found, damaged) = due(&store).await;
    assert_eq!((found.len() as u64, damaged), (salvaged.entries, 0));
    assert_eq!(entries(&store).await.0.len(), found.len());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_the_index_damaged_no_entry_is_hidden_without_an_error_or_lost() {
    let (directory, path) = temporary();
    scheduled(&path).await;
    damage(&path, b"transfer/1\0", true);
    let report = examine(&path).unwrap();
    assert!(report.lost_entries() == 0 && report.damaged > 0, "{report:?}");
    let store = FileStore::open(options(&path)).unwrap();
    let (found, damaged) = entries(&store).await;
    assert_eq!((found.len() as u64, damaged), (ENTRIES, 0));
    let (found, damaged) = due(&store).await;
    assert!((found.len() as u64) < ENTRIES && damaged > 0, "{} found, {damaged}", found.len());
    assert!(matches!(store.queues().await, Err(StoreError::Corrupt(_))));
    store.close().await;

    let new = directory.path().join("new.db");
    let salvaged = salvage(&path, &new).unwrap();
    assert_eq!((salvaged.entries, salvaged.lost_entries()), (ENTRIES, 0));
    let store = FileStore::open(options(&new).verify(true)).unwrap();
    assert_eq!(due(&store).await.0.len() as u64, ENTRIES);
    store.close().await;
}

/// Nobody requests anything: the check in the background reads it.
#[tokio::test]
async fn damage_to_the_schedule_is_found_before_a_request_needs_it() {
    for is_index in [false, true] {
        let (_directory, path) = temporary();
        scheduled(&path).await;
        let bytes = if is_index { b"transfer/1\0".to_vec() } else { key(5).as_bytes().to_vec() };
        damage(&path, &bytes, is_index);
        let store = FileStore::open(options(&path).check_for(Duration::ZERO)).unwrap();
        while store.stats().damaged == 0 {
            tokio::task::yield_now().await;
        }
        store.close().await;
    }
}

#[tokio::test]
async fn a_note_that_another_secret_sealed_is_an_error_in_its_place() {
    let (_directory, path) = temporary();
    let ring = KeyRing::new(Secret::new([1; 32]));
    let newer = ring.clone().sealing(Secret::new([2; 32]));
    let open = |ring: &KeyRing| {
        FileStore::open(FileOptions::new(&path).secret(SecretSource::Ring(ring.clone()))).unwrap()
    };
    let store = open(&newer);
    store.insert(entry(1, NOW)).await.unwrap();
    store.close().await;
    let store = open(&ring);
    store.insert(entry(2, NOW)).await.unwrap();
    for (found, damaged) in [entries(&store).await, due(&store).await] {
        assert_eq!((found.len(), damaged), (1, 1));
        assert_eq!(found[0].key, entry(2, NOW).key);
    }
    // It can be moved and removed without being read.
    assert!(store.postpone(entry(1, NOW).key, None, LATER).await.unwrap());
    store.close().await;
    let store = open(&newer);
    let found = entries(&store).await.0;
    assert!(found.iter().any(|found| found.note == entry(1, NOW).note), "{found:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_hides_no_entry_without_an_error_and_changes_none() {
    let trials = std::env::var("HAPAX_FLIPS").map_or(40, |flips| flips.parse().unwrap());
    let seed = std::env::var("HAPAX_FLIPS_SEED").map_or(1, |seed| seed.parse().unwrap());
    let (directory, path) = temporary();
    let whole = scheduled(&path).await;
    let used: Vec<_> = (2 * 4096..whole.len()).filter(|byte| whole[*byte] != 0).collect();
    let dice = SeededEntropy::new(seed);
    let (mut unopened, mut touched) = (0, 0);
    for trial in 0..trials {
        let (byte, bit) = (used[dice.below(used.len() as u64) as usize], dice.below(8));
        let mut damaged = whole.clone();
        damaged[byte] ^= 1 << bit;
        let path = directory.path().join(format!("{trial}.db"));
        std::fs::write(&path, damaged).unwrap();
        println!("bit {bit} of byte {byte}");
        let Ok(store) = FileStore::open(options(&path)) else {
            unopened += 1;
            continue;
        };
        for (found, damaged) in [entries(&store).await, due(&store).await] {
            for found in &found {
                let same = (0..ENTRIES).map(|of| entry(of, NOW)).find(|e| e.key == found.key);
                assert_eq!(same.map(|entry| entry.note), Some(found.note.clone()));
            }
            let hidden = ENTRIES - found.len() as u64;
            assert!(hidden == 0 || damaged > 0, "{hidden} entries are hidden");
            touched += u64::from(hidden > 0);
        }
        // A record under the same operation id does not depend on the schedule.
        if let Ok(hapax_core::store::Swapped::Stored(_)) = store.swap(claim(5)).await {
            expect_stored(&store, &complete(&claim(5), 10_005, b"answer")).await;
        }
        store.close().await;
        std::fs::remove_file(&path).unwrap();
    }
    println!("{trials} flips: {unopened} files did not open, {touched} replies had errors");
    assert!(trials < 40 || touched > 0, "no flip touched an entry: the test shows nothing");
}

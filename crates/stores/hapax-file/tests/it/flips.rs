//! Flipped bits: what was acknowledged is replayed as it was or refused, never executed anew.
//!
//! `HAPAX_FLIPS` sets how many files are damaged, one bit each; 500 is the long run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::store::Swapped;
use hapax_core::{RecordState, Store};
use hapax_file::{FileOptions, FileStore, OpenError, SecretSource, examine, salvage};
use hapax_testkit::SeededEntropy;

use crate::support::{claim, complete, expect_stored, key};

/// Enough for a tree of branches and leaves.
const KEYS: u64 = 400;

fn options(path: &Path) -> FileOptions {
    FileOptions::new(path).secret(SecretSource::None)
}

fn answer(of: u64) -> Vec<u8> {
    let mut answer = format!("answer {of} ").into_bytes();
    answer.resize(200 + (of as usize % 7) * 100, b'x');
    answer
}

/// A closed file with finished records.
async fn finished(path: &Path) -> Vec<u8> {
    let store = Arc::new(FileStore::open(options(path)).unwrap());
    let tasks: Vec<_> = (0..KEYS)
        .map(|of| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let claimed = claim(of);
                expect_stored(&*store, &claimed).await;
                expect_stored(&*store, &complete(&claimed, of + 10_000, &answer(of))).await;
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    store.close().await;
    std::fs::read(path).unwrap()
}

/// Claims every key anew. Returns how many were replayed; the others were refused.
async fn replays(store: &Arc<FileStore>) -> u64 {
    let tasks: Vec<_> = (0..KEYS)
        .map(|of| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                let again = hapax_core::store::Swap {
                    write_id: crate::support::write_id(of + 20_000),
                    ..claim(of)
                };
                let replayed = match store.swap(again).await {
                    Ok(Swapped::Stored(_)) => panic!("key {of} was executed again"),
                    Ok(Swapped::Conflict(seen)) => {
                        let stored = seen.stored.unwrap_or_else(|| panic!("key {of} looks unused"));
                        let RecordState::Done(outcome) = stored.record.state else {
                            panic!("key {of} is not done");
                        };
                        assert_eq!(outcome.bytes(), &answer(of), "key {of} has another answer");
                        true
                    }
                    Err(_) => false,
                };
                match store.load(&key(of)).await {
                    Ok(seen) => assert!(seen.stored.is_some(), "key {of} is absent to a load"),
                    Err(_) => assert!(!replayed, "key {of} was there a moment ago"),
                }
                replayed
            })
        })
        .collect();
    let mut replayed = 0;
    for task in tasks {
        replayed += u64::from(task.await.unwrap());
    }
    replayed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_executes_nothing_again_and_answers_nothing_wrong() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        before(panic);
    }));
    let trials = std::env::var("HAPAX_FLIPS").map_or(40, |flips| flips.parse().unwrap());
    let seed = std::env::var("HAPAX_FLIPS_SEED").map_or(1, |seed| seed.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    let whole = finished(&path).await;
    let dice = SeededEntropy::new(seed);
    let (mut unopened, mut touched) = (0, 0);
    for trial in 0..trials {
        // The first of them in one of the two copies of the header.
        let bytes = if trial < 8 { 320 } else { whole.len() as u64 };
        let (byte, bit) = (dice.below(bytes) as usize, dice.below(8));
        let byte = if trial < 4 { byte + 4096 } else { byte };
        let mut damaged = whole.clone();
        damaged[byte] ^= 1 << bit;
        let path = directory.path().join(format!("{trial}.db"));
        std::fs::write(&path, damaged).unwrap();
        println!("bit {bit} of byte {byte}");
        match FileStore::open(options(&path)) {
            Ok(store) => {
                let store = Arc::new(store);
                let replayed = replays(&store).await;
                assert!(trial >= 8 || replayed == KEYS, "the other copy is whole: {replayed}");
                touched += u64::from(replayed < KEYS);
                store.close().await;
            }
            Err(error) => {
                assert!(error.to_string().contains("hapax doctor --salvage"), "{error}");
                assert!(trial >= 8, "the other copy is whole: {error}");
                unopened += 1;
            }
        }
        std::fs::remove_file(&path).unwrap();
    }
    println!("{trials} flips: {unopened} files did not open, {touched} refused some keys");
    assert!(trials < 40 || touched > 0, "no flip touched a record: the test shows nothing");
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}

/// What damage does to a new key, whichever block it is in: the index of expiry is one that a claim
/// under `block` does not touch and its completion does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_any_block_damaged_an_accepted_claim_can_be_completed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    let whole = finished(&path).await;
    let mut completed = 0;
    for block in 1..whole.len() / 4096 {
        let mut damaged = whole.clone();
        damaged[block * 4096 + 1_000] ^= 1;
        let path = directory.path().join(format!("{block}.db"));
        std::fs::write(&path, damaged).unwrap();
        let Ok(store) = FileStore::open(options(&path)) else { continue };
        for of in KEYS..KEYS + 20 {
            let mut claimed = claim(of);
            // As under `block`.
            claimed.draft.keep = None;
            if let Ok(Swapped::Stored(_)) = store.swap(claimed.clone()).await {
                let ended = complete(&claimed, of + 10_000, &answer(of));
                let recorded = store.swap(ended).await;
                assert!(matches!(recorded, Ok(Swapped::Stored(_))), "block {block}: {recorded:?}");
                completed += 1;
            }
        }
        store.close().await;
        std::fs::remove_file(&path).unwrap();
    }
    assert!(completed > 0);
}

/// Flips a bit in the middle of the last of `answer`s in the file.
fn damage(path: &Path, of: u64) -> PathBuf {
    let mut file = std::fs::read(path).unwrap();
    let text = format!("answer {of} xx");
    let mut damaged = 0;
    for at in 0..file.len() - text.len() {
        if file[at..].starts_with(text.as_bytes()) {
            file[at] ^= 4;
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    let damaged = path.with_extension("damaged.db");
    std::fs::write(&damaged, file).unwrap();
    damaged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salvage_writes_intact_records_and_counts_lost_ones() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    finished(&path).await;
    let store = FileStore::open(options(&path)).unwrap();
    let identity = store.identity();
    store.close().await;
    let whole = examine(&path).unwrap();
    assert_eq!((whole.read, whole.expected, whole.damaged), (KEYS, KEYS, 0));
    let old = damage(&path, 77);
    let before = std::fs::read(&old).unwrap();
    let new = directory.path().join("new.db");
    let salvaged = salvage(&old, &new).unwrap();
    assert_eq!(salvaged.expected, KEYS);
    assert!((1..60).contains(&salvaged.lost()), "{salvaged:?}");
    assert_eq!(salvaged.damaged, 1);
    assert_eq!(std::fs::read(&old).unwrap(), before, "the old file is only read");
    assert!(matches!(salvage(&old, &new), Err(OpenError::Io { .. })), "it is never overwritten");

    let store = Arc::new(FileStore::open(options(&new).verify(true)).unwrap());
    assert_eq!(store.identity(), identity);
    let mut there = 0;
    for of in 0..KEYS {
        let Some(stored) = crate::support::load(&*store, of).await else { continue };
        let RecordState::Done(outcome) = stored.record.state else { panic!() };
        assert_eq!(outcome.bytes(), &answer(of));
        there += 1;
    }
    assert_eq!(there, salvaged.read);
    // What is due is reaped: the index is whole.
    expect_stored(&*store, &claim(77)).await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_copy_of_the_header_is_replaced_by_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    let whole = finished(&path).await;
    assert_eq!(whole[..512], whole[4096..4096 + 512]);
    for at in [0, 4096] {
        let mut file = whole.clone();
        file[at + 9] ^= 1;
        std::fs::write(&path, &file).unwrap();
        assert_eq!(examine(&path).unwrap().read, KEYS);
        assert_eq!(std::fs::read(&path).unwrap(), file, "a file that is examined is only read");
        let store = Arc::new(FileStore::open(options(&path)).unwrap());
        let mended = std::fs::read(&path).unwrap();
        assert_eq!(mended[..512], mended[4096..4096 + 512]);
        assert_eq!(replays(&store).await, KEYS);
        store.close().await;
    }
}

/// The second copy is older after a crash between the two writes of a header. What is answered
/// after the file is opened again must not depend on the first copy alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_the_header_that_is_older_is_replaced_at_open() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    let older = finished(&path).await;
    let store = FileStore::open(options(&path)).unwrap();
    let claimed = claim(KEYS);
    expect_stored(&store, &claimed).await;
    store.close().await;
    let mut file = std::fs::read(&path).unwrap();
    assert_ne!(file[..512], older[..512]);
    file[4096..4096 + 512].copy_from_slice(&older[..512]);
    std::fs::write(&path, &file).unwrap();
    let store = FileStore::open(options(&path)).unwrap();
    assert!(crate::support::load(&store, KEYS).await.is_some());
    let mut file = std::fs::read(&path).unwrap();
    store.close().await;
    file[9] ^= 1;
    std::fs::write(&path, &file).unwrap();
    let store = FileStore::open(options(&path)).unwrap();
    assert!(crate::support::load(&store, KEYS).await.is_some(), "an older header was used");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salvage_without_an_intact_header_reports_the_loss_of_all_records() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    let mut file = finished(&path).await;
    file[9] ^= 1;
    file[4096 + 9] ^= 1;
    std::fs::write(&path, file).unwrap();
    let opened = FileStore::open(options(&path));
    assert!(matches!(opened, Err(OpenError::Damaged(_))), "{opened:?}");
    let new = directory.path().join("new.db");
    let salvaged = salvage(&path, &new);
    assert!(matches!(salvaged, Err(OpenError::Damaged(_))), "{salvaged:?}");
    assert!(!new.exists());
}

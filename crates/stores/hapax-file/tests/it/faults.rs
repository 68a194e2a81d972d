//! A disk that fails, fills up or is slow, and callers that go away.

use std::num::NonZeroU32;
use std::sync::Arc;

use hapax_core::store::{Swap, Swapped};
use hapax_core::{Clock, Store, StoreError};
use hapax_file::{FileOptions, FileStore, SecretSource};
use tokio::task::JoinHandle;

use crate::medium::{Fault, Lies, Medium};
use crate::support::{claim, complete, expect_stored, key, load, seen};

type Answer = Result<Swapped, StoreError>;

pub(crate) fn open(change: impl FnOnce(FileOptions) -> FileOptions) -> (Medium, Arc<FileStore>) {
    let medium = Medium::new(Vec::new(), Lies::None);
    let options = change(FileOptions::new("in memory").secret(SecretSource::None));
    let store = FileStore::open_on(Arc::new(medium.clone()), options).unwrap();
    (medium, Arc::new(store))
}

/// Sends, and returns once `queued` requests wait behind the commit in progress.
pub(crate) async fn send(store: &Arc<FileStore>, swap: Swap, queued: usize) -> JoinHandle<Answer> {
    let sender = Arc::clone(store);
    let task = tokio::spawn(async move { sender.swap(swap).await });
    until(|| store.stats().queued == queued).await;
    task
}

/// Sends the first swap of a held disk: on its way to the disk when this returns.
pub(crate) async fn send_first(
    store: &Arc<FileStore>,
    medium: &Medium,
    swap: Swap,
) -> JoinHandle<Answer> {
    let before = medium.operations();
    let task = send(store, swap, 0).await;
    until(|| medium.operations() > before).await;
    task
}

pub(crate) async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

/// The same swap again until the store knows.
async fn insist(store: &FileStore, swap: &Swap) -> Swapped {
    loop {
        match store.swap(swap.clone()).await {
            Ok(swapped) => return swapped,
            Err(StoreError::Corrupt(error)) => panic!("{error}"),
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

#[tokio::test]
async fn requests_that_wait_for_a_commit_share_the_next() {
    let (medium, store) = open(|options| options);
    medium.hold();
    let first = send_first(&store, &medium, claim(0)).await;
    let mut rest = Vec::new();
    for of in 1..=50 {
        rest.push(send(&store, claim(of), of as usize).await);
    }
    assert_eq!(store.stats().commits, 0);
    medium.release();
    first.await.unwrap().unwrap();
    for task in rest {
        assert!(matches!(task.await.unwrap(), Ok(Swapped::Stored(_))));
    }
    assert_eq!(store.stats().commits, 2, "fifty swaps shared a commit");
}

#[tokio::test]
async fn swaps_of_one_key_in_one_commit_are_applied_in_order() {
    let (medium, store) = open(|options| options);
    medium.hold();
    let first = send_first(&store, &medium, claim(0)).await;
    let claimed = claim(1);
    let rival = Swap { write_id: crate::support::write_id(500), ..claimed.clone() };
    let done = complete(&claimed, 2, b"answer");
    let tasks = [
        send(&store, claimed.clone(), 1).await,
        send(&store, rival, 2).await,
        send(&store, done.clone(), 3).await,
        send(&store, done.clone(), 4).await,
        send(&store, claimed.clone(), 5).await,
    ];
    medium.release();
    first.await.unwrap().unwrap();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap().unwrap());
    }
    let conflict = |answer: &Swapped| match answer {
        Swapped::Stored(_) => None,
        Swapped::Conflict(seen) => seen.stored.as_ref().map(|stored| stored.write_id),
    };
    let tags: Vec<_> = answers.iter().map(conflict).collect();
    assert_eq!(tags, [None, Some(claimed.write_id), None, None, Some(done.write_id)]);
    assert_eq!(store.stats().commits, 2);
    assert_eq!(load(&*store, 1).await.unwrap().record, done.draft.record);
}

#[tokio::test]
async fn a_load_sees_durable_writes_only() {
    let (medium, store) = open(|options| options);
    medium.hold();
    let task = send_first(&store, &medium, claim(1)).await;
    assert_eq!(load(&*store, 1).await, None);
    assert!(!task.is_finished());
    medium.release();
    task.await.unwrap().unwrap();
    assert!(load(&*store, 1).await.is_some());
}

#[tokio::test]
async fn dropped_callers_cancel_no_write() {
    let (medium, store) = open(|options| options);
    medium.hold();
    let in_progress = send_first(&store, &medium, claim(1)).await;
    let waiting = send(&store, claim(2), 1).await;
    in_progress.abort();
    waiting.abort();
    assert!(in_progress.await.is_err() && waiting.await.is_err());
    medium.release();
    expect_stored(&*store, &claim(3)).await;
    assert!(load(&*store, 1).await.is_some());
    assert!(load(&*store, 2).await.is_some());
}

#[tokio::test]
async fn a_full_queue_rejects_claims_before_completions() {
    let (medium, store) = open(|options| options.queue(8, 1 << 20));
    let open: Vec<_> = (0..3).map(claim).collect();
    for claimed in &open {
        expect_stored(&*store, claimed).await;
    }
    medium.hold();
    let first = send_first(&store, &medium, claim(10)).await;
    let mut tasks = Vec::new();
    for of in 1..=7 {
        tasks.push(send(&store, claim(10 + of), of as usize).await);
    }
    assert!(matches!(store.swap(claim(30)).await, Err(StoreError::Unavailable(_))));
    tasks.push(send(&store, complete(&open[0], 100, b"done"), 8).await);
    let refused = store.swap(complete(&open[1], 101, b"done")).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))));
    medium.release();
    first.await.unwrap().unwrap();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(load(&*store, 30).await, None);
}

#[tokio::test]
async fn after_a_failed_commit_its_swaps_are_ambiguous_and_queued_ones_unavailable() {
    // Of two syncs, the one that makes the pages durable, or the one that makes them count.
    for sync in [0, 1] {
        let (medium, store) = open(|options| options);
        let earlier = claim(7);
        expect_stored(&*store, &earlier).await;
        medium.hold();
        let first = send_first(&store, &medium, claim(1)).await;
        let behind = send(&store, claim(2), 1).await;
        medium.set_fault(Fault::Sync(sync));
        medium.release();
        let first = first.await.unwrap();
        assert!(matches!(first, Err(StoreError::Ambiguous(_))), "{first:?}");
        let behind = behind.await.unwrap();
        assert!(matches!(behind, Err(StoreError::Unavailable(_))), "{behind:?}");
        assert!(matches!(insist(&store, &claim(1)).await, Swapped::Stored(_)));
        assert!(matches!(insist(&store, &claim(2)).await, Swapped::Stored(_)));
        assert_eq!(store.stats().reopened, 1);
        // The process lives, and so do its leases.
        let (snapshot, stored) = seen(&*store, 7).await;
        assert!(stored.lease_until > snapshot.now);
        expect_stored(&*store, &complete(&earlier, 70, b"answer")).await;
    }
}

#[tokio::test]
async fn after_a_panic_of_the_engine_the_database_is_reopened() {
    let (medium, store) = open(|options| options);
    medium.set_fault(Fault::Panic);
    let first = store.swap(claim(1)).await;
    assert!(matches!(first, Err(StoreError::Ambiguous(_))), "{first:?}");
    assert_eq!(medium.fault(), Fault::None);
    assert!(matches!(insist(&store, &claim(1)).await, Swapped::Stored(_)));
    assert_eq!(store.stats().reopened, 1);
}

#[tokio::test]
async fn a_full_disk_is_retried_until_it_has_space() {
    let (medium, store) = open(|options| options);
    expect_stored(&*store, &claim(1)).await;
    medium.set_fault(Fault::Full);
    assert!(matches!(store.swap(claim(2)).await, Err(StoreError::Ambiguous(_))));
    for _ in 0..3 {
        assert!(matches!(store.swap(claim(3)).await, Err(StoreError::Unavailable(_))));
    }
    assert!(matches!(store.load(&key(1)).await, Err(StoreError::Unavailable(_))));
    medium.set_fault(Fault::None);
    assert!(matches!(insist(&store, &claim(2)).await, Swapped::Stored(_)));
    assert!(load(&*store, 1).await.is_some());
}

#[tokio::test]
async fn below_the_free_space_limit_only_new_keys_are_rejected() {
    let (medium, store) = open(|options| options.min_free_bytes(1000));
    let claimed = claim(1);
    expect_stored(&*store, &claimed).await;
    medium.set_free(999);
    let refused = store.swap(claim(2)).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    // What was stored already is no new key.
    expect_stored(&*store, &claimed).await;
    expect_stored(&*store, &complete(&claimed, 3, b"answer")).await;
    medium.set_free(1000);
    expect_stored(&*store, &claim(2)).await;
}

#[tokio::test]
async fn a_store_that_cannot_open_its_disk_can_be_closed() {
    let (medium, store) = open(|options| options);
    medium.set_fault(Fault::Full);
    assert!(store.swap(claim(1)).await.is_err());
    store.close().await;
    assert!(matches!(store.swap(claim(2)).await, Err(StoreError::Unavailable(_))));
}

#[tokio::test]
async fn swaps_are_served_while_records_are_reaped() {
    let clock = Arc::new(hapax_testkit::ManualClock::default());
    let (medium, store) = open(|options| options.clock(clock.clone()));
    for of in 0..400 {
        expect_stored(&*store, &claim(of)).await;
    }
    clock.set(clock.now().after(crate::support::RETENTION + crate::support::LEASE));
    medium.hold();
    let reaper = Arc::clone(&store);
    let reaping = tokio::spawn(async move { reaper.reap(NonZeroU32::MAX).await });
    let operations = medium.operations();
    until(|| medium.operations() > operations).await;
    let swap = send(&store, claim(1000), 1).await;
    // The commit in progress, and the next one, each with two syncs: the swap is in that one.
    medium.let_through(4);
    swap.await.unwrap().unwrap();
    assert!(!reaping.is_finished(), "the reaper held the disk for long");
    medium.release();
    assert_eq!(reaping.await.unwrap().unwrap().removed, 400);
}

/// Fills what room there is, by claims that nothing completes. Returns how many were stored.
async fn fill(store: &FileStore, from: u64) -> u64 {
    let mut stored = 0;
    for of in from.. {
        match store.swap(claim(of)).await {
            Ok(Swapped::Stored(_)) => stored += 1,
            Ok(other) => panic!("{other:?}"),
            Err(_) => break,
        }
    }
    stored
}

#[tokio::test]
async fn on_a_full_disk_the_reserve_stores_completions_and_replays_continue() {
    let (medium, store) = open(|options| options.min_free_bytes(1));
    let (done, in_progress) = (claim(1), claim(2));
    expect_stored(&*store, &done).await;
    expect_stored(&*store, &complete(&done, 1001, b"answer")).await;
    expect_stored(&*store, &in_progress).await;
    assert!(medium.reserved().is_some());
    // Full, and the file system says so: new keys are rejected, whatever is in progress is recorded.
    medium.set_room(0);
    medium.set_free(0);
    assert!(matches!(store.swap(claim(3)).await, Err(StoreError::Unavailable(_))));
    let large = vec![b'x'; 64 << 10];
    let completed = insist(&store, &complete(&in_progress, 1002, &large)).await;
    assert!(matches!(completed, Swapped::Stored(_)), "{completed:?}");
    assert!(medium.reserved().is_none(), "the reserve made room");
    // Replays need no room at all.
    for _ in 0..3 {
        match store.swap(claim(1)).await {
            Ok(Swapped::Conflict(seen)) => assert!(seen.stored.is_some()),
            other => panic!("{other:?}"),
        }
    }
    // With room again, the reserve is made again.
    medium.set_room(usize::MAX);
    medium.set_free(u64::MAX);
    insist(&store, &claim(4)).await;
    until_reserved(&store, &medium).await;
}

async fn until_reserved(store: &FileStore, medium: &Medium) {
    for of in 5_000.. {
        if medium.reserved().is_some() {
            return;
        }
        insist(store, &claim(of)).await;
    }
}

#[tokio::test]
async fn with_the_reserve_used_up_writes_pause_and_replays_are_answered() {
    let (medium, store) = open(|options| options.min_free_bytes(0));
    let (done, in_progress) = (claim(1), claim(2));
    expect_stored(&*store, &done).await;
    expect_stored(&*store, &complete(&done, 1001, b"answer")).await;
    expect_stored(&*store, &in_progress).await;
    medium.set_room(0);
    fill(&store, 10_000).await;
    assert!(medium.reserved().is_none());
    // Larger than the reserve.
    let large = complete(&in_progress, 1002, &vec![b'x'; 2 << 20]);
    // Each that finds no room is a failed write; what comes in the pause after it is none.
    let mut answered = 0;
    for _ in 0..200 {
        let refused = store.swap(large.clone()).await;
        assert!(refused.is_err(), "{refused:?}");
        match store.swap(claim(1)).await {
            Ok(Swapped::Conflict(seen)) => answered += u32::from(seen.stored.is_some()),
            Ok(other) => panic!("{other:?}"),
            // Opened again at this moment.
            Err(StoreError::Unavailable(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(answered >= 150, "{answered} of 200 replays were answered");
    assert!(store.stats().reopened < 60, "{} times reopened", store.stats().reopened);
    medium.set_room(usize::MAX);
    insist(&store, &claim(3)).await;
}

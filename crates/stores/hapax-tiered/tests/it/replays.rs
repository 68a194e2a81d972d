//! Which claims are answered from the cache, with what, and for how long.

use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax_core::store::Swapped;
use hapax_core::{Fingerprint, RecordState, Secret, Store, StoreError};
use hapax_tiered::TieredOptions;
use tokio::time::{Instant, advance};

use crate::support::{
    LEASE, World, claim, complete, expect_stored, finished, key, refused, release, settle, write_id,
};

#[tokio::test(start_paused = true)]
async fn a_retry_gets_the_authoritys_outcome_from_the_cache() {
    let world = World::new();
    let store = world.process();
    finished(&store, 1, "yes").await;
    let first = refused(&store, &claim(1, 2)).await;
    settle().await;
    let before = world.authority.swaps();
    advance(Duration::from_secs(5)).await;
    let second = refused(&store, &claim(1, 3)).await;
    assert_eq!(world.authority.swaps(), before, "the authority was asked");
    assert_eq!(second, first);
    let now = store.load(&key(9)).await.unwrap().now;
    let second = refused(&store, &claim(1, 4)).await;
    assert_eq!((world.authority.swaps(), second.now), (before, now));
    // A process that never saw it finds it as well, once it knows what time it is there.
    let other = world.process();
    other.load(&key(9)).await.unwrap();
    assert_eq!(refused(&other, &claim(1, 5)).await.stored, first.stored);
    assert_eq!((other.stats().hits, world.authority.swaps()), (1, before));
}

#[tokio::test(start_paused = true)]
async fn only_finished_records_are_cached() {
    let world = World::new();
    let store = world.process();
    let claimed = claim(1, 1);
    expect_stored(&store, &claimed).await;
    refused(&store, &claim(1, 2)).await;
    let released = release(&claimed, 3);
    expect_stored(&store, &released).await;
    refused(&store, &claim(1, 4)).await;
    store.load(&key(1)).await.unwrap();
    settle().await;
    assert_eq!(world.cache.entry(&key(1)).await, None);
    assert_eq!(store.stats().puts, 0);
}

#[tokio::test(start_paused = true)]
async fn a_mismatch_is_decided_by_the_authority() {
    let world = World::new();
    let store = world.process();
    finished(&store, 1, "yes").await;
    refused(&store, &claim(1, 2)).await;
    settle().await;
    let mut other = claim(1, 3);
    other.draft.record.fingerprint = Fingerprint::from_bytes([8; 32]);
    let before = world.authority.swaps();
    refused(&store, &other).await;
    assert_eq!((store.stats().hits, world.authority.swaps()), (0, before + 1));
}

#[tokio::test(start_paused = true)]
async fn an_entry_is_used_for_the_ttl_from_before_it_was_loaded() {
    let world = World::new();
    let store = world.process();
    finished(&store, 1, "yes").await;
    refused(&store, &claim(1, 2)).await;
    settle().await;
    let before = world.authority.swaps();
    advance(Duration::from_millis(59_990)).await;
    refused(&store, &claim(1, 3)).await;
    assert_eq!(world.authority.swaps(), before);
    advance(Duration::from_millis(20)).await;
    refused(&store, &claim(1, 4)).await;
    assert_eq!(world.authority.swaps(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn an_entry_is_used_for_a_quarter_of_what_is_left_of_the_retention() {
    let world = World::new();
    let store = world.process();
    let claimed = claim(1, 1);
    expect_stored(&store, &claimed).await;
    let mut completed = complete(&claimed, 2, "yes");
    completed.draft.keep = Some(Duration::from_secs(100));
    expect_stored(&store, &completed).await;
    advance(Duration::from_secs(60)).await;
    refused(&store, &claim(1, 3)).await;
    settle().await;
    let before = world.authority.swaps();
    advance(Duration::from_secs(9)).await;
    refused(&store, &claim(1, 4)).await;
    assert_eq!(world.authority.swaps(), before);
    advance(Duration::from_secs(2)).await;
    refused(&store, &claim(1, 5)).await;
    assert_eq!(world.authority.swaps(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_restored_old_entry_is_not_used() {
    let world = World::new();
    let store = world.process();
    let completed = finished(&store, 1, "yes").await;
    refused(&store, &claim(1, 2)).await;
    settle().await;
    let old = world.cache.entry(&key(1)).await.expect("it is cached");
    expect_stored(&store, &release(&completed, 3)).await;
    advance(Duration::from_secs(61)).await;
    // In every process, also in one that just began.
    for (number, store) in [store, world.process()].into_iter().enumerate() {
        world.cache.plant(&key(1), old.clone()).await;
        store.load(&key(9)).await.unwrap();
        let seen = refused(&store, &claim(1, 10 + number as u64)).await;
        assert_eq!(seen.stored.unwrap().record.state, RecordState::Released);
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_was_seen_later_than_now_is_not_used() {
    let world = World::new();
    let store = world.process();
    finished(&store, 1, "yes").await;
    refused(&store, &claim(1, 2)).await;
    settle().await;
    world.authority.step_back(30);
    store.load(&key(9)).await.unwrap();
    // Nobody can tell its age any more. Seen anew, it is put anew.
    let before = world.authority.swaps();
    refused(&store, &claim(1, 3)).await;
    assert_eq!((store.stats().hits, world.authority.swaps()), (0, before + 1));
    settle().await;
    refused(&store, &claim(1, 4)).await;
    assert_eq!((store.stats().hits, world.authority.swaps()), (1, before + 1));
}

#[tokio::test(start_paused = true)]
async fn a_release_applies_here_at_once_and_elsewhere_after_the_ttl() {
    let world = World::new();
    let (here, there) = (world.process(), world.process());
    let completed = finished(&here, 1, "yes").await;
    for store in [&here, &there] {
        store.load(&key(1)).await.unwrap();
        settle().await;
    }
    // A cache that does not do as it is told, or is told too late.
    world.cache.never_forgets.store(true, Ordering::SeqCst);
    let released = Instant::now();
    expect_stored(&here, &release(&completed, 2)).await;
    let seen = refused(&here, &claim(1, 3)).await;
    assert_eq!(seen.stored.unwrap().record.state, RecordState::Released);
    let mut number = 10;
    loop {
        number += 1;
        let seen = refused(&there, &claim(1, number)).await;
        match seen.stored.unwrap().record.state {
            RecordState::Done(_) => assert!(released.elapsed() < Duration::from_secs(60)),
            RecordState::Released => break,
            other => panic!("{other:?}"),
        }
        advance(Duration::from_secs(1)).await;
    }
    assert!(released.elapsed() > Duration::from_secs(50), "it was not cached");
    // Where the cache does as it is told, it is seen at once.
    world.cache.never_forgets.store(false, Ordering::SeqCst);
    let completed = finished(&here, 2, "yes").await;
    refused(&here, &claim(2, 30)).await;
    settle().await;
    expect_stored(&here, &release(&completed, 31)).await;
    let seen = refused(&there, &claim(2, 32)).await;
    assert_eq!(seen.stored.unwrap().record.state, RecordState::Released);
}

#[tokio::test(start_paused = true)]
async fn a_repeated_unanswered_claim_reaches_the_authority() {
    let world = World::new();
    let (here, there) = (world.process(), world.process());
    let completed = finished(&there, 1, "old").await;
    refused(&there, &claim(1, 2)).await;
    settle().await;
    let old = world.cache.entry(&key(1)).await.expect("it is cached");
    let released = release(&completed, 3);
    expect_stored(&there, &released).await;
    // Stored, and its reply lost: nobody else can say so but the authority.
    let mut taken = claim(1, 4);
    taken.expected = Some(released.write_id);
    expect_stored(&there, &taken).await;
    let done = complete(&taken, 5, "new");
    expect_stored(&there, &done).await;
    let forgotten = release(&done, 6);
    expect_stored(&there, &forgotten).await;
    advance(LEASE * 3).await;
    there.reap(std::num::NonZeroU32::MAX).await.unwrap();
    here.load(&key(9)).await.unwrap();
    let claimed = claim(1, 7);
    world.authority.loses_replies.store(true, Ordering::SeqCst);
    let lost = here.swap(claimed.clone()).await;
    assert!(matches!(lost, Err(StoreError::Ambiguous(_))), "{lost:?}");
    world.authority.loses_replies.store(false, Ordering::SeqCst);
    // An entry of an earlier life turns up that looks fresh: the clock there went back.
    let fresh = relabelled(&here, &old).await;
    world.cache.plant(&key(1), fresh).await;
    let again = here.swap(claimed.clone()).await.unwrap();
    assert!(matches!(again, Swapped::Stored(_)), "{again:?}");
}

/// The same entry, seen now: without a secret anybody can make one.
async fn relabelled(store: &dyn Store, entry: &[u8]) -> Vec<u8> {
    let now = store.load(&key(9)).await.unwrap().now;
    let mut fields = entry[..52].to_vec();
    fields[20..28].copy_from_slice(&now.as_micros().to_be_bytes());
    let mut hash = blake3::Hasher::new_derive_key("hapax 1 tiered entry");
    hash.update(&entry[..52]);
    let mut bound = [0; 16];
    hash.finalize_xof().fill(&mut bound);
    let sealer = hapax_core::Sealer::checksum();
    let record =
        sealer.open(&key(1), hapax_core::WriteId::from_bytes(bound), &entry[52..]).unwrap();
    let mut hash = blake3::Hasher::new_derive_key("hapax 1 tiered entry");
    hash.update(&fields);
    hash.finalize_xof().fill(&mut bound);
    let bound = hapax_core::WriteId::from_bytes(bound);
    fields.extend(sealer.seal(&key(1), bound, &record, &hapax_core::SystemEntropy).unwrap());
    fields
}

#[tokio::test(start_paused = true)]
async fn a_forged_entry_is_used_only_without_a_secret() {
    let world = World::new();
    let completed = finished(&world.process(), 1, "yes").await;
    let plain = world.process();
    plain.load(&key(1)).await.unwrap();
    settle().await;
    let entry = world.cache.entry(&key(1)).await.unwrap();
    expect_stored(&*world.authority, &release(&completed, 2)).await;
    let made_up = relabelled(&*world.authority, &entry).await;
    let secret = Secret::new([1; 32]);
    let sealed = world.process_with(TieredOptions::default().secret(&secret));
    // Also where the authority opens records from before it had a secret.
    let ring = hapax_core::KeyRing::unnamed(secret.clone()).sealing(secret);
    let later = world.process_with(TieredOptions::default().key_ring(&ring));
    for (store, believes) in [(&plain, true), (&sealed, false), (&later, false)] {
        world.cache.plant(&key(1), made_up.clone()).await;
        store.load(&key(9)).await.unwrap();
        let seen = refused(store, &claim(1, 3)).await.stored.unwrap();
        assert_eq!(matches!(seen.record.state, RecordState::Done(_)), believes, "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_sealed_entry_is_valid_only_unchanged_and_for_its_key() {
    let world = World::new();
    let secret = Secret::new([1; 32]);
    let store = world.process_with(TieredOptions::default().secret(&secret));
    finished(&store, 1, "canary-4111").await;
    finished(&store, 2, "another").await;
    for of in [1, 2] {
        refused(&store, &claim(of, of + 50)).await;
    }
    settle().await;
    let entry = world.cache.entry(&key(1)).await.unwrap().to_vec();
    assert!(!entry.windows(6).any(|part| part == b"canary"), "it can be read");
    let before = world.authority.swaps();
    let mut number = 100;
    for at in 0..entry.len() {
        let mut damaged = entry.clone();
        damaged[at] ^= 1;
        world.cache.plant(&key(1), damaged).await;
        number += 1;
        let seen = refused(&store, &claim(1, number)).await;
        assert_eq!(seen.stored.unwrap().write_id, write_id(11));
    }
    assert_eq!(world.authority.swaps(), before + entry.len() as u64);
    world.cache.plant(&key(2), entry).await;
    let seen = refused(&store, &claim(2, 99)).await;
    assert_eq!(seen.stored.unwrap().write_id, write_id(21));
}

#[tokio::test(start_paused = true)]
async fn authorities_that_share_a_cache_do_not_find_each_others_entries() {
    let (here, there) = (World::new(), World::new());
    let cache = here.cache.clone();
    let before = |world: &World, name: &str| {
        let options = TieredOptions::default().authority(name);
        hapax_tiered::Tiered::with(world.authority.clone(), cache.clone(), options)
    };
    finished(&before(&here, "here"), 1, "paid here").await;
    let process = before(&here, "here");
    refused(&process, &claim(1, 2)).await;
    settle().await;
    refused(&process, &claim(1, 3)).await;
    assert_eq!(process.stats().hits, 1);
    // The same key, and never seen at the other authority: it is to be executed.
    let other = before(&there, "there");
    other.load(&key(9)).await.unwrap();
    expect_stored(&other, &claim(1, 4)).await;
    assert_eq!(other.stats().hits, 0);
}

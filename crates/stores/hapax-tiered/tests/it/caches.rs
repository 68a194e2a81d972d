//! Caches that are full, slow or away.

use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax_tiered::{Cache, MemoryCache, TieredOptions};
use tokio::time::{Instant, advance};

use crate::support::{World, claim, expect_stored, finished, key, refused, settle};

#[tokio::test(start_paused = true)]
async fn a_cache_that_hangs_costs_one_timeout_per_pause() {
    let world = World::new();
    let options = TieredOptions::default().cache_timeout(Duration::from_millis(50));
    let store = world.process_with(options);
    finished(&store, 1, "yes").await;
    world.cache.hangs.store(true, Ordering::SeqCst);
    let began = Instant::now();
    for number in 0..100 {
        refused(&store, &claim(1, 100 + number)).await;
    }
    assert!(began.elapsed() <= Duration::from_millis(51), "{:?}", began.elapsed());
    world.cache.hangs.store(false, Ordering::SeqCst);
    advance(Duration::from_secs(2)).await;
    for number in 0..3 {
        refused(&store, &claim(1, 300 + number)).await;
        settle().await;
    }
    assert!(store.stats().hits > 0, "{:?}", store.stats());
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_fails_is_not_called_for_a_while() {
    let world = World::new();
    let store = world.process();
    world.cache.fails.store(true, Ordering::SeqCst);
    for of in 0..50 {
        finished(&store, of, "yes").await;
    }
    assert_eq!(world.cache.asked(), 1);
    advance(Duration::from_secs(2)).await;
    expect_stored(&store, &claim(60, 600)).await;
    assert_eq!(world.cache.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_memory_cache_is_bounded_and_removes_the_oldest_entries() {
    let cache = MemoryCache::new(1 << 20);
    let minute = Duration::from_secs(60);
    for of in 0..10_000 {
        cache.put(&key(of), vec![0; 500].into(), minute).await.unwrap();
        assert!(cache.bytes() <= 1 << 20);
    }
    assert!(cache.bytes() > 900_000);
    assert!(cache.get(&key(0)).await.unwrap().is_none());
    assert!(cache.get(&key(9_999)).await.unwrap().is_some());
    // What is too large for it is not put, and does not drive out the rest.
    cache.put(&key(1), vec![0; 1 << 20].into(), minute).await.unwrap();
    assert!(cache.get(&key(1)).await.unwrap().is_none());
    assert!(cache.bytes() > 900_000);
}

#[tokio::test(start_paused = true)]
async fn the_memory_cache_removes_entries_on_request_and_at_their_end() {
    let cache = MemoryCache::default();
    cache.put(&key(1), "one".into(), Duration::from_secs(1)).await.unwrap();
    cache.put(&key(1), "two".into(), Duration::from_secs(2)).await.unwrap();
    advance(Duration::from_millis(1_900)).await;
    assert_eq!(cache.get(&key(1)).await.unwrap().as_deref(), Some(&b"two"[..]));
    advance(Duration::from_millis(100)).await;
    assert_eq!(cache.get(&key(1)).await.unwrap(), None);
    cache.put(&key(1), "three".into(), Duration::from_secs(1)).await.unwrap();
    cache.remove(&key(1)).await.unwrap();
    assert_eq!((cache.get(&key(1)).await.unwrap(), cache.bytes()), (None, 0));
    // Puts and removals leave nothing behind.
    for _ in 0..100_000 {
        cache.put(&key(2), "x".into(), Duration::from_secs(1)).await.unwrap();
    }
    assert!(cache.bytes() < 1_000);
}

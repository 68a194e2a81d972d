//! Steps of the tests, and stores and caches that fail on command.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::{BoxFuture, Capabilities, Draft, Reaped, Snapshot, Stamp, Swap, Swapped};
use hapax_core::{
    Clock, MemoryCapacity, MemoryStore, OnUnknown, OperationId, Outcome, Record, RecordState,
    Store, StoreError, Timestamp,
};
use hapax_testkit::steps;
pub(crate) use hapax_testkit::steps::{LEASE, RETENTION, key, write_id};
use hapax_tiered::{Cache, CacheError, MemoryCache, Tiered, TieredOptions};
use tokio::time::Instant;

/// Wall-clock time that follows tokio's, which tests pause, and that can be set back.
#[derive(Debug)]
pub(crate) struct TestClock {
    began: Instant,
    back_seconds: AtomicU64,
}

impl Default for TestClock {
    fn default() -> Self {
        Self { began: Instant::now(), back_seconds: AtomicU64::new(0) }
    }
}

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        let back = self.back_seconds.load(Ordering::SeqCst) * 1_000_000;
        Timestamp::from_micros(1_790_000_000_000_000 - back).after(self.began.elapsed())
    }
}

/// A memory store that counts what reaches it, and loses replies when told to.
#[derive(Debug)]
pub(crate) struct Authority {
    store: MemoryStore,
    clock: Arc<TestClock>,
    pub(crate) swaps: AtomicU64,
    pub(crate) loses_replies: AtomicBool,
}

impl Authority {
    pub(crate) fn new() -> Arc<Self> {
        let clock = Arc::new(TestClock::default());
        let store = MemoryStore::new(Arc::clone(&clock) as _, MemoryCapacity::default());
        let (swaps, loses_replies) = (AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Self { store, clock, swaps, loses_replies })
    }

    pub(crate) fn step_back(&self, seconds: u64) {
        self.clock.back_seconds.fetch_add(seconds, Ordering::SeqCst);
    }

    pub(crate) fn swaps(&self) -> u64 {
        self.swaps.load(Ordering::SeqCst)
    }
}

impl Store for Authority {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.swaps.fetch_add(1, Ordering::SeqCst);
            let swapped = self.store.swap(swap).await;
            if self.loses_replies.load(Ordering::SeqCst) {
                return Err(StoreError::ambiguous("the reply was lost"));
            }
            swapped
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

/// A cache that keeps what it was told to forget, hangs and fails when told to, and hands out and
/// takes entries behind everybody's back.
#[derive(Debug, Default)]
pub(crate) struct Odd {
    cache: MemoryCache,
    pub(crate) asked: AtomicU64,
    pub(crate) hangs: AtomicBool,
    pub(crate) fails: AtomicBool,
    pub(crate) never_forgets: AtomicBool,
}

impl Odd {
    async fn mood(&self) -> Result<(), CacheError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        match self.fails.load(Ordering::SeqCst) {
            true => Err("it is away".into()),
            false => Ok(()),
        }
    }

    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }

    pub(crate) async fn entry(&self, key: &OperationId) -> Option<Bytes> {
        self.cache.get(key).await.unwrap()
    }

    pub(crate) async fn plant(&self, key: &OperationId, entry: impl Into<Bytes>) {
        self.cache.put(key, entry.into(), RETENTION).await.unwrap();
    }
}

impl Cache for Odd {
    fn get<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Option<Bytes>, CacheError>> {
        Box::pin(async move {
            self.mood().await?;
            self.cache.get(key).await
        })
    }

    fn put<'a>(
        &'a self,
        key: &'a OperationId,
        entry: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move {
            self.mood().await?;
            self.cache.put(key, entry, ttl).await
        })
    }

    fn remove<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move {
            self.mood().await?;
            match self.never_forgets.load(Ordering::SeqCst) {
                true => Ok(()),
                false => self.cache.remove(key).await,
            }
        })
    }
}

/// One authority, one shared cache, and any number of processes over them.
pub(crate) struct World {
    pub(crate) authority: Arc<Authority>,
    pub(crate) cache: Arc<Odd>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self { authority: Authority::new(), cache: Arc::default() }
    }

    pub(crate) fn process(&self) -> Tiered<Authority> {
        self.process_with(TieredOptions::default())
    }

    pub(crate) fn process_with(&self, options: TieredOptions) -> Tiered<Authority> {
        Tiered::with(Arc::clone(&self.authority), Arc::clone(&self.cache) as _, options)
    }
}

/// Returns the claim of key `of` under the write id and lease id `tagged`.
pub(crate) fn claim(of: u64, tagged: u64) -> Swap {
    let mut swap = steps::claim(tagged);
    swap.id = key(of);
    swap.draft.keep = None;
    swap.draft.record.terms.on_unknown = OnUnknown::Block;
    swap
}

/// Returns the swap that completes what `swap` claimed; its write id is `next`.
pub(crate) fn complete(swap: &Swap, next: u64, outcome: &str) -> Swap {
    let state = RecordState::Done(Outcome::new("test/1", outcome.to_owned()));
    follow(swap, next, state, Some(RETENTION))
}

/// Returns the swap with which an operator releases what `swap` wrote.
pub(crate) fn release(swap: &Swap, next: u64) -> Swap {
    follow(swap, next, RecordState::Released, Some(LEASE))
}

fn follow(swap: &Swap, next: u64, state: RecordState, keep: Option<Duration>) -> Swap {
    let record = Record { state, ..swap.draft.record.clone() };
    let draft = Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, keep };
    Swap { id: swap.id, expected: Some(swap.write_id), write_id: write_id(next), draft }
}

pub(crate) async fn expect_stored(store: &dyn Store, swap: &Swap) {
    let swapped = store.swap(swap.clone()).await.unwrap();
    assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");
}

pub(crate) async fn refused(store: &dyn Store, swap: &Swap) -> Snapshot {
    match store.swap(swap.clone()).await.unwrap() {
        Swapped::Conflict(seen) => seen,
        Swapped::Stored(stamped) => panic!("it was stored: {stamped:?}"),
    }
}

/// Claims and completes key `of`; returns the completion, whose write id is `of * 10 + 1`.
pub(crate) async fn finished(store: &dyn Store, of: u64, outcome: &str) -> Swap {
    let claimed = claim(of, of * 10);
    expect_stored(store, &claimed).await;
    let completed = complete(&claimed, of * 10 + 1, outcome);
    expect_stored(store, &completed).await;
    completed
}

/// Lets every task run until all of them wait.
pub(crate) async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

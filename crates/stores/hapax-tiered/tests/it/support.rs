//! What the tests write and read, and stores and caches that fail on command.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::{BoxFuture, Capabilities, Draft, Reaped, Snapshot, Stamp, Swap, Swapped};
use hapax_core::{
    Clock, Fingerprint, FingerprintScheme, LeaseId, MemoryCapacity, MemoryStore, OnUnknown,
    OperationId, Outcome, Record, RecordState, Store, StoreError, Terms, Timestamp, WriteId,
};
use hapax_tiered::{Cache, CacheError, MemoryCache, Tiered, TieredOptions};
use tokio::time::Instant;

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const RETENTION: Duration = Duration::from_secs(86_400);

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

pub(crate) fn key(of: u64) -> OperationId {
    OperationId::from_bytes(wide(of))
}

pub(crate) fn write_id(of: u64) -> WriteId {
    WriteId::from_bytes(wide(of))
}

/// A claim of key `of`, tagged `tagged`.
pub(crate) fn claim(of: u64, tagged: u64) -> Swap {
    let lease_id = LeaseId::from_bytes(wide(tagged));
    let terms = Terms { lease: LEASE, retention: RETENTION, on_unknown: OnUnknown::Block };
    let record = Record {
        scheme: FingerprintScheme::new("test/1").unwrap(),
        fingerprint: Fingerprint::from_bytes([7; 32]),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms,
        checkpoint: None,
        notes: hapax_core::Notes::default(),
        state: RecordState::InFlight,
    };
    let draft = Draft { record, stamp: Stamp::NextFence, lease: LEASE, keep: None };
    Swap { id: key(of), expected: None, write_id: write_id(tagged), draft }
}

/// What follows `swap`: its outcome is `outcome`, its tag is `next`.
pub(crate) fn complete(swap: &Swap, next: u64, outcome: &str) -> Swap {
    let state = RecordState::Done(Outcome::new("test/1", outcome.to_owned()));
    follow(swap, next, state, Some(RETENTION))
}

/// What an operator writes after `swap`.
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

/// Key `of` finished by one process, as `of * 10 + 1`; the swap that did it.
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

fn wide<const N: usize>(of: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let spread = of.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes[..8].copy_from_slice(&spread.to_be_bytes());
    bytes[8..16].copy_from_slice(&of.to_be_bytes());
    bytes
}

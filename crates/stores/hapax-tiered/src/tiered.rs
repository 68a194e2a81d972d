//! The store that reads the cache before the authority.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor,
};
use hapax_core::{Inspect, Notify, OperationId, Store, StoreError};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::cache::Cache;
use crate::clock::ClockEstimate;
use crate::entry::Entry;
use crate::key_table::{CacheAction, KeyCall, KeyTable};
use crate::options::TieredOptions;

/// Limit of concurrent puts into the cache. A record beyond it is put at its next replay.
const PUTS: usize = 64;

/// Time for which the cache is not called after a failure, so that an unavailable cache costs a
/// timeout now and then instead of one per request.
const REST: Duration = Duration::from_secs(1);

/// A store whose finished records are also in a cache, from which retries are answered.
///
/// Cheap to clone; clones share everything.
pub struct Tiered<A: ?Sized> {
    inner: Arc<Inner>,
    authority: Arc<A>,
}

struct Inner {
    cache: Arc<dyn Cache>,
    options: TieredOptions,
    keys: Arc<KeyTable>,
    guess: ClockEstimate,
    puts: Arc<Semaphore>,
    /// The cache is not called until this many milliseconds after `began`.
    paused_until: AtomicU64,
    began: Instant,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    puts: AtomicU64,
    failures: AtomicU64,
}

/// Counters of the cache's use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TieredStats {
    /// Claims that were answered from the cache.
    pub hits: u64,
    /// Claims for which the cache had no usable entry.
    pub misses: u64,
    /// Records put into the cache.
    pub puts: u64,
    /// Calls that failed or timed out.
    pub failures: u64,
}

/// Reasons for which a claim is rejected: the source within a [`StoreError`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TieredError {
    /// Too many claims are pending already to record one more.
    #[error("too many claims were sent to the authority and not answered: retry later")]
    TooManyPendingClaims,
}

impl<A: Store + ?Sized> Tiered<A> {
    /// Creates a store with the default [`TieredOptions`]: `authority` decides, `cache` answers
    /// retries.
    ///
    /// All calls of this process should pass through one value and its clones: it records which
    /// entries they contradict.
    #[must_use]
    pub fn new(authority: Arc<A>, cache: Arc<dyn Cache>) -> Self {
        Self::with(authority, cache, TieredOptions::default())
    }

    /// Creates a store with `options`.
    #[must_use]
    pub fn with(authority: Arc<A>, cache: Arc<dyn Cache>, options: TieredOptions) -> Self {
        let inner = Inner {
            cache,
            options,
            keys: Arc::new(KeyTable::new()),
            guess: ClockEstimate::default(),
            puts: Arc::new(Semaphore::new(PUTS)),
            paused_until: AtomicU64::new(0),
            began: Instant::now(),
            counters: Counters::default(),
        };
        Self { inner: Arc::new(inner), authority }
    }

    /// The store that decides.
    #[must_use]
    pub const fn authority(&self) -> &Arc<A> {
        &self.authority
    }

    /// Returns the counters of the cache's use.
    #[must_use]
    pub fn stats(&self) -> TieredStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { hits, misses, puts, failures } = &self.inner.counters;
        TieredStats {
            hits: count(hits),
            misses: count(misses),
            puts: count(puts),
            failures: count(failures),
        }
    }

    async fn swap_cell(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let inner = &self.inner;
        let (key, write_id, is_claim) = (swap.id, swap.write_id, swap.expected.is_none());
        let call = inner.keys.enter(key);
        if is_claim {
            if let Some(seen) = inner.recall(&call, &swap).await {
                return Ok(Swapped::Conflict(seen));
            }
            if !call.may_send(write_id) {
                return Err(StoreError::unavailable(TieredError::TooManyPendingClaims));
            }
        }
        let called = Instant::now();
        let doubt = PendingClaim { call: &call, write_id, open: is_claim };
        let swapped = self.authority.swap(swap).await;
        match &swapped {
            Ok(Swapped::Stored(stamped)) => {
                inner.guess.answered(called, stamped.now);
                inner.clean(&call, call.note()).await;
            }
            Ok(Swapped::Conflict(seen)) => inner.saw(&call, called, key, seen).await,
            // A write that was applied nevertheless is noted by the call that sees it, or by the
            // one that is answered with it.
            Err(_) => {}
        }
        // This must come last: a future that is dropped before counts the claim as pending.
        doubt.answered(&swapped);
        swapped
    }

    async fn load_cell(&self, key: &OperationId) -> Result<Snapshot, StoreError> {
        let call = self.inner.keys.enter(*key);
        let called = Instant::now();
        let seen = self.authority.load(key).await?;
        self.inner.saw(&call, called, *key, &seen).await;
        Ok(seen)
    }
}

impl Inner {
    /// Returns an entry of the cache that may answer a claim. Correctness:
    ///
    /// - A finished record does not change until its retention ends, unless an operator releases
    ///   it. So until a release, the authority would answer the same conflict.
    /// - An entry is used for at most a quarter of the retention that was left when it was seen,
    ///   measured by the authority's own clock, whose estimate is never early.
    /// - The answer is always *done*, and only for a claim of the same scheme and fingerprint, so
    ///   that only a replay can follow. Every claim or change of a key is a swap of the authority.
    /// - The answer is never given to a repetition of a claim that was sent to the authority
    ///   before: that claim may have been stored, and then the owner must get that answer.
    async fn recall(&self, call: &KeyCall, claim: &Swap) -> Option<Snapshot> {
        if !call.may_read_cache() || self.rests() {
            return None;
        }
        // Without an answer of the authority the age of an entry is unknown.
        self.guess.now()?;
        let name = self.options.name(&claim.id);
        let found = self.ask(self.cache.get(&name)).await;
        let seen = found.flatten().and_then(|bytes| self.accept(call, claim, &bytes));
        let counter = if seen.is_some() { &self.counters.hits } else { &self.counters.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        seen
    }

    /// Returns the content of an entry if it may answer `claim` now.
    fn accept(&self, call: &KeyCall, claim: &Swap, bytes: &[u8]) -> Option<Snapshot> {
        let entry = Entry::decode(&claim.id, bytes, &self.options.sealer)?;
        let (asked, kept) = (&claim.draft.record, &entry.stored.record);
        let same = (&asked.scheme, &asked.fingerprint) == (&kept.scheme, &kept.fingerprint);
        let now = self.guess.now()?;
        if entry.seen > now.latest {
            // The authority's clock was set back since, so the age is unknown.
            return None;
        }
        let age = now.latest.since(entry.seen);
        let left = entry.ttl(self.options.longest).checked_sub(age)?;
        // Every process takes the entry for expired at this time, whichever end of the range is
        // right.
        let until = Instant::now() + left + now.latest.since(now.earliest);
        if !same || left.is_zero() || !call.may_answer(entry.stored.write_id, until) {
            return None;
        }
        // A time from an answer of the authority: an estimate might be later than its next answer.
        Some(Snapshot { now: now.said.max(entry.seen), stored: Some(entry.stored) })
    }

    /// Records the result of a call that began at `called` and read the record at the authority.
    async fn saw(&self, call: &KeyCall, called: Instant, key: OperationId, seen: &Snapshot) {
        self.guess.answered(called, seen.now);
        let entry = seen.stored.as_ref().and_then(|stored| Entry::new(seen.now, stored));
        let ttl = entry.as_ref().map_or(Duration::ZERO, |entry| entry.ttl(self.options.longest));
        let Some(entry) = entry.filter(|_| !ttl.is_zero()) else {
            return self.clean(call, call.note()).await;
        };
        // The entry was seen before now, so this is not early.
        let until = Instant::now() + ttl;
        match call.saw_finished(entry.stored.write_id, until) {
            CacheAction::Put => {
                let left = (called + ttl).saturating_duration_since(Instant::now());
                self.put(key, &entry, left, until);
            }
            CacheAction::Remove => self.clean(call, true).await,
            CacheAction::Leave => {}
        }
    }

    /// Puts an entry in a separate task, so that the answer does not wait for the put.
    fn put(&self, key: OperationId, entry: &Entry, left: Duration, until: Instant) {
        // A separate call, so that the row is retained until the put has ended.
        let mut putting = Putting { call: self.keys.enter(key), until, unsure: false };
        let Ok(permit) = Arc::clone(&self.puts).try_acquire_owned() else { return };
        if self.rests() || left.is_zero() {
            return;
        }
        let Ok(bytes) = entry.encode(&key, &self.options.sealer, &*self.options.entropy) else {
            return;
        };
        self.counters.puts.fetch_add(1, Ordering::Relaxed);
        let (cache, cache_timeout) = (Arc::clone(&self.cache), self.options.cache_timeout);
        let name = self.options.name(&key);
        tokio::spawn(async move {
            putting.unsure = true;
            let put = timeout(cache_timeout, cache.put(&name, bytes, left)).await;
            putting.unsure = !matches!(put, Ok(Ok(())));
            drop((putting, permit));
        });
    }

    /// Removes an entry that a call contradicted. This process would not use it anyway.
    async fn clean(&self, call: &KeyCall, remove: bool) {
        if remove && !self.rests() {
            self.ask(self.cache.remove(&self.options.name(call.key()))).await;
        }
    }

    /// Awaits a call of the cache. After a failure the cache is not called for a while.
    async fn ask<T>(&self, asked: impl Future<Output = Result<T, crate::CacheError>>) -> Option<T> {
        match timeout(self.options.cache_timeout, asked).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => tracing::debug!(%error, "the cache failed"),
            Err(_) => tracing::debug!("the cache did not answer in time"),
        }
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        let until = (self.began.elapsed() + REST).as_millis();
        self.paused_until.store(u64::try_from(until).unwrap_or(u64::MAX), Ordering::Relaxed);
        None
    }

    fn rests(&self) -> bool {
        self.began.elapsed().as_millis() < u128::from(self.paused_until.load(Ordering::Relaxed))
    }
}

/// A claim on its way to the authority. It counts as pending if it is dropped without an answer.
struct PendingClaim<'a> {
    call: &'a KeyCall,
    write_id: hapax_core::WriteId,
    open: bool,
}

impl PendingClaim<'_> {
    fn answered(mut self, swapped: &Result<Swapped, StoreError>) {
        let open = std::mem::take(&mut self.open);
        match swapped {
            Ok(_) if open => self.call.settle(self.write_id),
            Err(StoreError::Ambiguous(_)) if open => self.call.mark_pending(self.write_id),
            // This repetition did nothing. An earlier one stays pending if it was.
            _ => {}
        }
    }
}

impl Drop for PendingClaim<'_> {
    fn drop(&mut self) {
        if self.open {
            self.call.mark_pending(self.write_id);
        }
    }
}

/// A put in progress. If it may still arrive late, unnoticed, the key is avoided.
struct Putting {
    call: KeyCall,
    until: Instant,
    unsure: bool,
}

impl Drop for Putting {
    fn drop(&mut self) {
        if self.unsure {
            self.call.avoid(self.until);
        }
        self.call.put_ended();
    }
}

// Every method is passed on: a default method would bypass the authority unnoticed.
#[deny(clippy::missing_trait_methods)]
impl<A: Store + ?Sized> Store for Tiered<A> {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(self.swap_cell(swap))
    }

    /// Loads from the authority: a load must return the current state.
    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(self.load_cell(key))
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.authority.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.authority.capabilities()
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Inspect + ?Sized> Inspect for Tiered<A> {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.authority.page(after, limit)
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.authority.scan(from, limit, visit)
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.authority.scan_all(from, limit, since, visit)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Notify + ?Sized> Notify for Tiered<A> {
    fn written<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, ()> {
        self.authority.written(key)
    }
}

impl<A: ?Sized> Clone for Tiered<A> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), authority: Arc::clone(&self.authority) }
    }
}

impl<A: fmt::Debug + ?Sized> fmt::Debug for Tiered<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiered")
            .field("authority", &self.authority)
            .field("cache", &self.inner.cache)
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

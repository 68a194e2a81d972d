use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor,
};
use hapax_core::{Inspect, OperationId, Store, StoreError, Timestamp};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::SeededEntropy;

/// Rates of each fault, per mille of the calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultyRates {
    /// [`StoreError::Unavailable`]: nothing happens.
    pub unavailable: u32,
    /// [`StoreError::Ambiguous`] for a write that never happens.
    pub ambiguous_lost: u32,
    /// [`StoreError::Ambiguous`] for a write that happened.
    pub ambiguous_applied: u32,
    /// [`StoreError::Ambiguous`] for a write that happens some time after.
    pub ambiguous_late: u32,
    /// The reply is delayed.
    pub delay: u32,
    /// Maximum delay.
    pub delay_at_most: Duration,
}

/// Counts of what a [`FaultyStore`] did so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultyCounts {
    /// Calls rejected as unavailable.
    pub unavailable: u64,
    /// Writes lost.
    pub lost: u64,
    /// Writes whose reply was lost.
    pub applied: u64,
    /// Writes that happened after their caller's call had returned.
    pub late: u64,
    /// Replies delayed.
    pub delays: u64,
}

/// A store that injects faults by a seed, also into its schedule.
#[derive(Debug)]
pub struct FaultyStore<S> {
    inner: Arc<S>,
    dice: SeededEntropy,
    rates: Mutex<FaultyRates>,
    down: AtomicBool,
    counts: [AtomicU64; 5],
    /// Number of writes that are yet to happen.
    pending: watch::Sender<usize>,
}

#[derive(Clone, Copy)]
enum Count {
    Unavailable,
    Lost,
    Applied,
    Late,
    Delay,
}

/// The error of an injected fault of a [`FaultyStore`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this store fails on purpose")]
pub struct InjectedFault;

impl<S: Store> FaultyStore<S> {
    /// Wraps `inner`, without faults until [`FaultyStore::set`].
    #[must_use]
    pub fn new(inner: Arc<S>, seed: u64) -> Self {
        Self {
            inner,
            dice: SeededEntropy::new(seed),
            rates: Mutex::default(),
            down: AtomicBool::new(false),
            counts: Default::default(),
            pending: watch::Sender::new(0),
        }
    }

    /// Sets the rates of faults from now on.
    pub fn set(&self, rates: FaultyRates) {
        *self.rates.lock().unwrap_or_else(PoisonError::into_inner) = rates;
    }

    /// Sets whether every call from now on is [`StoreError::Unavailable`].
    pub fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// Resolves when every late write has happened.
    pub async fn settled(&self) {
        // The sender is `self`: it outlives the wait.
        let _ = self.pending.subscribe().wait_for(|pending| *pending == 0).await;
    }

    /// Returns the inner store.
    #[must_use]
    pub const fn inner(&self) -> &Arc<S> {
        &self.inner
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> FaultyCounts {
        let [unavailable, lost, applied, late, delays] =
            self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        FaultyCounts { unavailable, lost, applied, late, delays }
    }

    fn rates(&self) -> FaultyRates {
        *self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hit(&self, per_mille: u32, count: Count) -> bool {
        let hit = per_mille > 0 && self.dice.below(1_000) < u64::from(per_mille);
        if hit {
            self.counts[count as usize].fetch_add(1, Ordering::Relaxed);
        }
        hit
    }

    fn pause(&self, rates: &FaultyRates) -> Duration {
        let most = u64::try_from(rates.delay_at_most.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.dice.below(most.max(1)))
    }

    /// Runs before every call: rejects it or delays it.
    async fn enter(&self, rates: &FaultyRates) -> Result<(), StoreError> {
        let unavailable = if self.down.load(Ordering::SeqCst) { 1_000 } else { rates.unavailable };
        if self.hit(unavailable, Count::Unavailable) {
            return Err(StoreError::unavailable(InjectedFault));
        }
        if self.hit(rates.delay, Count::Delay) {
            sleep(self.pause(rates)).await;
        }
        Ok(())
    }

    /// Makes a call that writes, or fails. `call` may be made after the return.
    async fn write<T: Send + 'static>(
        &self,
        call: impl FnOnce(Arc<S>) -> BoxFuture<'static, Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let rates = self.rates();
        self.enter(&rates).await?;
        if self.hit(rates.ambiguous_lost, Count::Lost) {
            return Err(StoreError::ambiguous(InjectedFault));
        }
        let inner = Arc::clone(&self.inner);
        if self.hit(rates.ambiguous_late, Count::Late) {
            let (pause, pending) = (self.pause(&rates), self.pending.clone());
            pending.send_modify(|pending| *pending += 1);
            tokio::spawn(async move {
                sleep(pause).await;
                // The result is dropped: the caller has already got `Ambiguous`.
                let _ = call(inner).await;
                pending.send_modify(|pending| *pending -= 1);
            });
            return Err(StoreError::ambiguous(InjectedFault));
        }
        let written = call(inner).await;
        if written.is_ok() && self.hit(rates.ambiguous_applied, Count::Applied) {
            return Err(StoreError::ambiguous(InjectedFault));
        }
        written
    }
}

/// Returns the schedule of a store.
fn schedule<S: Store>(store: &S) -> Result<&dyn Schedule, StoreError> {
    let none = || StoreError::unavailable("the store within has no schedule");
    store.capabilities().schedule.ok_or_else(none)
}

/// A store without the notifications of the store within, so that waiters poll.
#[derive(Debug)]
pub struct Polling<S>(pub S);

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for Polling<S> {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.0.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.0.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.0.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { notify: None, ..self.0.capabilities() }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for FaultyStore<S> {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(self.write(|inner| Box::pin(async move { inner.swap(swap).await })))
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            self.inner.load(key).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            self.inner.reap(limit).await
        })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let inner = self.inner.capabilities();
        Capabilities { schedule: inner.schedule.map(|_| self as &dyn Schedule), ..inner }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Inspect> Inspect for FaultyStore<S> {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            self.inner.page(after, limit).await
        })
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            self.inner.scan(from, limit, visit).await
        })
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            self.inner.scan_all(from, limit, since, visit).await
        })
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Schedule for FaultyStore<S> {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(
            self.write(|inner| Box::pin(async move { schedule(&*inner)?.insert(entry).await })),
        )
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            schedule(&*self.inner)?.due(queues, limit).await
        })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.write(move |inner| {
            Box::pin(async move { schedule(&*inner)?.postpone(key, expected, due_in).await })
        }))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(
            self.write(move |inner| Box::pin(async move { schedule(&*inner)?.remove(key).await })),
        )
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            schedule(&*self.inner)?.entries(after, limit).await
        })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(async move {
            self.enter(&self.rates()).await?;
            schedule(&*self.inner)?.queues().await
        })
    }
}

//! Counts and times of a store's calls.

use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor,
};
use hapax_core::{Inspect, OperationId, Store, StoreError};
use tokio::time::Instant;

use crate::metrics::{Histogram, head, micros};

/// Upper bounds of the duration of a call, in microseconds.
const TOOK_US: [u64; 12] =
    [250, 500, 1_000, 2_000, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 1_000_000, 2_000_000];

/// Results of a call.
const ENDINGS: [&str; 6] = ["stored", "conflict", "unavailable", "ambiguous", "corrupt", "silent"];
const SILENT: usize = 5;

/// Counters of a store's calls.
#[derive(Debug, Default)]
pub(crate) struct StoreCalls {
    swaps: [AtomicU64; ENDINGS.len()],
    loads: [AtomicU64; ENDINGS.len()],
    swap_took: Histogram<{ TOOK_US.len() }>,
    load_took: Histogram<{ TOOK_US.len() }>,
    /// Whether the last swap got no definite result.
    rejected: AtomicBool,
}

impl StoreCalls {
    /// Returns whether the last swap had a definite result, or there was none. A store without free
    /// memory or disk may answer loads and accept no swaps.
    pub(crate) fn are_written(&self) -> bool {
        !self.rejected.load(Relaxed)
    }

    pub(crate) fn write(&self, out: &mut String) -> fmt::Result {
        for (name, help, counts) in [
            (
                "hapax_store_swaps_total",
                "Swaps by result; one without a definite result is sent again.",
                &self.swaps,
            ),
            ("hapax_store_loads_total", "Loads by result.", &self.loads),
        ] {
            head(out, name, "counter", help)?;
            for (ending, count) in ENDINGS.iter().zip(counts) {
                let count = count.load(Relaxed);
                fmt::Write::write_fmt(
                    out,
                    format_args!("{name}{{answer=\"{ending}\"}} {count}\n"),
                )?;
            }
        }
        for (name, help, took) in [
            ("hapax_store_swap_seconds", "How long answered swaps take.", &self.swap_took),
            ("hapax_store_load_seconds", "How long answered loads take.", &self.load_took),
        ] {
            head(out, name, "histogram", help)?;
            took.write(out, name, "", &TOOK_US, 1_000_000)?;
        }
        Ok(())
    }
}

/// A store whose calls are counted.
#[derive(Debug)]
pub(crate) struct MeasuredStore {
    store: Arc<dyn Inspect>,
    calls: Arc<StoreCalls>,
    timeout: Duration,
}

impl MeasuredStore {
    /// Counts calls of `store` in `calls`; a result is expected within `timeout`.
    pub(crate) const fn new(
        store: Arc<dyn Inspect>,
        calls: Arc<StoreCalls>,
        timeout: Duration,
    ) -> Self {
        Self { store, calls, timeout }
    }
}

/// Counter of one call: it counts the result, or its absence if it is dropped late. A call that is
/// dropped early is not counted: its caller got the result elsewhere, or has ended.
struct Timed<'a> {
    counts: &'a [AtomicU64; ENDINGS.len()],
    took: &'a Histogram<{ TOOK_US.len() }>,
    rejected: Option<&'a AtomicBool>,
    begun: Instant,
    timeout: Duration,
    answered: bool,
}

impl Timed<'_> {
    async fn count<T>(
        mut self,
        call: impl Future<Output = Result<T, StoreError>>,
        ending: impl FnOnce(&T) -> usize,
    ) -> Result<T, StoreError> {
        let answer = call.await;
        let ending = match &answer {
            Ok(answer) => ending(answer),
            Err(StoreError::Unavailable(_)) => 2,
            Err(StoreError::Ambiguous(_)) => 3,
            Err(StoreError::Corrupt(_)) => 4,
        };
        self.answered = true;
        self.ended(ending);
        if answer.is_ok() {
            self.took.observe(&TOOK_US, micros(self.begun.elapsed()));
        }
        answer
    }

    fn ended(&self, ending: usize) {
        self.counts[ending].fetch_add(1, Relaxed);
        if let Some(rejected) = self.rejected {
            rejected.store([2, 3, SILENT].contains(&ending), Relaxed);
        }
    }
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        if !self.answered && self.begun.elapsed() >= self.timeout / 2 {
            self.ended(SILENT);
        }
    }
}

impl MeasuredStore {
    fn timed<'a>(
        &self,
        counts: &'a [AtomicU64; ENDINGS.len()],
        took: &'a Histogram<{ TOOK_US.len() }>,
        rejected: Option<&'a AtomicBool>,
    ) -> Timed<'a> {
        let (begun, timeout) = (Instant::now(), self.timeout);
        Timed { counts, took, rejected, begun, timeout, answered: false }
    }
}

// Dropping any of these futures drops the inner store's future, which defines the effect.
impl Store for MeasuredStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        let StoreCalls { swaps, swap_took, rejected, .. } = &*self.calls;
        let timed = self.timed(swaps, swap_took, Some(rejected));
        Box::pin(timed.count(self.store.swap(swap), |swapped| match swapped {
            Swapped::Stored(_) => 0,
            Swapped::Conflict(_) => 1,
        }))
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        let timed = self.timed(&self.calls.loads, &self.calls.load_took, None);
        Box::pin(timed.count(self.store.load(key), |_| 0))
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for MeasuredStore {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.page(after, limit)
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.store.scan(from, limit, visit)
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.store.scan_all(from, limit, since, visit)
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::{MemoryStore, OperationId};
    use tokio::time::timeout;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    /// A store that never answers.
    #[derive(Debug)]
    struct Silent;

    impl Store for Silent {
        fn swap(&self, _: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
            Box::pin(std::future::pending())
        }

        fn load<'a>(&'a self, _: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
            Box::pin(std::future::pending())
        }

        fn reap(&self, _: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
            Box::pin(std::future::pending())
        }

        fn capabilities(&self) -> Capabilities<'_> {
            Capabilities::default()
        }
    }

    impl Inspect for Silent {
        fn page(
            &self,
            _: Option<OperationId>,
            _: NonZeroU32,
        ) -> BoxFuture<'_, Result<Page, StoreError>> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_with_and_without_an_answer_are_counted() {
        let calls = Arc::new(StoreCalls::default());
        let key = OperationId::from_bytes([1; 32]);
        let well =
            MeasuredStore::new(Arc::new(MemoryStore::default()), Arc::clone(&calls), TIMEOUT);
        well.load(&key).await.unwrap();
        let silent = MeasuredStore::new(Arc::new(Silent), Arc::clone(&calls), TIMEOUT);
        // Dropped early, and dropped after the timeout.
        for waited in [TIMEOUT / 10, TIMEOUT] {
            assert!(timeout(waited, silent.load(&key)).await.is_err());
        }
        let mut text = String::new();
        calls.write(&mut text).unwrap();
        for line in [
            "hapax_store_loads_total{answer=\"stored\"} 1",
            "hapax_store_loads_total{answer=\"silent\"} 1",
            "hapax_store_load_seconds_count 1",
            "hapax_store_swaps_total{answer=\"conflict\"} 0",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }
}

//! The rules of every store, checked for a store that wraps another one.
//!
//!     cargo run -p hapax-testkit --example own_store
//!
//! In a crate of a store, `store_suite!` makes a test of each rule.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{MemoryCapacity, MemoryStore, OperationId, Store, StoreError};
use hapax_testkit::ManualClock;
use hapax_testkit::suite::{StoreFixture, store_rules};

/// A store that counts its swaps.
#[derive(Debug)]
struct Counted {
    inner: MemoryStore,
    swaps: AtomicU64,
}

impl Store for Counted {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.swaps.fetch_add(1, Ordering::Relaxed);
        self.inner.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.inner.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.inner.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.inner.capabilities()
    }
}

#[derive(Default)]
struct Fixture(Arc<ManualClock>);

impl StoreFixture for Fixture {
    type Store = Counted;
    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<Counted> {
        let inner = MemoryStore::new(self.0.clone(), MemoryCapacity::default());
        Arc::new(Counted { inner, swaps: AtomicU64::new(0) })
    }

    async fn pass(&self, _: &Counted, by: Duration) {
        self.0.advance(by);
    }
}

#[tokio::main]
async fn main() {
    store_rules(&Fixture::default()).await;
    println!("every rule holds");
}

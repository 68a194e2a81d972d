//! Steps of the tests.

use hapax_core::Store;
use hapax_core::store::{Snapshot, Stamped, StoredRecord, Swap, Swapped};

pub(crate) use hapax_testkit::steps::{LEASE, RETENTION, claim, complete, key, load, write_id};

/// Swaps once: no network is between the test and a file.
pub(crate) async fn expect_stored(store: &dyn Store, swap: &Swap) -> Stamped {
    match store.swap(swap.clone()).await.unwrap() {
        Swapped::Stored(stamped) => stamped,
        Swapped::Conflict(seen) => panic!("a conflict: {seen:?}"),
    }
}

pub(crate) async fn seen(store: &dyn Store, of: u64) -> (Snapshot, StoredRecord) {
    let seen = store.load(&key(of)).await.unwrap();
    let stored = seen.stored.clone().unwrap();
    (seen, stored)
}

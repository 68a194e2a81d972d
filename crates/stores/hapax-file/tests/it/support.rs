//! Steps of the tests.

use hapax_core::Store;
use hapax_core::store::{Snapshot, StoredRecord};

pub(crate) use hapax_testkit::steps::{
    LEASE, RETENTION, claim, complete, expect_stored, key, load, write_id,
};

pub(crate) async fn seen(store: &dyn Store, of: u64) -> (Snapshot, StoredRecord) {
    let seen = store.load(&key(of)).await.unwrap();
    let stored = seen.stored.clone().unwrap();
    (seen, stored)
}

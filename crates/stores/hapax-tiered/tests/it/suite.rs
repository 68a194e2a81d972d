//! The rules of every store, through the cache.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule};
use hapax_core::{
    Clock, EntryId, MemoryCapacity, MemoryStore, OperationId, Secret, Store, Timestamp,
};
use hapax_file::{FileOptions, FileStore, SecretSource};
use hapax_testkit::ManualClock;
use hapax_testkit::suite::{ClockFixture, StoreFixture};
use hapax_tiered::{MemoryCache, Tiered};

mod memory {
    use super::*;

    #[derive(Default)]
    struct Memory(Arc<ManualClock>);

    impl StoreFixture for Memory {
        type Store = Tiered<MemoryStore>;

        const REAPS_AUTOMATICALLY: bool = false;

        async fn open(&self) -> Arc<Self::Store> {
            let store = MemoryStore::new(self.0.clone(), MemoryCapacity::default());
            let cache = Arc::new(MemoryCache::default());
            let options = hapax_tiered::TieredOptions::default().secret(&Secret::new([1; 32]));
            Arc::new(Tiered::with(Arc::new(store), cache, options))
        }

        async fn pass(&self, _: &Self::Store, by: Duration) {
            self.0.advance(by);
        }
    }

    impl ClockFixture for Memory {
        async fn step_back(&self, _: &Self::Store, by: Duration) {
            let now = self.0.now().as_micros() - by.as_micros() as u64;
            self.0.set(Timestamp::from_micros(now));
        }
    }

    hapax_testkit::store_suite!(Memory::default());
    hapax_testkit::inspect_suite!(Memory::default());
    hapax_testkit::clock_suite!(Memory::default());
}

mod file {
    use super::*;

    struct Files {
        folder: tempfile::TempDir,
        clock: Arc<ManualClock>,
    }

    impl Files {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().unwrap(), clock: Arc::default() }
        }
    }

    impl StoreFixture for Files {
        type Store = Tiered<FileStore>;

        const REAPS_AUTOMATICALLY: bool = false;

        async fn open(&self) -> Arc<Self::Store> {
            let options = FileOptions::new(self.folder.path().join("hapax.db"))
                .clock(self.clock.clone())
                .secret(SecretSource::None);
            let store = Arc::new(FileStore::open(options).unwrap());
            Arc::new(Tiered::new(store, Arc::new(MemoryCache::default())))
        }

        async fn pass(&self, _: &Self::Store, by: Duration) {
            self.clock.advance(by);
        }
    }

    hapax_testkit::store_suite!(Files::new());
    hapax_testkit::inspect_suite!(Files::new());
}

#[tokio::test]
async fn the_schedule_is_that_of_the_authority() {
    let authority = Arc::new(MemoryStore::default());
    let store = Tiered::new(Arc::clone(&authority), Arc::new(MemoryCache::default()));
    let schedule = store.capabilities().schedule.unwrap();
    let key =
        EntryKey { operation: OperationId::from_bytes([1; 32]), id: EntryId::from_bytes([2; 16]) };
    let queue = QueueName::new("transfer/1").unwrap();
    let entry = NewEntry { key, queue, due_in: Duration::ZERO, note: Bytes::from("note") };
    schedule.insert(entry).await.unwrap();
    let found = authority.entries(None, NonZeroU32::MIN).await.unwrap().entries;
    assert!(matches!(&found[..], [(found, Ok(_))] if *found == key), "{found:?}");
    authority.remove(key).await.unwrap();
    assert_eq!(schedule.queues().await.unwrap(), []);
}

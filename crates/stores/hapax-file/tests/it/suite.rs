//! The rules of every store, on a file.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, Timestamp};
use hapax_file::{FileOptions, FileStore};
use hapax_testkit::ManualClock;
use hapax_testkit::schedule::ReopenFixture;
use hapax_testkit::suite::{ClockFixture, StoreFixture};

/// Files in a directory of their own, gone with the fixture.
struct Files {
    directory: tempfile::TempDir,
    clock: Arc<ManualClock>,
}

impl Files {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), clock: Arc::default() }
    }
}

impl StoreFixture for Files {
    type Store = FileStore;

    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<FileStore> {
        let path = self.directory.path().join("hapax.db");
        let options = FileOptions::new(path).clock(self.clock.clone());
        Arc::new(FileStore::open(options).unwrap())
    }

    async fn pass(&self, _: &FileStore, by: Duration) {
        self.clock.advance(by);
    }
}

impl ClockFixture for Files {
    async fn step_back(&self, _: &FileStore, by: Duration) {
        self.clock
            .set(Timestamp::from_micros(self.clock.now().as_micros() - by.as_micros() as u64));
    }
}

impl ReopenFixture for Files {
    async fn reopen(&self, store: &FileStore) -> Arc<FileStore> {
        store.close().await;
        self.open().await
    }
}

hapax_testkit::store_suite!(Files::new());
hapax_testkit::inspect_suite!(Files::new());
hapax_testkit::clock_suite!(Files::new());
hapax_testkit::schedule_suite!(Files::new());
hapax_testkit::durable_schedule_suite!(Files::new());

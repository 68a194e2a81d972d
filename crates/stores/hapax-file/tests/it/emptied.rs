//! A new file beside an old secret.

use std::sync::Arc;

use hapax_file::{FileOptions, FileStore};
use hapax_testkit::suite::{EmptiedFixture, emptied_rules};

struct Emptied(tempfile::TempDir);

impl EmptiedFixture for Emptied {
    type Store = FileStore;

    const SHARED: bool = false;

    async fn open(&self, known: Option<String>) -> Arc<FileStore> {
        let store = FileStore::open(FileOptions::new(self.0.path().join("hapax.db"))).unwrap();
        if let Some(known) = known {
            store.expect(&known);
        }
        Arc::new(store)
    }

    fn known(&self, store: &FileStore) -> Option<String> {
        Some(store.identity())
    }

    fn is_replaced(&self, store: &FileStore) -> bool {
        store.is_replaced()
    }

    async fn empty(&self, round: u32) {
        let path = self.0.path().join("hapax.db");
        match round % 2 {
            0 => std::fs::remove_file(path).unwrap(),
            _ => std::fs::rename(&path, path.with_extension("old")).unwrap(),
        }
    }

    async fn confirm(&self, store: &FileStore) {
        store.confirm();
    }

    async fn close(&self, store: &FileStore) {
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn emptied_files_execute_nothing_again_before_an_operator_confirms() {
    emptied_rules(&Emptied(tempfile::tempdir().unwrap())).await;
}

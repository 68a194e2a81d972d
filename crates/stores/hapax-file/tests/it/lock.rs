//! The lock beside the database.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_file::{FileOptions, FileStore, OpenError};

/// Whoever looks who has the file must not be taken for somebody who has it.
#[tokio::test]
async fn a_check_of_the_lock_does_not_prevent_an_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hapax.db");
    FileStore::open(FileOptions::new(&path)).unwrap().close().await;
    let stop = Arc::new(AtomicBool::new(false));
    let lookers: Vec<_> = (0..2)
        .map(|_| {
            let (stop, path) = (Arc::clone(&stop), path.clone());
            std::thread::spawn(move || {
                let mut looks = 0;
                while !stop.load(Ordering::Relaxed) {
                    FileStore::lock_owner(&path).unwrap();
                    looks += 1;
                }
                looks
            })
        })
        .collect();
    for _ in 0..50 {
        let store = FileStore::open(FileOptions::new(&path)).unwrap();
        // Who has it is in the way, looked at or not.
        let second = FileStore::open(FileOptions::new(&path)).unwrap_err();
        assert!(matches!(second, OpenError::InUse { .. }), "{second}");
        store.close().await;
    }
    stop.store(true, Ordering::Relaxed);
    for looker in lookers {
        assert!(looker.join().unwrap() > 50);
    }
}

//! Backups of a file in use, and what is restored of them.

use std::path::Path;
use std::time::Duration;

use hapax_core::schedule::Schedule;
use hapax_core::{OnUnknown, RecordState};
use hapax_file::{FileOptions, FileStore, OpenError, SecretSource, restore};

use crate::support::{claim, complete, due, entries, entry, expect_stored, load};

fn secret_of(path: &Path) -> SecretSource {
    let mut name = path.as_os_str().to_owned();
    name.push(".secret");
    SecretSource::File(name.into())
}

#[tokio::test]
async fn a_restored_backup_has_finished_records_and_makes_those_in_flight_unknown() {
    let directory = tempfile::tempdir().unwrap();
    let (path, backup) = (directory.path().join("hapax.db"), directory.path().join("backup.db"));
    let store = FileStore::open(FileOptions::new(&path)).unwrap();
    let (done, mut in_progress) = (claim(1), claim(2));
    in_progress.draft.record.terms.on_unknown = OnUnknown::Block;
    in_progress.draft.keep = None;
    expect_stored(&store, &done).await;
    expect_stored(&store, &complete(&done, 1001, b"answer")).await;
    expect_stored(&store, &in_progress).await;
    store.insert(entry(2, Duration::ZERO)).await.unwrap();
    let scheduled = entries(&store).await;
    assert_eq!(store.backup(&backup).await.unwrap(), 2);
    let again = store.backup(&backup).await;
    assert!(matches!(again, Err(OpenError::Io { .. })), "no file is overwritten: {again:?}");
    // The store goes on, and what comes now is not in the backup.
    expect_stored(&store, &claim(3)).await;
    store.remove(entry(2, Duration::ZERO).key).await.unwrap();
    store.insert(entry(3, Duration::ZERO)).await.unwrap();
    let later = entries(&store).await;
    expect_stored(&store, &complete(&in_progress, 1002, b"late")).await;
    let fence = load(&store, 2).await.unwrap().fence;
    let identity = store.identity();
    store.close().await;
    let closed = directory.path().join("closed.db");
    assert_eq!(hapax_file::backup_closed(&path, &closed).unwrap(), 3);
    let options = FileOptions::new(&closed).secret(secret_of(&path)).verify(true);
    let store = FileStore::open(options).unwrap();
    assert_eq!((entries(&store).await, due(&store).await), (later.clone(), later));
    store.close().await;

    let restored = directory.path().join("restored.db");
    let counts = restore(&backup, &restored, &secret_of(&path)).unwrap();
    assert_eq!((counts.records, counts.unknown), (2, 1));
    let options = FileOptions::new(&restored).secret(secret_of(&path)).verify(true);
    let store = FileStore::open(options).unwrap();
    assert_eq!(store.identity(), identity);
    let RecordState::Done(outcome) = load(&store, 1).await.unwrap().record.state else { panic!() };
    assert_eq!(outcome.bytes(), "answer");
    let stored = load(&store, 2).await.unwrap();
    assert!(
        matches!(stored.record.state, RecordState::Unknown { seen: None, reconciling: false }),
        "{stored:?}"
    );
    assert_eq!((stored.fence, stored.keep_until), (fence, None));
    assert!(load(&store, 3).await.is_none(), "what came after the backup is forgotten");
    assert_eq!((entries(&store).await, due(&store).await), (scheduled.clone(), scheduled));
    store.close().await;
}

#[tokio::test]
async fn a_backup_is_restored_with_its_own_secret_only_and_over_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, backup) = (directory.path().join("hapax.db"), directory.path().join("backup.db"));
    let store = FileStore::open(FileOptions::new(&path)).unwrap();
    expect_stored(&store, &claim(1)).await;
    store.backup(&backup).await.unwrap();
    let in_use = restore(&path, &directory.path().join("x.db"), &secret_of(&path));
    assert!(matches!(in_use, Err(OpenError::InUse { .. })), "{in_use:?}");
    store.close().await;
    assert!(store.backup(&directory.path().join("late.db")).await.is_err());
    let other = directory.path().join("other.db");
    FileStore::open(FileOptions::new(&other)).unwrap().close().await;
    let to = directory.path().join("restored.db");
    let wrong = restore(&backup, &to, &secret_of(&other));
    assert!(matches!(wrong, Err(OpenError::OtherSecret)), "{wrong:?}");
    let missing = restore(&backup, &to, &secret_of(&to));
    assert!(matches!(missing, Err(OpenError::SecretMissing { .. })), "{missing:?}");
    assert!(!to.exists());
    let taken = restore(&backup, &other, &secret_of(&path));
    assert!(matches!(taken, Err(OpenError::Io { .. })), "{taken:?}");
}

#[tokio::test]
async fn a_backup_that_fails_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, backup) = (directory.path().join("hapax.db"), directory.path().join("backup.db"));
    let store = FileStore::open(FileOptions::new(&path)).unwrap();
    expect_stored(&store, &claim(1)).await;
    store.close().await;
    let whole = std::fs::read(&path).unwrap();
    let mut failed = 0;
    for (block, bytes) in whole.chunks_exact(4096).enumerate() {
        if bytes.iter().all(|byte| *byte == 0) {
            continue;
        }
        let mut flipped = whole.clone();
        flipped[block * 4096 + 100] ^= 1;
        std::fs::write(&path, flipped).unwrap();
        let unfinished = directory.path().join("backup.db.new");
        match hapax_file::backup_closed(&path, &backup) {
            Ok(_) => std::fs::remove_file(&backup).unwrap(),
            Err(_) => failed += 1,
        }
        assert!(!backup.exists() && !unfinished.exists(), "block {block}");
    }
    assert!(failed > 0);
}

#[tokio::test]
async fn a_wrong_path_of_a_backup_is_an_error_with_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    let store = FileStore::open(FileOptions::new(&path)).unwrap();
    let nowhere = directory.path().join("none").join("backup.db");
    for (to, advice) in [
        (directory.path(), "name a file in it"),
        (&*nowhere, "create it, or name another one"),
        (&*path, "name one that does not exist"),
    ] {
        let error = store.backup(to).await.unwrap_err().to_string();
        assert!(error.contains(advice), "{error}");
    }
    store.close().await;
    for (from, advice) in
        [(directory.path(), "name the database in it"), (&*nowhere, "name a database that exists")]
    {
        let to = directory.path().join("restored.db");
        let error = restore(from, &to, &secret_of(&path)).unwrap_err().to_string();
        assert!(error.contains(advice), "{error}");
    }
}

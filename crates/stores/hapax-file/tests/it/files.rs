//! The files: made, locked, lost, damaged.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::machine::{ClaimEvent, Event, Step, step};
use hapax_core::schedule::Schedule;
use hapax_core::{Clock, KeyRing, LeaseId, Secret, Store, StoreError, Timestamp};
use hapax_file::{FileOptions, FileStore, FileStoreError, LockOwner, OpenError, SecretSource};
use hapax_testkit::ManualClock;

use crate::support::{LEASE, claim, complete, due, entry, expect_stored, key, load, seen};

fn open(path: &Path) -> Result<FileStore, OpenError> {
    FileStore::open(FileOptions::new(path))
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    (directory, path)
}

#[tokio::test]
async fn records_survive_a_restart() {
    let (_directory, path) = temporary();
    let store = open(&path).unwrap();
    let claimed = claim(1);
    let first = expect_stored(&store, &claimed).await;
    expect_stored(&store, &complete(&claimed, 2, b"answer")).await;
    let before = load(&store, 1).await;
    store.close().await;
    let store = open(&path).unwrap();
    let after = load(&store, 1).await.unwrap();
    assert_eq!(after.fence, first.fence);
    assert_eq!(Some(after.record), before.map(|stored| stored.record));
}

#[tokio::test]
async fn a_wrong_path_or_secret_is_an_error_with_the_remedy() {
    let (directory, path) = temporary();
    let fails = |opened: Result<FileStore, OpenError>, advice: &str| {
        let error = opened.map(drop).unwrap_err().to_string();
        assert!(error.contains(advice), "{error}");
    };
    fails(open(directory.path()), "name a file in it, such as");
    fails(open(&directory.path().join("none").join("hapax.db")), "create it");
    open(&path).unwrap().close().await;
    let other = FileOptions::new(&path).secret(SecretSource::Secret(Secret::new([9; 32])));
    fails(FileStore::open(other), "set the secret of the database");
}

#[tokio::test]
async fn a_store_that_is_dropped_is_finished_in_the_background() {
    let (_directory, path) = temporary();
    let store = open(&path).unwrap();
    let closed = {
        let store = store;
        expect_stored(&store, &claim(1)).await;
        store.close()
    };
    closed.await;
    assert!(load(&open(&path).unwrap(), 1).await.is_some());
}

#[tokio::test]
async fn a_closed_store_answers_unavailable() {
    let (_directory, path) = temporary();
    let store = open(&path).unwrap();
    store.close().await;
    assert!(matches!(store.swap(claim(1)).await, Err(StoreError::Unavailable(_))));
    assert!(matches!(store.load(&key(1)).await, Err(StoreError::Unavailable(_))));
    store.close().await;
}

#[tokio::test]
async fn a_second_store_gets_the_owner_of_the_file() {
    let (_directory, path) = temporary();
    assert_eq!(FileStore::lock_owner(&path).unwrap(), None);
    let admin = "127.0.0.1:9090".parse().unwrap();
    let store = FileStore::open(FileOptions::new(&path).admin(admin)).unwrap();
    let me = Some(std::process::id());
    match open(&path) {
        Err(OpenError::InUse { pid, admin: said, .. }) => {
            assert_eq!((pid, said), (me, Some(admin)));
        }
        other => panic!("{other:?}"),
    }
    let elsewhere = "[::1]:1".parse().unwrap();
    store.set_admin(Some(elsewhere)).unwrap();
    let owner = LockOwner { pid: me, admin: Some(elsewhere) };
    assert_eq!(FileStore::lock_owner(&path).unwrap(), Some(owner));
    store.set_admin(None).unwrap();
    assert_eq!(FileStore::lock_owner(&path).unwrap().unwrap().admin, None);
    store.close().await;
    assert_eq!(FileStore::lock_owner(&path).unwrap(), None);
    assert!(open(&path).is_ok());
}

#[tokio::test]
async fn the_secret_is_made_once_and_for_the_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let (directory, path) = temporary();
    let store = open(&path).unwrap();
    let secret = store.secret().cloned();
    assert!(secret.is_some());
    store.close().await;
    for file in std::fs::read_dir(directory.path()).unwrap() {
        let mode = file.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    assert_eq!(open(&path).unwrap().secret(), secret.as_ref());
}

#[tokio::test]
async fn the_reserve_beside_a_store_has_16_mib_and_is_for_the_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let (directory, path) = temporary();
    let store = open(&path).unwrap();
    let reserve = directory.path().join("hapax.db.reserve").metadata().unwrap();
    assert_eq!((reserve.len(), reserve.permissions().mode() & 0o777), (16 << 20, 0o600));
    store.close().await;
}

#[tokio::test]
async fn a_link_or_another_file_in_place_of_the_lock_or_the_reserve_is_not_written() {
    let (directory, path) = temporary();
    let [theirs, lock, reserve] =
        ["theirs", "hapax.db.lock", "hapax.db.reserve"].map(|name| directory.path().join(name));
    std::fs::write(&theirs, "a file of its user").unwrap();
    let unchanged = |path: &Path| assert_eq!(std::fs::read(path).unwrap(), b"a file of its user");
    std::os::unix::fs::symlink(&theirs, &lock).unwrap();
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("found a symbolic link"), "{error}");
    unchanged(&theirs);
    std::fs::remove_file(&lock).unwrap();
    std::fs::copy(&theirs, &lock).unwrap();
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("expected a lock file of a store"), "{error}");
    unchanged(&lock);
    std::fs::remove_file(&lock).unwrap();
    // Without a reserve the store opens.
    std::os::unix::fs::symlink(&theirs, &reserve).unwrap();
    open(&path).unwrap().close().await;
    unchanged(&theirs);
    std::fs::remove_file(&reserve).unwrap();
    std::fs::copy(&theirs, &reserve).unwrap();
    open(&path).unwrap().close().await;
    unchanged(&reserve);
}

#[tokio::test]
async fn the_secret_that_seals_is_replaced_and_the_one_that_names_stays() {
    let (directory, path) = temporary();
    let store = open(&path).unwrap();
    let naming = store.secret().cloned().unwrap();
    let claimed = claim(1);
    expect_stored(&store, &claimed).await;
    store.close().await;
    let ring = KeyRing::new(naming.clone()).sealing(Secret::new([2; 32]));
    let file = directory.path().join("hapax.db.secret");
    std::fs::write(&file, ring.to_text()).unwrap();
    let store = open(&path).unwrap();
    assert_eq!(store.secret(), Some(&naming));
    assert!(load(&store, 1).await.is_some());
    expect_stored(&store, &complete(&claimed, 2, b"answer")).await;
    store.close().await;
    // What was sealed under the new one needs it.
    std::fs::write(&file, naming.to_hex()).unwrap();
    let store = open(&path).unwrap();
    assert!(matches!(store.load(&key(1)).await, Err(StoreError::Corrupt(_))));
    store.close().await;
    // Another one that names would find nothing, and is refused.
    std::fs::write(&file, KeyRing::new(Secret::new([2; 32])).opening(naming).to_text()).unwrap();
    assert!(matches!(open(&path), Err(OpenError::OtherSecret)));
}

#[tokio::test]
async fn a_database_that_was_created_without_a_secret_can_be_sealed() {
    let (_directory, path) = temporary();
    let open = |secret| FileStore::open(FileOptions::new(&path).secret(secret));
    let store = open(SecretSource::None).unwrap();
    let claimed = claim(1);
    expect_stored(&store, &claimed).await;
    store.close().await;
    let ring = KeyRing::unnamed(Secret::new([2; 32])).sealing(Secret::new([2; 32]));
    let store = open(SecretSource::Ring(ring.clone())).unwrap();
    assert!(load(&store, 1).await.is_some() && store.secret().is_none());
    expect_stored(&store, &complete(&claimed, 2, b"canary-answer")).await;
    store.close().await;
    let bytes = std::fs::read(&path).unwrap();
    assert!(!bytes.windows(13).any(|part| part == b"canary-answer"));
    let copy = path.with_extension("copy");
    hapax_file::backup_closed(&path, &copy).unwrap();
    let restored = path.with_extension("restored");
    hapax_file::restore(&copy, &restored, &SecretSource::Ring(ring.clone())).unwrap();
    let options = FileOptions::new(&restored).secret(SecretSource::Ring(ring));
    let store = FileStore::open(options).unwrap();
    assert!(load(&store, 1).await.is_some());
    store.close().await;
    let store = open(SecretSource::None).unwrap();
    assert!(matches!(store.load(&key(1)).await, Err(StoreError::Corrupt(_))));
}

#[test]
fn a_file_of_secrets_names_records() {
    let (directory, path) = temporary();
    let file = directory.path().join("hapax.db.secret");
    std::fs::write(&file, KeyRing::unnamed(Secret::new([2; 32])).to_text()).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(error, OpenError::Unnamed { .. }) && !path.exists(), "{error}");
    assert!(error.to_string().contains("found `name none`"), "{error}");
}

#[tokio::test]
async fn a_lost_secret_is_never_replaced() {
    let (directory, path) = temporary();
    open(&path).unwrap().close().await;
    let secret = directory.path().join("hapax.db.secret");
    std::fs::remove_file(&secret).unwrap();
    assert!(matches!(open(&path), Err(OpenError::SecretMissing { .. })));
    assert!(!secret.exists());
    std::fs::write(&secret, "not a secret").unwrap();
    assert!(matches!(open(&path), Err(OpenError::SecretUnreadable { .. })));
    std::fs::write(&secret, Secret::new([1; 32]).to_hex()).unwrap();
    assert!(matches!(open(&path), Err(OpenError::OtherSecret)));
    let none = FileOptions::new(&path).secret(SecretSource::None);
    assert!(matches!(FileStore::open(none), Err(OpenError::OtherSecret)));
}

#[tokio::test]
async fn a_secret_without_a_database_is_used() {
    let (directory, path) = temporary();
    let secret = Secret::new([5; 32]);
    std::fs::write(directory.path().join("hapax.db.secret"), secret.to_hex()).unwrap();
    assert_eq!(open(&path).unwrap().secret(), Some(&secret));
}

#[tokio::test]
async fn an_interrupted_creation_is_repeated() {
    let (directory, path) = temporary();
    std::fs::write(directory.path().join("hapax.db.new"), [0; 5000]).unwrap();
    std::fs::write(directory.path().join("hapax.db.secret.new"), "ab").unwrap();
    let store = open(&path).unwrap();
    expect_stored(&store, &claim(1)).await;
}

#[test]
fn a_file_that_is_no_database_is_not_changed() {
    let (_directory, path) = temporary();
    std::fs::write(&path, b"somebody's notes").unwrap();
    let given = FileOptions::new(&path).secret(SecretSource::None);
    assert!(matches!(FileStore::open(given), Err(OpenError::Database(_))));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's notes");
}

#[tokio::test]
async fn an_emptied_database_file_is_an_error() {
    let (_directory, path) = temporary();
    open(&path).unwrap().close().await;
    std::fs::write(&path, "").unwrap();
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("empty"), "{error}");
}

#[tokio::test]
async fn after_the_file_was_moved_no_write_is_acknowledged() {
    let (directory, path) = temporary();
    let store = open(&path).unwrap();
    expect_stored(&store, &claim(1)).await;
    let away = directory.path().join("away.db");
    std::fs::rename(&path, &away).unwrap();
    for _ in 0..3 {
        assert!(matches!(store.swap(claim(2)).await, Err(StoreError::Unavailable(_))));
    }
    assert!(!path.exists(), "a new database took its place");
    std::fs::rename(&away, &path).unwrap();
    expect_stored(&store, &claim(2)).await;
    assert!(load(&store, 1).await.is_some());
}

#[tokio::test]
async fn nothing_is_written_while_another_file_is_in_the_place_of_the_own_one() {
    let (directory, path) = temporary();
    let store = open(&path).unwrap();
    expect_stored(&store, &claim(1)).await;
    let away = directory.path().join("away.db");
    std::fs::rename(&path, &away).unwrap();
    std::fs::copy(&away, &path).unwrap();
    for _ in 0..3 {
        let error = store.swap(claim(2)).await.unwrap_err();
        let reason = std::error::Error::source(&error).and_then(|it| it.downcast_ref());
        assert!(matches!(reason, Some(FileStoreError::Moved)), "{error:?}");
    }
    assert!(load(&store, 1).await.is_some(), "replays are read from the file that is open");
    assert_eq!(store.backup(&directory.path().join("backup.db")).await.unwrap(), 1);
    std::fs::rename(&away, &path).unwrap();
    expect_stored(&store, &claim(2)).await;
}

#[tokio::test]
async fn a_lease_of_an_earlier_opening_has_lapsed_however_the_clock_was_set() {
    for set in [1_000_000_000, 3_000_000_000] {
        let (_directory, path) = temporary();
        let clock = Arc::new(ManualClock::at(Timestamp::from_micros(2_000_000_000)));
        let options = FileOptions::new(&path).clock(clock.clone());
        let store = FileStore::open(options.clone()).unwrap();
        let claimed = claim(1);
        expect_stored(&store, &claimed).await;
        assert!(takes_over(&store, &claimed).await.is_none(), "the lease is live");
        store.close().await;
        clock.set(Timestamp::from_micros(set));
        let store = FileStore::open(options).unwrap();
        let taken = takes_over(&store, &claimed).await.expect("the lease has lapsed");
        let (_, before) = seen(&store, 1).await;
        assert!(expect_stored(&store, &taken).await.fence > before.fence);
        // What this opening granted holds.
        assert!(takes_over(&store, &claimed).await.is_none());
        clock.set(seen(&store, 1).await.0.now.after(LEASE));
        assert!(takes_over(&store, &claimed).await.is_some());
    }
}

#[tokio::test]
async fn the_clock_shows_no_time_before_one_that_the_file_has_and_does_not_stand_still() {
    const HOUR: Duration = Duration::from_secs(60 * 60);
    let (directory, path) = temporary();
    let copy = directory.path().join("copy.db");
    let clock = Arc::new(ManualClock::default());
    let options =
        |path: &Path| FileOptions::new(path).secret(SecretSource::None).clock(clock.clone());
    let begin = clock.now();
    let store = FileStore::open(options(&path)).unwrap();
    clock.advance(30 * HOUR);
    expect_stored(&store, &claim(1)).await;
    store.backup(&copy).await.unwrap();
    drop(store);
    // The machine boots with a wrong clock.
    clock.set(begin.after(HOUR));
    for path in [&path, &copy] {
        let store = loop {
            match FileStore::open(options(path)) {
                Err(OpenError::InUse { .. }) => tokio::task::yield_now().await,
                opened => break opened.unwrap(),
            }
        };
        let now = seen(&store, 1).await.0.now;
        assert!(now >= begin.after(30 * HOUR), "{now:?}");
        store.insert(entry(2, Duration::from_millis(10))).await.unwrap();
        while due(&store).await.0.is_empty() {
            tokio::task::yield_now().await;
        }
        // With the right time again, it follows the machine.
        clock.set(begin.after(40 * HOUR));
        assert_eq!(seen(&store, 1).await.0.now, clock.now());
        store.close().await;
        clock.set(begin.after(HOUR));
    }
}

/// What somebody else would write to take over, if `step` lets it.
async fn takes_over(
    store: &FileStore,
    claimed: &hapax_core::store::Swap,
) -> Option<hapax_core::store::Swap> {
    let (snapshot, stored) = seen(store, 1).await;
    let record = &claimed.draft.record;
    let asked = ClaimEvent {
        lease_id: LeaseId::from_bytes([9; 16]),
        own_lease_ids: &[],
        scheme: &record.scheme,
        fingerprint: &record.fingerprint,
        rehashed: &[],
        terms: record.terms,
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: None,
    };
    match step(&snapshot, &Event::Claim(asked)) {
        Step::Execute(draft) => Some(hapax_core::store::Swap {
            id: claimed.id,
            expected: Some(stored.write_id),
            write_id: crate::support::write_id(99),
            draft,
        }),
        _ => None,
    }
}

#[tokio::test]
async fn a_purged_key_gets_a_larger_fence_even_if_the_clock_was_set_back() {
    let (_directory, path) = temporary();
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(9_000_000_000_000)));
    let options = FileOptions::new(&path).clock(clock.clone());
    let store = FileStore::open(options.clone()).unwrap();
    let before = expect_stored(&store, &claim(1)).await.fence;
    clock.advance(Duration::from_secs(1_000_000));
    assert_eq!(store.reap(std::num::NonZeroU32::MAX).await.unwrap().removed, 1);
    store.close().await;
    clock.set(Timestamp::from_micros(1));
    let store = FileStore::open(options).unwrap();
    assert_eq!(clock.now().as_micros(), 1);
    assert!(expect_stored(&store, &claim(1)).await.fence > before);
}

#[tokio::test]
async fn damage_in_a_block_is_an_error_for_its_keys_and_one_in_a_page_of_records() {
    let (_directory, path) = temporary();
    let options = FileOptions::new(&path).secret(SecretSource::None);
    let store = FileStore::open(options.clone()).unwrap();
    for of in 1..=3 {
        let claimed = claim(of);
        expect_stored(&store, &claimed).await;
        expect_stored(&store, &complete(&claimed, of + 10, format!("answer {of}").as_bytes()))
            .await;
    }
    store.close().await;
    flip(&path, b"answer 1");
    // The tag stands in the columns: damage to a deadline is no different.
    flip(&path, crate::support::write_id(12).as_bytes());
    let store = FileStore::open(options).unwrap();
    for of in 1..=3 {
        let loaded = store.load(&key(of)).await;
        assert!(matches!(loaded, Err(StoreError::Corrupt(_))), "{loaded:?}");
        let swapped = store.swap(claim(of)).await;
        assert!(matches!(swapped, Err(StoreError::Corrupt(_))), "{swapped:?}");
    }
    let limit = std::num::NonZeroU32::new(10).unwrap();
    let page = hapax_core::Inspect::page(&store, None, limit).await.unwrap();
    assert!(matches!(page.records.as_slice(), [(_, Err(StoreError::Corrupt(_)))]), "{page:?}");
    assert!(!page.more);
    assert_eq!(store.stats().damaged, 1);
}

#[tokio::test]
async fn a_page_of_large_records_ends_early_and_the_next_one_continues() {
    let (_directory, path) = temporary();
    let store = FileStore::open(FileOptions::new(&path).secret(SecretSource::None)).unwrap();
    let large = vec![b'x'; 700 << 10];
    for of in 1..=3 {
        let claimed = claim(of);
        expect_stored(&store, &claimed).await;
        expect_stored(&store, &complete(&claimed, of + 10, &large)).await;
    }
    let limit = std::num::NonZeroU32::new(10).unwrap();
    let first = hapax_core::Inspect::page(&store, None, limit).await.unwrap();
    assert_eq!((first.records.len(), first.more), (2, true), "a mebibyte, and what crosses it");
    let rest = hapax_core::Inspect::page(&store, Some(first.records[1].0), limit).await.unwrap();
    assert_eq!((rest.records.len(), rest.more), (1, false));
}

#[tokio::test]
async fn a_damaged_page_is_an_error_for_its_keys_alone() {
    let (directory, path) = temporary();
    let options = FileOptions::new(&path).secret(SecretSource::None);
    let store = FileStore::open(options.clone()).unwrap();
    for of in 0..100 {
        expect_stored(&store, &claim(of)).await;
    }
    store.close().await;
    FileStore::open(options.clone().verify(true)).unwrap().close().await;
    damage_page(&path, key(5).as_bytes());
    let copy = directory.path().join("copy.db");
    std::fs::copy(&path, &copy).unwrap();
    let verified = FileOptions::new(copy).secret(SecretSource::None).verify(true);
    let verified = FileStore::open(verified);
    assert!(matches!(verified, Err(OpenError::Damaged(_))), "{verified:?}");

    let store = Arc::new(FileStore::open(options).unwrap());
    let tasks: Vec<_> = (0..100)
        .map(|of| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                (store.swap(claim(of)).await, store.load(&key(of)).await.map(|seen| seen.stored))
            })
        })
        .collect();
    let mut whole = 0;
    for (of, task) in tasks.into_iter().enumerate() {
        match task.await.unwrap() {
            (Ok(_), Ok(Some(_))) => whole += 1,
            (Err(StoreError::Corrupt(_)), Err(StoreError::Corrupt(_))) => {}
            other => panic!("{of}: {other:?}"),
        }
    }
    assert!((70..100).contains(&whole), "{whole} of 100 keys are whole");
    assert!(matches!(store.load(&key(5)).await, Err(StoreError::Corrupt(_))));
    assert_eq!(store.stats().reopened, 0);
    expect_stored(&*store, &claim(1000)).await;
    // A listing goes around what is damaged.
    let (mut after, mut listed, mut damaged) = (None, 0, 0);
    loop {
        let limit = std::num::NonZeroU32::new(7).unwrap();
        let page = hapax_core::Inspect::page(&*store, after, limit).await.unwrap();
        listed += page.records.iter().filter(|(_, stored)| stored.is_ok()).count();
        damaged += page.records.iter().filter(|(_, stored)| stored.is_err()).count();
        after = page.records.last().map(|(key, _)| *key);
        if !page.more {
            break;
        }
    }
    assert_eq!((listed, damaged), (whole + 1, 1));
}

/// Nobody asks for anything: what reads in the background meets it.
#[tokio::test]
async fn a_damaged_page_is_found_before_a_request_needs_it() {
    let (_directory, path) = temporary();
    let options = FileOptions::new(&path).secret(SecretSource::None);
    let store = FileStore::open(options.clone()).unwrap();
    for of in 0..100 {
        expect_stored(&store, &claim(of)).await;
    }
    store.close().await;
    damage_page(&path, key(5).as_bytes());
    let store = FileStore::open(options).unwrap();
    while store.stats().damaged == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.stats().damaged, 1);
    assert!(matches!(store.load(&key(5)).await, Err(StoreError::Corrupt(_))));
    assert_eq!(store.stats().damaged, 1, "it was known");
    store.close().await;
}

#[tokio::test]
async fn a_file_of_an_earlier_format_is_rejected_as_such() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hapax.db");
    drop(redb::Database::create(&path).unwrap());
    let opened = FileStore::open(FileOptions::new(&path).secret(SecretSource::None));
    let error = opened.map(drop).unwrap_err().to_string();
    assert!(error.contains("expected file format 2"), "{error}");
    let error = hapax_file::examine(&path).unwrap_err().to_string();
    assert!(error.contains("expected file format 2"), "{error}");
}

/// Damages where the first value ends in every page that holds the record of the key `bytes`.
fn damage_page(path: &Path, bytes: &[u8]) {
    let mut file = std::fs::read(path).unwrap();
    let mut damaged = 0;
    for page in file[2 * 4096..].chunks_mut(4096 + 16) {
        let holds = |bytes: &[u8]| page.windows(bytes.len()).any(|window| window == bytes);
        if page[0] == 1 && holds(bytes) && holds(b"hxs\x01") {
            page[5] ^= 0x40;
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    std::fs::write(path, file).unwrap();
}

/// Flips a bit of `bytes` wherever they are in the file.
fn flip(path: &Path, bytes: &[u8]) {
    let mut file = std::fs::read(path).unwrap();
    let at: Vec<_> = (0..file.len()).filter(|at| file[*at..].starts_with(bytes)).collect();
    assert!(!at.is_empty(), "these bytes are nowhere");
    at.into_iter().for_each(|at| file[at] ^= 1);
    std::fs::write(path, file).unwrap();
}

#[tokio::test]
async fn a_database_that_must_exist_is_not_made_and_leaves_no_file() {
    let (directory, path) = temporary();
    let required = |path: &Path| FileStore::open(FileOptions::new(path).must_exist(true));
    for path in [&path, &directory.path().join("unmounted").join("hapax.db")] {
        match required(path) {
            Err(OpenError::Missing { path: expected }) => assert_eq!(&expected, path),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    let made = open(&path).unwrap();
    let created = made.created();
    assert!(made.is_new());
    made.close().await;
    let found = required(&path).unwrap();
    assert_eq!((found.created(), found.is_new()), (created, false));
}

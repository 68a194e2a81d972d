//! When keys are fetched.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_testkit::http::TestIssuer;
use http::StatusCode;
use tokio::time::{Instant, advance, sleep};

use super::super::fetch::{FetchError, Shared};
use super::super::keys::KeySet;

const LIMIT: Duration = Duration::from_secs(3);

/// Keys, a fetch of which takes a second.
#[derive(Clone, Default)]
struct Source {
    next: Arc<Mutex<VecDeque<Option<u8>>>>,
    begun: Arc<Mutex<Vec<Instant>>>,
    panics: Arc<AtomicBool>,
}

impl Source {
    /// The next fetch returns the key of this number, or fails.
    fn then(&self, key: Option<u8>) {
        self.next.lock().unwrap().push_back(key);
    }

    fn fetch(&self) -> BoxFuture<'static, Result<KeySet, FetchError>> {
        self.begun.lock().unwrap().push(Instant::now());
        let next = self.next.lock().unwrap().pop_front().flatten();
        let panics = Arc::clone(&self.panics);
        Box::pin(async move {
            sleep(Duration::from_secs(1)).await;
            assert!(!panics.load(Ordering::Relaxed), "a bug");
            let number = next.ok_or(FetchError::Status(StatusCode::BAD_GATEWAY))?;
            let set = TestIssuer::new(&number.to_string(), number).key_set();
            Ok(KeySet::parse(set.as_bytes())?)
        })
    }

    fn count(&self) -> usize {
        self.begun.lock().unwrap().len()
    }

    /// Begins to fetch.
    fn start(&self) -> Arc<Shared> {
        let shared = Arc::new(Shared::new());
        let (source, running) = (self.clone(), Arc::clone(&shared));
        tokio::spawn(async move { running.run(&move || source.fetch(), "http://keys").await });
        shared
    }
}

fn has_failed(shared: &Shared) -> bool {
    shared.failed().load(Ordering::Relaxed)
}

fn kid(set: &KeySet) -> String {
    set.keys()[0].id.clone().unwrap()
}

#[tokio::test(start_paused = true)]
async fn keys_that_are_not_there_at_the_start_are_fetched_each_second() {
    let source = Source::default();
    let shared = source.start();
    // A request that comes before the first result waits for it.
    assert!(shared.after(0, LIMIT).await.is_none());
    assert!(has_failed(&shared));
    assert!(shared.fetched().is_none());
    source.then(Some(1));
    let fetched = shared.after(1, LIMIT).await.unwrap();
    assert_eq!((kid(&fetched.set).as_str(), fetched.has_failed), ("1", false));
    assert!(!has_failed(&shared));
    // From then on every five minutes.
    let before = source.count();
    source.then(Some(2));
    advance(Duration::from_secs(299)).await;
    assert_eq!(source.count(), before);
    sleep(Duration::from_secs(3)).await;
    assert_eq!((source.count(), kid(&shared.fetched().unwrap().set).as_str()), (before + 1, "2"));
}

#[tokio::test(start_paused = true)]
async fn a_failed_fetch_keeps_the_keys() {
    let source = Source::default();
    source.then(Some(1));
    let shared = source.start();
    shared.after(0, LIMIT).await.unwrap();
    sleep(Duration::from_secs(302)).await;
    let fetched = shared.fetched().unwrap();
    assert_eq!((kid(&fetched.set).as_str(), fetched.has_failed), ("1", true));
    assert!(has_failed(&shared));
    source.then(Some(2));
    sleep(Duration::from_secs(12)).await;
    let fetched = shared.fetched().unwrap();
    assert_eq!((kid(&fetched.set).as_str(), fetched.has_failed), ("2", false));
    assert!(!has_failed(&shared));
}

#[tokio::test(start_paused = true)]
async fn a_fetch_that_panics_is_a_failure_and_ends_no_later_one() {
    let source = Source::default();
    source.then(Some(1));
    let shared = source.start();
    shared.after(0, LIMIT).await.unwrap();
    source.panics.store(true, Ordering::Relaxed);
    // A token that waits for the fetch does not wait for ever, and is not said to have an unknown key.
    assert!(shared.newer(1, LIMIT).await.unwrap().has_failed);
    assert!(has_failed(&shared), "`/readyz` states it");
    source.panics.store(false, Ordering::Relaxed);
    source.then(Some(2));
    let fetched = shared.after(2, Duration::from_secs(15)).await.unwrap();
    assert_eq!((kid(&fetched.set).as_str(), fetched.has_failed), ("2", false));
    assert!(!has_failed(&shared));
}

#[tokio::test(start_paused = true)]
async fn tokens_with_unknown_keys_have_the_keys_fetched_every_ten_seconds_at_most() {
    let source = Source::default();
    source.then(Some(1));
    let shared = source.start();
    let first = shared.after(0, LIMIT).await.unwrap();
    source.then(Some(2));
    // However many come at once, there is one fetch, and all of them get its keys.
    let requests: Vec<_> = (0..100)
        .map(|_| {
            let (shared, round) = (Arc::clone(&shared), first.round);
            tokio::spawn(async move { shared.newer(round, LIMIT).await })
        })
        .collect();
    for request in requests {
        assert_eq!(kid(&request.await.unwrap().unwrap().set), "2");
    }
    assert_eq!(source.count(), 2);
    let round = shared.fetched().unwrap().round;
    sleep(Duration::from_secs(8)).await;
    assert!(shared.newer(round, LIMIT).await.is_none());
    assert_eq!(source.count(), 2);
    sleep(Duration::from_secs(2)).await;
    // A failure says nothing about the key.
    assert!(shared.newer(round, LIMIT).await.unwrap().has_failed);
    assert_eq!(source.count(), 3);
}

//! Decisions about sagas whose store fails.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{BoxFuture, Capabilities, Page, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{EntryId, Inspect, MemoryStore, OperationId, Store, StoreError, Timestamp};
use serde_json::json;
use tokio::time::Instant;

use crate::world::Service;

/// The id of entries that cannot be read, and the beginning of that of records.
const DAMAGED: [u8; 16] = [u8::MAX; 16];

/// A store whose swaps, or whose postponements of entries, fail, or whose replies to swaps are lost.
#[derive(Debug)]
pub(crate) struct Failing {
    store: Arc<MemoryStore>,
    swaps: AtomicBool,
    postponements: AtomicBool,
    replies: AtomicBool,
}

impl Failing {
    pub(crate) const fn new(store: Arc<MemoryStore>) -> Self {
        let [swaps, postponements, replies] = [const { AtomicBool::new(false) }; 3];
        Self { store, swaps, postponements, replies }
    }
}

fn check(fails: &AtomicBool) -> Result<(), StoreError> {
    match fails.load(Ordering::Relaxed) {
        true => Err(StoreError::unavailable("a fault of the test")),
        false => Ok(()),
    }
}

impl Store for Failing {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            check(&self.swaps)?;
            let swapped = self.store.swap(swap).await;
            match self.replies.load(Ordering::Relaxed) {
                true => Err(StoreError::ambiguous("a fault of the test")),
                false => swapped,
            }
        })
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.store.capabilities() }
    }
}

impl Inspect for Failing {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            let mut page = self.store.page(after, limit).await?;
            for (id, stored) in &mut page.records {
                if id.as_bytes().starts_with(&DAMAGED) {
                    *stored = Err(StoreError::corrupt("a fault of the test"));
                }
            }
            Ok(page)
        })
    }
}

impl Schedule for Failing {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.insert(entry)
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        self.store.due(queues, limit)
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            check(&self.postponements)?;
            self.store.postpone(key, expected, due_in).await
        })
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        self.store.remove(key)
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move {
            let mut page = self.store.entries(after, limit).await?;
            for (key, entry) in &mut page.entries {
                if *key.id.as_bytes() == DAMAGED {
                    *entry = Err(StoreError::corrupt("a fault of the test"));
                }
            }
            Ok(page)
        })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        self.store.queues()
    }
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_could_not_be_woken_at_once_is_woken_a_second_later() {
    let (service, store) = Service::failing();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    // Its entry is due once a day from now on.
    tokio::time::sleep(Duration::from_secs(60)).await;
    store.postponements.store(true, Ordering::Relaxed);
    let resolve = json!({ "outcome": "did-not-happen", "force": true });
    let (decided, ()) = tokio::join!(service.decide(&shown, "resolve", resolve), async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        service.systems.succeed("charge");
        store.postponements.store(false, Ordering::Relaxed);
    });
    assert_eq!((decided.0, &decided.1["was"]["step"]), (200, &json!("charge")), "{decided:?}");
    let begin = Instant::now();
    started.outcome().await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_decision_whose_saga_cannot_be_woken_is_recorded_and_gets_not_woken() {
    let (service, store) = Service::failing();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    store.postponements.store(true, Ordering::Relaxed);
    let paid = json!({ "id": "by hand", "note": null, "cents": 1999 });
    let happened = json!({ "outcome": "happened", "result": paid });
    let (status, error) = service.decide(&shown, "resolve", happened).await;
    assert_eq!((status, &error["code"]), (503, &json!("not-woken")), "{error}");
    let lines = service.audit_lines();
    assert_eq!((lines.len(), &lines[1]["stage"]), (2, &json!("done")), "{lines:?}");
    store.postponements.store(false, Ordering::Relaxed);
    // It continues when its entry is due.
    assert_eq!(started.outcome().await.unwrap().id, "by hand");
}

#[tokio::test(start_paused = true)]
async fn a_decision_whose_saga_could_not_be_woken_can_be_repeated_and_wakes_it() {
    let (service, store) = Service::failing();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    store.postponements.store(true, Ordering::Relaxed);
    let resolve = json!({ "outcome": "did-not-happen", "force": true });
    let (status, error) = service.decide(&shown, "resolve", resolve.clone()).await;
    assert_eq!((status, &error["code"]), (503, &json!("not-woken")), "{error}");
    store.postponements.store(false, Ordering::Relaxed);
    service.systems.succeed("charge");
    let begin = Instant::now();
    // Another decision needs a new look.
    let (status, error) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!((status, &error["code"]), (409, &json!("changed")), "{error}");
    let (status, decided) = service.decide(&shown, "resolve", resolve).await;
    assert_eq!(status, 200, "{decided}");
    started.outcome().await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    let (_, shown) = service.get(&format!("/api/sagas/{}", started.id())).await;
    assert_eq!((&shown["state"], &shown["end"]), (&json!("ended"), &json!("done")), "{shown}");
}

#[tokio::test(start_paused = true)]
async fn a_decision_that_replaces_an_equal_one_and_got_no_reply_is_found_and_wakes_its_saga() {
    let (service, store) = Service::failing();
    service.systems.fail("notify");
    let (started, mut shown) = service.stuck("k").await;
    let path = format!("/api/sagas/{}", started.id());
    for _ in 0..2 {
        let (status, decided) = service.decide(&shown, "retry", json!({})).await;
        assert_eq!(status, 200, "{decided}");
        tokio::time::sleep(Duration::from_secs(60)).await;
        shown = service.get(&path).await.1;
        assert_eq!(shown["state"], "stuck", "{shown}");
    }
    store.replies.store(true, Ordering::Relaxed);
    let (decided, ()) = tokio::join!(service.decide(&shown, "retry", json!({})), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        service.systems.succeed("notify");
    });
    store.replies.store(false, Ordering::Relaxed);
    assert_eq!(decided.0, 200, "{decided:?}");
    let lines = service.audit_lines();
    assert_eq!(lines.last().unwrap()["stage"], "done", "{lines:?}");
    let begin = Instant::now();
    started.outcome().await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_decision_that_was_not_written_is_rejected_and_can_be_made_again() {
    let (service, store) = Service::failing();
    service.systems.fail("notify");
    let (started, shown) = service.stuck("k").await;
    store.swaps.store(true, Ordering::Relaxed);
    let (status, error) = service.decide(&shown, "retry", json!({})).await;
    assert_eq!((status, &error["code"]), (503, &json!("store-unavailable")), "{error}");
    let lines = service.audit_lines();
    assert_eq!((lines.len(), &lines[1]["stage"]), (2, &json!("rejected")), "{lines:?}");
    assert_eq!(lines[1]["code"], "store-unavailable");
    store.swaps.store(false, Ordering::Relaxed);
    service.systems.succeed("notify");
    assert_eq!(service.decide(&shown, "retry", json!({})).await.0, 200);
    assert_eq!(started.outcome().await.unwrap().cents, 1999);
}

#[tokio::test(start_paused = true)]
async fn a_damaged_entry_of_the_last_saga_does_not_step_over_the_limit_of_a_page() {
    let (mut service, store) = Service::failing();
    let mut expected = Vec::new();
    for key in ["a", "b", "c"] {
        let started = service.begin(key, 0).await;
        service.until(&started, "parked").await;
        expected.push(started.id());
    }
    service.stop_driving().await;
    for operation in &expected {
        let key = EntryKey { operation: *operation, id: EntryId::from_bytes(DAMAGED) };
        let queue = QueueName::new("saga:place-order:2").unwrap();
        let entry = NewEntry { key, queue, due_in: Duration::ZERO, note: "damaged".into() };
        store.store.insert(entry).await.unwrap();
    }
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let (_, page) = service.get(&format!("/api/sagas?limit=1{after}")).await;
        let sagas = page["sagas"].as_array().unwrap();
        assert!(sagas.len() <= 1, "{page}");
        found.extend(sagas.iter().map(|saga| saga["id"].as_str().unwrap().to_owned()));
        let Some(next) = page["next"].as_str() else { break };
        after = format!("&after={next}");
    }
    let mut expected: Vec<_> = expected.iter().map(ToString::to_string).collect();
    expected.sort();
    assert_eq!(found, expected);
}

#[tokio::test(start_paused = true)]
async fn a_saga_of_a_transaction_without_a_process_is_overdue() {
    let (mut service, store) = Service::failing();
    service.stop_driving().await;
    let entry = service.entry("k", 1999);
    let id = entry.key.operation.to_string();
    store.store.insert(entry).await.unwrap();
    tokio::time::sleep(Duration::from_secs(9 * 60)).await;
    assert_eq!(service.get("/api/sagas").await.1["sagas"], json!([]));
    tokio::time::sleep(Duration::from_secs(2 * 60)).await;
    let (_, listed) = service.get("/api/sagas?state=overdue&definition=place-order:2").await;
    let [row] = &listed["sagas"].as_array().unwrap()[..] else { panic!("{listed}") };
    assert_eq!((&row["id"], &row["attempt"]), (&json!(id), &json!(0)));
    assert_eq!((&row["state"], &row["overdue"]), (&json!("overdue"), &json!(true)));
}

//! Operators and a store that stops when it is told.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Page, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Idempotency, Inspect, Key, MemoryCapacity, MemoryStore, OperationId, RecordState, Store,
    StoreError, SystemClock,
};
use hapax_gateway::{Gateway, OpenStore};
use hapax_operators::{
    Audit, Decider, Decision, DecisionChannel, ListQuery, OperatorError, OperatorRecords,
};
use serde_json::json;
use tokio::sync::{Notify, Semaphore, watch};

use crate::world::{Upstream, config, get, post, send, text};

/// What a store is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Read,
    Release,
    Other,
}

/// A memory store that is stopped before it answers a read, or writes.
struct Stopped {
    store: MemoryStore,
    at: Mutex<Option<Call>>,
    /// Calls to let pass before one is stopped.
    skip: AtomicUsize,
    waiting: watch::Sender<usize>,
    passes: Semaphore,
    /// Records of a page, at most.
    page: u32,
}

impl fmt::Debug for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopped").finish_non_exhaustive()
    }
}

impl Stopped {
    fn new(page: u32) -> Arc<Self> {
        Arc::new(Self {
            store: MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default()),
            at: Mutex::new(None),
            skip: AtomicUsize::new(0),
            waiting: watch::Sender::new(0),
            passes: Semaphore::new(0),
            page,
        })
    }

    fn stop_at(&self, call: Option<Call>) {
        *self.at.lock().unwrap() = call;
    }

    async fn pass(&self, call: Call) {
        let skips = || self.skip.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
        if *self.at.lock().unwrap() == Some(call) && !skips() {
            self.waiting.send_modify(|waiting| *waiting += 1);
            self.passes.acquire().await.unwrap().forget();
            self.waiting.send_modify(|waiting| *waiting -= 1);
        }
    }

    async fn until_waiting(&self) {
        let waiting = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await.map(drop);
        waiting.unwrap();
    }

    /// Lets what waits go on, and stops nothing more.
    fn go_on(&self) {
        self.stop_at(None);
        self.passes.add_permits(1);
    }
}

impl Store for Stopped {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let releases = swap.draft.record.state == RecordState::Released;
            self.pass(if releases { Call::Release } else { Call::Other }).await;
            self.store.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            let seen = self.store.load(key).await;
            self.pass(Call::Read).await;
            seen
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for Stopped {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            self.pass(Call::Read).await;
            let few = NonZeroU32::new(self.page).unwrap();
            self.store.page(after, limit.min(few)).await
        })
    }
}

/// A gateway on `store`, in front of an upstream that answers with `status` when it is told.
async fn in_flight(
    store: &Arc<Stopped>,
    status: u16,
) -> (Arc<Notify>, Upstream, hapax_gateway::RunningGateway) {
    let answer = Arc::new(Notify::new());
    let upstream = {
        let answer = Arc::clone(&answer);
        Upstream::start(move |_| {
            let answer = Arc::clone(&answer);
            async move {
                answer.notified().await;
                text(status, "an answer")
            }
        })
        .await
    };
    let opened = OpenStore::new(Arc::clone(store) as Arc<dyn Inspect>, None);
    let gateway = Gateway::start_on(config(upstream.url()), opened).await.unwrap();
    // A later read is none of the census.
    let admin = gateway.admin_addr().unwrap();
    while get(admin, "/metrics").await.text().contains("hapax_census_age_seconds -1") {
        tokio::task::yield_now().await;
    }
    (answer, upstream, gateway)
}

/// Decides about the key that is in flight, which ends while the store is stopped at `call`; what the
/// operator is told.
async fn ends_meanwhile(call: Call, status: u16, force: bool) -> (u16, serde_json::Value) {
    let store = Stopped::new(100);
    let (answer, _upstream, gateway) = in_flight(&store, status).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    let asked = tokio::spawn(async move { post(address, "/", "k", "x").await });
    let listed = loop {
        let listed = get(admin, "/api/keys?state=in-flight").await.json();
        if listed["keys"][0].is_object() {
            break listed;
        }
    };
    let (id, fence) = (listed["keys"][0]["id"].as_str().unwrap(), &listed["keys"][0]["fence"]);
    let path = format!("/api/keys/{id}/release");
    let decision = json!({"fence": fence, "force": force, "forget": force, "reason": "r"});
    let decision = decision.to_string();
    // The first read of a decision is for the audit file, the second one is decided about.
    store.skip.store(usize::from(call == Call::Read), SeqCst);
    store.stop_at(Some(call));
    let deciding = tokio::spawn(async move {
        let json = [("content-type", "application/json")];
        send(admin, "POST", &path, &json, &decision).await
    });
    store.until_waiting().await;
    answer.notify_one();
    assert_eq!(asked.await.unwrap().status, status);
    store.go_on();
    let told = deciding.await.unwrap();
    (told.status, told.json())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_release_returns_the_state_that_it_replaced() {
    let (status, told) = ends_meanwhile(Call::Release, 201, true).await;
    assert_eq!(status, 200, "{told}");
    let was = &told["was"];
    assert_eq!((&was["state"], &was["status"]), (&json!("done"), &json!(201)), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_decision_names_the_state_that_prevented_it() {
    let (status, told) = ends_meanwhile(Call::Read, 500, false).await;
    assert_eq!((status, &told["code"]), (409, &json!("in-flight")), "{told}");
    assert!(!told["error"].as_str().unwrap().contains("--"), "{told}");
}

fn keys(store: &Arc<Stopped>) -> OperatorRecords {
    let engine = Idempotency::builder(Arc::clone(store) as Arc<dyn Store>).build().unwrap();
    let audit = Audit::new("/nowhere", "a test");
    OperatorRecords::new(
        engine,
        Arc::clone(store) as Arc<dyn Inspect>,
        audit,
        Duration::from_secs(3600),
    )
}

#[tokio::test(start_paused = true)]
async fn at_most_two_records_are_read_at_once_and_others_wait_in_order() {
    let store = Stopped::new(100);
    let keys = keys(&store);
    store.stop_at(Some(Call::Read));
    let ended = Arc::new(Mutex::new(Vec::new()));
    let mut readers = Vec::new();
    for number in 0..6 {
        let (keys, ended) = (keys.clone(), Arc::clone(&ended));
        readers.push(tokio::spawn(async move {
            if number % 2 == 0 {
                keys.list(ListQuery::default()).await.unwrap();
            } else {
                let id = keys.id(&[], &Key::new("k").unwrap());
                assert!(matches!(keys.show(&id).await, Err(OperatorError::NotFound)));
            }
            ended.lock().unwrap().push(number);
        }));
    }
    for count in 0..6 {
        // Time passes when every task waits.
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(*store.waiting.borrow(), (6 - count).min(2));
        assert_eq!(ended.lock().unwrap().len(), count);
        store.passes.add_permits(1);
    }
    for reader in readers {
        reader.await.unwrap();
    }
    assert!(ended.lock().unwrap().is_sorted());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_is_filled_from_short_pages_of_the_store() {
    let store = Stopped::new(1);
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let upstream = Upstream::counting().await;
    let gateway = Gateway::start_on(config(upstream.url()), opened).await.unwrap();
    for key in 0..50 {
        let answer = post(gateway.local_addr(), "/", &format!("key-{key}"), "x").await;
        assert_eq!(answer.status, 201);
    }
    let listed = get(gateway.admin_addr().unwrap(), "/api/keys").await.json();
    assert_eq!(listed["keys"].as_array().unwrap().len(), 50);
    assert!(listed["next"].is_null(), "{listed}");
}

fn lines(audit: &std::path::Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(audit).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A store that stops before it writes stands for a process that is killed there: what is on the disk
/// by then is all that is left.
#[tokio::test(flavor = "multi_thread")]
async fn an_intention_is_on_the_disk_before_the_record_is_written() {
    let store = Stopped::new(100);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>)
        .store_timeout(Duration::from_secs(3600))
        .build()
        .unwrap();
    let inspect = Arc::clone(&store) as Arc<dyn Inspect>;
    let keys = OperatorRecords::new(
        engine,
        inspect,
        Audit::new(&path, "a test"),
        Duration::from_secs(3600),
    );
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let upstream = Upstream::counting().await;
    let gateway = Gateway::start_on(config(upstream.url()), opened).await.unwrap();
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
    let id =
        OperationId::from_hex(keys.list(ListQuery::default()).await.unwrap().keys[0].id.as_str());
    let id = id.unwrap();
    let fence = keys.show(&id).await.unwrap().fence;
    let decide = || {
        let decision = json!({
            "fence": fence, "forget": true, "outcome": "did-not-happen", "reason": "a test charge",
        });
        let decision: Decision = serde_json::from_value(decision).unwrap();
        let by = Decider { who: "op".into(), by: DecisionChannel::Cli, from: "here".into() };
        let keys = keys.clone();
        async move { keys.resolve(&id, decision, by).await }
    };
    store.stop_at(Some(Call::Release));
    let deciding = tokio::spawn(decide());
    store.until_waiting().await;
    let seen = lines(&path);
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(seen[0]["stage"], "intended");
    assert_eq!(keys.show(&id).await.unwrap().state.as_str(), "done", "nothing is written yet");
    // The operator hangs up; the decision goes on to its second line all the same.
    deciding.abort();
    store.go_on();
    while lines(&path).len() < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(lines(&path)[1]["stage"], "done");
    let shown = keys.show(&id).await.unwrap();
    assert_eq!(shown.state.as_str(), "released");
    assert_eq!(shown.decision.unwrap().why, "a test charge");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_decided_where_the_audit_file_cannot_be_written() {
    let store = Stopped::new(100);
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.audit_file = Some("/nowhere/audit.jsonl".into());
    let gateway = Gateway::start_on(config, opened).await.unwrap();
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    assert_eq!(post(address, "/", "k", "x").await.status, 201);
    let seen = get(admin, "/api/keys").await.json()["keys"][0].clone();
    let path = format!("/api/keys/{}/release", seen["id"].as_str().unwrap());
    let json = [("content-type", "application/json")];
    let decision = json!({"fence": seen["fence"], "forget": true, "reason": "r"}).to_string();
    let answer = send(admin, "POST", &path, &json, &decision).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "audit"), "{}", answer.text());
    assert_eq!(get(admin, "/api/keys").await.json()["keys"][0]["state"], "done");
}

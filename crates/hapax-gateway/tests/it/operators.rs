//! Operators and a store that stops when it is told.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::store::{BoxFuture, Page, Reaped, Snapshot, Swap, Swapped};
use hapax::{
    Idempotency, Inspect, Key, MemoryCapacity, MemoryStore, State, Store, StoreError, StoreKey,
    SystemClock,
};
use hapax_gateway::{Gateway, Opened};
use hapax_operators::{Keys, KeysError, List};
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
            waiting: watch::Sender::new(0),
            passes: Semaphore::new(0),
            page,
        })
    }

    fn stop_at(&self, call: Option<Call>) {
        *self.at.lock().unwrap() = call;
    }

    async fn pass(&self, call: Call) {
        if *self.at.lock().unwrap() == Some(call) {
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
            let releases = swap.draft.record.state == State::Released;
            self.pass(if releases { Call::Release } else { Call::Other }).await;
            self.store.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a StoreKey) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            let seen = self.store.load(key).await;
            self.pass(Call::Read).await;
            seen
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }
}

impl Inspect for Stopped {
    fn page(
        &self,
        after: Option<StoreKey>,
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
) -> (Arc<Notify>, Upstream, hapax_gateway::Running) {
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
    let opened = Opened::new(Arc::clone(store) as Arc<dyn Inspect>, None);
    let gateway = Gateway::start_on(config(upstream.url()), opened).await.unwrap();
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
    let decision = json!({"fence": fence, "force": force, "forget": force}).to_string();
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
async fn what_was_done_in_the_last_moment_is_what_was_forgotten() {
    let (status, told) = ends_meanwhile(Call::Release, 201, true).await;
    assert_eq!(status, 200, "{told}");
    let was = &told["was"];
    assert_eq!((&was["state"], &was["status"]), (&json!("done"), &json!(201)), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_refused_is_told_what_it_was_refused_for() {
    let (status, told) = ends_meanwhile(Call::Read, 500, false).await;
    assert_eq!((status, &told["code"]), (409, &json!("in-flight")), "{told}");
    assert!(!told["error"].as_str().unwrap().contains("--"), "{told}");
}

fn keys(store: &Arc<Stopped>) -> Keys {
    let engine = Idempotency::builder(Arc::clone(store) as Arc<dyn Store>).build();
    Keys::new(engine, Arc::clone(store) as Arc<dyn Inspect>, Duration::from_secs(3600))
}

#[tokio::test(start_paused = true)]
async fn two_read_records_and_the_others_wait_in_order() {
    let store = Stopped::new(100);
    let keys = keys(&store);
    store.stop_at(Some(Call::Read));
    let ended = Arc::new(Mutex::new(Vec::new()));
    let mut readers = Vec::new();
    for number in 0..6 {
        let (keys, ended) = (keys.clone(), Arc::clone(&ended));
        readers.push(tokio::spawn(async move {
            if number % 2 == 0 {
                keys.list(List::default()).await.unwrap();
            } else {
                let id = keys.id(&[], &Key::new("k").unwrap());
                assert!(matches!(keys.show(&id).await, Err(KeysError::NotFound)));
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
    let opened = Opened::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
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

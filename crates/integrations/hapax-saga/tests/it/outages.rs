//! Servers that freeze, stop and crash while sagas run on several nodes, and nodes that die or shut
//! down. In the end every saga has ended, with one effect for each step and each undo, and no node has
//! called anything after another one.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use hapax_core::{FencingToken, Idempotency, Store, Verdict};
use hapax_saga::{
    Saga, SagaError, SagaOperator, Sagas, StepContext, StepEffect, StepError, StepRetry, UndoError,
};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::shop::DAY;
use crate::world::{key, scope};

/// Lease of the sagas whose nodes die: shorter than the outages.
const LEASE: Duration = Duration::from_secs(1);

/// Timeout of all that must happen; longer than a busy machine needs.
const LIMIT: Duration = Duration::from_secs(120);

/// A private server, and stores that use it.
pub(crate) trait OutageFixture: Sized {
    /// Starts a server whose acknowledged writes survive a kill.
    async fn start() -> Self;

    /// Opens a store. A server that has just started may reject that for a moment.
    fn open(&self) -> impl Future<Output = Arc<dyn Store>> + Send + use<Self> + 'static;

    /// Freezes the server: connections stay open without an answer.
    fn pause(&self);

    /// Lets it continue.
    fn resume(&self);

    /// Stops it, as an operator does.
    async fn stop(&mut self);

    /// Kills it.
    async fn kill(&mut self);

    /// Starts it again on its files.
    async fn restart(&mut self);
}

/// The systems that the steps call, and what they saw.
#[derive(Clone, Default)]
struct Outside(Arc<Mutex<Record>>);

#[derive(Default)]
struct Record {
    /// Calls, by saga and name.
    calls: BTreeMap<(u32, String), u32>,
    /// Keys, by saga and name: a system that honors keys has one effect for each.
    keys: BTreeMap<(u32, String), BTreeSet<String>>,
    /// The greatest fence of each saga.
    fences: BTreeMap<u32, FencingToken>,
    takeovers: u32,
    /// Nodes that have shut down.
    down: BTreeSet<u32>,
    violations: Vec<String>,
}

/// The state of the steps of a node.
struct Systems {
    node: u32,
    outside: Outside,
}

impl Systems {
    /// Calls a system, which takes a while.
    async fn call(at: &StepContext<Self>, saga: u32, name: &str) {
        at.outside.begin(at, saga, name);
        sleep(Duration::from_millis(30)).await;
        let mut record = at.outside.0.lock().unwrap();
        *record.calls.entry((saga, name.to_owned())).or_default() += 1;
        let keys = record.keys.entry((saga, name.to_owned())).or_default();
        keys.insert(at.key().as_str().to_owned());
    }
}

impl Outside {
    fn begin(&self, at: &StepContext<Systems>, saga: u32, name: &str) {
        let record = &mut *self.0.lock().unwrap();
        let (node, fence) = (at.node, at.fence());
        let last = record.fences.entry(saga).or_insert(fence);
        if fence < *last {
            let text = format!("node {node} called {name} of {saga} after another one");
            record.violations.push(text);
        }
        record.takeovers += u32::from(fence > *last);
        *last = fence.max(*last);
        if record.down.contains(&node) {
            record.violations.push(format!("node {node} called {name} after its shutdown"));
        }
    }

    fn calls(&self) -> u32 {
        self.0.lock().unwrap().calls.values().sum()
    }

    fn takeovers(&self) -> u32 {
        self.0.lock().unwrap().takeovers
    }

    /// Waits until there were `more` calls.
    async fn calls_again(&self, more: u32) {
        let calls = self.calls();
        while self.calls() < calls + more {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Compares what the systems saw with the ends of the sagas.
    fn check(&self, sagas: u32) {
        let record = self.0.lock().unwrap();
        assert!(record.violations.is_empty(), "{:#?}", record.violations);
        for saga in 0..sagas {
            let is_undone = is_undone(saga);
            for step in ["one", "two", "mail", "three"] {
                let effects =
                    |name: &str| record.keys.get(&(saga, name.to_owned())).map_or(0, BTreeSet::len);
                assert_eq!(effects(step), 1, "{step} of {saga}");
                let undone = effects(&format!("undo {step}"));
                assert_eq!(undone, usize::from(is_undone), "undo {step} of {saga}");
            }
            // A system without keys.
            assert_eq!(record.calls.get(&(saga, "mail".to_owned())), Some(&1), "mail of {saga}");
        }
    }
}

/// Returns whether a saga of this number is undone.
const fn is_undone(saga: u32) -> bool {
    saga % 2 == 1
}

/// Returns a saga of steps and pauses, which is undone if its number is odd.
fn errand(systems: Systems) -> Saga<u32, u32, String> {
    let outside = systems.outside.clone();
    let mut saga = Saga::define("errand", 1, systems);
    let quick = StepRetry::default().timeout(Duration::from_secs(2));
    let undo = |name: &'static str| {
        move |at: StepContext<Systems>, saga: u32, _: StepEffect<u32>| async move {
            Systems::call(&at, saga, &format!("undo {name}")).await;
            Ok::<_, UndoError>(())
        }
    };
    let [one, two, three] = ["one", "two", "three"].map(|name| {
        saga.keyed(name, DAY, move |at: StepContext<Systems>, saga: u32| async move {
            Systems::call(&at, saga, name).await;
            Ok::<_, StepError<String>>(saga)
        })
        .retry(quick)
        .settle(Duration::ZERO)
        .undo(undo(name))
    });
    let mail = saga
        .once("mail", async |at: StepContext<Systems>, saga: u32| {
            Systems::call(&at, saga, "mail").await;
            Ok::<_, StepError<String>>(saga)
        })
        .retry(quick)
        .settle(Duration::ZERO)
        .reconcile(move |_: StepContext<Systems>, saga: u32| {
            let sent = outside.0.lock().unwrap().calls.contains_key(&(saga, "mail".to_owned()));
            async move { if sent { Verdict::Happened(saga) } else { Verdict::DidNotHappen } }
        })
        .undo(undo("mail"));
    saga.flow(move |op, saga: u32| async move {
        op.run(one, saga).await?;
        op.sleep("short", Duration::from_millis(200)).await;
        op.run(two, saga).await?;
        // It never arrives: the saga is parked meanwhile.
        assert_eq!(op.signal::<u32>("never", Duration::from_secs(1)).await, None);
        op.run(mail, saga).await?;
        op.run(three, saga).await?;
        if is_undone(saga) { Err("odd".to_owned()) } else { Ok(saga) }
    })
    .unwrap()
}

/// A node: a process, as far as it loses all it has when it is killed.
struct Node {
    runtime: Runtime,
    sagas: Sagas,
    saga: Saga<u32, u32, String>,
    /// Ends its work.
    stop: oneshot::Sender<()>,
    stopped: tokio::task::JoinHandle<bool>,
}

impl Node {
    async fn new(
        opening: impl Future<Output = Arc<dyn Store>> + Send + 'static,
        node: u32,
        outside: &Outside,
        lease: Duration,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let saga = errand(Systems { node, outside: outside.clone() });
        let own = saga.clone();
        let opened = runtime.spawn(async move {
            let engine = Idempotency::builder(opening.await).namespace("").build().unwrap();
            Sagas::builder(engine).register(&own).lease(lease).build().unwrap()
        });
        let sagas = opened.await.unwrap();
        let (stop, stopping) = oneshot::channel();
        let running = sagas.clone();
        let stopped = runtime.spawn(async move {
            // A sender that is dropped stops nothing.
            let stopping = async {
                if stopping.await.is_err() {
                    pending().await
                }
            };
            running.run(stopping, Duration::from_secs(30)).await
        });
        Self { runtime, sagas, saga, stop, stopped }
    }

    fn kill(self) {
        self.runtime.shutdown_background();
    }

    fn client(&self) -> Client {
        let (sagas, saga) = (self.sagas.clone(), self.saga.clone());
        Client { runtime: self.runtime.handle().clone(), sagas, saga }
    }
}

/// A client of a node, whose calls end with it.
#[derive(Clone)]
struct Client {
    runtime: Handle,
    sagas: Sagas,
    saga: Saga<u32, u32, String>,
}

impl Client {
    /// Returns the outcome of a saga; `None` without an answer.
    async fn outcome(self, saga: u32) -> Option<Result<u32, SagaError<String>>> {
        let outcome = async move {
            let (scope, key) = (scope(), key(&saga.to_string()));
            let started = self.sagas.start(&self.saga, &scope, &key, &saga).await.ok()?;
            Some(started.outcome().await)
        };
        let outcome = self.runtime.spawn(timeout(Duration::from_secs(5), outcome));
        match outcome.await {
            Ok(outcome) => outcome.ok()?,
            Err(error) if error.is_cancelled() => None,
            Err(error) => panic!("{error}"),
        }
    }
}

type Clients = Arc<RwLock<Vec<Client>>>;

/// Starts a saga and waits for its end, by whichever node answers.
async fn insist(clients: Clients, saga: u32) {
    for attempt in 0.. {
        let client = {
            let clients = clients.read().unwrap();
            clients[(saga as usize + attempt) % clients.len()].clone()
        };
        match client.outcome(saga).await {
            Some(Ok(n)) if !is_undone(saga) && n == saga => return,
            Some(Err(SagaError::Undone(error))) if is_undone(saga) && error == "odd" => return,
            // The store is away, or the node has died.
            None | Some(Err(SagaError::Store(_))) => sleep(Duration::from_millis(50)).await,
            Some(outcome) => panic!("{saga}: {outcome:?}"),
        }
    }
}

/// Waits until all clients have the outcome of their saga.
async fn all_end(clients: &mut JoinSet<()>, store: Arc<dyn Store>) {
    let ended = async { while clients.join_next().await.transpose().unwrap().is_some() {} };
    if timeout(LIMIT, ended).await.is_err() {
        let operator =
            SagaOperator::new(Idempotency::builder(store).namespace("").build().unwrap());
        let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
        panic!("sagas did not end: {sagas:#?}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Outage {
    Freeze,
    Stop,
    Kill,
}

async fn suffer<F: OutageFixture>(server: &mut F, outage: Outage) {
    match outage {
        Outage::Freeze => server.pause(),
        Outage::Stop => server.stop().await,
        Outage::Kill => server.kill().await,
    }
    // Leases lapse meanwhile.
    sleep(2 * LEASE).await;
    match outage {
        Outage::Freeze => server.resume(),
        Outage::Stop | Outage::Kill => server.restart().await,
    }
}

/// Sagas survive outages of their store, while they run and while another node continues them.
pub(crate) async fn sagas_survive_outages<F: OutageFixture>() {
    const BATCH: u32 = 24;
    let mut server = F::start().await;
    let outside = Outside::default();
    let mut nodes = Vec::new();
    for number in 0..3 {
        nodes.push(Node::new(server.open(), number, &outside, LEASE).await);
    }
    let alive = Clients::default();
    let publish = |nodes: &[Node]| {
        *alive.write().unwrap() = nodes.iter().map(Node::client).collect();
    };
    publish(&nodes);
    let (mut clients, mut sagas) = (JoinSet::new(), 0);
    for outage in [Outage::Freeze, Outage::Stop, Outage::Kill] {
        for saga in sagas..sagas + BATCH {
            clients.spawn(insist(Arc::clone(&alive), saga));
        }
        sagas += BATCH;
        outside.calls_again(BATCH / 2).await;
        suffer(&mut server, outage).await;
        outside.calls_again(BATCH / 4).await;
        // A node dies, and the store fails again while others continue its sagas.
        let takeovers = outside.takeovers();
        nodes.remove(0).kill();
        let recovering = async {
            while outside.takeovers() == takeovers {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LIMIT, recovering).await.expect("another node continues");
        suffer(&mut server, outage).await;
        nodes.push(Node::new(server.open(), 3 + sagas, &outside, LEASE).await);
        publish(&nodes);
        // An outage longer than a lease counts as a crash of what ran, and five in a row need an
        // operator: each saga lives through two, and the death of its node.
        all_end(&mut clients, server.open().await).await;
    }
    outside.check(sagas);
    nodes.into_iter().for_each(Node::kill);
}

/// A node that shuts down under load calls nothing afterwards, and another one continues at once: no
/// lease lapses within the test.
pub(crate) async fn a_shutdown_under_load_hands_its_sagas_over<F: OutageFixture>() {
    const SAGAS: u32 = 40;
    let server = F::start().await;
    let outside = Outside::default();
    let hour = Duration::from_secs(3600);
    let first = Node::new(server.open(), 0, &outside, hour).await;
    let alive: Clients = Arc::new(RwLock::new(vec![first.client()]));
    let mut clients = JoinSet::new();
    for saga in 0..SAGAS {
        clients.spawn(insist(Arc::clone(&alive), saga));
    }
    outside.calls_again(SAGAS).await;
    let second = Node::new(server.open(), 1, &outside, hour).await;
    *alive.write().unwrap() = vec![second.client()];
    first.stop.send(()).unwrap();
    assert!(timeout(LIMIT, first.stopped).await.unwrap().unwrap(), "a run did not end");
    outside.0.lock().unwrap().down.insert(0);
    all_end(&mut clients, server.open().await).await;
    outside.check(SAGAS);
    assert!(outside.takeovers() > 0, "no saga was handed over");
    first.runtime.shutdown_background();
    second.kill();
}

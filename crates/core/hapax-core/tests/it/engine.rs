//! The engine, with a store whose faults and a clock whose time are set by tests.

mod faults;
mod functions;
mod ghosts;
mod keyed;
mod leases;
mod limits;
mod local;
mod namespaces;
mod operators;
mod parked;
mod quarantine;
mod transactions;
mod unretried;
mod waiting;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Claim, Clock, EngineLimits, Fingerprint, FingerprintScheme, Idempotency, Key, KeyRing, Lease,
    MemoryCapacity, MemoryStore, Notify, OnUnknown, OperationId, OperationRequest, Outcome, Policy,
    Scope, Store, StoreError, Timestamp,
};
use tokio::time::Instant;

use faults::Unreliable;

/// Wall-clock time that follows tokio's, which tests pause.
#[derive(Debug)]
struct TestClock(Instant);

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_000_000_000_000).after(self.0.elapsed())
    }
}

/// A request whose fingerprint is that of its text.
struct Text(&'static str);

impl OperationRequest for Text {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("text/2").unwrap()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        let domain = match scheme.as_str() {
            "text/1" => "text/1",
            "text/2" => "text/2",
            _ => return None,
        };
        Some(Fingerprint::builder(domain).field(self.0.as_bytes()).finish())
    }
}

/// One store, and any number of processes that use it.
struct World {
    store: Arc<Unreliable>,
    clock: Arc<TestClock>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(TestClock(Instant::now()));
        let memory = Arc::new(MemoryStore::new(clock.clone(), MemoryCapacity::default()));
        Self { store: Arc::new(Unreliable::new(memory)), clock }
    }

    /// Returns the same records behind a connection with its own faults.
    fn elsewhere(&self) -> Self {
        Self { store: Arc::new(self.store.elsewhere()), clock: self.clock.clone() }
    }

    fn process(&self) -> Idempotency {
        self.limited(EngineLimits::default())
    }

    fn limited(&self, limits: EngineLimits) -> Idempotency {
        let engine = Idempotency::builder(Arc::clone(&self.store)).clock(self.clock.clone());
        engine.limits(limits).build().unwrap()
    }
}

/// A store with other capabilities than the inner one.
#[derive(Debug)]
struct WithCapabilities {
    store: Arc<Unreliable>,
    secrets: Option<KeyRing>,
    notify: Option<Arc<dyn Notify>>,
    shared: bool,
}

impl Store for WithCapabilities {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            secrets: self.secrets.as_ref(),
            notify: self.notify.as_deref(),
            shared: self.shared,
            schedule: None,
        }
    }
}

fn policy(on_unknown: OnUnknown) -> Policy {
    let mut policy = Policy::default();
    policy.terms.on_unknown = on_unknown;
    policy
}

/// Returns a policy that executes unknown operations again.
fn reexecute() -> Policy {
    policy(OnUnknown::Reexecute)
}

fn key() -> Key {
    Key::new("k-1").unwrap()
}

async fn claim(process: &Idempotency, text: &'static str, policy: &Policy) -> Claim {
    process.claim(&Scope::shared(), &key(), &Text(text), policy).await.unwrap()
}

async fn own(process: &Idempotency, policy: &Policy) -> Lease {
    match claim(process, "a", policy).await {
        Claim::Execute(lease) => lease,
        other => panic!("expected to execute, got {other:?}"),
    }
}

fn outcome(text: &'static str) -> Outcome {
    Outcome::new("text", text)
}

async fn replayed(process: &Idempotency) -> Outcome {
    match claim(process, "a", &Policy::default()).await {
        Claim::Replay(replay) => replay.outcome,
        other => panic!("expected a replay, got {other:?}"),
    }
}

/// Lets every task run until all of them wait.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

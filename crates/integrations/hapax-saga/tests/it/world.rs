//! A store in memory whose clock follows tokio's, which tests pause, and processes over it.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, Idempotency, Key, MemoryCapacity, MemoryStore, Scope, Timestamp};
use hapax_saga::{Saga, Sagas};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Wall-clock time that follows tokio's.
#[derive(Debug)]
struct TestClock(Instant);

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_790_000_000_000_000).after(self.0.elapsed())
    }
}

/// One store, and any number of processes that use it.
pub(crate) struct World {
    pub(crate) store: Arc<MemoryStore>,
    clock: Arc<TestClock>,
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(TestClock(Instant::now()));
        let store = Arc::new(MemoryStore::new(clock.clone(), MemoryCapacity::default()));
        Self { store, clock }
    }

    /// Starts a process that has this definition and drives what is due.
    pub(crate) fn process<I, O, E>(&self, saga: &Saga<I, O, E>) -> Process {
        let engine = Idempotency::builder(Arc::clone(&self.store)).clock(self.clock.clone());
        let engine = engine.build().unwrap();
        let sagas = Sagas::builder(engine.clone()).register(saga).build().unwrap();
        let running = sagas.clone();
        let task = tokio::spawn(async move {
            running.run(std::future::pending(), Duration::ZERO).await;
        });
        Process { sagas, engine, task }
    }
}

/// A process.
pub(crate) struct Process {
    pub(crate) sagas: Sagas,
    pub(crate) engine: Idempotency,
    pub(crate) task: JoinHandle<()>,
}

pub(crate) fn scope() -> Scope {
    Scope::of([("customer", "c-1")])
}

pub(crate) fn key(text: &str) -> Key {
    text.parse().unwrap()
}

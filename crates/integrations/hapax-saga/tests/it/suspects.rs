//! A saga that ends its process, and those that run beside it.

use std::collections::BTreeMap;
use std::future::pending;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{Idempotency, MemoryStore};
use hapax_saga::log::{Log, StuckReason};
use hapax_saga::{Saga, SagaOperator, Sagas, StepContext, StepError};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::shop::DAY;
use crate::world::{key, scope};

const LEASE: Duration = Duration::from_millis(300);

/// The number of the saga that ends its process, which starts after the others.
const DEADLY: u32 = 4;

/// A process, as its steps see it.
#[derive(Clone, Default)]
struct Process {
    killed: Arc<Notify>,
    calls: Arc<Mutex<BTreeMap<u32, u32>>>,
}

fn saga(process: &Process) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("suspects", 1, process.clone());
    let work = async |at: StepContext<Process>, n: u32| {
        *at.calls.lock().unwrap().entry(n).or_default() += 1;
        if n == DEADLY {
            at.killed.notify_one();
            pending::<()>().await;
        }
        // Slower than the deadly one.
        sleep(LEASE).await;
        Ok::<_, StepError<String>>(n)
    };
    let work = saga.keyed("work", DAY, work).no_undo();
    saga.flow(move |op, n: u32| async move { op.run(work, n).await }).unwrap()
}

/// Runs a process until it is killed, or until every saga is done or stuck. Returns whether it was
/// killed.
fn process(store: &Arc<MemoryStore>, calls: &Arc<Mutex<BTreeMap<u32, u32>>>) -> bool {
    let process = Process { calls: Arc::clone(calls), ..Process::default() };
    let saga = saga(&process);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // All that the process has is dropped with the runtime, as in a kill.
    runtime.block_on(async {
        let engine = Idempotency::builder(Arc::clone(store)).build().unwrap();
        let operator = SagaOperator::new(engine.clone());
        let sagas = Sagas::builder(engine).register(&saga).lease(LEASE).build().unwrap();
        let work = async {
            for n in 0..=DEADLY {
                sagas.start(&saga, &scope(), &key(&n.to_string()), &n).await.unwrap();
            }
            loop {
                let (unfinished, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
                let is_stuck = |log: &Log| log.stuck.is_some();
                if unfinished.iter().all(|saga| saga.log.as_ref().is_some_and(is_stuck)) {
                    return;
                }
                sleep(LEASE / 10).await;
            }
        };
        tokio::select! {
            () = process.killed.notified() => true,
            () = work => false,
            _ = sagas.run(pending(), Duration::ZERO) => unreachable!("it does not shut down"),
        }
    })
}

#[test]
fn a_saga_that_ends_its_process_makes_no_other_one_stuck() {
    let (store, calls) = (Arc::new(MemoryStore::default()), Arc::default());
    let mut kills = 0;
    while process(&store, &calls) {
        kills += 1;
        assert!(kills <= 5, "the deadly saga is not stuck");
    }
    assert_eq!(calls.lock().unwrap()[&DEADLY], 5);
    // Every other one is done.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listed = runtime.block_on(async {
        let operator = SagaOperator::new(Idempotency::builder(store).build().unwrap());
        operator.list(None, NonZeroU32::MAX).await.unwrap().0
    });
    let [only] = &*listed else { panic!("expected one saga, found {listed:?}") };
    let log = only.log.clone().unwrap();
    assert_eq!(log.stuck.unwrap().reason, StuckReason::Crashed);
    assert_eq!(log.steps[0].argument.0, hapax_core::value::write(&DEADLY, 64).unwrap());
}

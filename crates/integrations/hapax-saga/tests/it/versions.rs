//! Several versions of a definition over one store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::{Idempotency, OperationId};
use hapax_saga::{Saga, SagaLookup, SagaOperator, Sagas, StepContext, StepError};
use tokio::time::sleep;

use crate::shop::DAY;
use crate::world::{World, key, scope};

type Calls = Arc<AtomicU32>;

async fn charge(at: StepContext<Calls>, cents: u64) -> Result<u64, StepError<String>> {
    // The first process dies in the first call.
    if at.fetch_add(1, Ordering::SeqCst) == 0 {
        std::future::pending::<()>().await;
    }
    Ok(cents)
}

async fn other(_: StepContext<Calls>, _: u64) -> Result<u64, StepError<String>> {
    Ok(0)
}

fn first(calls: &Calls) -> Saga<u64, u64, String> {
    let mut order = Saga::define("order", 1, Arc::clone(calls));
    let charge = order.keyed("charge", DAY, charge).no_undo();
    order.flow(move |op, cents| async move { op.run(charge, cents).await }).unwrap()
}

/// The second version requests another step.
fn second(calls: &Calls) -> Saga<u64, u64, String> {
    let mut order = Saga::define("order", 2, Arc::clone(calls));
    let other = order.again("other", other).no_undo();
    order.flow(move |op, cents| async move { op.run(other, cents).await }).unwrap()
}

/// Starts a saga in a process that dies in its first step: a runtime of its own, which ends.
fn die_in_a_step(world: &World, saga: &Saga<u64, u64, String>, calls: &Calls) -> OperationId {
    let die = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let process = world.process(saga);
            let started = process.sagas.start(saga, &scope(), &key("k"), &1999).await.unwrap();
            while calls.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            started.id()
        })
    };
    std::thread::scope(|threads| threads.spawn(die).join()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_start_of_a_newer_version_leaves_an_unfinished_saga_to_the_version_of_its_log() {
    let (world, calls) = (World::new(), Calls::default());
    let (old, new) = (first(&calls), second(&calls));
    let id = die_in_a_step(&world, &old, &calls);
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let upgraded = Sagas::builder(engine.clone()).register(&new).build().unwrap();
    sleep(Duration::from_secs(60)).await;
    for _ in 0..7 {
        let started = upgraded.start(&new, &scope(), &key("k"), &1999).await.unwrap();
        assert!(!started.is_first());
        sleep(Duration::from_secs(60)).await;
    }
    let SagaLookup::Unfinished(seen) = SagaOperator::new(engine).show(&id).await.unwrap() else {
        panic!("it is unfinished")
    };
    let log = seen.log.unwrap();
    assert_eq!((log.version, log.stuck), (1, None));
    // A process with the first version continues it.
    let last = world.process(&old);
    let started = last.sagas.start(&old, &scope(), &key("k"), &1999).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 1999);
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_process_with_both_versions_continues_a_saga_by_the_version_of_its_log() {
    let (world, calls) = (World::new(), Calls::default());
    let (old, new) = (first(&calls), second(&calls));
    die_in_a_step(&world, &old, &calls);
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let both = Sagas::builder(engine).register(&old).register(&new).build().unwrap();
    sleep(Duration::from_secs(60)).await;
    let started = both.start(&new, &scope(), &key("k"), &1999).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 1999, "not 0, as of the second version");
}

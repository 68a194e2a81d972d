//! Results: one execution, whose result every call with the same request gets.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use hapax_core::{InFlight, OnUnknown, Policy, RunError, Scope};
use serde::Serialize;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::super::{World, key, settle};
use super::{
    Count, LEASE, Unwritable, call, charge, declare, executed, never, receipt, replayed, run,
};

#[tokio::test(start_paused = true)]
async fn a_function_is_executed_once_and_its_value_is_replayed() {
    let world = World::new();
    let (here, there) = (world.process(), world.process());
    let count = Count::default();
    let first = call(&charge(&here, OnUnknown::Reexecute), count.then(Ok(receipt("r-1")))).await;
    assert_eq!(executed(&first), &receipt("r-1"));
    for process in [here, there] {
        let again = call(&charge(&process, OnUnknown::Reexecute), never).await;
        assert_eq!(replayed(&again), &receipt("r-1"));
        assert_eq!(again.unwrap().fence, first.as_ref().unwrap().fence);
    }
    assert_eq!(count.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn one_of_many_concurrent_calls_executes_and_all_are_answered() {
    let world = World::new();
    let count = Count::default();
    let mut calls = JoinSet::new();
    for process in [world.process(), world.process()] {
        let charge =
            declare(&process).at_least_once().wait(Duration::from_secs(60)).build().unwrap();
        for _ in 0..25 {
            let (charge, work) = (charge.clone(), count.slowly(LEASE));
            calls.spawn(async move { call(&charge, work).await });
        }
    }
    let answers = calls.join_all().await;
    assert_eq!(count.get(), 1);
    let here = answers.iter().filter(|answer| !answer.as_ref().unwrap().replayed).count();
    assert_eq!((answers.len(), here), (50, 1));
    assert!(answers.iter().all(|answer| answer.as_ref().unwrap().value == receipt("slow")));
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_in_flight_is_answered_with_a_retry_after() {
    let world = World::new();
    let charge = charge(&world.process(), OnUnknown::Reexecute);
    let count = Count::default();
    let running = tokio::spawn({
        let (charge, work) = (charge.clone(), count.slowly(Duration::from_secs(100)));
        async move { call(&charge, work).await }
    });
    settle().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let Err(RunError::InFlight { retry_after }) = call(&charge, never).await else { panic!() };
    assert_eq!(retry_after.as_secs(), 5);
    executed(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_caller_neither_stops_the_execution_nor_loses_its_outcome() {
    let world = World::new();
    let process = world.process();
    let charge = charge(&process, OnUnknown::Block);
    let (begin, begun) = oneshot::channel();
    let work = move |_| async move {
        begin.send(()).unwrap();
        tokio::time::sleep(LEASE * 3).await;
        Ok(receipt("r-1"))
    };
    let calling = charge.clone();
    let caller = tokio::spawn(async move { call(&calling, work).await });
    begun.await.unwrap();
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    // The drain of the process waits for it.
    process.drain().await;
    assert_eq!(replayed(&call(&charge, never).await), &receipt("r-1"));
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_a_call_from_its_claim_on() {
    async fn once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
        poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
    }
    let world = World::new();
    let process = world.process();
    let charge = charge(&process, OnUnknown::Block);
    let (end, ended) = oneshot::channel();
    let mut calling = pin!(call(&charge, |_| async { Ok(ended.await.unwrap()) }));
    // The call claims; its claim is decided, and it has not read that yet; it executes.
    for _ in 0..2 {
        assert!(once(calling.as_mut()).await.is_pending());
        settle().await;
        assert!(once(pin!(process.drain())).await.is_pending(), "the drain ended");
    }
    end.send(receipt("r-1")).unwrap();
    executed(&calling.await);
    process.drain().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_dropped_while_it_claims_leaves_nothing_behind() {
    let world = World::new();
    let process = world.process();
    world.store.set(super::super::faults::Mode::NoAnswer);
    let calling = charge(&process, OnUnknown::Block);
    let caller = tokio::spawn(async move { call(&calling, never).await });
    world.store.wait_for_swaps(1).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    world.store.set(super::super::faults::Mode::Healthy);
    assert_eq!(world.store.deliver().await, 1);
    process.drain().await;
    let charge = charge(&process, OnUnknown::Block);
    executed(&call(&charge, Count::default().then(Ok(receipt("r-1")))).await);
}

#[tokio::test(start_paused = true)]
async fn a_function_gets_its_lease() {
    let world = World::new();
    let charge = charge(&world.process(), OnUnknown::Reexecute);
    let first = call(&charge, |lease| async move {
        assert_eq!((lease.attempt(), lease.checkpoint()), (1, None));
        lease.save(bytes::Bytes::from_static(b"half way")).await.unwrap();
        panic!("in the middle");
    });
    assert!(matches!(first.await, Err(RunError::Panicked)));
    let second = call(&charge, |lease| async move {
        assert_eq!(lease.checkpoint().unwrap(), "half way");
        Ok(receipt(&format!("{} under {}", lease.attempt(), lease.fence())))
    })
    .await
    .unwrap();
    assert_eq!(second.value.id, format!("2 under {}", second.fence));
}

#[tokio::test(start_paused = true)]
async fn another_request_under_the_key_is_rejected() {
    let world = World::new();
    let process = world.process();
    let one = || async { Ok::<_, String>(1) };
    let request: HashMap<_, _> = (0..100).map(|n| (n.to_string(), n)).collect();
    assert!(!run(&process, &request, one).await.unwrap().replayed);
    // In any order of the entries.
    let same: HashMap<_, _> = request.iter().map(|(name, n)| (name.clone(), *n)).collect();
    assert!(run(&process, &same, one).await.unwrap().replayed);
    let sorted: BTreeMap<_, _> = request.into_iter().collect();
    assert!(run(&process, &sorted, one).await.unwrap().replayed);
    assert!(matches!(run(&process, "another", one).await, Err(RunError::KeyReused)));
}

#[tokio::test(start_paused = true)]
async fn requests_differ_by_everything_that_serde_writes() {
    async fn differ<A: Serialize, B: Serialize>(one: A, other: B) {
        let process = World::new().process();
        let work = || async { Ok::<_, String>(1) };
        run(&process, one, work).await.unwrap();
        let other = run(&process, other, work).await;
        assert!(matches!(other, Err(RunError::KeyReused)), "{other:?}");
    }
    differ(None::<Option<u8>>, Some(None::<u8>)).await;
    differ(None::<()>, Some(())).await;
    differ(f64::NAN, f64::INFINITY).await;
    differ((1, "2"), ("1", 2)).await;
    differ(BTreeMap::from([(1, 2)]), BTreeMap::from([("1", 2)])).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_fingerprint_is_rejected() {
    let world = World::new();
    let one = || async { Ok::<_, String>(1) };
    let error = run(&world.process(), Unwritable, one).await.unwrap_err();
    assert!(matches!(error, RunError::Request(_)));
    assert_eq!(error.to_string(), "the request cannot be serialized");
    assert_eq!(error.source().unwrap().to_string(), "this value cannot be written");
    assert_eq!(world.store.swaps(), 0);
}

#[tokio::test(start_paused = true)]
async fn functions_with_different_names_have_different_records() {
    let world = World::new();
    let process = world.process();
    let charge = process.function::<u8, ()>("charge").at_most_once().build().unwrap();
    let mail = process.function::<u8, ()>("mail").at_most_once().build().unwrap();
    let scope = Scope::shared();
    let one = charge.run(&scope, &key(), "r", |_| async { Ok(1) }).await.unwrap();
    let two = mail.run(&scope, &key(), "r", |_| async { Ok(2) }).await.unwrap();
    assert_eq!((one.value, two.value, two.replayed), (1, 2, false));
    // Their scopes, under which operators find the records.
    assert_ne!(charge.scope(&scope), mail.scope(&scope));
    let record = process.operation_id(&charge.scope(&scope), &key());
    assert!(process.store().load(&record).await.unwrap().stored.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_function_executes_again_after_the_retention() {
    let world = World::new();
    let mut policy = Policy { in_flight: InFlight::Reject, ..Policy::default() };
    policy.terms.retention = Duration::from_secs(60);
    let charge = declare(&world.process()).policy(policy).at_most_once().build().unwrap();
    let count = Count::default();
    for passed in [0, 59, 1] {
        tokio::time::sleep(Duration::from_secs(passed)).await;
        call(&charge, count.then(Ok(receipt("r-1")))).await.unwrap();
    }
    assert_eq!(count.get(), 2);
}

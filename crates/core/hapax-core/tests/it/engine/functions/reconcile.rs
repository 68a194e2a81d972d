//! Reconcile hooks of functions.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::machine::{DefiniteVerdict, HookTiming, Resolve};
use hapax_core::{FencingToken, Policy, ReconcileCall, RunError, Scope, Verdict};
use tokio::time::Instant;

use super::super::{World, key, settle};
use super::{Charge, Charged, Count, Refused, call, declare, executed, never, receipt, replayed};

const HOOK: HookTiming =
    HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };

/// Returns a function whose hook returns this verdict, and the fences of the calls of the hook.
fn with_hook<F, A>(world: &World, answer: F) -> (Charge, Arc<Mutex<Vec<FencingToken>>>)
where
    F: Fn(ReconcileCall) -> A + Send + Sync + 'static,
    A: Future<Output = Verdict<Charged>> + Send + 'static,
{
    let fences = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&fences);
    let hook = move |reconcile: ReconcileCall| {
        seen.lock().unwrap().push(reconcile.fence);
        assert_eq!(reconcile.request::<(String, u8)>().unwrap(), ("order".to_owned(), 17));
        assert_eq!(reconcile.key.as_str(), "k-1");
        answer(reconcile)
    };
    (declare(&world.process()).reconcile_with(HOOK, hook).build().unwrap(), fences)
}

async fn leave_unknown(charge: &Charge) {
    call(charge, Count::default().then(Err(Refused::NoAnswer))).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn the_outcome_of_a_hook_is_replayed() {
    let world = World::new();
    let (charge, fences) = with_hook(&world, |_| async { Verdict::Happened(receipt("found")) });
    leave_unknown(&charge).await;
    for _ in 0..2 {
        assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
    }
    assert_eq!(fences.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_did_not_happen_is_executed() {
    let world = World::new();
    let (charge, fences) = with_hook(&world, |_| async { Verdict::DidNotHappen });
    leave_unknown(&charge).await;
    let answer = call(&charge, Count::default().then(Ok(receipt("second")))).await;
    assert_eq!(executed(&answer), &receipt("second"));
    assert!(fences.lock().unwrap()[0] < answer.unwrap().fence);
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_cannot_say_panics_or_hangs_leaves_the_outcome_unknown() {
    let world = World::new();
    let (charge, fences) = with_hook(&world, |_| async { Verdict::CannotSay });
    leave_unknown(&charge).await;
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    let (panics, _) = with_hook(&world, |_| async { panic!("in the hook") });
    assert!(matches!(call(&panics, never).await, Err(RunError::OutcomeUnknown)));
    let (hangs, _) = with_hook(&world, |_| std::future::pending());
    assert!(matches!(call(&hangs, never).await, Err(RunError::OutcomeUnknown)));
    // The next call calls the hook again.
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    assert_eq!(fences.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_reconciled_too() {
    let world = World::new();
    let (charge, _) = with_hook(&world, |_| async { Verdict::Happened(receipt("found")) });
    assert!(matches!(call(&charge, never).await, Err(RunError::Panicked)));
    assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
}

#[tokio::test(start_paused = true)]
async fn the_hook_is_called_also_if_the_policy_is_set_after_it() {
    let world = World::new();
    let charge = declare(&world.process())
        .reconcile_with(HOOK, |_| async { Verdict::Happened(receipt("found")) })
        .policy(Policy::default())
        .build()
        .unwrap();
    leave_unknown(&charge).await;
    assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
}

/// Returns a function whose duplicates wait, and whose hook returns this verdict after two seconds.
fn waiting(world: &World, answer: Verdict<Charged>) -> Charge {
    let hook = move |_| {
        let answer = answer.clone();
        async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            answer
        }
    };
    declare(&world.process())
        .wait(Duration::from_secs(60))
        .reconcile_with(HOOK, hook)
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_waiter_waits_for_the_hook() {
    let world = World::new();
    let here = waiting(&world, Verdict::Happened(receipt("found")));
    let there = waiting(&world, Verdict::CannotSay);
    leave_unknown(&here).await;
    let reconciling = call(&here, never);
    let duplicates = async {
        settle().await;
        tokio::join!(call(&here, never), call(&there, never))
    };
    let (first, (second, third)) = tokio::join!(reconciling, duplicates);
    for answer in [first, second, third] {
        assert_eq!(replayed(&answer), &receipt("found"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_of_a_hook_is_promoted_or_answered_and_does_not_call_it_again() {
    let world = World::new();
    let did_not = waiting(&world, Verdict::DidNotHappen);
    leave_unknown(&did_not).await;
    let count = Count::default();
    let (first, second) = tokio::join!(
        call(&did_not, count.slowly(Duration::from_secs(10))),
        call(&did_not, count.slowly(Duration::from_secs(10)))
    );
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    assert_eq!(count.get(), 1);

    let world = World::new();
    let cannot_say = waiting(&world, Verdict::CannotSay);
    leave_unknown(&cannot_say).await;
    let began = Instant::now();
    let (first, second) = tokio::join!(call(&cannot_say, never), call(&cannot_say, never));
    for answer in [first, second] {
        assert!(matches!(answer, Err(RunError::OutcomeUnknown)), "{answer:?}");
    }
    assert_eq!(began.elapsed().as_secs(), 2, "the hook was called once for both");
}

/// The call of the hook is dropped before its verdict.
#[tokio::test(start_paused = true)]
async fn a_waiter_of_a_dropped_hook_calls_it_again() {
    let world = World::new();
    let charge = waiting(&world, Verdict::Happened(receipt("found")));
    leave_unknown(&charge).await;
    let reconciling = tokio::time::timeout(Duration::from_secs(1), call(&charge, never));
    let duplicate = async {
        settle().await;
        call(&charge, never).await
    };
    let (first, second) = tokio::join!(reconciling, duplicate);
    assert!(first.is_err());
    assert_eq!(replayed(&second), &receipt("found"));
}

#[tokio::test(start_paused = true)]
async fn a_call_of_the_hook_waits_for_an_execution_that_began_before_its_verdict() {
    let world = World::new();
    let charge = waiting(&world, Verdict::CannotSay);
    leave_unknown(&charge).await;
    let reconciling = call(&charge, never);
    let operator = async {
        settle().await;
        let process = world.process();
        let record = process.operation_id(&charge.scope(&Scope::shared()), &key());
        let expected = process.store().load(&record).await.unwrap().stored.unwrap().fence;
        let resolution = DefiniteVerdict::DidNotHappen;
        let resolve = Resolve {
            expected,
            force: false,
            forget: false,
            resolution,
            note: None,
            restart: false,
        };
        process.resolve(record, resolve).await.unwrap();
        call(&charge, Count::default().slowly(Duration::from_secs(10))).await
    };
    let (first, executing) = tokio::join!(reconciling, operator);
    assert_eq!(executed(&executing), &receipt("slow"));
    assert_eq!(replayed(&first), &receipt("slow"));
}

#[tokio::test(start_paused = true)]
async fn a_downstream_key_is_unique_to_its_operation() {
    let world = World::new();
    let (keys, hook_key) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(None)));
    let seen = Arc::clone(&hook_key);
    let charge = declare(&world.process()).reconcile_with(HOOK, move |reconcile: ReconcileCall| {
        *seen.lock().unwrap() = Some(reconcile.downstream);
        async { Verdict::DidNotHappen }
    });
    let charge = charge.build().unwrap();
    let other =
        world.process().function::<Charged, Refused>("other").at_least_once().build().unwrap();
    let call = async |charge: &Charge, customer: &str| {
        let keys = Arc::clone(&keys);
        let work = move |lease: hapax_core::LeaseHandle| async move {
            keys.lock().unwrap().push(lease.downstream());
            Err(Refused::NoAnswer)
        };
        charge.run(&Scope::of([("customer", customer)]), &key(), "r", work).await.unwrap_err();
    };
    for (function, customer) in [(&charge, "a"), (&charge, "b"), (&other, "a"), (&charge, "a")] {
        call(function, customer).await;
    }
    let keys = keys.lock().unwrap();
    assert_eq!(keys[0], keys[3], "the same for each execution");
    assert_eq!(hook_key.lock().unwrap().as_ref(), Some(&keys[0]));
    assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    let record =
        world.process().operation_id(&charge.scope(&Scope::of([("customer", "a")])), &key());
    assert_ne!(keys[0].as_str(), record.to_string());
}

//! The hook that is asked what became of a call.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::machine::{HookTiming, Resolution, Resolve};
use hapax_core::{FencingToken, Policy, ReconcileCall, RunError, Scope, Verdict};
use tokio::time::Instant;

use super::super::{World, key, settle};
use super::{Charge, Charged, Count, Refused, call, declare, executed, never, receipt, replayed};

const HOOK: HookTiming =
    HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };

/// A function whose hook answers this, and what the hook was asked.
fn asking<F, A>(world: &World, answer: F) -> (Charge, Arc<Mutex<Vec<FencingToken>>>)
where
    F: Fn(ReconcileCall) -> A + Send + Sync + 'static,
    A: Future<Output = Verdict<Charged>> + Send + 'static,
{
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let ask = move |doubt: ReconcileCall| {
        seen.lock().unwrap().push(doubt.fence);
        assert_eq!(doubt.request::<(String, u8)>().unwrap(), ("order".to_owned(), 17));
        assert_eq!(doubt.key.as_str(), "k-1");
        answer(doubt)
    };
    (declare(&world.process()).reconcile_with(HOOK, ask).build().unwrap(), asked)
}

async fn doubtful(charge: &Charge) {
    call(charge, Count::default().then(Err(Refused::NoAnswer))).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn what_the_hook_says_happened_is_the_answer() {
    let world = World::new();
    let (charge, asked) = asking(&world, |_| async { Verdict::Happened(receipt("found")) });
    doubtful(&charge).await;
    for _ in 0..2 {
        assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
    }
    assert_eq!(asked.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_the_hook_says_did_not_happen_is_executed() {
    let world = World::new();
    let (charge, asked) = asking(&world, |_| async { Verdict::DidNotHappen });
    doubtful(&charge).await;
    let answer = call(&charge, Count::default().then(Ok(receipt("second")))).await;
    assert_eq!(executed(&answer), &receipt("second"));
    assert!(asked.lock().unwrap()[0] < answer.unwrap().fence);
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_cannot_say_panics_or_hangs_leaves_it_unknown() {
    let world = World::new();
    let (charge, asked) = asking(&world, |_| async { Verdict::CannotSay });
    doubtful(&charge).await;
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    let (panics, _) = asking(&world, |_| async { panic!("in the hook") });
    assert!(matches!(call(&panics, never).await, Err(RunError::OutcomeUnknown)));
    let (hangs, _) = asking(&world, |_| std::future::pending());
    assert!(matches!(call(&hangs, never).await, Err(RunError::OutcomeUnknown)));
    // The next call asks again.
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    assert_eq!(asked.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_panic_leads_to_the_hook_too() {
    let world = World::new();
    let (charge, _) = asking(&world, |_| async { Verdict::Happened(receipt("found")) });
    assert!(matches!(call(&charge, never).await, Err(RunError::Panicked)));
    assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
}

#[tokio::test(start_paused = true)]
async fn the_hook_is_asked_whenever_the_policy_was_said() {
    let world = World::new();
    let charge = declare(&world.process())
        .reconcile_with(HOOK, |_| async { Verdict::Happened(receipt("found")) })
        .policy(Policy::default())
        .build()
        .unwrap();
    doubtful(&charge).await;
    assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
}

/// A function whose copies wait, and whose hook takes two seconds for this answer.
fn waiting(world: &World, answer: Verdict<Charged>) -> Charge {
    let ask = move |_| {
        let answer = answer.clone();
        async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            answer
        }
    };
    declare(&world.process())
        .wait(Duration::from_secs(60))
        .reconcile_with(HOOK, ask)
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_waits_waits_for_the_hook() {
    let world = World::new();
    let here = waiting(&world, Verdict::Happened(receipt("found")));
    let there = waiting(&world, Verdict::CannotSay);
    doubtful(&here).await;
    let reconciling = call(&here, never);
    let copies = async {
        settle().await;
        tokio::join!(call(&here, never), call(&there, never))
    };
    let (first, (second, third)) = tokio::join!(reconciling, copies);
    for answer in [first, second, third] {
        assert_eq!(replayed(&answer), &receipt("found"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_waited_for_the_hook_is_promoted_or_told_and_asks_no_further() {
    let world = World::new();
    let did_not = waiting(&world, Verdict::DidNotHappen);
    doubtful(&did_not).await;
    let count = Count::default();
    let (first, second) = tokio::join!(
        call(&did_not, count.slowly(Duration::from_secs(10))),
        call(&did_not, count.slowly(Duration::from_secs(10)))
    );
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    assert_eq!(count.get(), 1);

    let world = World::new();
    let nobody = waiting(&world, Verdict::CannotSay);
    doubtful(&nobody).await;
    let began = Instant::now();
    let (first, second) = tokio::join!(call(&nobody, never), call(&nobody, never));
    for answer in [first, second] {
        assert!(matches!(answer, Err(RunError::OutcomeUnknown)), "{answer:?}");
    }
    assert_eq!(began.elapsed().as_secs(), 2, "asked once for both");
}

/// Whoever asked goes away before there is an answer.
#[tokio::test(start_paused = true)]
async fn a_copy_that_waited_in_vain_asks_itself() {
    let world = World::new();
    let charge = waiting(&world, Verdict::Happened(receipt("found")));
    doubtful(&charge).await;
    let reconciling = tokio::time::timeout(Duration::from_secs(1), call(&charge, never));
    let copy = async {
        settle().await;
        call(&charge, never).await
    };
    let (asked, copied) = tokio::join!(reconciling, copy);
    assert!(asked.is_err());
    assert_eq!(replayed(&copied), &receipt("found"));
}

#[tokio::test(start_paused = true)]
async fn who_asked_waits_for_who_came_before_the_answer() {
    let world = World::new();
    let charge = waiting(&world, Verdict::CannotSay);
    doubtful(&charge).await;
    let reconciling = call(&charge, never);
    let operator = async {
        settle().await;
        let process = world.process();
        let record = process.operation_id(&charge.scope(&Scope::shared()), &key());
        let expected = process.store().load(&record).await.unwrap().stored.unwrap().fence;
        let resolution = Resolution::DidNotHappen;
        let resolve = Resolve { expected, force: false, forget: false, resolution, note: None };
        process.resolve(record, resolve).await.unwrap();
        call(&charge, Count::default().slowly(Duration::from_secs(10))).await
    };
    let (asked, executing) = tokio::join!(reconciling, operator);
    assert_eq!(executed(&executing), &receipt("slow"));
    assert_eq!(replayed(&asked), &receipt("slow"));
}

#[tokio::test(start_paused = true)]
async fn downstream_an_execution_has_a_key_that_nobody_else_has() {
    let world = World::new();
    let (keys, asked) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(None)));
    let tell = Arc::clone(&asked);
    let charge = declare(&world.process()).reconcile_with(HOOK, move |doubt: ReconcileCall| {
        *tell.lock().unwrap() = Some(doubt.downstream);
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
    assert_eq!(keys[0], keys[3], "the same whenever it executes");
    assert_eq!(asked.lock().unwrap().as_ref(), Some(&keys[0]));
    assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    let record =
        world.process().operation_id(&charge.scope(&Scope::of([("customer", "a")])), &key());
    assert_ne!(keys[0].as_str(), record.to_string());
}

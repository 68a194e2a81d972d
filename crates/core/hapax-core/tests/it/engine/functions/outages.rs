//! Functions with a store that is unavailable, or that other processes write to meanwhile.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    ClaimError, Fingerprint, FingerprintScheme, OnUnknown, OperationRequest, Outcome, OutcomeClass,
    Policy, RunError, Scope,
};
use tokio::sync::Notify;

use super::super::faults::Mode;
use super::super::{Text, World, key};
use super::{Count, LEASE, Refused, call, charge, executed, failed, never, receipt, replayed};

#[tokio::test(start_paused = true)]
async fn without_a_claim_nothing_is_executed() {
    let world = World::new();
    let charge = charge(&world.process(), OnUnknown::Reexecute);
    world.store.set(Mode::Unavailable);
    let failed_call = call(&charge, never).await;
    assert!(
        matches!(failed_call, Err(RunError::NotClaimed(ClaimError::Store(_)))),
        "{failed_call:?}"
    );
    world.store.set(Mode::Healthy);
    executed(&call(&charge, Count::default().then(Ok(receipt("r-1")))).await);
}

#[tokio::test(start_paused = true)]
async fn a_deferred_outcome_is_pending_for_every_caller() {
    let world = World::new();
    let process = world.process();
    let charge = charge(&process, OnUnknown::Reexecute);
    let store = Arc::clone(&world.store);
    let first = call(&charge, move |_| async move {
        store.set(Mode::Unavailable);
        Ok(receipt("r-1"))
    });
    for answer in [first.await, call(&charge, never).await] {
        let Err(RunError::Pending { result }) = answer else { panic!("{answer:?}") };
        assert_eq!(result, Ok(receipt("r-1")));
    }
    world.store.set(Mode::Healthy);
    process.drain().await;
    assert_eq!(replayed(&call(&charge, never).await), &receipt("r-1"));
}

#[tokio::test(start_paused = true)]
async fn a_retryable_error_is_not_pending() {
    let world = World::new();
    let process = world.process();
    let charge = charge(&process, OnUnknown::Block);
    let store = Arc::clone(&world.store);
    let answer = call(&charge, move |_| async move {
        store.set(Mode::Unavailable);
        Err(Refused::Busy)
    });
    assert_eq!(failed(&answer.await), (&Refused::Busy, OutcomeClass::Retryable, false));
    world.store.set(Mode::Healthy);
    process.drain().await;
    executed(&call(&charge, Count::default().then(Ok(receipt("r-1")))).await);
}

/// Executes a function whose process cannot renew its lease, a second call in another process, and
/// a third call after both; returns their results.
async fn lapse(
    on_unknown: OnUnknown,
) -> (super::ChargeResult, super::ChargeResult, super::ChargeResult) {
    let (world, cut_off) = {
        let world = World::new();
        let cut_off = world.elsewhere();
        (world, cut_off)
    };
    let slow = charge(&cut_off.process(), on_unknown);
    let next = charge(&world.process(), on_unknown);
    let (begun, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let first = tokio::spawn({
        let (begun, end) = (Arc::clone(&begun), Arc::clone(&end));
        let work = move |_| async move {
            begun.notify_one();
            end.notified().await;
            Ok(receipt("late"))
        };
        async move { call(&slow, work).await }
    });
    begun.notified().await;
    cut_off.store.set(Mode::Unavailable);
    tokio::time::sleep(LEASE).await;
    let second = call(&next, Count::default().then(Ok(receipt("second")))).await;
    cut_off.store.set(Mode::Healthy);
    end.notify_one();
    let first = first.await.unwrap();
    let third = call(&next, never).await;
    (first, second, third)
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_was_taken_over_is_superseded() {
    let (first, second, third) = lapse(OnUnknown::Reexecute).await;
    let Err(RunError::Superseded { result }) = &first else { panic!("{first:?}") };
    assert_eq!(result, &Ok(receipt("late")));
    assert_eq!(executed(&second), &receipt("second"));
    assert_eq!(replayed(&third), &receipt("second"));
}

#[tokio::test(start_paused = true)]
async fn under_block_there_is_no_takeover_and_a_late_outcome_counts() {
    let (first, second, third) = lapse(OnUnknown::Block).await;
    assert!(matches!(second, Err(RunError::OutcomeUnknown)), "{second:?}");
    assert_eq!(executed(&first), &receipt("late"));
    assert_eq!(replayed(&third), &receipt("late"));
}

#[tokio::test(start_paused = true)]
async fn a_function_is_notified_that_its_lease_was_lost() {
    let world = World::new();
    let cut_off = world.elsewhere();
    let slow = charge(&cut_off.process(), OnUnknown::Reexecute);
    let begun = Arc::new(Notify::new());
    let first = tokio::spawn({
        let begun = Arc::clone(&begun);
        let work = move |lease: hapax_core::LeaseHandle| async move {
            begun.notify_one();
            lease.lost().await;
            Err(Refused::NoAnswer)
        };
        async move { call(&slow, work).await }
    });
    begun.notified().await;
    cut_off.store.set(Mode::Unavailable);
    tokio::time::sleep(LEASE).await;
    let next = charge(&world.process(), OnUnknown::Reexecute);
    executed(&call(&next, Count::default().then(Ok(receipt("second")))).await);
    cut_off.store.set(Mode::Healthy);
    let first = tokio::time::timeout(LEASE, first).await.unwrap().unwrap();
    assert!(matches!(first, Err(RunError::Superseded { result: Err(Refused::NoAnswer) })));
}

#[tokio::test(start_paused = true)]
async fn a_record_of_another_integration_is_not_executed_again() {
    let world = World::new();
    let process = world.process();
    let scope = Scope::shared();
    let claim = process.claim(&scope, &key(), &Text("a"), &Policy::default()).await.unwrap();
    let hapax_core::Claim::Execute(lease) = claim else { panic!() };
    lease.complete(Outcome::new("text", "a"), None).await.unwrap();
    let ran = process.at_least_once(&(&scope, key(), "a"), || async { Ok::<u8, ()>(1) }).await;
    assert!(matches!(ran, Err(RunError::NotClaimed(ClaimError::UnknownScheme))), "{ran:?}");

    // A request with the same fingerprint finds the record, and cannot read it.
    let function = process.function::<u8, ()>("f").at_most_once().build().unwrap();
    let here = function.scope(&scope);
    let claim = process.claim(&here, &key(), &Text("a"), &Policy::default()).await.unwrap();
    let hapax_core::Claim::Execute(lease) = claim else { panic!() };
    lease.complete(Outcome::new("text", "a"), None).await.unwrap();
    let ran = function.run_request(&scope, &key(), &Text("a"), |_| async { Ok(1) }).await;
    assert!(matches!(ran, Err(RunError::Undecodable { format, .. }) if format == "text"));
}

/// A request whose fingerprint is that of its number.
struct Numbered(u64);

impl OperationRequest for Numbered {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("numbered/1").unwrap()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (scheme.as_str() == "numbered/1")
            .then(|| Fingerprint::builder("numbered/1").field(&self.0.to_be_bytes()).finish())
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_may_have_a_fingerprint_of_its_own() {
    let world = World::new();
    let function = world.process().function::<u64, ()>("double").at_most_once().build().unwrap();
    let run = |number: u64| {
        let function = function.clone();
        async move {
            let work = move |_| async move { Ok(number * 2) };
            function.run_request(&Scope::shared(), &key(), &Numbered(number), work).await
        }
    };
    assert_eq!(run(4).await.unwrap().value, 8);
    assert!(run(4).await.unwrap().replayed);
    assert!(matches!(run(5).await, Err(RunError::KeyReused)));
    assert_eq!(function.policy().terms.lease, Duration::from_secs(30));
}

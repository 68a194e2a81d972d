//! Executions of the own process: none is taken over, even if its lease has lapsed by the clock.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    Claim, ClaimError, Clock, FinishError, Idempotency, InFlight, MemoryCapacity, MemoryStore,
    OnUnknown, Policy, Scope, Store, Timestamp,
};
use tokio::sync::watch;
use tokio::time::Instant;

use super::faults::{Mode, Unreliable};
use super::{TestClock, Text, World, claim, key, outcome, own, policy, replayed, settle};

/// A clock that only tests move.
#[derive(Debug)]
struct Stepped(watch::Sender<u64>);

impl Stepped {
    fn forward(&self, by: Duration) {
        self.0.send_modify(|micros| *micros += by.as_micros() as u64);
    }
}

impl Clock for Stepped {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(*self.0.borrow())
    }
}

fn world() -> (World, Arc<Stepped>) {
    let clock = Arc::new(Stepped(watch::Sender::new(1_000_000_000_000)));
    let memory = MemoryStore::new(Arc::clone(&clock) as _, MemoryCapacity::default());
    let store = Arc::new(Unreliable::new(Arc::new(memory)));
    // The wall clock of the processes does not step with that of the store.
    (World { store, clock: Arc::new(TestClock(Instant::now())) }, clock)
}

async fn assert_in_flight(process: &Idempotency, policy: &Policy) {
    let duplicate = claim(process, "a", policy).await;
    assert!(matches!(duplicate, Claim::InFlight { .. }), "{duplicate:?}");
}

const STEP: Duration = Duration::from_secs(90);

#[tokio::test(start_paused = true)]
async fn a_clock_step_forward_takes_nothing_over_from_an_execution_of_the_same_process() {
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Reconcile, OnUnknown::Block] {
        let (world, clock) = world();
        let (process, policy) = (world.process(), policy(on_unknown));
        let first = own(&process, &policy).await;
        clock.forward(STEP);
        assert_in_flight(&process, &policy).await;
        assert!(matches!(claim(&process, "b", &policy).await, Claim::Mismatch));
        assert!(first.complete(outcome("first"), None).await.is_ok());
        assert_eq!(replayed(&process).await, outcome("first"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_step_past_the_retention_takes_nothing_over_even_after_reaping() {
    let (world, clock) = world();
    let (process, policy) = (world.process(), policy(OnUnknown::Reexecute));
    let first = own(&process, &policy).await;
    clock.forward(policy.terms.retention + policy.terms.lease);
    assert_in_flight(&process, &policy).await;
    let all = NonZeroU32::new(10).unwrap();
    assert_eq!(world.store.reap(all).await.unwrap().removed, 1);
    assert_in_flight(&process, &policy).await;
    // A renewal that finds no record does not end the execution.
    let saved = first.handle().save(bytes::Bytes::new()).await;
    assert_eq!(saved, Err(FinishError::Gone));
    assert_in_flight(&process, &policy).await;
    drop(first);
    drop(own(&process, &policy).await);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_times_out_takes_nothing_from_a_running_owner() {
    let (world, clock) = world();
    let (process, policy) = (world.process(), policy(OnUnknown::Reexecute));
    let first = own(&process, &policy).await;
    clock.forward(STEP);
    world.store.set(Mode::LosesReplies);
    let duplicate = process.claim(&Scope::shared(), &key(), &Text("a"), &policy).await;
    assert!(matches!(duplicate, Ok(Claim::InFlight { .. })), "{duplicate:?}");
    world.store.set(Mode::Healthy);
    process.drain().await;
    assert!(first.complete(outcome("first"), None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_claim_in_progress_is_not_taken_over_by_another_of_the_same_process() {
    let (world, clock) = world();
    let (process, policy) = (world.process(), policy(OnUnknown::Reexecute));
    // The swap is applied, and its reply does not arrive before its lease has lapsed.
    world.store.set(Mode::LosesReplies);
    let first = process.claim(&Scope::shared(), &key(), &Text("a"), &policy).await;
    assert!(matches!(first, Err(ClaimError::Store(_))), "{first:?}");
    clock.forward(STEP);
    let duplicate = process.claim(&Scope::shared(), &key(), &Text("a"), &policy).await;
    assert!(duplicate.is_err() || matches!(duplicate, Ok(Claim::InFlight { .. })), "{duplicate:?}");
    // The claim is released in the background.
    world.store.set(Mode::Healthy);
    process.drain().await;
    assert_eq!(own(&process, &policy).await.attempt(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_lease_promotes_a_waiter_once_it_has_lapsed() {
    let (world, clock) = world();
    let (process, mut policy) = (world.process(), policy(OnUnknown::Reexecute));
    policy.in_flight = InFlight::Wait(Duration::from_secs(60));
    let first = own(&process, &policy).await;
    clock.forward(STEP);
    let waiter = {
        let process = process.clone();
        tokio::spawn(async move { claim(&process, "a", &policy).await })
    };
    // Longer than the polling interval: the lapse alone promotes no waiter.
    tokio::time::sleep(Duration::from_secs(2)).await;
    settle().await;
    assert!(!waiter.is_finished());
    drop(first);
    let promoted = waiter.await.unwrap();
    assert!(matches!(promoted, Claim::Execute(_)), "{promoted:?}");
}

#[tokio::test(start_paused = true)]
async fn another_process_takes_over_and_its_record_counts() {
    let (world, clock) = world();
    let (process, policy) = (world.process(), policy(OnUnknown::Reexecute));
    let first = own(&process, &policy).await;
    clock.forward(STEP);
    let second = own(&world.process(), &policy).await;
    clock.forward(STEP);
    // Another process owns the record now, so that only its lease counts.
    let third = own(&process, &policy).await;
    assert_eq!(first.complete(outcome("first"), None).await, Err(FinishError::Lost));
    assert_eq!(second.complete(outcome("second"), None).await, Err(FinishError::Lost));
    assert!(third.complete(outcome("third"), None).await.is_ok());
}

//! Leases: renewal, loss, checkpoints, endings; and what operators and hooks do to them.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::{HookTiming, Resolution, Resolve, Verdict};
use hapax_core::{Claim, FinishError, OnUnknown, Policy, Scope};

use super::faults::Mode;
use super::{Text, World, claim, key, outcome, own, policy, reexecute, replayed, settle};

const LEASE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn work_may_take_many_leases() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let done = lease
        .keep_alive(async {
            for _ in 0..20 {
                tokio::time::sleep(LEASE / 2).await;
                let copy = claim(&world.process(), "a", &reexecute()).await;
                assert!(matches!(copy, Claim::InFlight { .. }), "{copy:?}");
            }
            "done"
        })
        .await;
    assert!(lease.complete(outcome(done), None).await.is_ok());
    assert_eq!(replayed(&process).await, outcome("done"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_nobody_renews_lapses_and_its_owner_comes_too_late() {
    let world = World::new();
    let first = own(&world.process(), &reexecute()).await;
    tokio::time::sleep(LEASE).await;
    let second = own(&world.process(), &reexecute()).await;
    assert!(second.fence() > first.fence());
    assert_eq!((first.attempt(), second.attempt()), (1, 2));
    let handle = first.handle();
    assert_eq!(first.complete(outcome("first"), None).await, Err(FinishError::Lost));
    assert!(handle.is_lost());
    assert!(second.complete(outcome("second"), None).await.is_ok());
    assert_eq!(replayed(&world.process()).await, outcome("second"));
}

#[tokio::test(start_paused = true)]
async fn a_lapsed_lease_that_nobody_took_is_renewed() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Away);
    let work = async {
        tokio::time::sleep(LEASE * 2).await;
        world.store.set(Mode::Well);
        tokio::time::sleep(LEASE * 2).await;
    };
    lease.keep_alive(work).await;
    let copy = claim(&world.process(), "a", &reexecute()).await;
    assert!(matches!(copy, Claim::InFlight { .. }));
    assert!(lease.complete(outcome("done"), None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn work_hears_that_its_lease_was_lost() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let handle = lease.handle();
    world.store.set(Mode::Away);
    let work = async {
        tokio::time::sleep(LEASE).await;
        world.store.set(Mode::Well);
        drop(own(&world.process(), &reexecute()).await);
        handle.lost().await;
    };
    lease.keep_alive(work).await;
    assert_eq!(lease.release().await, Err(FinishError::Lost));
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_is_found_by_the_next_owner() {
    let world = World::new();
    let first = own(&world.process(), &reexecute()).await;
    first.handle().save(Bytes::from_static(b"half way")).await.unwrap();
    tokio::time::sleep(LEASE).await;
    let second = own(&world.process(), &reexecute()).await;
    assert_eq!(second.checkpoint(), Some(&Bytes::from_static(b"half way")));
    assert_eq!(first.handle().save(Bytes::new()).await, Err(FinishError::Lost));
}

#[tokio::test(start_paused = true)]
async fn what_is_released_is_executed_again() {
    let world = World::new();
    let process = world.process();
    let first = own(&process, &reexecute()).await;
    assert_eq!(first.release().await, Ok(()));
    assert_eq!(own(&process, &reexecute()).await.attempt(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_unknown_is_blocked_until_an_operator_says() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    let lease = own(&process, &block).await;
    let fence = lease.fence();
    assert_eq!(lease.abandon(None).await, Ok(()));
    tokio::time::sleep(Duration::from_secs(400 * 24 * 60 * 60)).await;
    // The record's policy counts, not only the caller's.
    assert!(matches!(claim(&process, "a", &reexecute()).await, Claim::Unknown { .. }));
    let resolution = Resolution::Happened(outcome("seen in the ledger"));
    let resolve = Resolve { expected: fence, force: false, forget: false, resolution, note: None };
    let store_key = process.operation_id(&Scope::shared(), &key());
    process.resolve(store_key, resolve).await.unwrap();
    assert_eq!(replayed(&process).await, outcome("seen in the ledger"));
}

#[tokio::test(start_paused = true)]
async fn the_hook_decides_what_is_unknown() {
    let world = World::new();
    let process = world.process();
    let mut reconciling = policy(OnUnknown::Reconcile);
    let hook = HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };
    reconciling.hook = Some(hook);
    let lease = own(&world.process(), &reconciling).await;
    tokio::time::sleep(LEASE + Duration::from_secs(59)).await;
    // What the dead owner sent may still run.
    let early = claim(&process, "a", &reconciling).await;
    let second = Some(Duration::from_secs(1));
    assert!(
        matches!(early, Claim::Unknown { reconcile_in } if reconcile_in == second),
        "{early:?}"
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    let Claim::Reconcile(question) = claim(&process, "a", &reconciling).await else { panic!() };
    assert_eq!(question.fence(), lease.fence());
    assert!(
        matches!(claim(&process, "a", &reconciling).await, Claim::Unknown { .. }),
        "one asker at a time"
    );
    let answered = question.conclude(Verdict::CannotSay, &Text("a")).await.unwrap();
    let now = Some(Duration::ZERO);
    assert!(
        matches!(answered, Claim::Unknown { reconcile_in } if reconcile_in == now),
        "{answered:?}"
    );

    let Claim::Reconcile(question) = claim(&process, "a", &reconciling).await else { panic!() };
    let answered = question.conclude(Verdict::DidNotHappen, &Text("a")).await.unwrap();
    let Claim::Execute(second) = answered else { panic!("{answered:?}") };
    assert_eq!(second.attempt(), 2);
    assert_eq!(lease.complete(outcome("late"), None).await, Err(FinishError::Lost));
}

#[tokio::test(start_paused = true)]
async fn the_owners_late_outcome_beats_the_hooks_answer() {
    let world = World::new();
    let process = world.process();
    let mut reconciling = policy(OnUnknown::Reconcile);
    reconciling.hook = Some(HookTiming { after: Duration::ZERO, timeout: Duration::from_secs(5) });
    let lease = own(&world.process(), &reconciling).await;
    tokio::time::sleep(LEASE).await;
    let Claim::Reconcile(question) = claim(&process, "a", &reconciling).await else { panic!() };
    assert!(lease.complete(outcome("late"), None).await.is_ok());
    let answered = question.conclude(Verdict::DidNotHappen, &Text("a")).await.unwrap();
    let Claim::Replay(replay) = answered else { panic!("{answered:?}") };
    assert_eq!(replay.outcome, outcome("late"));
}

#[tokio::test(start_paused = true)]
async fn another_request_under_the_key_is_refused_in_every_state() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    assert!(matches!(claim(&process, "b", &reexecute()).await, Claim::Mismatch));
    lease.complete(outcome("done"), None).await.unwrap();
    assert!(matches!(claim(&process, "b", &reexecute()).await, Claim::Mismatch));
    assert_eq!(replayed(&process).await, outcome("done"));
}

#[tokio::test(start_paused = true)]
async fn retention_ends_and_the_key_is_new() {
    let world = World::new();
    let process = world.process();
    let first = own(&process, &reexecute()).await;
    let fence = first.fence();
    first.complete(outcome("done"), Some(Duration::from_secs(60))).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let second = own(&process, &reexecute()).await;
    assert_eq!(second.attempt(), 1);
    assert!(second.fence() > fence);
}

/// Over a clock that follows real time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_blocks_its_thread_keeps_its_lease() {
    let world = World::new();
    let mut short = reexecute();
    short.terms.lease = Policy::MIN_LEASE;
    let lease = own(&world.process(), &short).await;
    let (end, ended) = std::sync::mpsc::channel();
    let work = tokio::spawn(async move {
        let done = lease.keep_alive(async move { ended.recv() }).await;
        (lease, done)
    });
    let renewed = tokio::time::timeout(Duration::from_secs(60), world.store.asked(5)).await;
    // Before anything can fail: what blocks a thread of the runtime keeps it from its end.
    end.send(()).unwrap();
    renewed.expect("it was not renewed");
    let (lease, done) = work.await.unwrap();
    done.unwrap();
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_renewed_once_the_work_is_done_or_dropped() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    lease.keep_alive(tokio::time::sleep(LEASE)).await;
    let hangs = lease.keep_alive(std::future::pending::<()>());
    assert!(tokio::time::timeout(LEASE / 2, hangs).await.is_err());
    settle().await;
    let before = world.store.swaps();
    tokio::time::sleep(LEASE * 2).await;
    assert_eq!(world.store.swaps(), before);
    assert_eq!(process.stats().in_flight, 1);
    drop(lease);
    assert_eq!(process.stats().in_flight, 0);
}

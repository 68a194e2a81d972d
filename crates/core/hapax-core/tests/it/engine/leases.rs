//! Leases: renewal, loss, checkpoints, ends, and decisions of operators and hooks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::{DefiniteVerdict, HookTiming, Resolve, Verdict};
use hapax_core::{Claim, Clock, FinishError, Idempotency, OnUnknown, Policy, Scope, Timestamp};

use super::faults::Mode;
use super::{Text, World, claim, key, outcome, own, policy, reexecute, replayed, settle};

const LEASE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn an_execution_may_take_longer_than_its_lease() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let done = lease
        .keep_alive(async {
            for _ in 0..20 {
                tokio::time::sleep(LEASE / 2).await;
                let duplicate = claim(&world.process(), "a", &reexecute()).await;
                assert!(matches!(duplicate, Claim::InFlight { .. }), "{duplicate:?}");
            }
            "done"
        })
        .await;
    assert!(lease.complete(outcome(done), None).await.is_ok());
    assert_eq!(replayed(&process).await, outcome("done"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_renewed_lapses_and_its_owner_loses() {
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
async fn a_lapsed_lease_without_a_takeover_is_renewed() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    let work = async {
        tokio::time::sleep(LEASE * 2).await;
        world.store.set(Mode::Healthy);
        tokio::time::sleep(LEASE * 2).await;
    };
    lease.keep_alive(work).await;
    let duplicate = claim(&world.process(), "a", &reexecute()).await;
    assert!(matches!(duplicate, Claim::InFlight { .. }));
    assert!(lease.complete(outcome("done"), None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn an_execution_is_notified_that_its_lease_was_lost() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let handle = lease.handle();
    world.store.set(Mode::Unavailable);
    let work = async {
        tokio::time::sleep(LEASE).await;
        world.store.set(Mode::Healthy);
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
async fn a_released_operation_executes_again() {
    let world = World::new();
    let process = world.process();
    let first = own(&process, &reexecute()).await;
    assert_eq!(first.release().await, Ok(()));
    assert_eq!(own(&process, &reexecute()).await.attempt(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_claim_is_no_attempt() {
    let world = World::new();
    let process = world.process();
    for _ in 0..3 {
        assert_eq!(own(&process, &reexecute()).await.withdraw().await, Ok(()));
    }
    assert_eq!(own(&process, &reexecute()).await.attempt(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_released_key_keeps_its_attempts_for_as_long_as_the_policy_says() {
    for (keep_released, attempt) in [(Duration::ZERO, 1), (10 * LEASE, 2)] {
        let world = World::new();
        let policy = Policy { keep_released, ..reexecute() };
        assert_eq!(own(&world.process(), &policy).await.release().await, Ok(()));
        tokio::time::sleep(9 * LEASE).await;
        assert_eq!(own(&world.process(), &policy).await.attempt(), attempt);
    }
}

#[tokio::test(start_paused = true)]
async fn a_takeover_stays_one_until_it_executes() {
    let world = World::new();
    let first = own(&world.process(), &reexecute()).await;
    assert!(!first.is_takeover());
    tokio::time::sleep(LEASE).await;
    for _ in 0..2 {
        let second = own(&world.process(), &reexecute()).await;
        assert_eq!((second.attempt(), second.is_takeover()), (2, true));
        assert_eq!(second.withdraw().await, Ok(()));
    }
    let third = own(&world.process(), &reexecute()).await;
    assert!(third.is_takeover());
    assert_eq!(third.release().await, Ok(()));
    let fourth = own(&world.process(), &reexecute()).await;
    assert_eq!((fourth.attempt(), fourth.is_takeover()), (3, false));
    assert_eq!(first.release().await, Err(FinishError::Gone));
}

#[tokio::test(start_paused = true)]
async fn a_lease_tells_how_long_it_is_held() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let handle = lease.handle();
    assert_eq!(handle.remaining(), LEASE);
    let renewed = lease.keep_alive(async {
        tokio::time::sleep(2 * LEASE).await;
        handle.remaining()
    });
    assert!(renewed.await >= LEASE * 2 / 3);
    // As after a suspension of the process: no renewal has failed.
    tokio::time::sleep(LEASE).await;
    assert_eq!((handle.remaining(), handle.is_lost()), (Duration::ZERO, false));
    drop(own(&world.process(), &reexecute()).await);
    assert_eq!(lease.release().await, Err(FinishError::Lost));
    assert_eq!(handle.remaining(), Duration::ZERO);
}

/// A wall clock that only steps.
#[derive(Default, Debug)]
struct Wall(AtomicU64);

impl Wall {
    fn step(&self, by: Duration) {
        self.0.fetch_add(by.as_secs(), Ordering::SeqCst);
    }
}

impl Clock for Wall {
    fn now(&self) -> Timestamp {
        Timestamp::default().after(Duration::from_secs(self.0.load(Ordering::SeqCst)))
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapses_by_the_wall_clock_is_held_again_after_a_renewal() {
    let (world, wall) = (World::new(), Arc::new(Wall::default()));
    let process = Idempotency::builder(Arc::clone(&world.store)).clock(wall.clone());
    let process = process.build().unwrap();
    let lease = own(&process, &reexecute()).await;
    let handle = lease.handle();
    assert_eq!((handle.remaining(), handle.elapsed()), (LEASE, Duration::ZERO));
    // As after a suspension: the monotonic clock stood still.
    wall.step(LEASE - Duration::from_secs(1));
    assert_eq!(handle.remaining(), Duration::from_secs(1));
    wall.step(100 * LEASE);
    assert_eq!((handle.remaining(), handle.is_lost()), (Duration::ZERO, false));
    // The store's clock did not step, so the lease is this owner's.
    handle.save(Bytes::from_static(b"saved")).await.unwrap();
    assert_eq!(handle.remaining(), LEASE);
    wall.step(LEASE);
    assert_eq!(handle.remaining(), Duration::ZERO);
    // The first renewal of an operation is due after a third of the lease, which has passed.
    let renewed = lease.keep_alive(async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        handle.remaining()
    });
    assert_eq!(renewed.await, LEASE - Duration::from_secs(1));
    assert_eq!(handle.elapsed(), 102 * LEASE);
    lease.complete(outcome("done"), None).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_unknown_operation_is_blocked_until_an_operator_decides() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    let lease = own(&process, &block).await;
    let fence = lease.fence();
    assert_eq!(lease.abandon(None).await, Ok(()));
    tokio::time::sleep(Duration::from_secs(400 * 24 * 60 * 60)).await;
    // The policy of the record counts too, not only the caller's.
    assert!(matches!(claim(&process, "a", &reexecute()).await, Claim::Unknown { .. }));
    let resolution = DefiniteVerdict::Happened(outcome("seen in the ledger"));
    let resolve = Resolve {
        expected: fence,
        force: false,
        forget: false,
        resolution,
        note: None,
        restart: false,
    };
    let id = process.operation_id(&Scope::shared(), &key());
    process.resolve(id, resolve).await.unwrap();
    assert_eq!(replayed(&process).await, outcome("seen in the ledger"));
}

#[tokio::test(start_paused = true)]
async fn the_hook_decides_an_unknown_operation() {
    let world = World::new();
    let process = world.process();
    let mut reconciling = policy(OnUnknown::Reconcile);
    let hook = HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };
    reconciling.hook = Some(hook);
    let lease = own(&world.process(), &reconciling).await;
    tokio::time::sleep(LEASE + Duration::from_secs(59)).await;
    // The crashed owner's requests may still be in progress.
    let early = claim(&process, "a", &reconciling).await;
    let second = Some(Duration::from_secs(1));
    assert!(
        matches!(early, Claim::Unknown { reconcile_in } if reconcile_in == second),
        "{early:?}"
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    let Claim::Reconcile(reconciliation) = claim(&process, "a", &reconciling).await else {
        panic!()
    };
    assert_eq!(reconciliation.fence(), lease.fence());
    assert!(
        matches!(claim(&process, "a", &reconciling).await, Claim::Unknown { .. }),
        "one claim calls the hook at a time"
    );
    let answered = reconciliation.conclude(Verdict::CannotSay, &Text("a")).await.unwrap();
    let now = Some(Duration::ZERO);
    assert!(
        matches!(answered, Claim::Unknown { reconcile_in } if reconcile_in == now),
        "{answered:?}"
    );

    let Claim::Reconcile(reconciliation) = claim(&process, "a", &reconciling).await else {
        panic!()
    };
    let answered = reconciliation.conclude(Verdict::DidNotHappen, &Text("a")).await.unwrap();
    let Claim::Execute(second) = answered else { panic!("{answered:?}") };
    assert_eq!(second.attempt(), 2);
    assert_eq!(lease.complete(outcome("late"), None).await, Err(FinishError::Lost));
}

#[tokio::test(start_paused = true)]
async fn the_owners_late_outcome_takes_precedence_over_the_hooks_verdict() {
    let world = World::new();
    let process = world.process();
    let mut reconciling = policy(OnUnknown::Reconcile);
    reconciling.hook = Some(HookTiming { after: Duration::ZERO, timeout: Duration::from_secs(5) });
    let lease = own(&world.process(), &reconciling).await;
    tokio::time::sleep(LEASE).await;
    let Claim::Reconcile(reconciliation) = claim(&process, "a", &reconciling).await else {
        panic!()
    };
    assert!(lease.complete(outcome("late"), None).await.is_ok());
    let answered = reconciliation.conclude(Verdict::DidNotHappen, &Text("a")).await.unwrap();
    let Claim::Replay(replay) = answered else { panic!("{answered:?}") };
    assert_eq!(replay.outcome, outcome("late"));
}

#[tokio::test(start_paused = true)]
async fn another_request_under_the_key_is_a_mismatch_in_every_state() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    assert!(matches!(claim(&process, "b", &reexecute()).await, Claim::Mismatch));
    lease.complete(outcome("done"), None).await.unwrap();
    assert!(matches!(claim(&process, "b", &reexecute()).await, Claim::Mismatch));
    assert_eq!(replayed(&process).await, outcome("done"));
}

#[tokio::test(start_paused = true)]
async fn the_key_is_new_after_the_retention() {
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

/// The clock follows real time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_while_the_execution_blocks_its_thread() {
    let world = World::new();
    let mut short = reexecute();
    short.terms.lease = Policy::MIN_LEASE;
    let lease = own(&world.process(), &short).await;
    let (end, ended) = std::sync::mpsc::channel();
    let work = tokio::spawn(async move {
        let done = lease.keep_alive(async move { ended.recv() }).await;
        (lease, done)
    });
    let renewed =
        tokio::time::timeout(Duration::from_secs(60), world.store.wait_for_swaps(5)).await;
    // Sent before any assertion: the runtime cannot shut down while a thread of it is blocked.
    end.send(()).unwrap();
    renewed.expect("the lease was not renewed");
    let (lease, done) = work.await.unwrap();
    done.unwrap();
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn no_lease_is_renewed_after_its_future_ended_or_was_dropped() {
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

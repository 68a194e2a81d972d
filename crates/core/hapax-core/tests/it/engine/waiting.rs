//! Duplicates that wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::machine::HookTiming;
use hapax_core::store::BoxFuture;
use hapax_core::{
    Claim, EngineLimits, Idempotency, InFlight, Notify, OnUnknown, OperationId, Policy,
};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{WithCapabilities, World, claim, outcome, own, policy, reexecute, settle};

fn waiting(timeout: Duration) -> Policy {
    Policy { in_flight: InFlight::Wait(timeout), ..reexecute() }
}

fn duplicates(process: &Idempotency, count: usize, policy: Policy) -> JoinSet<Claim> {
    let mut duplicates = JoinSet::new();
    for _ in 0..count {
        let process = process.clone();
        duplicates.spawn(async move { claim(&process, "a", &policy).await });
    }
    duplicates
}

#[tokio::test(start_paused = true)]
async fn every_waiter_gets_the_outcome_of_the_owner() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let duplicates = duplicates(&process, 100, waiting(Duration::from_secs(5)));
    settle().await;
    assert_eq!(process.stats().waiting, 100);
    lease.complete(outcome("done"), None).await.unwrap();
    for duplicate in duplicates.join_all().await {
        assert!(matches!(&duplicate, Claim::Replay(replay) if replay.outcome == outcome("done")));
    }
    assert_eq!(process.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn waiters_get_the_outcome_of_an_owner_in_another_process() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let duplicates = duplicates(&world.process(), 10, waiting(Duration::from_secs(5)));
    settle().await;
    lease.complete(outcome("done"), None).await.unwrap();
    for duplicate in duplicates.join_all().await {
        assert!(matches!(duplicate, Claim::Replay(_)), "{duplicate:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn exactly_one_waiter_is_promoted_when_the_owner_releases() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let promoted = Arc::new(AtomicUsize::new(0));
    let mut duplicates = JoinSet::new();
    for _ in 0..100 {
        let (process, promoted) = (process.clone(), Arc::clone(&promoted));
        duplicates.spawn(async move {
            match claim(&process, "a", &waiting(Duration::from_secs(5))).await {
                Claim::Execute(lease) => {
                    promoted.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    lease.complete(outcome("second"), None).await.unwrap();
                }
                Claim::Replay(replay) => assert_eq!(replay.outcome, outcome("second")),
                other => panic!("{other:?}"),
            }
        });
    }
    settle().await;
    lease.release().await.unwrap();
    duplicates.join_all().await;
    assert_eq!(promoted.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_promotion_whose_caller_was_dropped_passes_to_the_next_waiter() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    let policy = Policy { in_flight: InFlight::Wait(Duration::from_secs(5)), ..block };
    let lease = own(&process, &block).await;
    let mut gone = duplicates(&process, 50, policy);
    let there = duplicates(&process, 1, policy);
    settle().await;
    let (released, ()) = tokio::join!(lease.release(), async { gone.abort_all() });
    released.unwrap();
    let promoted = there.join_all().await;
    assert!(matches!(promoted[..], [Claim::Execute(_)]), "{promoted:?}");
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_waits_no_longer_than_its_policy_states() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let before = tokio::time::Instant::now();
    let duplicate = claim(&process, "a", &waiting(Duration::from_secs(3))).await;
    assert!(matches!(duplicate, Claim::InFlight { .. }));
    assert_eq!(before.elapsed().as_secs(), 3);
    // Without a limit.
    let duplicates = duplicates(&process, 1, waiting(Duration::MAX));
    tokio::time::sleep(Duration::from_secs(20)).await;
    lease.complete(outcome("done"), None).await.unwrap();
    assert!(matches!(duplicates.join_all().await[..], [Claim::Replay(_)]));
}

#[tokio::test(start_paused = true)]
async fn waiters_are_limited_by_key() {
    let world = World::new();
    let process = world.limited(EngineLimits { waiters_per_key: 3, ..EngineLimits::default() });
    let lease = own(&process, &reexecute()).await;
    let duplicates = duplicates(&process, 10, waiting(Duration::from_secs(5)));
    settle().await;
    assert_eq!(process.stats().waiting, 3);
    lease.complete(outcome("done"), None).await.unwrap();
    let replayed = duplicates.join_all().await;
    let replayed =
        replayed.iter().filter(|duplicate| matches!(duplicate, Claim::Replay(_))).count();
    assert_eq!(replayed, 3);
}

#[tokio::test(start_paused = true)]
async fn one_process_polls_a_key_once_for_all_its_waiters() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let process = world.process();
    let before = world.store.swaps();
    let duplicates = duplicates(&process, 100, waiting(Duration::from_secs(5)));
    settle().await;
    let arrived = world.store.swaps() - before;
    assert_eq!(arrived, 200, "each duplicate claims twice: before and after it registers");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(world.store.swaps() - before, arrived, "polls load, and do not claim");
    drop((lease, duplicates));
}

/// A notification that tests send, also without a write.
#[derive(Debug, Default)]
struct TestNotify(tokio::sync::Notify);

impl Notify for TestNotify {
    fn written<'a>(&'a self, _: &'a OperationId) -> BoxFuture<'a, ()> {
        Box::pin(self.0.notified())
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_load_at_once_when_the_store_notifies_of_a_write() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let notify_test = Arc::new(TestNotify::default());
    let notify = Some(Arc::clone(&notify_test) as _);
    let store =
        WithCapabilities { store: Arc::clone(&world.store), secrets: None, notify, shared: false };
    let process = Idempotency::builder(store).build().unwrap();
    let duplicates = duplicates(&process, 10, waiting(Duration::from_secs(5)));
    settle().await;
    // Without a write: the operation is still in flight.
    notify_test.0.notify_one();
    settle().await;
    assert_eq!(process.stats().waiting, 10);
    let began = tokio::time::Instant::now();
    lease.complete(outcome("done"), None).await.unwrap();
    notify_test.0.notify_one();
    for duplicate in duplicates.join_all().await {
        assert!(matches!(duplicate, Claim::Replay(_)), "{duplicate:?}");
    }
    assert!(began.elapsed() < Duration::from_millis(10), "{:?}", began.elapsed());
}

/// Returns a policy with a hook that is called 60 s after a lapse, and duplicates that wait this
/// long.
fn reconciled(timeout: Duration) -> Policy {
    let hook = HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };
    let in_flight = InFlight::Wait(timeout);
    Policy { in_flight, hook: Some(hook), ..policy(OnUnknown::Reconcile) }
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_waits_until_the_hook_may_be_called() {
    let world = World::new();
    let policy = reconciled(Duration::from_secs(200));
    drop(own(&world.process(), &policy).await);
    let began = Instant::now();
    let claimed = claim(&world.process(), "a", &policy).await;
    assert!(matches!(claimed, Claim::Reconcile(_)), "{claimed:?}");
    // The lease and the delay of the hook.
    assert_eq!(began.elapsed().as_secs(), 90);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_timed_out_is_answered_when_the_hook_may_be_called() {
    let world = World::new();
    let policy = reconciled(Duration::from_secs(40));
    drop(own(&world.process(), &policy).await);
    let answer = claim(&world.process(), "a", &policy).await;
    let Claim::Unknown { reconcile_in: Some(reconcile_in) } = answer else { panic!("{answer:?}") };
    assert!((49..=50).contains(&reconcile_in.as_secs()), "{reconcile_in:?}");
}

/// The owner records its outcome after the lapse and before the hook may be called.
#[tokio::test(start_paused = true)]
async fn a_duplicate_that_waits_for_the_hook_gets_the_owners_late_outcome() {
    let world = World::new();
    let policy = reconciled(Duration::from_secs(200));
    let lease = own(&world.process(), &policy).await;
    let late = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        lease.complete(outcome("late"), None).await.unwrap();
    };
    let began = Instant::now();
    let process = world.process();
    let (answer, ()) = tokio::join!(claim(&process, "a", &policy), late);
    let Claim::Replay(replay) = answer else { panic!("{answer:?}") };
    assert_eq!(replay.outcome, outcome("late"));
    assert!(began.elapsed() < Duration::from_secs(62), "{:?}", began.elapsed());
}

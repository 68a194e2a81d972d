//! Copies that wait.

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

fn copies(process: &Idempotency, count: usize, policy: Policy) -> JoinSet<Claim> {
    let mut copies = JoinSet::new();
    for _ in 0..count {
        let process = process.clone();
        copies.spawn(async move { claim(&process, "a", &policy).await });
    }
    copies
}

#[tokio::test(start_paused = true)]
async fn every_copy_gets_the_answer_of_the_first() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let copies = copies(&process, 100, waiting(Duration::from_secs(5)));
    settle().await;
    assert_eq!(process.stats().waiting, 100);
    lease.complete(outcome("done"), None).await.unwrap();
    for copy in copies.join_all().await {
        assert!(matches!(&copy, Claim::Replay(replay) if replay.outcome == outcome("done")));
    }
    assert_eq!(process.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn copies_hear_of_an_owner_in_another_process() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let copies = copies(&world.process(), 10, waiting(Duration::from_secs(5)));
    settle().await;
    lease.complete(outcome("done"), None).await.unwrap();
    for copy in copies.join_all().await {
        assert!(matches!(copy, Claim::Replay(_)), "{copy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn exactly_one_copy_is_promoted_when_the_owner_gives_up() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let promoted = Arc::new(AtomicUsize::new(0));
    let mut copies = JoinSet::new();
    for _ in 0..100 {
        let (process, promoted) = (process.clone(), Arc::clone(&promoted));
        copies.spawn(async move {
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
    copies.join_all().await;
    assert_eq!(promoted.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_promotion_whose_caller_is_gone_passes_on() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    let policy = Policy { in_flight: InFlight::Wait(Duration::from_secs(5)), ..block };
    let lease = own(&process, &block).await;
    let mut gone = copies(&process, 50, policy);
    let there = copies(&process, 1, policy);
    settle().await;
    let (released, ()) = tokio::join!(lease.release(), async { gone.abort_all() });
    released.unwrap();
    let promoted = there.join_all().await;
    assert!(matches!(promoted[..], [Claim::Execute(_)]), "{promoted:?}");
}

#[tokio::test(start_paused = true)]
async fn a_copy_waits_no_longer_than_it_wants() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let before = tokio::time::Instant::now();
    let copy = claim(&process, "a", &waiting(Duration::from_secs(3))).await;
    assert!(matches!(copy, Claim::InFlight { .. }));
    assert_eq!(before.elapsed().as_secs(), 3);
    // As long as it takes.
    let copies = copies(&process, 1, waiting(Duration::MAX));
    tokio::time::sleep(Duration::from_secs(20)).await;
    lease.complete(outcome("done"), None).await.unwrap();
    assert!(matches!(copies.join_all().await[..], [Claim::Replay(_)]));
}

#[tokio::test(start_paused = true)]
async fn waiters_are_limited_by_key() {
    let world = World::new();
    let process = world.limited(EngineLimits { waiters_per_key: 3, ..EngineLimits::default() });
    let lease = own(&process, &reexecute()).await;
    let copies = copies(&process, 10, waiting(Duration::from_secs(5)));
    settle().await;
    assert_eq!(process.stats().waiting, 3);
    lease.complete(outcome("done"), None).await.unwrap();
    let replayed = copies.join_all().await;
    let replayed = replayed.iter().filter(|copy| matches!(copy, Claim::Replay(_))).count();
    assert_eq!(replayed, 3);
}

#[tokio::test(start_paused = true)]
async fn one_process_polls_a_key_once_for_all_its_copies() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let process = world.process();
    let before = world.store.swaps();
    let copies = copies(&process, 100, waiting(Duration::from_secs(5)));
    settle().await;
    let arrived = world.store.swaps() - before;
    assert_eq!(arrived, 200, "each looks twice: before and after it registers");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(world.store.swaps() - before, arrived, "polls load, and claim nothing");
    drop((lease, copies));
}

/// Rings when a test says so; for nothing as well.
#[derive(Debug, Default)]
struct Bell(tokio::sync::Notify);

impl Notify for Bell {
    fn written<'a>(&'a self, _: &'a OperationId) -> BoxFuture<'a, ()> {
        Box::pin(self.0.notified())
    }
}

#[tokio::test(start_paused = true)]
async fn copies_look_at_once_when_the_store_tells_of_a_write() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let bell = Arc::new(Bell::default());
    let notify = Some(Arc::clone(&bell) as _);
    let store = WithCapabilities { store: Arc::clone(&world.store), secret: None, notify };
    let process = Idempotency::builder(store).build().unwrap();
    let copies = copies(&process, 10, waiting(Duration::from_secs(5)));
    settle().await;
    // For nothing: it is still in flight.
    bell.0.notify_one();
    settle().await;
    assert_eq!(process.stats().waiting, 10);
    let began = tokio::time::Instant::now();
    lease.complete(outcome("done"), None).await.unwrap();
    bell.0.notify_one();
    for copy in copies.join_all().await {
        assert!(matches!(copy, Claim::Replay(_)), "{copy:?}");
    }
    assert!(began.elapsed() < Duration::from_millis(10), "{:?}", began.elapsed());
}

/// A policy under which a hook is asked 60 s after a lapse, and duplicates wait this long.
fn reconciled(timeout: Duration) -> Policy {
    let hook = HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };
    let in_flight = InFlight::Wait(timeout);
    Policy { in_flight, hook: Some(hook), ..policy(OnUnknown::Reconcile) }
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_waits_until_the_hook_may_be_asked() {
    let world = World::new();
    let policy = reconciled(Duration::from_secs(200));
    drop(own(&world.process(), &policy).await);
    let began = Instant::now();
    let asked = claim(&world.process(), "a", &policy).await;
    assert!(matches!(asked, Claim::Reconcile(_)), "{asked:?}");
    // The lease, and the hook's time.
    assert_eq!(began.elapsed().as_secs(), 90);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_waited_in_vain_is_told_when_the_hook_may_be_asked() {
    let world = World::new();
    let policy = reconciled(Duration::from_secs(40));
    drop(own(&world.process(), &policy).await);
    let told = claim(&world.process(), "a", &policy).await;
    let Claim::Unknown { reconcile_in: Some(reconcile_in) } = told else { panic!("{told:?}") };
    assert!((49..=50).contains(&reconcile_in.as_secs()), "{reconcile_in:?}");
}

/// The owner was late, and recorded its outcome before the hook could be asked.
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
    let (told, ()) = tokio::join!(claim(&process, "a", &policy), late);
    let Claim::Replay(replay) = told else { panic!("{told:?}") };
    assert_eq!(replay.outcome, outcome("late"));
    assert!(began.elapsed() < Duration::from_secs(62), "{:?}", began.elapsed());
}

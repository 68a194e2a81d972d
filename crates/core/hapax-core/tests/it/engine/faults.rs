//! The engine with a store that is unavailable, does not answer or loses replies.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::machine::{HookTiming, Verdict};
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Claim, ClaimError, EngineLimits, FinishError, InFlight, MemoryStore, OnUnknown, Policy, Store,
    StoreError,
};
use tokio::sync::watch;

use super::{Text, World, claim, key, outcome, own, policy, reexecute, replayed, settle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Healthy,
    /// Rejects each swap at once; nothing is written.
    Unavailable,
    /// Writes, and answers that the swap is ambiguous.
    LosesReplies,
    /// Never answers. [`Unreliable::deliver`] applies the swaps later.
    NoAnswer,
}

#[derive(Debug)]
pub(super) struct Unreliable {
    memory: Arc<MemoryStore>,
    mode: Mutex<Mode>,
    late: Mutex<Vec<Swap>>,
    swaps: watch::Sender<usize>,
}

impl Unreliable {
    pub(super) fn new(memory: Arc<MemoryStore>) -> Self {
        Self {
            memory,
            mode: Mutex::new(Mode::Healthy),
            late: Mutex::default(),
            swaps: watch::Sender::new(0),
        }
    }

    /// Returns a store of the same records with its own faults.
    pub(super) fn elsewhere(&self) -> Self {
        Self::new(Arc::clone(&self.memory))
    }

    pub(super) fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    pub(super) fn swaps(&self) -> usize {
        *self.swaps.borrow()
    }

    /// Applies the swaps of [`Mode::NoAnswer`], and returns their number.
    pub(super) async fn deliver(&self) -> usize {
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        let count = late.len();
        for swap in late {
            self.memory.swap(swap).await.unwrap();
        }
        count
    }

    /// Waits until the store has received so many swaps in total.
    pub(super) async fn wait_for_swaps(&self, times: usize) {
        self.swaps.subscribe().wait_for(|swaps| *swaps >= times).await.unwrap();
    }
}

impl Store for Unreliable {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.swaps.send_modify(|swaps| *swaps += 1);
            let mode = *self.mode.lock().unwrap();
            match mode {
                Mode::Healthy => self.memory.swap(swap).await,
                Mode::Unavailable => Err(StoreError::unavailable("the store is unavailable")),
                Mode::LosesReplies => {
                    self.memory.swap(swap).await?;
                    Err(StoreError::ambiguous("the reply was lost"))
                }
                Mode::NoAnswer => {
                    self.late.lock().unwrap().push(swap);
                    std::future::pending().await
                }
            }
        })
    }

    fn load<'a>(
        &'a self,
        key: &'a hapax_core::OperationId,
    ) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.memory.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.memory.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.memory.capabilities()
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_replies_are_lost_is_rejected_and_then_released() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    world.store.set(Mode::LosesReplies);
    let claimed = process.claim(&hapax_core::Scope::shared(), &key(), &Text("a"), &block).await;
    assert!(matches!(claimed, Err(ClaimError::Store(StoreError::Ambiguous(_)))), "{claimed:?}");
    assert_eq!(process.stats().deferred, 1);
    world.store.set(Mode::Healthy);
    process.drain().await;
    // Under `block` a claim left behind would block the key for ever.
    assert_eq!(own(&world.process(), &block).await.attempt(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_applied_after_its_timeout_is_released() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    world.store.set(Mode::NoAnswer);
    let claimed = process.claim(&hapax_core::Scope::shared(), &key(), &Text("a"), &block).await;
    assert!(matches!(claimed, Err(ClaimError::Store(StoreError::Ambiguous(_)))));
    world.store.set(Mode::Healthy);
    assert!(world.store.deliver().await > 0);
    process.drain().await;
    drop(own(&world.process(), &block).await);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_caller_leaves_no_claim() {
    let world = World::new();
    let process = world.process();
    let block = policy(OnUnknown::Block);
    world.store.set(Mode::LosesReplies);
    let caller = {
        let process = process.clone();
        tokio::spawn(async move { claim(&process, "a", &block).await })
    };
    world.store.wait_for_swaps(1).await;
    caller.abort();
    world.store.set(Mode::Healthy);
    settle().await;
    process.drain().await;
    drop(own(&world.process(), &block).await);
}

#[tokio::test(start_paused = true)]
async fn an_unavailable_store_fails_claims_at_once() {
    let world = World::new();
    let process = world.process();
    world.store.set(Mode::Unavailable);
    let scope = hapax_core::Scope::shared();
    let claimed = process.claim(&scope, &key(), &Text("a"), &reexecute()).await;
    assert!(matches!(claimed, Err(ClaimError::Store(StoreError::Unavailable(_)))));
    assert_eq!(process.stats().deferred, 0, "no swap can be applied late");
    assert_eq!(world.store.swaps(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_deferred_outcome_is_replayed_here_and_written_later() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.complete(outcome("done"), None).await, Err(FinishError::Pending));
    assert_eq!(replayed(&process).await, outcome("done"));
    let scope = hapax_core::Scope::shared();
    let other = process.claim(&scope, &key(), &Text("b"), &reexecute()).await;
    assert!(matches!(other, Ok(Claim::Mismatch)));
    assert_eq!(process.stats().deferred_bytes, 4);

    world.store.set(Mode::Healthy);
    process.drain().await;
    assert_eq!(replayed(&world.process()).await, outcome("done"));
    assert_eq!(process.stats().deferred_bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn while_a_redirect_is_deferred_another_request_is_interrupted_and_executes_later() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.redirect(outcome("there")).await, Err(FinishError::Pending));
    assert_eq!(replayed(&process).await, outcome("there"));
    assert_eq!(process.stats().deferred_bytes, 5);
    let scope = hapax_core::Scope::shared();
    let other = async || process.claim(&scope, &key(), &Text("b"), &reexecute()).await;
    assert!(matches!(other().await, Err(ClaimError::Interrupted(_))));

    world.store.set(Mode::Healthy);
    process.drain().await;
    let Ok(Claim::Execute(lease)) = other().await else { panic!() };
    assert_eq!(replayed(&process).await, outcome("there"));
    // The outcome of the request that followed is deferred: the redirect is known nevertheless.
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.complete(outcome("done"), None).await, Err(FinishError::Pending));
    assert_eq!(replayed(&process).await, outcome("there"));
    let Ok(Claim::Replay(done)) = other().await else { panic!() };
    assert_eq!(done.outcome, outcome("done"));
    let third = process.claim(&scope, &key(), &Text("c"), &reexecute()).await;
    assert!(matches!(third, Ok(Claim::Mismatch)));
    world.store.set(Mode::Healthy);
    process.drain().await;
    assert_eq!(replayed(&world.process()).await, outcome("there"));
}

#[tokio::test(start_paused = true)]
async fn a_replay_states_whether_its_outcome_is_stored() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.complete(outcome("done"), None).await, Err(FinishError::Pending));
    let deferred = async || match claim(&process, "a", &reexecute()).await {
        Claim::Replay(replay) => replay.deferred,
        other => panic!("{other:?}"),
    };
    assert!(deferred().await);
    world.store.set(Mode::Healthy);
    process.drain().await;
    assert!(!deferred().await);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_read_a_record_is_interrupted_when_the_store_fails() {
    let world = World::new();
    let process = world.process();
    let scope = hapax_core::Scope::shared();
    // The operation was in flight at the last answer of the store.
    let lease = own(&world.elsewhere().process(), &reexecute()).await;
    let wait = InFlight::Wait(Duration::from_secs(60));
    let waiting = Policy { in_flight: wait, ..reexecute() };
    let duplicate = tokio::spawn({
        let (process, scope) = (process.clone(), scope.clone());
        async move { process.claim(&scope, &key(), &Text("a"), &waiting).await }
    });
    settle().await;
    world.store.set(Mode::Unavailable);
    lease.release().await.unwrap();
    let claimed = duplicate.await.unwrap();
    assert!(matches!(claimed, Err(ClaimError::Interrupted(_))), "{claimed:?}");

    // The outcome was unknown at the last answer of the store, and when the hook answered.
    world.store.set(Mode::Healthy);
    let mut reconciling = policy(OnUnknown::Reconcile);
    reconciling.hook = Some(HookTiming { after: Duration::ZERO, timeout: Duration::from_secs(5) });
    own(&process, &reconciling).await.abandon(None).await.unwrap();
    let Claim::Reconcile(reconciliation) = claim(&process, "a", &reconciling).await else {
        panic!()
    };
    world.store.set(Mode::Unavailable);
    let claimed = reconciliation.conclude(Verdict::Happened(outcome("found")), &Text("a")).await;
    assert!(matches!(claimed, Err(ClaimError::Interrupted(_))), "{claimed:?}");
}

#[tokio::test(start_paused = true)]
async fn the_outcome_seen_of_a_deferred_abandon_counts_in_the_backlog() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.abandon(Some(outcome("500"))).await, Err(FinishError::Pending));
    assert_eq!(process.stats().deferred_bytes, 3);
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_is_too_large_is_not_deferred() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &policy(OnUnknown::Block)).await;
    let handle = lease.handle();
    let checkpoint = bytes::Bytes::from(vec![0; hapax_core::codec::MAX_CHECKPOINT + 1]);
    assert_eq!(handle.save(checkpoint).await, Err(FinishError::TooLarge));
    let large = hapax_core::Outcome::new("text", vec![0; hapax_core::codec::MAX_OUTCOME + 1]);
    assert_eq!(lease.complete(large, None).await, Err(FinishError::TooLarge));
    assert_eq!(process.stats().deferred, 0);
    // The operation happened: it does not execute again.
    let duplicate = claim(&process, "a", &policy(OnUnknown::Block)).await;
    assert!(matches!(duplicate, Claim::Unknown { .. }), "{duplicate:?}");
}

#[tokio::test(start_paused = true)]
async fn a_completion_whose_reply_was_lost_is_recorded_once() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::LosesReplies);
    let finishing = tokio::spawn(lease.complete(outcome("done"), None));
    world.store.wait_for_swaps(2).await;
    settle().await;
    world.store.set(Mode::Healthy);
    assert!(finishing.await.unwrap().is_ok());
    assert_eq!(replayed(&world.process()).await, outcome("done"));
}

#[tokio::test(start_paused = true)]
async fn a_completion_continues_when_its_caller_is_dropped() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::LosesReplies);
    let finishing = tokio::spawn(lease.complete(outcome("done"), None));
    world.store.wait_for_swaps(2).await;
    finishing.abort();
    world.store.set(Mode::Healthy);
    process.drain().await;
    assert_eq!(replayed(&world.process()).await, outcome("done"));
}

#[tokio::test(start_paused = true)]
async fn claims_are_rejected_while_the_backlog_is_full() {
    let world = World::new();
    let process = world.limited(EngineLimits { deferred: 1, ..EngineLimits::default() });
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.complete(outcome("done"), None).await, Err(FinishError::Pending));
    let other = hapax_core::Key::new("k-2").unwrap();
    let scope = hapax_core::Scope::shared();
    let rejected = process.claim(&scope, &other, &Text("a"), &reexecute()).await;
    assert!(matches!(rejected, Err(ClaimError::Overloaded)));
    world.store.set(Mode::Healthy);
    process.drain().await;
    let taken = process.claim(&scope, &other, &Text("a"), &reexecute()).await;
    assert!(matches!(taken, Ok(Claim::Execute(_))));
}

#[tokio::test(start_paused = true)]
async fn a_deferred_outcome_of_a_lost_lease_is_not_written() {
    let world = World::new();
    let (slow, quick) = (world.process(), world.elsewhere().process());
    let lease = own(&slow, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    assert_eq!(lease.complete(outcome("slow"), None).await, Err(FinishError::Pending));
    // Its process reaches the store again only after another process took over and completed.
    tokio::time::sleep(Duration::from_secs(31)).await;
    let taken = own(&quick, &reexecute()).await;
    assert!(taken.complete(outcome("quick"), None).await.is_ok());
    world.store.set(Mode::Healthy);
    slow.drain().await;
    assert_eq!(replayed(&slow).await, outcome("quick"));
}

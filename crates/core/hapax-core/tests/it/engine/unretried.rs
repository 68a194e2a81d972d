//! Reconciliation without a retry.

use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Claim, FencingToken, HookTiming, Idempotency, OnUnknown, Policy, Quarantine, Reconciled,
    Record, RecordState, Scope, Timestamp, UndecidedOperation, Verdict,
};
use tokio::time::advance;

use super::{Text, World, claim, key, outcome, own, policy, replayed, settle};

fn reconciling() -> Policy {
    let hook = HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };
    Policy { hook: Some(hook), ..policy(OnUnknown::Reconcile) }
}

/// Calls a hook about the execution with this fence.
async fn reconcile<F>(
    process: &Idempotency,
    fence: FencingToken,
    hook: impl FnOnce(FencingToken, u32) -> F,
) -> Reconciled
where
    F: Future<Output = Verdict>,
{
    let id = process.operation_id(&Scope::shared(), &key());
    let seen = process.load(&id).await.unwrap();
    let note = Some(Bytes::from("by the hook"));
    let undecided =
        UndecidedOperation { id, seen, fence, route: None, pause: Duration::ZERO, note };
    process.reconcile_without_retry(undecided, &reconciling(), hook).await.unwrap()
}

async fn record(process: &Idempotency) -> Record {
    let id = process.operation_id(&Scope::shared(), &key());
    process.load(&id).await.unwrap().stored.unwrap().record
}

async fn state(process: &Idempotency) -> RecordState {
    record(process).await.state
}

async fn never(_: FencingToken, _: u32) -> Verdict {
    panic!("the hook must not be called")
}

async fn did_not_happen(_: FencingToken, _: u32) -> Verdict {
    Verdict::DidNotHappen
}

async fn happened(_: FencingToken, _: u32) -> Verdict {
    Verdict::Happened(outcome("paid"))
}

/// Leaves an execution whose process died, after the time at which its hook may be called.
async fn lapsed(world: &World) -> FencingToken {
    let lease = own(&world.process(), &reconciling()).await;
    let fence = lease.fence();
    drop(lease);
    advance(Duration::from_secs(90)).await;
    fence
}

#[tokio::test(start_paused = true)]
async fn a_hook_is_called_a_lease_and_its_delay_after_a_crash_with_fence_and_attempt() {
    let world = World::new();
    let lease = own(&world.process(), &reconciling()).await;
    let fence = lease.fence();
    drop(lease);
    let process = world.process();
    assert_eq!(reconcile(&process, fence, never).await, Reconciled::InFlight);
    advance(Duration::from_secs(31)).await;
    let found = reconcile(&process, fence, never).await;
    let Reconciled::NotYet { retry_in } = found else { panic!("{found:?}") };
    advance(retry_in).await;
    let found = reconcile(&process, fence, async |asked, attempt| {
        assert_eq!((asked, attempt), (fence, 1));
        Verdict::DidNotHappen
    });
    assert_eq!(found.await, Reconciled::DidNotHappen);
    // It shows why the key executes again, also when no client retries for a while.
    advance(reconciling().terms.retention - Duration::from_secs(1)).await;
    let released = record(&process).await;
    assert_eq!(released.state, RecordState::Released);
    assert_eq!(released.notes.decision.unwrap(), "by the hook");
    assert_eq!(reconcile(&process, fence, never).await, Reconciled::Decided);
    let lease = own(&process, &reconciling()).await;
    assert_eq!(lease.attempt(), 2);
    assert!(lease.fence() > fence);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_was_executed_anew_since_it_was_listed_is_not_decided() {
    let world = World::new();
    let listed = lapsed(&world).await;
    let process = world.process();
    assert_eq!(reconcile(&process, listed, did_not_happen).await, Reconciled::DidNotHappen);
    // The next execution, about which a hook would answer something else.
    let lease = own(&process, &reconciling()).await;
    let present = lease.fence();
    lease.abandon(None).await.unwrap();
    assert_eq!(reconcile(&process, listed, never).await, Reconciled::Decided);
    assert!(matches!(state(&process).await, RecordState::Unknown { reconciling: false, .. }));
    assert_eq!(reconcile(&process, present, happened).await, Reconciled::Happened);
    assert_eq!(replayed(&process).await, outcome("paid"));
}

/// The steps before it took effect under this operation: a release would have them executed again.
#[tokio::test(start_paused = true)]
async fn an_execution_that_saved_a_checkpoint_is_continued_by_a_retry_only() {
    let world = World::new();
    let lease = own(&world.process(), &reconciling()).await;
    let fence = lease.fence();
    lease.handle().save("charged".into()).await.unwrap();
    drop(lease);
    advance(Duration::from_secs(90)).await;
    let process = world.process();
    assert_eq!(reconcile(&process, fence, never).await, Reconciled::Blocked);
    let Claim::Reconcile(asked) = claim(&process, "a", &reconciling()).await else { panic!() };
    let claimed = asked.conclude(Verdict::DidNotHappen, &Text("a")).await.unwrap();
    let Claim::Execute(lease) = claimed else { panic!("{claimed:?}") };
    assert_eq!(lease.checkpoint().unwrap(), "charged");
}

#[tokio::test(start_paused = true)]
async fn a_verdict_does_not_replace_the_late_outcome_of_the_owner() {
    let world = World::new();
    let owner = world.process();
    let lease = own(&owner, &reconciling()).await;
    let fence = lease.fence();
    advance(Duration::from_secs(90)).await;
    let process = world.process();
    let found = reconcile(&process, fence, async |_, _| {
        lease.complete(outcome("late"), None).await.unwrap();
        Verdict::DidNotHappen
    });
    assert_eq!(found.await, Reconciled::Decided);
    assert_eq!(replayed(&process).await, outcome("late"));
}

/// The store's clock may step: the process knows that the execution is in progress.
#[tokio::test(start_paused = true)]
async fn an_execution_of_the_same_process_is_in_flight_whatever_its_lease() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reconciling()).await;
    let fence = lease.fence();
    advance(Duration::from_secs(3600)).await;
    assert_eq!(reconcile(&process, fence, never).await, Reconciled::InFlight);
    assert!(lease.complete(outcome("done"), None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn one_process_at_a_time_calls_the_hook() {
    let world = World::new();
    let fence = lapsed(&world).await;
    let [process, other] = [world.process(), world.process()];
    let found = reconcile(&process, fence, async |_, _| {
        let found = reconcile(&other, fence, never).await;
        assert!(matches!(found, Reconciled::NotYet { retry_in } if retry_in.as_secs() <= 5));
        let retry = claim(&other, "a", &reconciling()).await;
        assert!(matches!(retry, Claim::Unknown { .. }), "{retry:?}");
        Verdict::CannotSay
    });
    assert_eq!(found.await, Reconciled::CannotSay);
    // A hook that takes too long cannot say.
    let found = reconcile(&other, fence, async |_, _| pending().await).await;
    assert_eq!(found, Reconciled::CannotSay);
    assert!(matches!(state(&other).await, RecordState::Unknown { reconciling: false, .. }));
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_that_begins_during_the_call_keeps_the_outcome_unknown() {
    let world = World::new();
    let fence = lapsed(&world).await;
    let process = world.process();
    let found = reconcile(&process, fence, async |_, _| {
        let since = Timestamp::from_micros(1);
        let quarantine = Quarantine { route: None, since, until: Timestamp::MAX };
        process.quarantines().replace(vec![quarantine], since);
        Verdict::DidNotHappen
    });
    assert_eq!(found.await, Reconciled::CannotSay);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_at_any_await_is_made_again() {
    let mut dropped = 0;
    for polls in 1.. {
        let world = World::new();
        let fence = lapsed(&world).await;
        let (process, calls) = (world.process(), AtomicUsize::new(0));
        let mut future = Box::pin(reconcile(&process, fence, async |_, _| {
            calls.fetch_add(1, Ordering::SeqCst);
            settle().await;
            Verdict::DidNotHappen
        }));
        let mut ended = false;
        for _ in 0..polls {
            ended |= poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await;
            if ended {
                break;
            }
            settle().await;
        }
        drop(future);
        if ended {
            break;
        }
        dropped += 1;
        // Writes in progress end, and the announced call has timed out.
        advance(Duration::from_secs(6)).await;
        settle().await;
        let found = reconcile(&world.process(), fence, did_not_happen).await;
        assert!(matches!(found, Reconciled::DidNotHappen | Reconciled::Decided), "{found:?}");
        assert_eq!(state(&process).await, RecordState::Released);
        assert!(calls.load(Ordering::SeqCst) <= 1);
    }
    assert!(dropped > 0);
}

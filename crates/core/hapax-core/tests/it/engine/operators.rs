//! What operators decide, and what they are told that it was.

use hapax_core::exchange::{Next, Resolved, WriteExchange, WriteResult};
use hapax_core::machine::{Resolution, Resolve};
use hapax_core::store::Swapped;
use hapax_core::{FencingToken, OperationId, RecordState, Scope, Store, SystemEntropy};

use super::faults::Mode;
use super::{World, key, outcome, own, reexecute};

fn operation_id(world: &World) -> OperationId {
    world.process().operation_id(&Scope::shared(), &key())
}

const fn whatever_it_is(expected: FencingToken) -> Resolve {
    Resolve {
        expected,
        force: true,
        forget: true,
        resolution: Resolution::DidNotHappen,
        note: None,
    }
}

fn was(resolved: Resolved) -> RecordState {
    resolved.was.stored.unwrap().record.state
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_reply_was_about_is_told_when_the_swap_is_sent_again() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let fence = lease.fence();
    lease.complete(outcome("done"), None).await.unwrap();
    let (operation_id, sent) = (operation_id(&world), world.store.swaps());
    world.store.set(Mode::LosesReplies);
    let resolving =
        tokio::spawn(
            async move { process.resolve(operation_id, whatever_it_is(fence)).await.unwrap() },
        );
    world.store.asked(sent + 2).await;
    world.store.set(Mode::Well);
    let resolved = resolving.await.unwrap();
    assert!(matches!(resolved.result, WriteResult::Recorded(_)));
    assert_eq!(was(resolved), RecordState::Done(outcome("done")));
}

#[tokio::test(start_paused = true)]
async fn what_ended_while_the_operator_decided_is_what_was_replaced() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let (key, fence) = (operation_id(&world), lease.fence());
    let seen = world.store.load(&key).await.unwrap();
    let resolve = whatever_it_is(fence);
    let (mut writing, next) = WriteExchange::resolve(key, seen, resolve, &SystemEntropy).unwrap();
    let Next::Send(swap) = next else { panic!("{next:?}") };
    lease.complete(outcome("just now"), None).await.unwrap();
    let conflict = world.store.swap(swap).await.unwrap();
    assert!(matches!(conflict, Swapped::Conflict(_)));
    let Next::Send(swap) = writing.receive(conflict, &SystemEntropy).unwrap() else { panic!() };
    let stored = world.store.swap(swap).await.unwrap();
    let Next::Ready(wrote) = writing.receive(stored, &SystemEntropy).unwrap() else { panic!() };
    assert!(matches!(wrote, WriteResult::Recorded(_)));
    let replaced = was(Resolved { result: wrote, was: writing.into_seen() });
    assert_eq!(replaced, RecordState::Done(outcome("just now")));
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_is_told_for_what() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let resolve = Resolve { force: false, ..whatever_it_is(lease.fence()) };
    let resolved = process.resolve(operation_id(&world), resolve).await.unwrap();
    assert_eq!(resolved.result, WriteResult::Rejected);
    assert_eq!(was(resolved), RecordState::InFlight);
    assert!(lease.complete(outcome("done"), None).await.is_ok());
}

//! Decisions of operators, and the states that they replace.

use hapax_core::exchange::{Next, Resolved, WriteExchange, WriteResult};
use hapax_core::machine::{DefiniteVerdict, Resolve};
use hapax_core::store::Swapped;
use hapax_core::{FencingToken, OperationId, RecordState, Scope, Store, SystemEntropy};

use super::faults::Mode;
use super::{World, key, outcome, own, reexecute};

fn operation_id(world: &World) -> OperationId {
    world.process().operation_id(&Scope::shared(), &key())
}

const fn release_any_state(expected: FencingToken) -> Resolve {
    Resolve {
        expected,
        force: true,
        forget: true,
        resolution: DefiniteVerdict::DidNotHappen,
        note: None,
        restart: false,
    }
}

fn was(resolved: Resolved) -> RecordState {
    resolved.was.stored.unwrap().record.state
}

#[tokio::test(start_paused = true)]
async fn a_repeated_swap_returns_the_state_that_it_replaced() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let fence = lease.fence();
    lease.complete(outcome("done"), None).await.unwrap();
    let (operation_id, sent) = (operation_id(&world), world.store.swaps());
    world.store.set(Mode::LosesReplies);
    let resolving = tokio::spawn(async move {
        process.resolve(operation_id, release_any_state(fence)).await.unwrap()
    });
    world.store.wait_for_swaps(sent + 2).await;
    world.store.set(Mode::Healthy);
    let resolved = resolving.await.unwrap();
    assert!(matches!(resolved.result, WriteResult::Recorded(_)));
    assert_eq!(was(resolved), RecordState::Done(outcome("done")));
}

#[tokio::test(start_paused = true)]
async fn a_decision_returns_the_state_of_an_execution_that_just_ended() {
    let world = World::new();
    let lease = own(&world.process(), &reexecute()).await;
    let (key, fence) = (operation_id(&world), lease.fence());
    let seen = world.store.load(&key).await.unwrap();
    let resolve = release_any_state(fence);
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
async fn a_rejected_decision_returns_the_state() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let resolve = Resolve { force: false, ..release_any_state(lease.fence()) };
    let resolved = process.resolve(operation_id(&world), resolve).await.unwrap();
    assert_eq!(resolved.result, WriteResult::Rejected);
    assert_eq!(was(resolved), RecordState::InFlight);
    assert!(lease.complete(outcome("done"), None).await.is_ok());
}

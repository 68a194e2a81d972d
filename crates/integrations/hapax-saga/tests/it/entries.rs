//! Entries of the schedule: of a second start, of another version, and those that cannot be read.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry};
use hapax_core::{Amendment, EntryId, Idempotency, OperationId, Store};

use hapax_saga::log::Failure;
use hapax_saga::{
    DecisionMismatch, EndedSaga, Saga, SagaDecision, SagaError, SagaLookup, SagaOperator,
    SagaOperatorError, SagaStartError, SagaView, Sagas, StepContext, StepError,
};
use serde::Serialize;
use tokio::time::sleep;

use crate::hooks::{Fault, HookedStore, StoreCall, entries};
use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::world::{World, key, scope};

const HOUR: Duration = Duration::from_secs(3600);

async fn insert(world: &World, entry: NewEntry) {
    world.store.capabilities().schedule.unwrap().insert(entry).await.unwrap();
}

fn operator(world: &World) -> SagaOperator {
    SagaOperator::new(Idempotency::builder(Arc::clone(&world.store)).build().unwrap())
}

async fn show(world: &World, id: &OperationId) -> SagaView {
    match operator(world).show(id).await.unwrap() {
        SagaLookup::Unfinished(view) => *view,
        other => panic!("expected an unfinished saga, found {other:?}"),
    }
}

fn entry_of(view: &SagaView) -> EntryKey {
    let log = view.log.as_ref().expect("it has a log");
    EntryKey { operation: view.id, id: EntryId::from_bytes(log.entry) }
}

/// Starts a saga under the key `k` in a process that dies after it has inserted the entry, before it
/// saves the log.
pub(crate) fn die_before_the_log<I, O, E>(world: &World, saga: &Saga<I, O, E>, input: &I)
where
    I: Serialize + Sync,
{
    let die = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let store = HookedStore::new(world);
            store.hook(|call| match call {
                StoreCall::Swap(swap) if swap.draft.record.checkpoint.is_some() => {
                    Some(Fault::Unavailable)
                }
                _ => None,
            });
            let process = store.process(saga);
            process.sagas.start(saga, &scope(), &key("k"), input).await.unwrap();
        });
    };
    std::thread::scope(|threads| threads.spawn(die).join()).unwrap();
}

/// Charges, and then waits for a signal. Its outcome is stored for an hour.
fn charges(version: u32, systems: &Systems) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("charges", version, systems.clone()).retention(HOUR);
    let name: &'static str = if version == 1 { "charge" } else { "charge again" };
    let charge = saga
        .again("charge", move |at: StepContext<Systems>, n: u32| async move {
            at.note(name, "");
            Ok::<_, StepError<String>>(n)
        })
        .no_undo();
    saga.flow(move |op, n: u32| async move {
        let n = op.run(charge, n).await?;
        op.signal::<()>("shipped", 3 * HOUR).await;
        Ok(n)
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_second_start_in_a_transaction_begins_nothing_after_the_end() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    let process = world.process(&saga);
    for _ in 0..2 {
        let entry = process.sagas.entry(&saga, &scope(), &key("k"), &7).unwrap();
        insert(&world, entry).await;
        sleep(Duration::from_secs(60)).await;
    }
    let find = async || process.sagas.find(&saga, &scope(), &key("k")).await.unwrap();
    let started = find().await.unwrap();
    let view = show(&world, &started.id()).await;
    assert_eq!(entries(&world).await, [entry_of(&view)]);
    started.signal("shipped", &()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
    sleep(HOUR - Duration::from_secs(1)).await;
    assert!(find().await.is_some());
    sleep(Duration::from_secs(2)).await;
    assert!(find().await.is_none(), "its outcome has expired");
    sleep(4 * HOUR).await;
    assert_eq!(systems.names(), ["charge"]);
    assert_eq!(entries(&world).await, []);
}

#[tokio::test(start_paused = true)]
async fn a_start_in_a_transaction_is_found_once_a_process_has_accepted_it() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), charges(1, &systems));
    store.hook(|call| match call {
        StoreCall::Insert => Some(Fault::Unavailable),
        _ => None,
    });
    let process = store.process(&saga);
    insert(&world, process.sagas.entry(&saga, &scope(), &key("k"), &7).unwrap()).await;
    let find = async || process.sagas.find(&saga, &scope(), &key("k")).await.unwrap();
    // It is claimed and released again and again.
    for _ in 0..60_000 {
        assert!(find().await.is_none());
        sleep(Duration::from_millis(1)).await;
    }
    store.unhook();
    let started = loop {
        match find().await {
            Some(started) => break started,
            None => sleep(Duration::from_millis(1)).await,
        }
    };
    started.signal("shipped", &()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_start_without_a_log_is_found() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    die_before_the_log(&world, &saga, &7);
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let sagas = Sagas::builder(engine).register(&saga).build().unwrap();
    assert!(sagas.find(&saga, &scope(), &key("k")).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_is_adopted_without_a_log_gets_an_entry_of_its_own() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    die_before_the_log(&world, &saga, &7);
    let found = entries(&world).await;
    assert_eq!(found.len(), 1);
    let process = world.process(&saga);
    sleep(Duration::from_secs(60)).await;
    let view = show(&world, &found[0].operation).await;
    assert_eq!(entries(&world).await, [entry_of(&view)]);
    assert_ne!(entry_of(&view), found[0]);
    assert_eq!(systems.names(), ["charge"]);
    drop(process);
}

#[tokio::test(start_paused = true)]
async fn a_node_of_another_version_leaves_a_saga_alone() {
    let (world, systems) = (World::new(), Systems::default());
    let (old, new) = (charges(1, &systems), charges(2, &systems));
    die_before_the_log(&world, &old, &7);
    sleep(Duration::from_secs(31)).await;
    let second = world.process(&new);
    let started = second.sagas.start(&new, &scope(), &key("k"), &7).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    second.task.abort();
    let before = show(&world, &started.id()).await;
    assert_eq!(before.log.as_ref().unwrap().version, 2);
    let first = world.process(&old);
    sleep(5 * HOUR).await;
    let after = show(&world, &started.id()).await;
    assert_eq!((after.write_id, after.attempt), (before.write_id, before.attempt));
    assert_eq!(entries(&world).await, [entry_of(&after)]);
    let _third = world.process(&new);
    assert_eq!(started.outcome().await.unwrap(), 7);
    assert_eq!(systems.names(), ["charge again"]);
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn a_log_that_cannot_be_read_is_left_to_those_that_can() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let write = async |checkpoint: bytes::Bytes| {
        let seen = engine.load(&started.id()).await.unwrap();
        let expected = seen.stored.as_ref().unwrap().write_id;
        let lease = Duration::ZERO;
        let amendment = Amendment { expected, checkpoint: Some(checkpoint), lease };
        engine.amend(started.id(), seen, amendment).await.unwrap();
    };
    let view = show(&world, &started.id()).await;
    let schedule = world.store.capabilities().schedule.unwrap();
    write("a later version".into()).await;
    schedule.postpone(entry_of(&view), None, Duration::ZERO).await.unwrap();
    sleep(Duration::from_secs(300)).await;
    let stored = engine.load(&started.id()).await.unwrap().stored.unwrap();
    assert_eq!(stored.record.attempt, view.attempt, "no process has claimed it");
    let page = schedule.entries(None, std::num::NonZeroU32::MIN).await.unwrap();
    let due = page.entries[0].1.as_ref().unwrap().due;
    assert!(page.now.since(due) >= Duration::from_secs(300), "it is due for others");
    write(view.log.unwrap().encode().unwrap()).await;
    started.signal("shipped", &()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_start_in_a_transaction_whose_key_has_another_input_never_runs_until_it_is_removed() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), charges(1, &systems));
    let process = store.process(&saga);
    let late = process.sagas.entry(&saga, &scope(), &key("k"), &8).unwrap();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let scope = scope();
    let name = (&scope, &key("k"));
    let rejected = process.sagas.start_in(&*store, &mut (), &saga, name, &8).await;
    assert!(matches!(rejected, Err(SagaStartError::KeyReused)), "{rejected:?}");
    process.sagas.start_in(&*store, &mut (), &saga, name, &7).await.unwrap();
    // Its transaction began before the key was used.
    insert(&world, late.clone()).await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(process.sagas.stats().definitions[0].rejected, 1);
    started.signal("shipped", &()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
    // Also not once the key is free, and no poll finds it.
    sleep(DAY + HOUR).await;
    assert_eq!(systems.names(), ["charge"]);
    assert_eq!(process.sagas.stats().definitions[0].rejected, 1);
    let operator = operator(&world);
    assert_eq!(operator.definitions().await.unwrap(), []);
    let [kept] = entries(&world).await[..] else { panic!("it is not lost") };
    assert_ne!(kept, late.key);
    let start = operator.start(&kept).await.unwrap().unwrap();
    assert_eq!((&*start.definition, start.version, start.is_rejected), ("charges", 1, true));
    operator.abort_start(&start, "ann", "started under another key").await.unwrap();
    assert_eq!(entries(&world).await, []);
    assert_eq!(operator.start(&kept).await.unwrap(), None);
    let again = operator.abort_start(&start, "ann", "again").await;
    assert!(matches!(again, Err(SagaOperatorError::NotFound)), "{again:?}");
    assert_eq!(systems.names(), ["charge"]);
}

#[tokio::test(start_paused = true)]
async fn a_start_that_could_not_insert_keeps_the_key_and_runs_when_it_is_repeated() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    let first = HookedStore::new(&world);
    first.hook(|call| match call {
        StoreCall::Insert => Some(Fault::Unavailable),
        _ => None,
    });
    let process = first.process(&saga);
    let late = process.sagas.entry(&saga, &scope(), &key("k"), &8).unwrap();
    process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap_err();
    drop(process);
    insert(&world, late).await;
    let process = world.process(&saga);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(systems.names(), Vec::<&str>::new());
    let other = process.sagas.start(&saga, &scope(), &key("k"), &8).await;
    assert!(matches!(other, Err(SagaStartError::KeyReused)), "{other:?}");
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    started.signal("shipped", &()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
}

/// Returns the author, the reason and the time of each decision about a saga that was aborted.
fn decisions(ended: &EndedSaga) -> Vec<(&str, &str, &str)> {
    let Some(Failure::Cancelled { reason }) = &ended.failure else { panic!("{ended:?}") };
    assert_eq!(reason, "aborted by ann: the order is void");
    ended.decisions.iter().map(|it| (&*it.action, &*it.by, &*it.reason)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_saga_without_a_log_and_without_a_process_is_aborted_and_stays_so() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    die_before_the_log(&world, &saga, &7);
    let operator = operator(&world);
    let id = entries(&world).await[0].operation;
    let (by, reason) = ("ann", "the order is void");
    let view = show(&world, &id).await;
    let early = operator.decide(&view, &SagaDecision::Abort, by, reason).await;
    let mismatch = SagaOperatorError::Mismatch(DecisionMismatch::NotStuck).to_string();
    assert_eq!(early.unwrap_err().to_string(), mismatch, "its lease has not lapsed");
    sleep(HOUR).await;
    let view = show(&world, &id).await;
    let retried = operator.decide(&view, &SagaDecision::Retry, by, reason).await;
    assert_eq!(retried.unwrap_err().to_string(), mismatch);
    operator.decide(&view, &SagaDecision::Abort, by, reason).await.unwrap();
    let SagaLookup::Ended(ended) = operator.show(&id).await.unwrap() else { panic!("it ended") };
    assert_eq!(decisions(&ended), [("abort", by, reason)]);
    assert!(ended.decisions[0].at >= view.now.into() && ended.steps.is_empty());
    assert_eq!((entries(&world).await, operator.definitions().await.unwrap()), (vec![], vec![]));
    let changed = operator.decide(&view, &SagaDecision::Abort, by, reason).await;
    assert!(matches!(changed, Err(SagaOperatorError::Changed)), "{changed:?}");
    // A process with the definition executes nothing, and its callers get the cancellation.
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(matches!(started.outcome().await, Err(SagaError::Cancelled { .. })));
    assert_eq!(systems.names(), Vec::<&str>::new());
}

#[tokio::test(start_paused = true)]
async fn a_saga_with_an_empty_log_and_without_a_process_ends_when_it_is_aborted() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    die_before_the_log(&world, &saga, &7);
    sleep(HOUR).await;
    let entry = entries(&world).await[0];
    let view = show(&world, &entry.operation).await;
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let run = saga.simulate(None, entry.id, view.attempt, view.now.into(), &7).unwrap();
    let checkpoint = Some(run.log().encode().unwrap());
    let seen = engine.load(&view.id).await.unwrap();
    let (expected, lease) = (view.write_id, Duration::ZERO);
    engine.amend(view.id, seen, Amendment { expected, checkpoint, lease }).await.unwrap();
    let view = show(&world, &view.id).await;
    let operator = operator(&world);
    let (by, reason) = ("ann", "the order is void");
    operator.decide(&view, &SagaDecision::Abort, by, reason).await.unwrap();
    let SagaLookup::Ended(ended) = operator.show(&view.id).await.unwrap() else { panic!("ended") };
    assert_eq!(decisions(&ended), [("abort", by, reason)]);
    assert_eq!(entries(&world).await, []);
}

#[tokio::test(start_paused = true)]
async fn a_start_in_a_transaction_that_no_process_accepts_is_aborted_and_replayed() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = charges(1, &systems);
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let sagas = Sagas::builder(engine).register(&saga).build().unwrap();
    let entry = sagas.entry(&saga, &scope(), &key("k"), &7).unwrap();
    // Two transactions that start the same saga.
    insert(&world, entry.clone()).await;
    insert(&world, sagas.entry(&saga, &scope(), &key("k"), &7).unwrap()).await;
    let id = entry.key.operation;
    let operator = operator(&world);
    assert!(matches!(operator.show(&id).await.unwrap(), SagaLookup::NotFound));
    let start = operator.start_of(&id).await.unwrap().unwrap();
    assert!(!start.is_rejected);
    operator.abort_start(&start, "ann", "the order is void").await.unwrap();
    let SagaLookup::Ended(ended) = operator.show(&id).await.unwrap() else { panic!("it ended") };
    assert_eq!(decisions(&ended), [("abort", "ann", "the order is void")]);
    assert_eq!(entries(&world).await, []);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(matches!(started.outcome().await, Err(SagaError::Cancelled { .. })));
    assert_eq!(systems.names(), Vec::<&str>::new());
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_cannot_be_read_is_not_moved_and_hides_no_other() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    let process = store.process_with(&saga, 1, Duration::from_secs(30));
    let [damaged, other] =
        ["damaged", "other"].map(|name| process.sagas.entry(&saga, &scope(), &key(name), &cart()));
    let damaged = damaged.unwrap();
    let key = damaged.key;
    let moved = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&moved);
    store.damage(Some(key.operation));
    store.hook(move |call| match call {
        StoreCall::Postpone(postponed) if postponed.operation == key.operation => {
            seen.lock().unwrap().push(*postponed);
            Some(Fault::Corrupt)
        }
        _ => None,
    });
    insert(&world, damaged).await;
    insert(&world, other.unwrap()).await;
    sleep(Duration::from_secs(120)).await;
    assert_eq!(systems.names(), ["reserve", "charge", "notify"]);
    assert_eq!(*moved.lock().unwrap(), []);
    store.damage(None);
    sleep(Duration::from_secs(120)).await;
    assert_eq!(systems.names().len(), 6);
    assert_eq!(entries(&world).await, []);
}

#[tokio::test(start_paused = true)]
async fn the_entry_of_a_saga_that_runs_here_is_not_postponed_by_a_lease() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    systems.answer("charge", &[Answer::Hang]);
    let process = store.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    while systems.names().len() < 2 {
        sleep(Duration::from_millis(10)).await;
    }
    let moved = Arc::new(Mutex::new(0));
    let seen = Arc::clone(&moved);
    store.hook(move |call| {
        if let StoreCall::Postpone(_) = call {
            *seen.lock().unwrap() += 1;
        }
        None
    });
    // It is made due, as by a signal that arrives while it is parked.
    let entry = entries(&world).await[0];
    let schedule = world.store.capabilities().schedule.unwrap();
    schedule.postpone(entry, None, Duration::ZERO).await.unwrap();
    sleep(Duration::from_secs(10)).await;
    assert_eq!(*moved.lock().unwrap(), 0);
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
}

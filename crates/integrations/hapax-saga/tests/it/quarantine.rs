//! Sagas in a quarantine of their store.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::{ClaimError, Idempotency, Quarantine, Timestamp};
use hapax_saga::{Saga, SagaStartError, SagaView, SignalError, StepContext, StepError};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::hooks::{HookedStore, entries};
use crate::shop::{Systems, cart, order};
use crate::stuck::operator;
use crate::world::{World, key, scope};

const HOUR: Duration = Duration::from_secs(3600);

/// Time within which a saga goes on after a quarantine.
const SOON: Duration = Duration::from_secs(5);

async fn now(engine: &Idempotency) -> Timestamp {
    let id = engine.operation_id(&scope(), &key("of no saga"));
    engine.load(&id).await.unwrap().now
}

/// Begins a quarantine of three hours.
pub(crate) async fn begin(engine: &Idempotency, route: Option<&str>) {
    let (route, since) = (route.map(str::to_owned), now(engine).await);
    let it = Quarantine { route, since, until: since.after(3 * HOUR) };
    engine.quarantines().replace(vec![it], since);
}

/// Ends all quarantines.
pub(crate) async fn end(engine: &Idempotency) {
    engine.quarantines().replace(Vec::new(), now(engine).await);
}

async fn view(world: &World) -> SagaView {
    let (sagas, _) = operator(world).list(None, NonZeroU32::MAX).await.unwrap();
    sagas.into_iter().next().unwrap()
}

/// Two steps around a pause of an hour.
fn nap(systems: &Systems) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("nap", 1, systems.clone());
    let note = async |at: StepContext<Systems>, n: u32| {
        at.note("call", at.key().as_str());
        Ok::<_, StepError<String>>(n)
    };
    let call = saga.again("call", note).no_undo();
    saga.flow(move |op, n: u32| async move {
        op.run(call.nth(0), n).await?;
        op.sleep("nap", HOUR).await;
        op.run(call.nth(1), n + 1).await
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_is_due_in_a_quarantine_is_resumed_after_it() {
    for is_ended in [false, true] {
        let (world, systems) = (World::new(), Systems::default());
        let saga = nap(&systems);
        let process = world.process(&saga);
        let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
        sleep(HOUR / 2).await;
        let attempt = view(&world).await.attempt;
        begin(&process.engine, None).await;
        sleep(3 * HOUR - SOON).await;
        assert_eq!((systems.names().len(), view(&world).await.attempt), (1, attempt));
        // By its operator, or by itself.
        if is_ended {
            end(&process.engine).await;
        } else {
            sleep(SOON).await;
        }
        assert_eq!(timeout(SOON, started.outcome()).await.unwrap().unwrap(), 8);
        assert_eq!(systems.names().len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_runs_when_a_quarantine_begins_parks_after_its_step() {
    let (world, calls) = (World::new(), watch::Sender::new(0));
    let gate = watch::Sender::new(false);
    let mut saga = Saga::define("charges", 1, (calls.clone(), gate.clone()));
    let charge = saga.once("charge", async |at: StepContext<_>, n: u32| {
        let (calls, gate): &(watch::Sender<u32>, watch::Sender<bool>) = &at;
        calls.send_modify(|calls| *calls += 1);
        let _ = gate.subscribe().wait_for(|is_open| *is_open).await;
        Ok::<_, StepError<String>>(n)
    });
    let charge = charge.no_undo();
    let saga = saga.flow(move |op, n: u32| async move {
        let first = op.run(charge.nth(0), n).await?;
        op.run(charge.nth(1), first + 1).await
    });
    let saga = saga.unwrap();
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    calls.subscribe().wait_for(|calls| *calls == 1).await.unwrap();
    begin(&process.engine, None).await;
    gate.send_replace(true);
    sleep(HOUR).await;
    let parked = view(&world).await;
    assert!(parked.lease_until <= parked.now, "no process runs it: {parked:?}");
    let log = parked.log.unwrap();
    assert!(log.stuck.is_none() && log.crashes == 0, "{log:?}");
    assert_eq!(*calls.borrow(), 1);
    end(&process.engine).await;
    assert_eq!(timeout(SOON, started.outcome()).await.unwrap().unwrap(), 8);
    assert_eq!(*calls.borrow(), 2, "the first step was not called again");
}

#[tokio::test(start_paused = true)]
async fn a_start_in_a_quarantine_is_rejected_and_one_whose_record_exists_is_found() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    let before = process.sagas.start(&saga, &scope(), &key("before"), &cart()).await.unwrap();
    assert_eq!(before.outcome().await.unwrap(), "visa:1999");
    let calls = systems.names();
    begin(&process.engine, None).await;
    let found = process.sagas.start(&saga, &scope(), &key("before"), &cart()).await.unwrap();
    assert_eq!(found.outcome().await.unwrap(), "visa:1999");
    let rejected = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await;
    let is_rejected = |error: &SagaStartError| matches!(error, SagaStartError::Claim(ClaimError::Quarantined { retry_in }) if *retry_in <= HOUR / 60);
    assert!(rejected.as_ref().is_err_and(is_rejected), "{rejected:?}");
    sleep(HOUR).await;
    assert_eq!((systems.names(), entries(&world).await), (calls.clone(), vec![]));
    end(&process.engine).await;
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    assert_eq!(systems.names(), [calls.clone(), calls].concat());
}

#[tokio::test(start_paused = true)]
async fn a_start_in_a_transaction_is_rejected_in_a_quarantine_unless_its_record_exists() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), nap(&systems));
    let process = store.process(&saga);
    let (scope, known, new) = (scope(), key("known"), key("new"));
    process.sagas.start(&saga, &scope, &known, &7).await.unwrap();
    begin(&process.engine, None).await;
    let start = async |name, input: u32| {
        process.sagas.start_in(&*store, &mut (), &saga, (&scope, name), &input).await
    };
    let rejected = start(&new, 7).await;
    let is_rejected =
        matches!(rejected, Err(SagaStartError::Claim(ClaimError::Quarantined { .. })));
    assert!(is_rejected, "{rejected:?}");
    assert_eq!(entries(&world).await.len(), 1, "it does not begin after the quarantine");
    start(&known, 7).await.unwrap();
    assert!(matches!(start(&known, 8).await, Err(SagaStartError::KeyReused)));
    end(&process.engine).await;
    start(&new, 7).await.unwrap();
    process.engine.quarantines().expire();
    let rejected = start(&key("other"), 7).await;
    assert!(matches!(rejected, Err(SagaStartError::Claim(ClaimError::Quarantined { .. }))));
}

#[tokio::test(start_paused = true)]
async fn a_signal_that_is_sent_in_a_quarantine_is_rejected_or_received_after_it() {
    let world = World::new();
    let saga = Saga::define("approval", 1, ()).flow(move |op, _: u32| async move {
        Ok::<_, String>(op.signal::<u32>("approval", 24 * HOUR).await)
    });
    let saga = saga.unwrap();
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(SOON).await;
    begin(&process.engine, None).await;
    let sent = started.signal("approval", &1).await;
    assert!(matches!(sent, Err(SignalError::Claim(ClaimError::Quarantined { .. }))), "{sent:?}");
    end(&process.engine).await;
    assert!(started.signal("approval", &2).await.unwrap());
    assert_eq!(started.outcome().await.unwrap(), Some(2));
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_of_a_route_does_not_pause_sagas() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    begin(&process.engine, Some("/payments")).await;
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    assert_eq!(timeout(SOON, started.outcome()).await.unwrap().unwrap(), "visa:1999");
}

//! An engine whose store may have lost records.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    BoxFuture, Claim, ClaimError, HookTiming, Idempotency, Key, OnUnknown, OperationId, Policy,
    Quarantine, Scope, Store, StoreError, Timestamp, Verdict,
};
use tokio::time::advance;

use super::faults::Mode;
use super::{Text, World, outcome, own, policy, reexecute, replayed};

/// A store that is unavailable.
#[derive(Debug)]
struct Down;

impl Store for Down {
    fn swap(&self, _: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async { Err(StoreError::unavailable("down")) })
    }

    fn load<'a>(&'a self, _: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async { Err(StoreError::unavailable("down")) })
    }

    fn reap(&self, _: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async { Err(StoreError::unavailable("down")) })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { secrets: None, notify: None, shared: false, schedule: None }
    }
}

const MINUTE: Duration = Duration::from_secs(60);

/// Begins a quarantine of ten minutes.
fn quarantine(engine: &Idempotency, now: Timestamp, route: Option<&str>) {
    let it =
        Quarantine { route: route.map(str::to_owned), since: now, until: now.after(10 * MINUTE) };
    engine.quarantines().replace(vec![it], now);
}

fn now(world: &World) -> Timestamp {
    use hapax_core::Clock;
    world.clock.now()
}

async fn claim_of(engine: &Idempotency, key: &str, policy: &Policy) -> Result<Claim, ClaimError> {
    let key = Key::new(key).unwrap();
    engine.claim(&Scope::shared(), &key, &Text("a"), policy).await
}

fn is_rejected(claim: &Result<Claim, ClaimError>) -> bool {
    matches!(claim, Err(ClaimError::Quarantined { retry_in }) if *retry_in <= MINUTE)
}

#[tokio::test(start_paused = true)]
async fn a_key_without_a_record_is_rejected_until_the_quarantine_ends() {
    let world = World::new();
    let process = world.process();
    own(&process, &reexecute()).await.complete(outcome("paid"), None).await.unwrap();
    quarantine(&process, now(&world), None);
    assert_eq!(replayed(&process).await, outcome("paid"));
    assert!(process.quarantines().pauses());
    for key in ["order-1", "8e03978e-40d5-43dd-bc93-6894a57f9324"] {
        assert!(is_rejected(&claim_of(&process, key, &reexecute()).await));
    }
    // Ids alone have no time.
    let id = process.operation_id(&Scope::shared(), &Key::new("id").unwrap());
    assert!(is_rejected(&process.claim_id(id, &Text("a"), &reexecute()).await));

    // A UUID of version 7, by the store's clock.
    let millis = (now(&world).as_micros() / 1000 + 1).to_be_bytes();
    let digits = millis[2..].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let later = format!("{}-{}-7cc3-98c4-dc0c0c07398f", &digits[..8], &digits[8..]);
    let executed = claim_of(&process, &later, &reexecute()).await;
    assert!(matches!(executed, Ok(Claim::Execute(_))), "{executed:?}");

    advance(10 * MINUTE).await;
    assert!(!process.quarantines().pauses());
    assert!(process.quarantines().in_force().is_empty());
    assert!(matches!(claim_of(&process, "order-1", &reexecute()).await, Ok(Claim::Execute(_))));
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_of_a_route_leaves_other_operations() {
    let world = World::new();
    let process = world.process();
    quarantine(&process, now(&world), Some("/payments"));
    assert!(!process.quarantines().pauses());
    assert!(matches!(claim_of(&process, "k", &reexecute()).await, Ok(Claim::Execute(_))));
    struct Routed(&'static str);
    impl hapax_core::OperationRequest for Routed {
        fn scheme(&self) -> hapax_core::FingerprintScheme {
            Text("a").scheme()
        }

        fn fingerprint(
            &self,
            scheme: &hapax_core::FingerprintScheme,
        ) -> Option<hapax_core::Fingerprint> {
            Text("a").fingerprint(scheme)
        }

        fn route(&self) -> Option<&str> {
            Some(self.0)
        }
    }
    let (scope, key) = (Scope::shared(), Key::new("routed").unwrap());
    let claimed = process.claim(&scope, &key, &Routed("/payments"), &reexecute()).await;
    assert!(is_rejected(&claimed), "{claimed:?}");
    let claimed = process.claim(&scope, &key, &Routed("/orders"), &reexecute()).await;
    assert!(matches!(claimed, Ok(Claim::Execute(_))), "{claimed:?}");
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_a_key_in_a_quarantine_is_rejected_as_quarantined() {
    let world = World::new();
    let process = Idempotency::builder(Arc::new(Down)).build().unwrap();
    assert!(matches!(claim_of(&process, "k", &reexecute()).await, Err(ClaimError::Store(_))));
    quarantine(&process, now(&world), None);
    // A route that executes without a record during an outage must not take it for one.
    assert!(is_rejected(&claim_of(&process, "k", &reexecute()).await));
    // The register is not written either.
    process.quarantines().expire();
    assert!(is_rejected(&claim_of(&process, "k", &reexecute()).await));
}

#[tokio::test(start_paused = true)]
async fn without_the_register_no_key_without_a_record_executes() {
    let world = World::new();
    let process = world.process();
    own(&process, &reexecute()).await.complete(outcome("paid"), None).await.unwrap();
    process.quarantines().set_valid_until(Some(process.quarantines().time() + MINUTE));
    assert!(matches!(claim_of(&process, "before", &reexecute()).await, Ok(Claim::Execute(_))));
    advance(MINUTE).await;
    assert!(process.quarantines().pauses());
    assert!(is_rejected(&claim_of(&process, "k", &reexecute()).await));
    assert_eq!(replayed(&process).await, outcome("paid"));
    let rejected = claim_of(&process, "k", &reexecute()).await.unwrap_err().to_string();
    assert!(rejected.ends_with("retry with the same key after 1 s"), "{rejected}");
    // The store answers claims only: for a route that executes during an outage this is one.
    process.quarantines().note_failure();
    let claimed = claim_of(&process, "k", &reexecute()).await;
    assert!(matches!(claimed, Err(ClaimError::Store(_))), "{claimed:?}");
    process.quarantines().set_valid_until(None);
    assert!(matches!(claim_of(&process, "k", &reexecute()).await, Ok(Claim::Execute(_))));
}

#[tokio::test(start_paused = true)]
async fn a_key_without_a_record_is_reconciled() {
    let world = World::new();
    let process = world.process();
    let hook = HookTiming { after: MINUTE, timeout: Duration::from_secs(5) };
    let ask = Policy { hook: Some(hook), ..policy(OnUnknown::Reconcile) };
    quarantine(&process, now(&world), None);
    assert!(is_rejected(&claim_of(&process, "k", &ask).await));
    advance(2 * MINUTE).await;
    for (key, verdict) in [
        ("a", Verdict::DidNotHappen),
        ("b", Verdict::Happened(outcome("paid"))),
        ("c", Verdict::CannotSay),
    ] {
        let Ok(Claim::Reconcile(question)) = claim_of(&process, key, &ask).await else {
            panic!("expected a call of the hook")
        };
        let claimed = question.conclude(verdict.clone(), &Text("a")).await.unwrap();
        match verdict {
            Verdict::DidNotHappen => assert!(matches!(claimed, Claim::Execute(_)), "{claimed:?}"),
            Verdict::Happened(_) => assert!(matches!(claimed, Claim::Replay(_)), "{claimed:?}"),
            Verdict::CannotSay => assert!(matches!(claimed, Claim::Unknown { .. }), "{claimed:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_without_a_claim_is_checked_as_a_claim_is() {
    let world = World::new();
    let process = world.process();
    let seen = async |key: &str| {
        let id = process.operation_id(&Scope::shared(), &Key::new(key).unwrap());
        process.load(&id).await.unwrap()
    };
    let release = async |key: &str| match claim_of(&process, key, &reexecute()).await {
        Ok(Claim::Execute(lease)) => lease.release().await.unwrap(),
        claim => panic!("expected an execution, found {claim:?}"),
    };
    let held_back = async |key: &str| {
        let checked = process.quarantines().check(&seen(key).await);
        let executes = matches!(claim_of(&process, key, &reexecute()).await, Ok(Claim::Execute(_)));
        assert_eq!(checked.is_ok(), executes, "{key}");
        matches!(checked, Err(ClaimError::Quarantined { retry_in }) if retry_in <= MINUTE)
    };
    own(&process, &reexecute()).await.complete(outcome("paid"), None).await.unwrap();
    release("before").await;
    assert!(process.quarantines().check(&seen("new").await).is_ok());
    advance(Duration::from_millis(1)).await;
    quarantine(&process, now(&world), None);
    advance(Duration::from_millis(1)).await;
    assert!(held_back("new").await);
    assert!(held_back("before").await);
    assert!(process.quarantines().check(&seen("k-1").await).is_ok(), "its record exists");
    process.quarantines().expire();
    assert!(held_back("new").await, "there may be one");
}

#[tokio::test(start_paused = true)]
async fn a_claim_in_progress_when_a_quarantine_begins_executes_nothing() {
    let world = World::new();
    let process = world.process();
    world.store.set(Mode::LosesReplies);
    let claiming = tokio::spawn({
        let process = process.clone();
        async move { claim_of(&process, "k", &reexecute()).await }
    });
    world.store.wait_for_swaps(1).await;
    quarantine(&process, now(&world), None);
    world.store.set(Mode::Healthy);
    let claimed = claiming.await.unwrap();
    assert!(is_rejected(&claimed), "{claimed:?}");
    process.drain().await;
    // The released record of the claim does not count as one of before.
    assert!(is_rejected(&claim_of(&process, "k", &reexecute()).await));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_reconciled_while_the_register_was_unread_executes_nothing() {
    let world = World::new();
    let [process, other] = [world.process(), world.process()];
    let hook = HookTiming { after: Duration::ZERO, timeout: Duration::from_secs(5) };
    let ask = Policy { hook: Some(hook), ..policy(OnUnknown::Reconcile) };
    let Ok(Claim::Execute(lease)) = claim_of(&process, "k", &ask).await else {
        panic!("expected an execution")
    };
    lease.abandon(None).await.unwrap();
    let reconciled = async |process: &Idempotency| match claim_of(process, "k", &ask).await {
        Ok(Claim::Reconcile(reconciliation)) => reconciliation,
        claim => panic!("expected a call of the hook, found {claim:?}"),
    };
    let reconciliation = reconciled(&process).await;
    process.quarantines().expire();
    // Its record is no longer the one that the hook was called for.
    advance(MINUTE).await;
    let claimed = reconciled(&other).await.conclude(Verdict::DidNotHappen, &Text("a")).await;
    let Ok(Claim::Execute(lease)) = claimed else { panic!("expected an execution") };
    lease.release().await.unwrap();
    let claimed = reconciliation.conclude(Verdict::DidNotHappen, &Text("a")).await;
    assert!(is_rejected(&claimed), "{claimed:?}");
    process.quarantines().set_valid_until(None);
    assert!(matches!(claim_of(&process, "k", &ask).await, Ok(Claim::Execute(_))));
}

//! Limits of a process.

use std::time::Duration;

use hapax_core::{
    Claim, ClaimError, EngineError, EngineLimits, FinishError, Idempotency, Key, MemoryStore,
    NaturalKey, Scope, StoreError,
};
use tokio::time::{Instant, timeout};

use super::faults::Mode;
use super::{Text, World, outcome, own, reexecute, replayed, settle};

#[tokio::test(start_paused = true)]
async fn claims_need_a_permit_for_the_store() {
    let world = World::new();
    let process = world.limited(EngineLimits { claims: 2, ..EngineLimits::default() });
    let claim = |at: usize| {
        let process = process.clone();
        tokio::spawn(async move {
            let key = Key::new(format!("k-{at}")).unwrap();
            process.claim(&Scope::shared(), &key, &Text("a"), &reexecute()).await
        })
    };
    world.store.set(Mode::NoAnswer);
    let began = Instant::now();
    let claims: Vec<_> = (0..5).map(claim).collect();
    settle().await;
    assert_eq!(world.store.swaps(), 2);
    for claim in claims {
        let rejected = claim.await.unwrap();
        assert!(matches!(rejected, Err(ClaimError::Store(_))), "{rejected:?}");
    }
    // The timeout covers the wait for a permit and the answer together.
    assert_eq!(began.elapsed(), Duration::from_secs(2));

    world.store.set(Mode::Healthy);
    world.store.deliver().await;
    process.drain().await;
    // A dropped caller returns its permit, while it waits for one and while it claims.
    world.store.set(Mode::NoAnswer);
    let dropped: Vec<_> = (5..9).map(claim).collect();
    settle().await;
    dropped.iter().for_each(tokio::task::JoinHandle::abort);
    world.store.set(Mode::Healthy);
    world.store.deliver().await;
    process.drain().await;
    let claims: Vec<_> = (9..14).map(claim).collect();
    for claim in claims {
        assert!(matches!(claim.await.unwrap(), Ok(Claim::Execute(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn choosing_needs_a_permit_too() {
    let world = World::new();
    let process = world.limited(EngineLimits { claims: 1, ..EngineLimits::default() });
    let parts = NaturalKey::new("pay").part("user", "u-1");
    let key = Key::composite(&parts, Duration::from_secs(60)).unwrap();
    let (scope, other, policy) = (Scope::shared(), super::key(), reexecute());
    world.store.set(Mode::NoAnswer);
    let began = Instant::now();
    let (_, chosen) = tokio::join!(
        process.claim(&scope, &other, &Text("a"), &policy),
        process.choose(&scope, &key)
    );
    assert!(matches!(chosen, Err(ClaimError::Store(StoreError::Unavailable(_)))), "{chosen:?}");
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    assert_eq!(&process.choose(&scope, &key).await.unwrap(), key.current());
}

#[tokio::test(start_paused = true)]
async fn a_claim_without_a_permit_answers_that_the_store_is_unavailable() {
    let world = World::new();
    let process = world.limited(EngineLimits { claims: 1, ..EngineLimits::default() });
    world.store.set(Mode::NoAnswer);
    let (scope, policy) = (Scope::shared(), reexecute());
    let (key, other) = (super::key(), Key::new("first").unwrap());
    let (_, rejected) = tokio::join!(
        process.claim(&scope, &other, &Text("a"), &policy),
        process.claim(&scope, &key, &Text("a"), &policy)
    );
    assert!(matches!(rejected, Err(ClaimError::Store(StoreError::Unavailable(_)))), "{rejected:?}");
    assert_eq!(process.stats().deferred, 1, "only the first claim may be applied");
}

#[tokio::test(start_paused = true)]
async fn executions_end_when_the_backlog_has_memory_for_their_outcomes() {
    let world = World::new();
    let process = world.limited(EngineLimits { deferred_bytes: 4, ..EngineLimits::default() });
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Unavailable);
    let mut ending = tokio::spawn(lease.complete(outcome("large"), None));
    let hour = Duration::from_secs(3600);
    assert!(timeout(hour, &mut ending).await.is_err(), "the outcome was deferred without memory");
    // The outcome is safe: counted, replayed from here, and written later.
    assert_eq!(process.stats().deferred_bytes, 5);
    assert_eq!(replayed(&process).await, outcome("large"));
    world.store.set(Mode::Healthy);
    assert_eq!(ending.await.unwrap(), Err(FinishError::Pending));
    process.drain().await;
    assert_eq!(replayed(&world.process()).await, outcome("large"));
}

#[tokio::test]
async fn an_engine_is_not_built_with_invalid_limits() {
    let claims = |claims| EngineLimits { claims, ..EngineLimits::default() };
    let build = |limits| Idempotency::builder(MemoryStore::default()).limits(limits).build();
    assert_eq!(build(claims(0)).unwrap_err(), EngineError::Claims { found: 0 });
    assert_eq!(build(claims(usize::MAX)).unwrap_err(), EngineError::Claims { found: usize::MAX });
    let none = Idempotency::builder(MemoryStore::default()).store_timeout(Duration::ZERO).build();
    assert_eq!(none.unwrap_err(), EngineError::NoStoreTimeout);
}

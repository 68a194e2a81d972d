//! How much a process takes on at one time.

use std::time::Duration;

use hapax_core::{
    Claim, ClaimError, EngineError, EngineLimits, FinishError, Idempotency, Key, MemoryStore,
    NaturalKey, Scope, StoreError,
};
use tokio::time::{Instant, timeout};

use super::faults::Mode;
use super::{Text, World, outcome, own, reexecute, replayed, settle};

#[tokio::test(start_paused = true)]
async fn claims_talk_to_the_store_in_turns() {
    let world = World::new();
    let process = world.limited(EngineLimits { claims: 2, ..EngineLimits::default() });
    let claim = |at: usize| {
        let process = process.clone();
        tokio::spawn(async move {
            let key = Key::new(format!("k-{at}")).unwrap();
            process.claim(&Scope::shared(), &key, &Text("a"), &reexecute()).await
        })
    };
    world.store.set(Mode::Silent);
    let began = Instant::now();
    let claims: Vec<_> = (0..5).map(claim).collect();
    settle().await;
    assert_eq!(world.store.swaps(), 2);
    for claim in claims {
        let refused = claim.await.unwrap();
        assert!(matches!(refused, Err(ClaimError::Store(_))), "{refused:?}");
    }
    // Nobody waits for a turn, and then as long again for an answer.
    assert_eq!(began.elapsed(), Duration::from_secs(2));

    world.store.set(Mode::Well);
    world.store.deliver().await;
    process.drain().await;
    // A caller that goes away gives its turn to the next, waiting or talking.
    world.store.set(Mode::Silent);
    let gone: Vec<_> = (5..9).map(claim).collect();
    settle().await;
    gone.iter().for_each(tokio::task::JoinHandle::abort);
    world.store.set(Mode::Well);
    world.store.deliver().await;
    process.drain().await;
    let turns: Vec<_> = (9..14).map(claim).collect();
    for claim in turns {
        assert!(matches!(claim.await.unwrap(), Ok(Claim::Execute(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn choosing_takes_a_turn_too() {
    let world = World::new();
    let process = world.limited(EngineLimits { claims: 1, ..EngineLimits::default() });
    let parts = NaturalKey::new("pay").part("user", "u-1");
    let key = Key::composite(&parts, Duration::from_secs(60)).unwrap();
    let (scope, other, policy) = (Scope::shared(), super::key(), reexecute());
    world.store.set(Mode::Silent);
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
async fn a_claim_that_had_no_turn_says_that_the_store_was_away() {
    let world = World::new();
    let process = world.limited(EngineLimits { claims: 1, ..EngineLimits::default() });
    world.store.set(Mode::Silent);
    let (scope, policy) = (Scope::shared(), reexecute());
    let (key, other) = (super::key(), Key::new("first").unwrap());
    let (_, refused) = tokio::join!(
        process.claim(&scope, &other, &Text("a"), &policy),
        process.claim(&scope, &key, &Text("a"), &policy)
    );
    assert!(matches!(refused, Err(ClaimError::Store(StoreError::Unavailable(_)))), "{refused:?}");
    assert_eq!(process.stats().deferred, 1, "only the first may land");
}

#[tokio::test(start_paused = true)]
async fn executions_end_as_there_is_room_for_their_outcomes() {
    let world = World::new();
    let process = world.limited(EngineLimits { deferred_bytes: 4, ..EngineLimits::default() });
    let lease = own(&process, &reexecute()).await;
    world.store.set(Mode::Away);
    let mut ending = tokio::spawn(lease.complete(outcome("large"), None));
    let hour = Duration::from_secs(3600);
    assert!(timeout(hour, &mut ending).await.is_err(), "it was held back without room");
    // It is as safe as any: counted, replayed from here, and written later.
    assert_eq!(process.stats().deferred_bytes, 5);
    assert_eq!(replayed(&process).await, outcome("large"));
    world.store.set(Mode::Well);
    assert_eq!(ending.await.unwrap(), Err(FinishError::Pending));
    process.drain().await;
    assert_eq!(replayed(&world.process()).await, outcome("large"));
}

#[tokio::test]
async fn an_engine_is_not_built_with_limits_that_cannot_hold() {
    let claims = |claims| EngineLimits { claims, ..EngineLimits::default() };
    let build = |limits| Idempotency::builder(MemoryStore::default()).limits(limits).build();
    assert_eq!(build(claims(0)).unwrap_err(), EngineError::Claims { found: 0 });
    assert_eq!(build(claims(usize::MAX)).unwrap_err(), EngineError::Claims { found: usize::MAX });
    let none = Idempotency::builder(MemoryStore::default()).store_timeout(Duration::ZERO).build();
    assert_eq!(none.unwrap_err(), EngineError::NoStoreTimeout);
}

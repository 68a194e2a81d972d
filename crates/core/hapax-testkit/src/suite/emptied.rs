//! Rules of a store that is emptied or replaced while processes use it.

use std::future::Future;
use std::sync::Arc;

use hapax_core::{
    Claim, ClaimError, Fingerprint, FingerprintScheme, Idempotency, Key, OnUnknown,
    OperationRequest, Policy, Scope, Store,
};

/// A store with an identity, which a test empties.
pub trait EmptiedFixture: Send + Sync {
    /// The store.
    type Store: Store;

    /// Whether it can be emptied while a process uses it, and several processes share it.
    const SHARED: bool = true;

    /// Opens the store, as a process that remembers the identity `known`.
    fn open(&self, known: Option<String>) -> impl Future<Output = Arc<Self::Store>> + Send;

    /// Returns the identity in which `store` claims.
    fn known(&self, store: &Self::Store) -> Option<String>;

    /// Returns whether `store` found that it was emptied or replaced.
    fn is_replaced(&self, store: &Self::Store) -> bool;

    /// Empties the store, as an operator could by mistake; each round in a different way.
    fn empty(&self, round: u32) -> impl Future<Output = ()> + Send;

    /// Confirms the new identity, as an operator, through `store`.
    fn confirm(&self, store: &Self::Store) -> impl Future<Output = ()> + Send;

    /// Closes the store, if it is not [`SHARED`](Self::SHARED).
    fn close(&self, _: &Self::Store) -> impl Future<Output = ()> + Send {
        async {}
    }
}

const STRICT: [OnUnknown; 2] = [OnUnknown::Block, OnUnknown::Reconcile];

/// Runs `HAPAX_EMPTIED_ROUNDS` rounds, by default 4. The store is emptied under a process that uses
/// it, or between two. After that, no key under `block` or `reconcile` executes before an operator
/// confirms; then it executes in every process. Prints how many executed before that.
pub async fn emptied_rules<F: EmptiedFixture>(fixture: &F) {
    let rounds = std::env::var("HAPAX_EMPTIED_ROUNDS").map_or(4, |text| text.parse().unwrap());
    let (mut known, mut rejected, mut again) = (None, 0, 0);
    for round in 0..rounds {
        let first = fixture.open(known.clone()).await;
        assert!(!fixture.is_replaced(&first), "{round}");
        let mut before = engine(&first);
        for on_unknown in STRICT {
            let claimed = claim(&before, round, on_unknown).await.unwrap();
            assert!(matches!(claimed, Claim::Execute(_)), "{round}: {claimed:?}");
            drop(claimed);
        }
        known = fixture.known(&first);
        assert!(known.is_some(), "{round}: it has no identity");

        let remembering = if F::SHARED {
            fixture.empty(round).await;
            // A process without a remembered identity may be there as well.
            if round % 4 > 1 {
                fixture.open(None).await;
            }
            // A process that used the store, or one that starts now and remembers it.
            match round % 2 {
                0 => Arc::clone(&first),
                _ => fixture.open(known.clone()).await,
            }
        } else {
            before = nothing();
            fixture.close(&first).await;
            fixture.empty(round).await;
            fixture.open(known.clone()).await
        };
        drop(first);
        let after = engine(&remembering);
        // Includes rounds in which the first claim to notice may execute.
        if round % 3 == 0 {
            executes(&after, round, OnUnknown::Reexecute).await;
            assert!(fixture.is_replaced(&remembering), "{round}: unnoticed");
        }
        for on_unknown in [STRICT, STRICT].concat() {
            match claim(&after, round, on_unknown).await {
                Err(ClaimError::Store(_)) => rejected += 1,
                Ok(Claim::Execute(_)) => again += 1,
                other => panic!("{round}: {other:?}"),
            }
        }
        assert!(fixture.is_replaced(&remembering), "{round}");
        if round % 3 != 0 {
            executes(&after, round, OnUnknown::Reexecute).await;
        }

        if F::SHARED {
            fixture.confirm(&*fixture.open(None).await).await;
            executes(&before, round, OnUnknown::Block).await;
        } else {
            fixture.confirm(&remembering).await;
            executes(&after, round, OnUnknown::Block).await;
        }
        executes(&after, round + 1_000_000, OnUnknown::Block).await;
        assert!(!fixture.is_replaced(&remembering), "{round}");
        known = fixture.known(&remembering);
        fixture.close(&remembering).await;
    }
    println!("emptied: {rounds} rounds, {rejected} claims rejected, {again} executed again");
    assert_eq!(again, 0, "executed again before an operator confirmed");
}

async fn executes(engine: &Idempotency, of: u32, on_unknown: OnUnknown) {
    let claimed = claim(engine, of, on_unknown).await;
    assert!(matches!(claimed, Ok(Claim::Execute(_))), "{of}: {claimed:?}");
}

/// Returns an engine that no test uses. It replaces one that must drop its store.
fn nothing() -> Idempotency {
    engine(&Arc::new(hapax_core::MemoryStore::default()))
}

fn engine<S: Store>(store: &Arc<S>) -> Idempotency {
    Idempotency::builder(Arc::clone(store) as Arc<dyn Store>).namespace("").build().unwrap()
}

async fn claim(
    engine: &Idempotency,
    round: u32,
    on_unknown: OnUnknown,
) -> Result<Claim, ClaimError> {
    let mut policy = Policy::default();
    policy.terms.on_unknown = on_unknown;
    let key = Key::new(format!("{on_unknown:?}-{round}")).unwrap();
    engine.claim(&Scope::shared(), &key, &Same, &policy).await
}

/// A request with a constant fingerprint.
struct Same;

impl OperationRequest for Same {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("same/1").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

//! Secrets that change.

use hapax_core::{Claim, Idempotency, KeyRing, Outcome, Policy, Secret, Store, StoreError};

use super::{ServerFixture, StoreConnection, open_by};
use crate::steps::{claim, claim_key, complete, expect_stored, key};

/// A retry is replayed after the secret that seals records was replaced twice.
pub async fn a_retry_is_replayed_after_the_secret_was_replaced<F: ServerFixture>() {
    let server = F::start().await;
    let direct = StoreConnection::through(server.address().port());
    let [first, second, third] = [1, 2, 3].map(|byte| Secret::new([byte; 32]));
    let rings = [
        KeyRing::new(first.clone()),
        KeyRing::new(first.clone()).sealing(second.clone()),
        KeyRing::new(first).sealing(second).sealing(third),
    ];
    for (round, ring) in rings.into_iter().enumerate() {
        let store = open_by(&server, direct.clone().secrets(ring)).await;
        let process = Idempotency::builder(store).namespace("").build().unwrap();
        match (round, claim_key(&process, 1, &Policy::default()).await) {
            (0, Claim::Execute(lease)) => {
                lease.complete(Outcome::new("test/1", "paid"), None).await.unwrap();
            }
            (1 | 2, Claim::Replay(replay)) => assert_eq!(replay.outcome.bytes(), "paid"),
            (round, other) => panic!("in round {round}: {other:?}"),
        }
    }
}

/// A record that is written under a new secret cannot be read, nor replaced, without it.
pub async fn secrets_change_without_losing_records<F: ServerFixture>() {
    let server = F::start().await;
    let direct = StoreConnection::through(server.address().port());
    let [first, second] = [1, 2].map(|byte| Secret::new([byte; 32]));
    let old = open_by(&server, direct.clone().secrets(KeyRing::new(first.clone()))).await;
    let claimed = claim(1);
    expect_stored(&old, &claimed).await;
    let new = open_by(&server, direct.secrets(KeyRing::new(first).sealing(second))).await;
    assert!(new.load(&key(1)).await.unwrap().stored.is_some());
    expect_stored(&new, &complete(&claimed, 2, b"yes")).await;
    let loaded = old.load(&key(1)).await;
    assert!(matches!(loaded, Err(StoreError::Corrupt(_))), "{loaded:?}");
    let swapped = old.swap(claim(1)).await;
    assert!(matches!(swapped, Err(StoreError::Corrupt(_))), "{swapped:?}");
    // The secret that names operation ids is unchanged.
    assert_eq!(new.capabilities().secret, old.capabilities().secret);
}

//! Secrets that change.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName};
use hapax_core::store::Swap;
use hapax_core::{
    Claim, ClaimError, EntryId, Idempotency, KeyRing, Outcome, Policy, RecordState, Scope, Secret,
    Store, StoreError,
};

use super::{ServerFixture, StoreConnection, open_by};
use crate::steps::{
    SameRequest, claim, claim_key, complete, expect_stored, key, load, named, own, write_id,
};

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
    assert_eq!(new.capabilities().naming(), old.capabilities().naming());
}

/// The records of a store that began without a secret stay readable while a ring without a name is rolled out,
/// and after its second step the records that a process writes are sealed. A process without the ring reads none
/// of those, and does not find their keys free.
pub async fn a_store_that_began_without_a_secret_is_sealed_in_steps<F: ServerFixture>() {
    let server = F::start().await;
    let direct = StoreConnection::through(server.address().port());
    let secret = Secret::new([1; 32]);
    let first = KeyRing::unnamed(secret.clone());
    let second = first.clone().sealing(secret);
    let bare = Arc::new(open_by(&server, direct.clone()).await);
    let opens = Arc::new(open_by(&server, direct.clone().secrets(first)).await);
    let seals = Arc::new(open_by(&server, direct.secrets(second)).await);
    assert!(!opens.capabilities().seals() && seals.capabilities().seals());
    assert!(seals.capabilities().naming().is_none());

    let old = in_all_states();
    for swap in &old {
        expect_stored(&*bare, swap).await;
    }
    let mut writers = Vec::new();
    for (of, store) in (1..).zip([&bare, &opens, &seals]) {
        let process = Idempotency::builder(Arc::clone(store)).namespace("").build().unwrap();
        let lease = own(&process, of, &Policy::default()).await;
        lease.complete(Outcome::new("test/1", "paid"), None).await.unwrap();
        expect_stored(&**store, &claim(of + 20)).await;
        schedule(&**store, of).await;
        writers.push(process);
    }
    for (store, process) in [(&opens, &writers[1]), (&seals, &writers[2])] {
        for swap in &old {
            let found = store.load(&swap.id).await.unwrap().stored.unwrap();
            assert_eq!(found.record, swap.draft.record);
        }
        for of in 1..=3 {
            let replayed = claim_key(process, of, &Policy::default()).await;
            assert!(matches!(replayed, Claim::Replay(_)), "{of}: {replayed:?}");
            assert!(load(&**store, of + 20).await.is_some());
            assert_eq!(note(&**store, of).await.unwrap(), "a note");
        }
    }
    // A record from before is sealed by its next write, and no process takes it for another one.
    let done = complete(&old[0], 30, b"yes");
    expect_stored(&*seals, &done).await;
    assert_eq!(load(&*opens, 11).await.unwrap().record, done.draft.record);

    assert!(load(&*bare, 22).await.is_some(), "the first step seals nothing");
    for of in [11, 23] {
        let loaded = bare.load(&key(of)).await;
        assert!(matches!(loaded, Err(StoreError::Corrupt(_))), "{loaded:?}");
        let swapped = bare.swap(Swap { write_id: write_id(40), ..claim(of) }).await;
        assert!(matches!(swapped, Err(StoreError::Corrupt(_))), "{swapped:?}");
    }
    assert!(matches!(note(&*bare, 3).await, Err(StoreError::Corrupt(_))));
    let claimed =
        writers[0].claim(&Scope::shared(), &named(3), &SameRequest, &Policy::default()).await;
    assert!(matches!(claimed, Err(ClaimError::Store(StoreError::Corrupt(_)))), "{claimed:?}");
}

/// Returns claims of the keys from 11, with a record in each state.
fn in_all_states() -> Vec<Swap> {
    let outcome = RecordState::Done(Outcome::new("test/1", "old"));
    let states = [
        RecordState::InFlight,
        RecordState::Unknown { seen: None, reconciling: false },
        outcome,
        RecordState::Released,
    ];
    let swap = |(of, state)| {
        let mut swap = claim(of);
        swap.draft.record.state = state;
        swap
    };
    (11..).zip(states).map(swap).collect()
}

fn entry(of: u64) -> EntryKey {
    EntryKey { operation: key(of), id: EntryId::from_bytes([7; 16]) }
}

async fn schedule(store: &dyn Store, of: u64) {
    let queue = QueueName::new("secrets").unwrap();
    let new = NewEntry {
        key: entry(of),
        queue,
        due_in: Duration::ZERO,
        note: Bytes::from_static(b"a note"),
    };
    // The same insertion may be repeated.
    while store.capabilities().schedule.unwrap().insert(new.clone()).await.is_err() {}
}

async fn note(store: &dyn Store, of: u64) -> Result<Bytes, StoreError> {
    let queue = [QueueName::new("secrets").unwrap()];
    let schedule = store.capabilities().schedule.unwrap();
    let due = schedule.due(&queue, NonZeroU32::MIN.saturating_add(9)).await?;
    let found = due.entries.into_iter().find(|(key, _)| *key == entry(of)).unwrap();
    found.1.map(|entry| entry.note)
}

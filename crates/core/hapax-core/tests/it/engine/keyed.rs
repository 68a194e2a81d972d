//! Fingerprints under a secret.

use hapax_core::store::{Draft, Stamp, Swap};
use hapax_core::{
    Claim, ClaimError, Fingerprint, FingerprintScheme, Idempotency, KeyRing, LeaseId, OperationId,
    OperationRequest, Outcome, Record, RecordState, Scope, Secret, Store, SystemEntropy, WriteId,
};

use super::{Text, WithCapabilities, World, claim, key, outcome, reexecute};

const LEASE: std::time::Duration = std::time::Duration::from_secs(30);
const SECRET: Secret = Secret::new([7; 32]);

fn process(world: &World) -> Idempotency {
    with_secret(world, SECRET)
}

fn with_secret(world: &World, secret: Secret) -> Idempotency {
    let store = WithCapabilities {
        store: world.store.clone(),
        secrets: Some(KeyRing::new(secret)),
        notify: None,
        shared: false,
    };
    Idempotency::builder(store).build().unwrap()
}

fn plain(text: &'static str) -> Fingerprint {
    Text(text).fingerprint(&Text(text).scheme()).unwrap()
}

async fn expect_stored(world: &World, id: &OperationId) -> Record {
    world.store.load(id).await.unwrap().stored.unwrap().record
}

#[tokio::test(start_paused = true)]
async fn with_a_secret_a_fingerprint_is_stored_under_a_key() {
    let world = World::new();
    let process = process(&world);
    let Claim::Execute(lease) = claim(&process, "a", &reexecute()).await else { panic!() };
    let record = expect_stored(&world, &process.operation_id(&Scope::shared(), &key())).await;
    assert_eq!(record.scheme.as_str(), "keyed/1;text/2");
    assert_eq!(record.scheme.of_request(), "text/2");
    assert_ne!(record.fingerprint, plain("a"));
    let hex: String = record.fingerprint.as_bytes().iter().map(|it| format!("{it:02x}")).collect();
    assert_eq!(hex, "88179b670e18de2705c57ee7862c4e1e9d54a6f2504d9096e274ea767e68e43d");
    // Another secret gives another fingerprint, so that two stores cannot be compared.
    let other = with_secret(&world, Secret::new([8; 32]));
    assert!(matches!(claim(&other, "a", &reexecute()).await, Claim::Execute(_)));
    let others = expect_stored(&world, &other.operation_id(&Scope::shared(), &key())).await;
    assert_ne!(others.fingerprint, record.fingerprint);

    lease.complete(outcome("done"), None).await.unwrap();
    assert!(matches!(claim(&process, "a", &reexecute()).await, Claim::Replay(_)));
    assert!(matches!(claim(&process, "b", &reexecute()).await, Claim::Mismatch));
}

/// Stores a record of the request "a".
async fn put(world: &World, id: OperationId, scheme: &str) {
    let lease_id = LeaseId::fresh(&SystemEntropy).unwrap();
    let record = Record {
        scheme: FingerprintScheme::new(scheme).unwrap(),
        fingerprint: plain("a"),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms: reexecute().terms,
        checkpoint: None,
        notes: hapax_core::Notes::default(),
        extensions: hapax_core::Extensions::default(),
        state: RecordState::Done(Outcome::new("text", "of an earlier release")),
    };
    let (stamp, lease) = (Stamp::NextFence, std::time::Duration::ZERO);
    let draft = Draft { record, stamp, lease, keep: Some(LEASE) };
    let write_id = WriteId::fresh(&SystemEntropy).unwrap();
    world.store.swap(Swap { id, expected: None, write_id, draft }).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_retry_is_hashed_by_the_scheme_of_its_record() {
    let world = World::new();
    let process = process(&world);
    put(&world, process.operation_id(&Scope::shared(), &key()), "text/2").await;
    assert!(matches!(claim(&process, "a", &reexecute()).await, Claim::Replay(_)));
    assert!(matches!(claim(&process, "b", &reexecute()).await, Claim::Mismatch));
}

#[tokio::test(start_paused = true)]
async fn without_the_secret_a_keyed_record_is_neither_executed_nor_replayed() {
    let world = World::new();
    let process = world.process();
    put(&world, process.operation_id(&Scope::shared(), &key()), "keyed/1;text/2").await;
    let claimed = process.claim(&Scope::shared(), &key(), &Text("a"), &reexecute()).await;
    assert!(matches!(claimed, Err(ClaimError::UnknownScheme)), "{claimed:?}");
}

#[test]
fn a_scheme_leaves_bytes_for_the_keyed_prefix() {
    let longest = "x".repeat(FingerprintScheme::MAX_LEN - "keyed/1;".len());
    assert!(FingerprintScheme::new(longest.clone()).is_ok());
    assert!(FingerprintScheme::new(format!("keyed/1;{longest}")).is_ok());
    assert!(FingerprintScheme::new(format!("{longest}x")).is_err());
}

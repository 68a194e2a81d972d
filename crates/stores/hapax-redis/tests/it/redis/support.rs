//! What the tests write and read.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Stamped, Swap, Swapped};
use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Key, Lease, LeaseId, OnUnknown,
    OperationId, OperationRequest, Outcome, Policy, Record, RecordState, Scope, Store, StoreError,
    Terms, WriteId,
};
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const RETENTION: Duration = Duration::from_secs(86_400);

pub(crate) fn at(port: u16) -> RedisOptions {
    RedisOptions::new(format!("redis://127.0.0.1:{port}"))
}

pub(crate) async fn connect(server: &RedisServer) -> Arc<RedisStore> {
    Arc::new(RedisStore::connect(at(server.port())).await.unwrap())
}

/// Connects with a time-out that may be too short for that on a busy machine: a test needs it later.
pub(crate) async fn connect_within(options: RedisOptions) -> RedisStore {
    loop {
        match RedisStore::connect(options.clone()).await {
            Ok(store) => return store,
            Err(error) => assert!(error.is_unreachable(), "{error}"),
        }
    }
}

pub(crate) fn key(of: u64) -> OperationId {
    OperationId::from_bytes(wide(of))
}

pub(crate) fn write_id(of: u64) -> WriteId {
    WriteId::from_bytes(wide(of))
}

/// A claim of key `of`, tagged `of`.
pub(crate) fn claim(of: u64) -> Swap {
    let lease_id = LeaseId::from_bytes(wide(of));
    let terms = Terms { lease: LEASE, retention: RETENTION, on_unknown: OnUnknown::Reexecute };
    let record = Record {
        scheme: FingerprintScheme::new("test/1").unwrap(),
        fingerprint: Fingerprint::from_bytes([7; 32]),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms,
        checkpoint: None,
        notes: hapax_core::Notes::default(),
        state: RecordState::InFlight,
    };
    let draft = Draft { record, stamp: Stamp::NextFence, lease: LEASE, keep: Some(RETENTION) };
    Swap { id: key(of), expected: None, write_id: write_id(of), draft }
}

/// What follows `swap`: its outcome is `outcome`, and its tag is `next`.
pub(crate) fn complete(swap: &Swap, next: u64, outcome: &[u8]) -> Swap {
    let state = RecordState::Done(Outcome::new("test/1", outcome.to_vec()));
    let record = Record { state, ..swap.draft.record.clone() };
    let draft = Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, keep: Some(RETENTION) };
    Swap { id: swap.id, expected: Some(swap.write_id), write_id: write_id(next), draft }
}

pub(crate) async fn expect_stored(store: &dyn Store, swap: &Swap) -> Stamped {
    let swapped = loop {
        match store.swap(swap.clone()).await {
            Ok(swapped) => break swapped,
            // A busy machine. Sent again, a swap that was stored is stored.
            Err(StoreError::Unavailable(_) | StoreError::Ambiguous(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    match swapped {
        Swapped::Stored(stamped) => stamped,
        Swapped::Conflict(seen) => panic!("a conflict: {seen:?}"),
    }
}

/// A request that is the same each time.
pub(crate) struct Same;

impl OperationRequest for Same {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("same/1").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

pub(crate) fn policy(on_unknown: OnUnknown) -> Policy {
    let mut policy = Policy::default();
    policy.terms.on_unknown = on_unknown;
    policy
}

pub(crate) fn named(of: u64) -> Key {
    Key::new(format!("key-{of}")).unwrap()
}

pub(crate) async fn ask(process: &Idempotency, of: u64, policy: &Policy) -> Claim {
    process.claim(&Scope::shared(), &named(of), &Same, policy).await.unwrap()
}

pub(crate) async fn own(process: &Idempotency, of: u64, policy: &Policy) -> Lease {
    match ask(process, of, policy).await {
        Claim::Execute(lease) => lease,
        other => panic!("expected to execute {of}, got {other:?}"),
    }
}

fn wide<const N: usize>(of: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let spread = of.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes[..8].copy_from_slice(&spread.to_be_bytes());
    bytes[8..16].copy_from_slice(&of.to_be_bytes());
    bytes
}

//! Swaps and claims of a test, each named by a number.
//!
//! A number names an operation id, a write id and a lease id, which are spread over their space as
//! hashes are.

#![allow(
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a step fails by panicking"
)]

use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Key, Lease, LeaseId, OnUnknown,
    OperationId, OperationRequest, Outcome, Policy, Record, RecordState, Scope, Store, StoreError,
    Terms, WriteId,
};
use tokio::time::Instant;

/// The lease of [`claim`].
pub const LEASE: Duration = Duration::from_secs(30);
/// The retention of [`claim`] and [`complete`].
pub const RETENTION: Duration = Duration::from_secs(86_400);

/// Returns the operation id of a number.
#[must_use]
pub fn key(of: u64) -> OperationId {
    OperationId::from_bytes(wide(of))
}

/// Returns the write id of a number.
#[must_use]
pub fn write_id(of: u64) -> WriteId {
    WriteId::from_bytes(wide(of))
}

/// Returns the swap that claims the absent record `of`; its write id and lease id are `of` too.
#[must_use]
pub fn claim(of: u64) -> Swap {
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
        extensions: hapax_core::Extensions::default(),
        state: RecordState::InFlight,
    };
    let draft = Draft { record, stamp: Stamp::NextFence, lease: LEASE, keep: Some(RETENTION) };
    Swap { id: key(of), expected: None, write_id: write_id(of), draft }
}

/// Returns the swap that completes what `swap` claimed; its write id is `next`.
#[must_use]
pub fn complete(swap: &Swap, next: u64, outcome: &[u8]) -> Swap {
    let state = RecordState::Done(Outcome::new("test/1", outcome.to_vec()));
    let record = Record { state, ..swap.draft.record.clone() };
    let draft = Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, keep: Some(RETENTION) };
    Swap { id: swap.id, expected: Some(swap.write_id), write_id: write_id(next), draft }
}

/// Sends a swap until the store answers; it must be stored. Returns its stamps.
pub async fn expect_stored(store: &dyn Store, swap: &Swap) -> Stamped {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match store.swap(swap.clone()).await {
            Ok(Swapped::Stored(stamped)) => return stamped,
            Ok(Swapped::Conflict(seen)) => panic!("a conflict: {seen:?}"),
            // A server on a busy machine. The same swap may be sent again.
            Err(StoreError::Unavailable(_) | StoreError::Ambiguous(_))
                if Instant::now() < deadline => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Returns the stored record of a number.
pub async fn load(store: &dyn Store, of: u64) -> Option<StoredRecord> {
    store.load(&key(of)).await.unwrap().stored
}

/// A request whose fingerprint is always the same.
#[derive(Clone, Copy, Debug)]
pub struct SameRequest;

impl OperationRequest for SameRequest {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("same/1").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

/// Returns the default policy with another rule for unknown outcomes.
#[must_use]
pub fn policy(on_unknown: OnUnknown) -> Policy {
    let mut policy = Policy::default();
    policy.terms.on_unknown = on_unknown;
    policy
}

/// Returns the idempotency key of a number.
#[must_use]
pub fn named(of: u64) -> Key {
    Key::new(format!("key-{of}")).unwrap()
}

/// Claims the key of a number for [`SameRequest`].
pub async fn claim_key(engine: &Idempotency, of: u64, policy: &Policy) -> Claim {
    engine.claim(&Scope::shared(), &named(of), &SameRequest, policy).await.unwrap()
}

/// Claims the key of a number, which must be free.
pub async fn own(engine: &Idempotency, of: u64, policy: &Policy) -> Lease {
    match claim_key(engine, of, policy).await {
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

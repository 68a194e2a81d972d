//! What the tests write and read.

use std::time::Duration;

use hapax_core::store::{Draft, Snapshot, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{
    Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Outcome, Record, RecordState,
    Store, Terms, WriteId,
};

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const RETENTION: Duration = Duration::from_secs(86_400);

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
    match store.swap(swap.clone()).await.unwrap() {
        Swapped::Stored(stamped) => stamped,
        Swapped::Conflict(seen) => panic!("a conflict: {seen:?}"),
    }
}

pub(crate) async fn load(store: &dyn Store, of: u64) -> Option<StoredRecord> {
    store.load(&key(of)).await.unwrap().stored
}

pub(crate) async fn seen(store: &dyn Store, of: u64) -> (Snapshot, StoredRecord) {
    let seen = store.load(&key(of)).await.unwrap();
    let stored = seen.stored.clone().unwrap();
    (seen, stored)
}

/// Spread over the key space as hashes are.
fn wide<const N: usize>(of: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let spread = of.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes[..8].copy_from_slice(&spread.to_be_bytes());
    bytes[8..16].copy_from_slice(&of.to_be_bytes());
    bytes
}

//! Concurrent operations of callers on few keys, in every order.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{
    Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Record, RecordState, Store,
    StoreError, Terms, WriteId,
};
use hapax_testkit::SeededEntropy;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Number of concurrent callers.
const CALLERS: u64 = 48;

/// Short, so that there is something to purge.
const KEEP: Duration = Duration::from_millis(20);

/// Claims, takes over, renews, loads and purges `keys` keys until `until`, and returns how many
/// swaps were stored. Stops at the first error, which a deadlock would be.
pub(crate) async fn scramble<S: Store>(
    stores: &[Arc<S>],
    keys: u64,
    seed: u64,
    until: Instant,
) -> Result<u64, StoreError> {
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let store = Arc::clone(&stores[caller as usize % stores.len()]);
        let entropy = SeededEntropy::new(seed ^ caller);
        callers.spawn(async move {
            let mut stored = 0;
            while Instant::now() < until {
                stored += u64::from(once(&*store, &entropy, keys).await?);
            }
            Ok(stored)
        });
    }
    callers.join_all().await.into_iter().sum()
}

async fn once(store: &dyn Store, entropy: &SeededEntropy, keys: u64) -> Result<bool, StoreError> {
    let key = key(entropy.below(keys));
    let expected = match entropy.below(8) {
        0 => None,
        1 => {
            store.reap(NonZeroU32::MIN.saturating_add(20)).await?;
            return Ok(false);
        }
        _ => store.load(&key).await?.stored.map(|stored| stored.write_id),
    };
    let fresh = |error: hapax_core::EntropyError| StoreError::unavailable(error);
    let write_id = WriteId::fresh(entropy).map_err(fresh)?;
    let lease_id = LeaseId::fresh(entropy).map_err(fresh)?;
    let terms = Terms { lease: Duration::ZERO, retention: KEEP, on_unknown: OnUnknown::Reexecute };
    let record = Record {
        scheme: FingerprintScheme::new("scramble/1").map_err(StoreError::corrupt)?,
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
    let draft = Draft { record, stamp: Stamp::NextFence, lease: KEEP, keep: Some(KEEP) };
    let swapped = store.swap(Swap { id: key, expected, write_id, draft }).await?;
    Ok(matches!(swapped, Swapped::Stored(_)))
}

/// Distributed over the key space like hashes.
fn key(of: u64) -> OperationId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&of.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    bytes[8..16].copy_from_slice(&of.to_be_bytes());
    OperationId::from_bytes(bytes)
}

//! The record of the register.

use std::time::Duration;

use hapax_core::store::{Draft, Snapshot, Stamp, Swap};
use hapax_core::{
    Entropy, Extensions, Fingerprint, FingerprintScheme, LeaseId, Notes, OnUnknown, Record,
    RecordState, StoreError, SystemEntropy, Terms, WriteId,
};

use super::fault::RegisterFault;
use super::{FORMAT, LAPSE, RegisterContent, register_id};

/// Lease of the record, which is not renewed: a store removes no record earlier than a lease after it expires.
const LEASE: Duration = Duration::from_secs(1);

/// Returns the content of a register that was loaded; an absent one is empty. One that cannot be read is not replaced: a
/// later version may have written it.
pub(super) fn content(seen: &Snapshot) -> Result<RegisterContent, StoreError> {
    match seen.stored.as_ref().map(|stored| &stored.record.state) {
        Some(RecordState::Done(outcome)) => RegisterContent::decode(outcome)
            .map_err(|error| StoreError::unavailable(RegisterFault::Content(error))),
        _ => Ok(RegisterContent::default()),
    }
}

/// Returns the swap that replaces what was loaded.
pub(super) fn swap(seen: &Snapshot, content: &RegisterContent) -> Result<Swap, StoreError> {
    let fresh = |error| StoreError::unavailable(error);
    let entropy: &dyn Entropy = &SystemEntropy;
    let lease_id = LeaseId::fresh(entropy).map_err(fresh)?;
    let record = Record {
        scheme: FingerprintScheme::new(FORMAT).map_err(StoreError::unavailable)?,
        fingerprint: Fingerprint::builder(FORMAT).finish(),
        lease_id,
        generation: lease_id,
        attempt: 1,
        // It is no operation: a store that was emptied accepts it before an operator confirms the store.
        terms: Terms { lease: LEASE, retention: LAPSE, on_unknown: OnUnknown::Reexecute },
        checkpoint: None,
        notes: Notes::default(),
        extensions: Extensions::default(),
        state: RecordState::Done(content.encode().map_err(StoreError::unavailable)?),
    };
    Ok(Swap {
        id: register_id(),
        expected: seen.stored.as_ref().map(|stored| stored.write_id),
        write_id: WriteId::fresh(entropy).map_err(fresh)?,
        draft: Draft { record, stamp: Stamp::NextFence, lease: Duration::ZERO, keep: None },
    })
}

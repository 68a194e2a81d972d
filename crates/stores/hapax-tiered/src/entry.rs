//! Entries of a cache: a finished record, the time at which it was seen, and a seal over both.
//!
//! The record is sealed as in a store, bound to the operation id. In place of the write id it is
//! bound to a hash of all other fields of the entry. So with a secret, a process that can write to
//! the cache cannot forge an entry, change one, or move one to another key. It can only restore an
//! old entry, and that contains the time at which it was seen.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::StoredRecord;
use hapax_core::{
    Entropy, FencingToken, OperationId, RecordState, SealError, Sealer, Timestamp, WriteId,
};

const MAGIC: &[u8; 4] = b"hxt1";
const FIELDS: usize = 4 + 16 + 4 * 8;
const FOR_EVER: u64 = u64::MAX;

/// A finished record, as it was at a time of the authority's clock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub(crate) seen: Timestamp,
    pub(crate) stored: StoredRecord,
}

impl Entry {
    /// Returns `None` for a record that is not finished or has expired: those are never cached.
    pub(crate) fn new(seen: Timestamp, stored: &StoredRecord) -> Option<Self> {
        let over = stored.keep_until.is_some_and(|until| until <= seen);
        let finished = matches!(stored.record.state, RecordState::Done(_));
        (finished && !over).then(|| Self { seen, stored: stored.clone() })
    }

    /// Returns for how long after `seen` the entry may be used: at most a quarter of the retention
    /// that is left, so that even a clock that runs at a quarter of the rate does not use it past
    /// its end.
    pub(crate) fn ttl(&self, longest: Duration) -> Duration {
        let remains = self.stored.keep_until.map_or(Duration::MAX, |until| until.since(self.seen));
        longest.min(remains / 4)
    }

    pub(crate) fn encode(
        &self,
        key: &OperationId,
        sealer: &Sealer,
        entropy: &dyn Entropy,
    ) -> Result<Bytes, SealError> {
        let StoredRecord { write_id, fence, lease_until, keep_until, record } = &self.stored;
        let keep_until = keep_until.map_or(FOR_EVER, Timestamp::as_micros);
        let mut out = Vec::with_capacity(FIELDS + 512);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(write_id.as_bytes());
        for number in [self.seen.as_micros(), fence.get(), lease_until.as_micros(), keep_until] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        let sealed = sealer.seal(key, bound(&out), record, entropy)?;
        out.extend_from_slice(&sealed);
        Ok(out.into())
    }

    /// Returns `None` for bytes that are no valid entry for this key.
    pub(crate) fn decode(key: &OperationId, bytes: &[u8], sealer: &Sealer) -> Option<Self> {
        let (fields, sealed) = bytes.split_at_checked(FIELDS)?;
        let (write_id, numbers) = fields.strip_prefix(MAGIC)?.split_first_chunk()?;
        let mut numbers = numbers.as_chunks().0.iter().map(|number| u64::from_be_bytes(*number));
        let [seen, fence, lease_until, keep_until] = std::array::from_fn(|_| numbers.next());
        let keep_until = keep_until.filter(|until| *until != FOR_EVER);
        let stored = StoredRecord {
            write_id: WriteId::from_bytes(*write_id),
            fence: FencingToken::new(fence?),
            lease_until: Timestamp::from_micros(lease_until?),
            keep_until: keep_until.map(Timestamp::from_micros),
            record: sealer.open(key, bound(fields), sealed).ok()?,
        };
        Self::new(Timestamp::from_micros(seen?), &stored)
    }
}

/// Represents the fields in the seal. Other fields with the same value need a second preimage of
/// 128 bits.
fn bound(fields: &[u8]) -> WriteId {
    let mut hash = blake3::Hasher::new_derive_key("hapax 1 tiered entry");
    hash.update(fields);
    let mut write_id = [0; 16];
    hash.finalize_xof().fill(&mut write_id);
    WriteId::from_bytes(write_id)
}

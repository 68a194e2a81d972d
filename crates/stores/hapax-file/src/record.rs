//! What a cell looks like in the file: columns, their checksum, and the sealed record.
//!
//! Deadlines and fence stand beside the record because the store stamps them. They decide who
//! may execute, so they have a checksum of their own, over the store key as well: a flipped bit
//! in a deadline must not look like a lapse.

use hapax_core::store::{Stamped, StoredRecord};
use hapax_core::{FencingToken, OperationId, Sealer, StoreError, Timestamp, WriteId};

const VERSION: u8 = 1;
const KEPT_FOR_EVER: u8 = 1;
const FIELDS: usize = 66;
const CHECKSUM: usize = 16;
const HEAD: usize = FIELDS + CHECKSUM;

/// When a cell is never due.
pub(crate) const NEVER: Timestamp = Timestamp::MAX;

/// What stands beside a sealed record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Columns {
    pub(crate) write_id: WriteId,
    pub(crate) fence: FencingToken,
    pub(crate) lease_until: Timestamp,
    pub(crate) keep_until: Option<Timestamp>,
    /// Which opening of the file granted the lease.
    pub(crate) epoch: u64,
    /// From when on it may be reaped; [`NEVER`] for never.
    pub(crate) due: Timestamp,
    /// Where the index of due cells has it, never later than `due`; [`NEVER`]: nowhere.
    pub(crate) indexed: Timestamp,
}

/// A cell as it was read: the record still sealed.
#[derive(Clone, Debug)]
pub(crate) struct SealedRecord {
    pub(crate) columns: Columns,
    pub(crate) sealed: Vec<u8>,
}

/// Sealed bytes up to which a cell is copied for whoever comes upon it. Larger ones, of which many
/// together are a burden, are asked for by those who have [`MemoryBudget`](crate::budget::MemoryBudget).
pub(crate) const SMALL: usize = 16 * 1024;

/// What a thread says of a cell.
#[derive(Clone, Debug)]
pub(crate) enum SealedRead {
    Record(SealedRecord),
    /// It has so many sealed bytes, more than there was room for.
    Large(usize),
}

impl SealedRead {
    pub(crate) fn copy(columns: Columns, sealed: &[u8], room: usize) -> Self {
        match sealed.len() {
            bytes if bytes > room => Self::Large(bytes),
            _ => Self::Record(SealedRecord { columns, sealed: sealed.to_vec() }),
        }
    }
}

/// Which leases hold: those granted since the file was opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    pub(crate) number: u64,
    pub(crate) opened_at: Timestamp,
}

/// A cell's columns are damaged.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the cell's columns are damaged or of an unknown version")]
pub(crate) struct Damaged;

impl Columns {
    pub(crate) fn write(&self, key: &OperationId, sealed: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + sealed.len());
        out.push(VERSION);
        out.push(if self.keep_until.is_none() { KEPT_FOR_EVER } else { 0 });
        out.extend_from_slice(self.write_id.as_bytes());
        out.extend_from_slice(&self.fence.get().to_be_bytes());
        for time in [self.lease_until, self.keep_until.unwrap_or(NEVER)] {
            out.extend_from_slice(&time.as_micros().to_be_bytes());
        }
        out.extend_from_slice(&self.epoch.to_be_bytes());
        for time in [self.due, self.indexed] {
            out.extend_from_slice(&time.as_micros().to_be_bytes());
        }
        let sum = checksum(key, &out);
        out.extend_from_slice(&sum);
        out.extend_from_slice(sealed);
        out
    }

    /// Splits what is stored into columns and sealed record.
    pub(crate) fn read<'a>(
        key: &OperationId,
        stored: &'a [u8],
    ) -> Result<(Self, &'a [u8]), Damaged> {
        let (fields, rest) = stored.split_first_chunk::<FIELDS>().ok_or(Damaged)?;
        let (sum, sealed) = rest.split_first_chunk::<CHECKSUM>().ok_or(Damaged)?;
        if checksum(key, fields) != *sum {
            return Err(Damaged);
        }
        let ([version, kept], fields) = fields.split_first_chunk().ok_or(Damaged)?;
        let (write_id, numbers) = fields.split_first_chunk().ok_or(Damaged)?;
        if *version != VERSION {
            return Err(Damaged);
        }
        let mut numbers = numbers.as_chunks().0.iter().map(|number| u64::from_be_bytes(*number));
        let mut number = || numbers.next().ok_or(Damaged);
        let fence = FencingToken::new(number()?);
        let lease_until = Timestamp::from_micros(number()?);
        let keep_until = Timestamp::from_micros(number()?);
        let columns = Self {
            write_id: WriteId::from_bytes(*write_id),
            fence,
            lease_until,
            keep_until: (*kept != KEPT_FOR_EVER).then_some(keep_until),
            epoch: number()?,
            due: Timestamp::from_micros(number()?),
            indexed: Timestamp::from_micros(number()?),
        };
        Ok((columns, sealed))
    }

    pub(crate) fn stamped(&self, now: Timestamp, epoch: Epoch) -> Stamped {
        Stamped { now, fence: self.fence, lease_until: self.lease(now, epoch) }
    }

    /// Until when the lease holds. Whoever held one when the file was last closed is gone, or has
    /// lost the file: its lease ended then at the latest, which is now at the latest.
    fn lease(&self, now: Timestamp, epoch: Epoch) -> Timestamp {
        if self.epoch == epoch.number {
            self.lease_until
        } else {
            self.lease_until.min(epoch.opened_at).min(now)
        }
    }
}

impl SealedRecord {
    /// Opens the record.
    pub(crate) fn open(
        &self,
        key: &OperationId,
        now: Timestamp,
        epoch: Epoch,
        sealer: &Sealer,
    ) -> Result<StoredRecord, StoreError> {
        let Columns { write_id, fence, keep_until, .. } = self.columns;
        let record = sealer.open(key, write_id, &self.sealed).map_err(StoreError::corrupt)?;
        Ok(StoredRecord {
            write_id,
            fence,
            lease_until: self.columns.lease(now, epoch),
            keep_until,
            record,
        })
    }
}

fn checksum(key: &OperationId, fields: &[u8]) -> [u8; CHECKSUM] {
    let mut hasher = blake3::Hasher::new_derive_key("hapax 1 embedded columns");
    hasher.update(key.as_bytes());
    hasher.update(fields);
    let mut sum = [0; CHECKSUM];
    hasher.finalize_xof().fill(&mut sum);
    sum
}

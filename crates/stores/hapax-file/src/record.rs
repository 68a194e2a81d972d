//! The format of a record in the file: columns, their checksum, and the sealed record.
//!
//! Deadlines and fence are outside the sealed record because the store stamps them. They decide
//! which execution has the lease, so they have a separate checksum, which also covers the operation
//! id: a flipped bit in a deadline must not look like a lapse.

use hapax_core::store::{Stamped, StoredRecord};
use hapax_core::{FencingToken, OperationId, Sealer, StoreError, Timestamp, WriteId};

const VERSION: u8 = 1;
const KEPT_FOR_EVER: u8 = 1;
const FIELDS: usize = 66;
const CHECKSUM: usize = 16;
const HEAD: usize = FIELDS + CHECKSUM;

/// Time at which a record without an end expires.
pub(crate) const NEVER: Timestamp = Timestamp::MAX;

/// The fields next to a sealed record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Columns {
    pub(crate) write_id: WriteId,
    pub(crate) fence: FencingToken,
    pub(crate) lease_until: Timestamp,
    pub(crate) keep_until: Option<Timestamp>,
    /// The epoch in which the lease began.
    pub(crate) epoch: u64,
    /// Time from which on the record may be reaped; [`NEVER`] for never.
    pub(crate) due: Timestamp,
    /// Time of the record's entry in the index of expiry, never later than `due`; [`NEVER`] if it
    /// has none.
    pub(crate) indexed: Timestamp,
}

/// A record as it was read, still sealed.
#[derive(Clone, Debug)]
pub(crate) struct SealedRecord {
    pub(crate) columns: Columns,
    pub(crate) sealed: Vec<u8>,
}

/// Limit of sealed bytes up to which a record is copied at once. Larger records, of which many
/// together need much memory, are read again under a reservation of the
/// [`MemoryBudget`](crate::budget::MemoryBudget).
pub(crate) const SMALL: usize = 16 * 1024;

/// The result of reading a record.
#[derive(Clone, Debug)]
pub(crate) enum SealedRead {
    Record(SealedRecord),
    /// The record has this many sealed bytes, more than the limit of the read.
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

/// The current epoch. Leases of earlier ones have lapsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    pub(crate) number: u64,
    pub(crate) opened_at: Timestamp,
}

/// The columns of a record are damaged.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the record's columns are damaged or of an unknown version")]
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

    /// Splits a stored value into columns and sealed record.
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

    /// Returns until when the lease is valid. The owner of a lease from an earlier epoch has ended,
    /// or has lost the file: its lease ended when the file was opened, at the latest, and so is
    /// over now.
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

//! Swaps and records in the form of the statements.

use std::time::Duration;

use hapax_core::store::{Snapshot, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{
    FencingToken, OnUnknown, OperationId, RecordState, Sealer, StoreError, Timestamp, WriteId,
};
use tokio_postgres::Row;

/// A swap with its sealed record.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) key: OperationId,
    pub(crate) write_id: WriteId,
    pub(crate) expected: Option<WriteId>,
    pub(crate) state: &'static str,
    pub(crate) sealed: Vec<u8>,
    pub(crate) lease: i64,
    pub(crate) keep: Option<i64>,
    /// Time after the end of the retention for which the row stays.
    pub(crate) grace: i64,
    /// Time after which the purge may check a row that is retained for ever.
    pub(crate) hint: i64,
    pub(crate) next_fence: bool,
    /// Whether it is for a new key.
    pub(crate) is_new: bool,
    /// True if it requires the expected tables: it is for a new key that must not execute twice.
    pub(crate) strict: bool,
}

impl Write {
    pub(crate) fn new(swap: &Swap, sealed: Vec<u8>) -> Self {
        let Swap { id: key, expected, write_id, draft } = swap;
        let terms = draft.record.terms;
        Self {
            key: *key,
            write_id: *write_id,
            expected: *expected,
            state: name(&draft.record.state),
            sealed,
            lease: micros(draft.lease),
            keep: draft.keep.map(micros),
            grace: micros(terms.lease),
            hint: micros(terms.retention.saturating_add(terms.lease)),
            next_fence: draft.stamp == Stamp::NextFence,
            is_new: expected.is_none(),
            strict: expected.is_none() && terms.on_unknown != OnUnknown::Reexecute,
        }
    }

    /// Returns the bytes that it takes in memory and in the statement.
    pub(crate) const fn size(&self) -> usize {
        self.sealed.len() + size_of::<Self>()
    }

    /// Returns whether the record is no longer in flight, so that its waiters must be notified.
    pub(crate) fn ends(&self) -> bool {
        self.state != name(&RecordState::InFlight)
    }
}

/// The longest time that is written: 36,000 years. The sum of three and the time of day fits.
const LONGEST: i64 = 1 << 60;

pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(LONGEST).min(LONGEST)
}

const fn name(state: &RecordState) -> &'static str {
    match state {
        RecordState::InFlight => "in-flight",
        RecordState::Unknown { .. } => "unknown",
        RecordState::Done(_) => "done",
        RecordState::Released => "released",
    }
}

/// The row that a statement returns for one key.
#[derive(Debug)]
pub(crate) struct ResultRow {
    pub(crate) now: Timestamp,
    /// Whether this statement wrote it.
    pub(crate) written: bool,
    /// The key; `None` in a page without rows.
    pub(crate) key: Option<OperationId>,
    /// The record after the statement.
    pub(crate) found: Result<Option<SealedRecord>, DamagedRow>,
}

/// A row.
#[derive(Debug)]
pub(crate) struct SealedRecord {
    pub(crate) write_id: WriteId,
    fence: FencingToken,
    lease_until: Timestamp,
    keep_until: Option<Timestamp>,
    state: Option<String>,
    /// `None` where the statement does not return it.
    pub(crate) sealed: Option<Vec<u8>>,
}

/// The result of a swap, with the record still sealed.
#[derive(Debug)]
pub(crate) enum RawSwapped {
    Stored(Stamped),
    Conflict { now: Timestamp, found: Option<SealedRecord> },
}

/// A row that is not as it was written.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the row is damaged, or was written by another program")]
pub(crate) struct DamagedRow;

impl ResultRow {
    /// # Errors
    /// [`DamagedRow`] if not even the key of the row can be read.
    pub(crate) fn read(row: &Row) -> Result<Self, DamagedRow> {
        let key: Option<&[u8]> = get(row, 2)?;
        Ok(Self {
            now: time(get(row, 0)?)?,
            written: get(row, 1)?,
            key: key.map(bytes).transpose()?.map(OperationId::from_bytes),
            found: SealedRecord::read(row),
        })
    }

    /// Returns the answer to `write`; `None` if the row gives none, and the swap may be sent again.
    pub(crate) fn answer(self, write: &Write) -> Option<Result<RawSwapped, StoreError>> {
        let Self { now, written, found, .. } = self;
        let found = match found {
            Ok(found) => found,
            Err(damaged) => return Some(Err(StoreError::corrupt(damaged))),
        };
        match found {
            // Written now, or by an earlier repetition of the same swap.
            Some(found) if written || found.write_id == write.write_id => {
                let SealedRecord { fence, lease_until, .. } = found;
                Some(Ok(RawSwapped::Stored(Stamped { now, fence, lease_until })))
            }
            // As expected, and yet not written: another transaction had locked, inserted or removed
            // it between two reads.
            found if found.as_ref().map(|found| found.write_id) == write.expected => None,
            found => Some(Ok(RawSwapped::Conflict { now, found })),
        }
    }
}

impl RawSwapped {
    pub(crate) fn open(self, key: &OperationId, sealer: &Sealer) -> Result<Swapped, StoreError> {
        Ok(match self {
            Self::Stored(stamped) => Swapped::Stored(stamped),
            Self::Conflict { now, found } => {
                let stored = found.map(|found| found.open(key, sealer)).transpose()?;
                Swapped::Conflict(Snapshot { now, stored })
            }
        })
    }
}

impl SealedRecord {
    fn read(row: &Row) -> Result<Option<Self>, DamagedRow> {
        let Some(write_id) = get::<Option<&[u8]>>(row, 3)? else { return Ok(None) };
        Ok(Some(Self {
            write_id: WriteId::from_bytes(bytes(write_id)?),
            fence: FencingToken::new(unsigned(get(row, 4)?)?),
            lease_until: time(get(row, 5)?)?,
            keep_until: get::<Option<i64>>(row, 6)?.map(time).transpose()?,
            state: get(row, 7)?,
            sealed: get(row, 8)?,
        }))
    }

    pub(crate) fn open(
        self,
        key: &OperationId,
        sealer: &Sealer,
    ) -> Result<StoredRecord, StoreError> {
        let Self { write_id, fence, lease_until, keep_until, state, sealed } = self;
        let sealed = sealed.ok_or_else(|| StoreError::corrupt(DamagedRow))?;
        let record = sealer.open(key, write_id, &sealed).map_err(StoreError::corrupt)?;
        if state.as_deref() != Some(name(&record.state)) {
            return Err(StoreError::corrupt(DamagedRow));
        }
        Ok(StoredRecord { write_id, fence, lease_until, keep_until, record })
    }
}

pub(crate) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    at: usize,
) -> Result<T, DamagedRow> {
    row.try_get(at).map_err(|_| DamagedRow)
}

pub(crate) fn bytes<const N: usize>(bytes: &[u8]) -> Result<[u8; N], DamagedRow> {
    bytes.try_into().map_err(|_| DamagedRow)
}

fn unsigned(number: i64) -> Result<u64, DamagedRow> {
    u64::try_from(number).map_err(|_| DamagedRow)
}

pub(crate) fn time(micros: i64) -> Result<Timestamp, DamagedRow> {
    unsigned(micros).map(Timestamp::from_micros)
}

//! The walk over undecided records, or over all.
//!
//! A step reads consecutive blocks of the table: in the order of their keys, each record would be in another block.
//! The last blocks are first: while the table grows they have the newest records. In a
//! walk over undecided records the server leaves out all others, which are nearly all.
//!
//! A record that is written during the walk may move to a block that was read already; blocks that were added
//! meanwhile are read at the end. A rewrite of the whole table, as by `VACUUM FULL`, moves all records, and ends the walk with an error.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Cursor, ScanStep, Visitor};
use hapax_core::{Sealer, StoreError, Timestamp};
use tokio_postgres::Row;

use crate::error::PostgresStoreError;
use crate::maintenance::{Job, Maintenance, MaintenanceError};
use crate::record::ResultRow;
use crate::sql::PAGE_BYTES;

/// Records with an outcome of some hundred bytes in a block, half of which is left empty for
/// updates.
const RECORDS_OF_A_BLOCK: u32 = 4;

/// Records that a walk visits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Visited {
    Undecided,
    /// All of which the last execution began at most so long ago; without a time all.
    All(Option<Duration>),
}

/// Limit of the blocks of a step, whose small records are in memory together: 2 MiB.
const MOST_BLOCKS: i64 = 256;

/// Numbers of 8 bytes in a position.
const NUMBERS: usize = 4;

/// A position: the blocks between `floor` and `left` are to be read, then those that were added to `top` blocks
/// since.
#[derive(Clone, Copy)]
struct Position {
    /// The file of the table.
    file: i64,
    floor: i64,
    left: i64,
    top: i64,
}

impl Position {
    /// Returns the position of a cursor; `None` for the beginning. Any caller may have written the numbers: those that
    /// are no blocks become the nearest ones.
    fn read(from: &Cursor) -> Option<Self> {
        let (numbers, []) = from.as_bytes().as_chunks() else { return None };
        let numbers: [[u8; 8]; NUMBERS] = numbers.try_into().ok()?;
        let [file, floor, left, top] = numbers.map(i64::from_be_bytes);
        let [floor, left, top] = [floor, left, top].map(|it| it.clamp(0, i64::from(u32::MAX)));
        Some(Self { file, floor, left, top })
    }

    fn cursor(self) -> Cursor {
        let Self { file, floor, left, top } = self;
        Cursor::new([file, floor, left, top].map(i64::to_be_bytes).concat())
    }

    /// Returns the position after the blocks from `first` on were read, of a table with so many `blocks` now.
    fn next(self, first: i64, blocks: i64) -> Option<Self> {
        if first > self.floor {
            return Some(Self { left: first.min(blocks), ..self });
        }
        // Once: under load the table grows with each step, and a walk that followed it would not end.
        (self.floor == 0 && blocks > self.top).then_some(Self {
            floor: self.top,
            left: blocks,
            top: blocks,
            ..self
        })
    }
}

/// Reads as many blocks as `limit` records may take.
pub(crate) async fn step(
    upkeep: &Arc<Maintenance>,
    sealer: &Sealer,
    from: Cursor,
    limit: NonZeroU32,
    visited: Visited,
    visit: Visitor<'_>,
) -> Result<ScanStep, StoreError> {
    let place = match Position::read(&from) {
        Some(place) => place,
        None => {
            // Of no blocks: which file it is, and how many blocks it has.
            let Blocks { file, blocks, .. } = read(upkeep, 0, 0, visited).await?;
            Position { file, floor: 0, left: blocks, top: blocks }
        }
    };
    let count = i64::from(limit.get().div_ceil(RECORDS_OF_A_BLOCK)).min(MOST_BLOCKS);
    let first = place.left.saturating_sub(count).max(place.floor);
    let found = read(upkeep, first, place.left, visited).await?;
    if place.file != found.file {
        return Err(StoreError::unavailable(PostgresStoreError::Rewritten));
    }
    let (mut keys, mut bytes) = (Vec::new(), 0);
    for (row, length) in found.rows {
        if matches!(&row.found, Ok(Some(found)) if found.sealed.is_some()) {
            open(row, sealer, visit)?;
            continue;
        }
        let Some(key) = row.key else { continue };
        bytes += length;
        keys.push(key.as_bytes().to_vec());
        if bytes >= PAGE_BYTES as usize {
            load(upkeep, sealer, std::mem::take(&mut keys), visit).await?;
            bytes = 0;
        }
    }
    if !keys.is_empty() {
        load(upkeep, sealer, keys, visit).await?;
    }
    let next = place.next(first, found.blocks).map(Position::cursor);
    Ok(ScanStep { now: found.now, next })
}

/// Loads large records on the maintenance connection, so that requests do not wait for it, and visits
/// them.
async fn load(
    upkeep: &Arc<Maintenance>,
    sealer: &Sealer,
    keys: Vec<Vec<u8>>,
    visit: Visitor<'_>,
) -> Result<(), StoreError> {
    let rows = upkeep.run(Job::Load { keys }).await.map_err(MaintenanceError::into_read_error)?;
    for row in &rows {
        open(ResultRow::read(row).map_err(StoreError::corrupt)?, sealer, visit)?;
    }
    Ok(())
}

fn open(row: ResultRow, sealer: &Sealer, visit: Visitor<'_>) -> Result<(), StoreError> {
    let ResultRow { now, key, found, .. } = row;
    let key = key.ok_or_else(unreadable)?;
    let stored = match found {
        Ok(Some(found)) => found.open(&key, sealer),
        // Removed since it was found.
        Ok(None) => return Ok(()),
        Err(damaged) => Err(StoreError::corrupt(damaged)),
    };
    visit(&key, &stored, now);
    Ok(())
}

/// The records of some blocks of the table.
struct Blocks {
    now: Timestamp,
    /// The file of the table.
    file: i64,
    /// Number of blocks of the whole table.
    blocks: i64,
    /// The records, each with its length in bytes. Large ones are without the record itself.
    rows: Vec<(ResultRow, usize)>,
}

/// Reads the blocks from `first` to below `end`.
async fn read(
    upkeep: &Arc<Maintenance>,
    first: i64,
    end: i64,
    visited: Visited,
) -> Result<Blocks, StoreError> {
    let job = Job::Blocks { first, end, visited };
    let rows = upkeep.run(job).await.map_err(MaintenanceError::into_read_error)?;
    Blocks::read(&rows).map_err(|_| unreadable())
}

impl Blocks {
    fn read(rows: &[Row]) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let first = rows.first().ok_or("no row")?;
        let (file, blocks) = (first.try_get(9)?, first.try_get(10)?);
        let now = ResultRow::read(first)?.now;
        let mut found = Vec::new();
        for row in rows {
            let record = ResultRow::read(row)?;
            if record.key.is_some() {
                let length = row.try_get::<_, Option<i32>>(11)?.unwrap_or_default();
                found.push((record, usize::try_from(length)?));
            }
        }
        Ok(Self { now, file, blocks, rows: found })
    }
}

fn unreadable() -> StoreError {
    StoreError::unavailable(PostgresStoreError::UnexpectedAnswer)
}

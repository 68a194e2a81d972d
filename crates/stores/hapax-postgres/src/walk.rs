//! The walk over undecided records, or over all.
//!
//! It reads the blocks of the table in their order on the disk: in the order of keys each record
//! would be in another block. In a walk over undecided records the server leaves out all others,
//! which are nearly all.
//!
//! A record that is written during the walk may move to a block that was read already. A rewrite of
//! the whole table, as by `VACUUM FULL`, moves all records, and ends the walk with an error.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;

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

/// Reads as many blocks as `limit` records may take. A position is the file of the table and the
/// number of the next block.
pub(crate) async fn step(
    upkeep: &Arc<Maintenance>,
    sealer: &Sealer,
    from: Cursor,
    limit: NonZeroU32,
    all: bool,
    visit: Visitor<'_>,
) -> Result<ScanStep, StoreError> {
    let (file, first) = match from.as_bytes().as_chunks().0 {
        [file, first] => (Some(i64::from_be_bytes(*file)), i64::from_be_bytes(*first)),
        _ => (None, 0),
    };
    let count = i64::from(limit.get().div_ceil(RECORDS_OF_A_BLOCK));
    let rows = upkeep
        .run(Job::Blocks { first, count, all })
        .await
        .map_err(MaintenanceError::into_read_error)?;
    let found = Blocks::read(&rows).map_err(|_| unreadable())?;
    if file.is_some_and(|file| file != found.file) {
        return Err(StoreError::unavailable(PostgresStoreError::Rewritten));
    }
    let (mut keys, mut bytes) = (Vec::new(), 0);
    for (key, length) in found.keys {
        bytes += length;
        keys.push(key);
        if bytes >= PAGE_BYTES as usize {
            load(upkeep, sealer, std::mem::take(&mut keys), visit).await?;
            bytes = 0;
        }
    }
    if !keys.is_empty() {
        load(upkeep, sealer, keys, visit).await?;
    }
    let next = first.saturating_add(count);
    let place = || Cursor::new([found.file.to_be_bytes(), next.to_be_bytes()].concat());
    Ok(ScanStep { now: found.now, next: (next < found.blocks).then(place) })
}

/// Loads records on the maintenance connection, so that requests do not wait for it, and visits
/// them.
async fn load(
    upkeep: &Arc<Maintenance>,
    sealer: &Sealer,
    keys: Vec<Vec<u8>>,
    visit: Visitor<'_>,
) -> Result<(), StoreError> {
    let rows = upkeep.run(Job::Load { keys }).await.map_err(MaintenanceError::into_read_error)?;
    for row in &rows {
        let ResultRow { now, key, found, .. } =
            ResultRow::read(row).map_err(StoreError::corrupt)?;
        let key = key.ok_or_else(unreadable)?;
        let stored = match found {
            Ok(Some(found)) => found.open(&key, sealer),
            // Removed since it was found.
            Ok(None) => continue,
            Err(damaged) => Err(StoreError::corrupt(damaged)),
        };
        visit(&key, &stored, now);
    }
    Ok(())
}

/// The records of some blocks of the table.
struct Blocks {
    now: Timestamp,
    /// The file of the table.
    file: i64,
    /// Number of blocks of the whole table.
    blocks: i64,
    /// Keys of the records, each with the size of its record in bytes.
    keys: Vec<(Vec<u8>, usize)>,
}

impl Blocks {
    fn read(rows: &[Row]) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let first = rows.first().ok_or("no row")?;
        let mut keys = Vec::new();
        for row in rows {
            if let Some(key) = row.try_get::<_, Option<Vec<u8>>>(3)? {
                keys.push((key, usize::try_from(row.try_get::<_, i32>(4)?)?));
            }
        }
        let now = Timestamp::from_micros(u64::try_from(first.try_get::<_, i64>(0)?)?);
        Ok(Self { now, file: first.try_get(1)?, blocks: first.try_get(2)?, keys })
    }
}

fn unreadable() -> StoreError {
    StoreError::unavailable(PostgresStoreError::UnexpectedAnswer)
}

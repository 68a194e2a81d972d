//! Reads of tables: pages and stretches, which go around what is damaged.

use std::ops::Bound;

use hapax_core::{StoreError, Timestamp};
use redb::{
    Database, Key, ReadTransaction, ReadableDatabase, StorageError, TableDefinition, Value,
};

use crate::database::guarded;
use crate::error::unchanged;

/// Sealed bytes after which a page ends early. A record is in memory twice while it is opened.
pub(crate) const PAGE_BYTES: usize = 1 << 20;

/// A page of a table whose keys have `N` bytes.
#[derive(Debug)]
pub(crate) struct RawPage<const N: usize, V> {
    pub(crate) now: Timestamp,
    pub(crate) found: Vec<([u8; N], Result<V, StoreError>)>,
    pub(crate) more: bool,
}

/// A table whose keys have `N` bytes.
pub(crate) type Keyed<const N: usize> = TableDefinition<'static, &'static [u8; N], &'static [u8]>;

/// Reads a page of a table, each value by `read`.
pub(crate) fn page<const N: usize, V>(
    database: &Database,
    table: Keyed<N>,
    after: Option<[u8; N]>,
    limit: u32,
    now: Timestamp,
    read: impl Fn(&[u8; N], &[u8]) -> Result<V, StoreError>,
) -> Result<RawPage<N, V>, redb::Error> {
    let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
    let (mut found, mut bytes) = (Vec::new(), 0);
    let more = each(database, table, from, |key, stored| {
        if found.len() >= limit as usize || bytes >= PAGE_BYTES {
            return false;
        }
        bytes += stored.len();
        found.push((*key, read(key, stored)));
        true
    });
    match more {
        Ok(more) => Ok(RawPage { now, found, more }),
        // What was read so far is the page; the next one begins with the damage.
        Err(redb::Error::Corrupted(_)) if !found.is_empty() => {
            Ok(RawPage { now, found, more: true })
        }
        // One error represents everything that cannot be read.
        Err(redb::Error::Corrupted(text)) => {
            let last = past_keys(database, table, from)?;
            let error = unchanged(StorageError::Corrupted(text));
            let found = vec![(last.unwrap_or([0xff; N]), Err(error))];
            Ok(RawPage { now, found, more: last.is_some() })
        }
        Err(error) => Err(error),
    }
}

/// Reads entries of a table until `take` returns `false`. Returns whether `take` ended it.
pub(crate) fn each<K: Key + 'static, V: Value + 'static>(
    database: &Database,
    table: TableDefinition<'static, K, V>,
    from: Bound<K::SelfType<'_>>,
    mut take: impl FnMut(K::SelfType<'_>, V::SelfType<'_>) -> bool,
) -> Result<bool, redb::Error> {
    guarded(|| {
        let table = begin(database)?.open_table(table)?;
        let range = table.range::<K::SelfType<'_>>((from, Bound::Unbounded))?;
        for found in range {
            let (key, stored) = found?;
            if !take(key.value(), stored.value()) {
                return Ok(true);
            }
        }
        Ok(false)
    })
}

/// A stretch of a table that the background check has read, and where the next one begins.
#[derive(Debug)]
pub(crate) enum Stretch<T> {
    Read { next: T, count: u64 },
    Damaged { next: T },
}

impl<T> Stretch<T> {
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Stretch<U> {
        match self {
            Self::Read { next, count } => Stretch::Read { next: change(next), count },
            Self::Damaged { next } => Stretch::Damaged { next: change(next) },
        }
    }
}

/// Reads at most 256 KiB of a table after the key `from`. Returns the last key; `None` at the end.
pub(crate) fn stretch<const N: usize>(
    database: &Database,
    table: Keyed<N>,
    from: Option<[u8; N]>,
) -> Result<Stretch<Option<[u8; N]>>, redb::Error> {
    let from = from.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
    stretch_of(
        |take| each(database, table, from, |key, stored| take(*key, stored.len())),
        || past_keys(database, table, from),
    )
}

/// Reads at most 256 KiB of what `read` passes on: keys, and the lengths of values. `past` finds the
/// last key that cannot be read.
pub(crate) fn stretch_of<T>(
    read: impl FnOnce(&mut dyn FnMut(T, usize) -> bool) -> Result<bool, redb::Error>,
    past: impl FnOnce() -> Result<Option<T>, redb::Error>,
) -> Result<Stretch<Option<T>>, redb::Error> {
    const BYTES: usize = 256 * 1024;
    let (mut last, mut bytes, mut count) = (None, 0, 0);
    let more = read(&mut |key, length| {
        if bytes >= BYTES {
            return false;
        }
        (last, bytes, count) = (Some(key), bytes + 100 + length, count + 1);
        true
    });
    match more {
        Ok(true) => Ok(Stretch::Read { next: last, count }),
        Ok(false) => Ok(Stretch::Read { next: None, count }),
        Err(redb::Error::Corrupted(_)) if last.is_some() => Ok(Stretch::Read { next: last, count }),
        Err(redb::Error::Corrupted(_)) => Ok(Stretch::Damaged { next: past()? }),
        Err(error) => Err(error),
    }
}

/// Returns the last key of the unreadable range that begins at `from`; `None` if nothing after it
/// can be read.
fn past_keys<const N: usize>(
    database: &Database,
    table: Keyed<N>,
    from: Bound<&[u8; N]>,
) -> Result<Option<[u8; N]>, redb::Error> {
    let at = |prefix: u64| {
        let mut key = [0xff; N];
        key[..8].copy_from_slice(&prefix.to_be_bytes());
        key
    };
    let start = match from {
        Bound::Included(key) | Bound::Excluded(key) => {
            key.first_chunk().map_or(0, |prefix| u64::from_be_bytes(*prefix))
        }
        Bound::Unbounded => 0,
    };
    let whole = past_damage(start, |prefix| {
        each(database, table, Bound::Excluded(&at(prefix)), |_, _| false)
    })?;
    Ok(whole.map(at))
}

/// Returns the first number after `start`, about, from which on `read` meets no damage; `None` if it
/// does from every one.
pub(crate) fn past_damage(
    start: u64,
    mut read: impl FnMut(u64) -> Result<bool, redb::Error>,
) -> Result<Option<u64>, redb::Error> {
    let mut readable = |from: u64| match read(from) {
        Ok(_) => Ok(true),
        Err(redb::Error::Corrupted(_)) => Ok(false),
        Err(error) => Err(error),
    };
    // In growing steps forward, and then back to the first number from which it is readable.
    let (mut damaged, mut gap) = (start, 1_u64);
    let mut whole = loop {
        let Some(next) = start.checked_add(gap) else { return Ok(None) };
        if readable(next)? {
            break next;
        }
        let Some(further) = gap.checked_mul(2) else { return Ok(None) };
        (damaged, gap) = (next, further);
    };
    while whole - damaged > 1 {
        let middle = damaged + (whole - damaged) / 2;
        if readable(middle)? { whole = middle } else { damaged = middle }
    }
    Ok(Some(whole))
}

pub(crate) fn begin(database: &Database) -> Result<ReadTransaction, redb::Error> {
    Ok(database.begin_read()?)
}

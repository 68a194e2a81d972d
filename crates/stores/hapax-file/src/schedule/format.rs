//! The format of an entry in the file: columns, their checksum, and the sealed note; and its key in
//! the index.
//!
//! Queue and due time are outside the sealed note because the store moves entries. They have a
//! separate checksum, which also covers the key: a flipped bit in a due time must not look like an
//! entry that is due in a year.

use hapax_core::schedule::{EntryKey, QueueName, ScheduleEntry};
use hapax_core::{EntryId, OperationId, Sealer, StoreError, Timestamp};

const VERSION: u8 = 1;
const CHECKSUM: usize = 16;
/// Length of version, due time and the length of the queue's name.
const FIELDS: usize = 10;
/// Length of a key in the table of entries.
pub(crate) const KEY: usize = 48;
/// Follows the name of a queue in the index. No name contains it, so names that begin alike are
/// separate.
const END_OF_QUEUE: u8 = 0;

/// The fields next to a sealed note.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct EntryColumns {
    pub(crate) queue: QueueName,
    pub(crate) due: Timestamp,
}

/// An entry as it was read, still sealed.
#[derive(Clone, Debug)]
pub(crate) struct SealedEntry {
    pub(crate) columns: EntryColumns,
    pub(crate) sealed: Vec<u8>,
}

/// The columns of an entry are damaged.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "expected an entry of version 1 with its checksum, found a damaged one or a later version: run the newest version, or salvage the file"
)]
pub(crate) struct DamagedEntry;

impl EntryColumns {
    pub(crate) fn write(&self, key: &EntryKey, sealed: &[u8]) -> Vec<u8> {
        let queue = self.queue.as_str().as_bytes();
        let mut out = Vec::with_capacity(FIELDS + queue.len() + CHECKSUM + sealed.len());
        out.push(VERSION);
        out.extend_from_slice(&self.due.as_micros().to_be_bytes());
        // A name has at most 128 bytes.
        out.push(queue.len() as u8);
        out.extend_from_slice(queue);
        let sum = checksum(key, &out);
        out.extend_from_slice(&sum);
        out.extend_from_slice(sealed);
        out
    }

    /// Splits a stored value into columns and sealed note.
    pub(crate) fn read<'a>(
        key: &EntryKey,
        stored: &'a [u8],
    ) -> Result<(Self, &'a [u8]), DamagedEntry> {
        let length = usize::from(*stored.get(FIELDS - 1).ok_or(DamagedEntry)?);
        let (fields, rest) = stored.split_at_checked(FIELDS + length).ok_or(DamagedEntry)?;
        let (sum, sealed) = rest.split_first_chunk::<CHECKSUM>().ok_or(DamagedEntry)?;
        if checksum(key, fields) != *sum || fields[0] != VERSION {
            return Err(DamagedEntry);
        }
        let due = fields[1..].first_chunk().ok_or(DamagedEntry)?;
        let queue = std::str::from_utf8(&fields[FIELDS..]).map_err(|_| DamagedEntry)?;
        let queue = QueueName::new(queue).map_err(|_| DamagedEntry)?;
        Ok((Self { queue, due: Timestamp::from_micros(u64::from_be_bytes(*due)) }, sealed))
    }

    /// Returns the key of the entry in the index.
    pub(crate) fn index(&self, key: &EntryKey) -> Vec<u8> {
        let mut out = index_after(&self.queue, self.due);
        out.truncate(out.len() - KEY);
        out.extend_from_slice(&stored_key(key));
        out
    }
}

impl SealedEntry {
    /// Copies an entry, to open it on another thread.
    pub(crate) fn copy(key: &EntryKey, stored: &[u8]) -> Result<Self, DamagedEntry> {
        let (columns, sealed) = EntryColumns::read(key, stored)?;
        Ok(Self { columns, sealed: sealed.to_vec() })
    }

    /// Opens the entry.
    pub(crate) fn open(self, key: EntryKey, sealer: &Sealer) -> Result<ScheduleEntry, StoreError> {
        let note = sealer.open_note(&key, &self.sealed).map_err(StoreError::corrupt)?;
        let EntryColumns { queue, due } = self.columns;
        Ok(ScheduleEntry { key, queue, due, note })
    }
}

/// Returns the key in the form of the table of entries.
pub(crate) fn stored_key(key: &EntryKey) -> [u8; KEY] {
    let mut bytes = [0; KEY];
    bytes[..32].copy_from_slice(key.operation.as_bytes());
    bytes[32..].copy_from_slice(key.id.as_bytes());
    bytes
}

pub(crate) fn entry_key(stored: &[u8; KEY]) -> EntryKey {
    let (mut operation, mut id) = ([0; 32], [0; 16]);
    operation.copy_from_slice(&stored[..32]);
    id.copy_from_slice(&stored[32..]);
    EntryKey { operation: OperationId::from_bytes(operation), id: EntryId::from_bytes(id) }
}

/// Returns the beginning of a queue in the index.
pub(crate) fn index_start(queue: &QueueName) -> Vec<u8> {
    let mut out = Vec::with_capacity(queue.as_str().len() + 1 + 8 + KEY);
    out.extend_from_slice(queue.as_str().as_bytes());
    out.push(END_OF_QUEUE);
    out
}

/// Returns the last key of the index that an entry of `queue` with this due time may have.
pub(crate) fn index_after(queue: &QueueName, due: Timestamp) -> Vec<u8> {
    let mut out = index_start(queue);
    out.extend_from_slice(&due.as_micros().to_be_bytes());
    out.extend_from_slice(&[0xff; KEY]);
    out
}

/// Splits a key of the index; `None` if it is none.
pub(crate) fn split_index(index: &[u8]) -> Option<(&[u8], Timestamp, EntryKey)> {
    let (rest, key) = index.split_last_chunk::<KEY>()?;
    let (rest, due) = rest.split_last_chunk()?;
    let (END_OF_QUEUE, queue) = rest.split_last().map(|(end, queue)| (*end, queue))? else {
        return None;
    };
    Some((queue, Timestamp::from_micros(u64::from_be_bytes(*due)), entry_key(key)))
}

fn checksum(key: &EntryKey, fields: &[u8]) -> [u8; CHECKSUM] {
    let mut hasher = blake3::Hasher::new_derive_key("hapax 1 schedule columns");
    hasher.update(&stored_key(key));
    hasher.update(fields);
    let mut sum = [0; CHECKSUM];
    hasher.finalize_xof().fill(&mut sum);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_as_written_and_any_flipped_bit_is_damage() {
        let key = entry_key(&std::array::from_fn(|at| at as u8));
        for name in ["a", &"q".repeat(QueueName::MAX_LEN)] {
            let queue = QueueName::new(name).unwrap();
            let columns = EntryColumns { queue, due: Timestamp::from_micros(0x0102_0304_0506) };
            let stored = columns.write(&key, b"sealed");
            assert_eq!(
                EntryColumns::read(&key, &stored).unwrap(),
                (columns.clone(), &b"sealed"[..])
            );
            let other = entry_key(&[7; KEY]);
            EntryColumns::read(&other, &stored).unwrap_err();
            for bit in 0..8 * (stored.len() - b"sealed".len()) {
                let mut damaged = stored.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                EntryColumns::read(&key, &damaged).unwrap_err();
            }
            for length in 0..stored.len() - b"sealed".len() {
                EntryColumns::read(&key, &stored[..length]).unwrap_err();
            }
            let found = split_index(&columns.index(&key))
                .map(|(queue, due, key)| (queue.to_vec(), due, key));
            assert_eq!(found, Some((name.as_bytes().to_vec(), columns.due, key)));
        }
    }

    #[test]
    fn the_index_is_in_order_of_queue_then_time_then_key() {
        let at = |queue: &str, due, key| {
            let queue = QueueName::new(queue).unwrap();
            let columns = EntryColumns { queue, due: Timestamp::from_micros(due) };
            columns.index(&entry_key(&[key; KEY]))
        };
        let expected = [
            at("a", 0, 9),
            at("a", 1, 1),
            at("a", 1, 2),
            at("a", 256, 0),
            at("a", u64::MAX, 255),
            at("a!", 0, 0),
            at("aa", 0, 0),
        ];
        assert!(expected.is_sorted());
        let queue = QueueName::new("a").unwrap();
        assert!(index_start(&queue) < expected[0]);
        assert!(expected[2] < index_after(&queue, Timestamp::from_micros(1)));
        assert!(index_after(&queue, Timestamp::from_micros(1)) < expected[3]);
        assert!(index_after(&queue, Timestamp::MAX) >= expected[4]);
        assert!(index_after(&queue, Timestamp::MAX) < expected[5]);
        assert_eq!(split_index(b"short"), None);
    }
}

//! Answers of the scripts of the schedule.

use std::time::Duration;

use hapax_core::schedule::{DueEntries, EntryKey, QueueName, QueueStatus, ScheduleEntry};
use hapax_core::{EntryId, OperationId, Sealer, StoreError, Timestamp};
use redis::Value;

use crate::error::RedisStoreError;
use crate::record::{ReplyError, bytes, number, time};

const MAGIC: &[u8; 4] = b"hxe1";
const OPERATION: usize = 32;
const MEMBER: usize = OPERATION + 16;

/// Returns the name of an entry in the scripts.
pub(crate) fn member(key: &EntryKey) -> [u8; MEMBER] {
    let mut member = [0; MEMBER];
    member[..OPERATION].copy_from_slice(key.operation.as_bytes());
    member[OPERATION..].copy_from_slice(key.id.as_bytes());
    member
}

fn key(member: &[u8]) -> Option<EntryKey> {
    let (operation, id) = member.split_first_chunk()?;
    let id = EntryId::from_bytes(id.try_into().ok()?);
    Some(EntryKey { operation: OperationId::from_bytes(*operation), id })
}

/// The entries of slots that are due.
#[derive(Debug, Default)]
pub(crate) struct DueReply {
    now: Timestamp,
    entries: Vec<SealedEntry>,
    /// Time at which the first further entry of any slot is due, and the time until then.
    next: Option<(Timestamp, Duration)>,
}

impl DueReply {
    /// Parses the answer of `due.lua` for the slot with this first key.
    pub(crate) fn read(asked: &str, answer: Value) -> Result<Self, ReplyError> {
        let [now, next, entries] = fields(asked, answer)?;
        let now = time(&now)?;
        let next = match next {
            Value::Nil | Value::Boolean(false) => None,
            next => Some(time(&next)?),
        };
        let next = next.map(|next| (next, next.since(now)));
        Ok(Self { now, entries: SealedEntry::read(&entries)?, next })
    }

    /// Adds the entries of another slot.
    pub(crate) fn add(&mut self, other: Self) {
        self.now = self.now.max(other.now);
        self.entries.extend(other.entries);
        self.next = match (self.next, other.next) {
            (Some(one), Some(other)) => Some((one.0.min(other.0), one.1.min(other.1))),
            (one, other) => one.or(other),
        };
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the earliest entries. One that is due after an entry that its slot left out is left
    /// out as well.
    pub(crate) fn take(mut self, limit: usize, sealer: &Sealer) -> DueEntries {
        self.entries.sort_unstable_by_key(|entry| (entry.due, entry.key));
        let found = self.entries.len();
        let is_early = |entry: &SealedEntry| self.next.is_none_or(|(next, _)| entry.due <= next);
        let entries: Vec<_> = self
            .entries
            .iter()
            .take(limit)
            .take_while(|entry| is_early(entry))
            .map(|entry| (entry.key, entry.open(sealer)))
            .collect();
        let next_in = match entries.len() < found {
            true => Some(Duration::ZERO),
            false => self.next.map(|(_, next_in)| next_in),
        };
        DueEntries { now: self.now, entries, next_in }
    }
}

/// A part of a page of entries.
#[derive(Debug)]
pub(crate) struct EntriesReply {
    pub(crate) now: Timestamp,
    /// Whether the slot may have further entries.
    pub(crate) more: bool,
    entries: Vec<SealedEntry>,
}

impl EntriesReply {
    /// Parses the answer of `entries.lua` for the slot with this first key.
    pub(crate) fn read(asked: &str, answer: Value) -> Result<Self, ReplyError> {
        let [now, more, entries] = fields(asked, answer)?;
        let more = number(&more)? > 0;
        Ok(Self { now: time(&now)?, more, entries: SealedEntry::read(&entries)? })
    }

    /// Returns the size of the notes, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.entries.iter().map(|entry| entry.value.len()).sum()
    }

    pub(crate) fn open(
        &self,
        sealer: &Sealer,
    ) -> impl Iterator<Item = (EntryKey, Result<ScheduleEntry, StoreError>)> {
        self.entries.iter().map(|entry| (entry.key, entry.open(sealer)))
    }
}

/// Parses the answer of `queues.lua` for the slot with this first key.
pub(crate) fn status(asked: &str, answer: Value) -> Result<Vec<QueueStatus>, ReplyError> {
    let [now, queues] = fields(asked, answer)?;
    let (now, Value::Array(queues)) = (time(&now)?, queues) else {
        return Err(ReplyError::Unreadable);
    };
    let (queues, []) = queues.as_chunks::<3>() else { return Err(ReplyError::Unreadable) };
    let status = |[name, count, first]: &[Value; 3]| {
        let queue = bytes(name).and_then(queue).ok_or_else(foreign)?;
        let overdue = now.since(time(first)?);
        Ok(QueueStatus { queue, entries: number(count)?, overdue })
    };
    queues.iter().map(status).collect()
}

/// An entry as the scripts return it.
#[derive(Debug)]
struct SealedEntry {
    key: EntryKey,
    due: Timestamp,
    value: Vec<u8>,
}

impl SealedEntry {
    fn read(entries: &Value) -> Result<Vec<Self>, ReplyError> {
        let Value::Array(entries) = entries else { return Err(ReplyError::Unreadable) };
        let (entries, []) = entries.as_chunks::<3>() else { return Err(ReplyError::Unreadable) };
        let read = |[member, due, value]: &[Value; 3]| {
            // Another program wrote this member.
            let key = bytes(member).and_then(key).ok_or_else(foreign)?;
            let value = bytes(value).ok_or(ReplyError::Unreadable)?.to_vec();
            Ok(Self { key, due: time(due)?, value })
        };
        entries.iter().map(read).collect()
    }

    fn open(&self, sealer: &Sealer) -> Result<ScheduleEntry, StoreError> {
        let Self { key, due, value } = self;
        let (queue, note) =
            split(value).ok_or_else(|| StoreError::corrupt(RedisStoreError::ForeignValue))?;
        let note = sealer.open_note(key, note).map_err(StoreError::corrupt)?;
        Ok(ScheduleEntry { key: *key, queue, due: *due, note })
    }
}

/// Splits a value into queue and sealed note.
fn split(value: &[u8]) -> Option<(QueueName, &[u8])> {
    let (length, rest) = value.strip_prefix(MAGIC)?.split_first()?;
    let (name, note) = rest.split_at_checked(usize::from(*length))?;
    Some((queue(name)?, note))
}

fn queue(name: &[u8]) -> Option<QueueName> {
    QueueName::new(std::str::from_utf8(name).ok()?).ok()
}

fn foreign() -> ReplyError {
    ReplyError::Damaged(StoreError::corrupt(RedisStoreError::ForeignValue))
}

/// Returns what follows the first key in an answer to the request with this first key.
fn fields<const N: usize>(asked: &str, answer: Value) -> Result<[Value; N], ReplyError> {
    let Value::Array(mut answer) = answer else { return Err(ReplyError::Unreadable) };
    if answer.first().and_then(bytes) != Some(asked.as_bytes()) {
        return Err(ReplyError::Unreadable);
    }
    answer.remove(0);
    answer.try_into().map_err(|_| ReplyError::Unreadable)
}

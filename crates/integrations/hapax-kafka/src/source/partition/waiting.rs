//! Records that wait: those that were delayed for a pause, and those behind them with their order key.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::time::Instant;

use super::Record;

/// Waiting records of a partition. An order key is blocked from the time at which a record is delayed, or keeps its
/// followers, until it is acknowledged, and then behind each of those that waited, in their order: the first one is
/// delivered, after each of its pauses, and no later one of its key is.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Delayed, by offset, each until its pause ends.
    delayed: BTreeMap<i64, (Instant, Box<Record>)>,
    /// The blocked order keys.
    blocked: HashMap<Arc<str>, Blocked>,
    /// The key of each offset that is the first one of a blocked key.
    firsts: HashMap<i64, Arc<str>>,
    /// Number of the records behind others.
    behind: usize,
    bytes: usize,
}

/// Offset of the first record of an order key, and the records behind it.
#[derive(Debug)]
struct Blocked {
    first: i64,
    behind: BTreeMap<i64, Box<Record>>,
}

impl Waiting {
    /// Returns the number of records that wait.
    pub(super) fn records(&self) -> usize {
        self.delayed.len() + self.behind
    }

    /// Returns their bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Blocks an order key behind the record at an offset.
    pub(super) fn block(&mut self, key: &str, offset: i64) {
        let key = match self.blocked.get_mut(key) {
            // A consumer without the order has delayed several.
            Some(blocked) if blocked.first <= offset => return,
            Some(blocked) => {
                let first = std::mem::replace(&mut blocked.first, offset);
                self.firsts.remove(&first).unwrap_or_else(|| key.into())
            }
            None => {
                let key: Arc<str> = key.into();
                let behind = BTreeMap::new();
                self.blocked.insert(Arc::clone(&key), Blocked { first: offset, behind });
                key
            }
        };
        self.firsts.insert(offset, key);
    }

    /// Returns whether this order key is blocked by an earlier record.
    pub(super) fn follows(&self, key: Option<&str>, offset: i64) -> bool {
        key.is_some_and(|key| self.blocked.get(key).is_some_and(|it| it.first < offset))
    }

    /// Keeps a record that was delayed until its pause ends.
    pub(super) fn delay(&mut self, offset: i64, until: Instant, record: Box<Record>) {
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.delayed.insert(offset, (until, record));
    }

    /// Keeps a record behind the first one of its order key. Returns it if it follows none.
    pub(super) fn keep_behind(&mut self, offset: i64, record: Box<Record>) -> Option<Box<Record>> {
        let key = record.message.key.as_ref();
        let blocked = key.and_then(|key| self.blocked.get_mut(&**key));
        let Some(blocked) = blocked.filter(|it| it.first < offset) else { return Some(record) };
        self.behind += 1;
        self.bytes = self.bytes.saturating_add(record.bytes);
        blocked.behind.insert(offset, record);
        None
    }

    /// Returns the record whose pause has ended; `None` if it was not kept, or until another time.
    pub(super) fn end_delay(&mut self, offset: i64, until: Instant) -> Option<Box<Record>> {
        if self.delayed.get(&offset)?.0 != until {
            return None;
        }
        let (_, record) = self.delayed.remove(&offset)?;
        self.bytes = self.bytes.saturating_sub(record.bytes);
        Some(record)
    }

    /// Returns the next record of an order key whose first one is acknowledged, which blocks the key until it is
    /// acknowledged too. So none passes it that was delivered before it returned.
    pub(super) fn unblock(&mut self, offset: i64) -> Option<(i64, Box<Record>)> {
        let key = self.firsts.remove(&offset)?;
        let blocked = self.blocked.get_mut(&key)?;
        let Some((next, record)) = blocked.behind.pop_first() else {
            self.blocked.remove(&key);
            return None;
        };
        blocked.first = next;
        self.firsts.insert(next, key);
        self.behind = self.behind.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(record.bytes);
        Some((next, record))
    }
}

//! Records that wait: those that were delayed for a pause, and those behind them with their order key.

use std::collections::{BTreeMap, HashMap};

use tokio::time::Instant;

use super::Record;

/// Waiting records of a partition, by offset. An order key is blocked from the time at which its first record is
/// delayed until it is acknowledged: it is delivered after each pause, and no later one of its key is.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Delayed, each until its pause ends.
    delayed: BTreeMap<i64, (Instant, Box<Record>)>,
    /// Behind one that was delayed.
    behind: BTreeMap<i64, Box<Record>>,
    /// Offset of the first record of each blocked order key, and the key of each such offset.
    blocked: HashMap<String, i64>,
    firsts: HashMap<i64, String>,
    bytes: usize,
}

impl Waiting {
    /// Returns the number of records that wait.
    pub(super) fn records(&self) -> usize {
        self.delayed.len() + self.behind.len()
    }

    /// Returns their bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Blocks an order key behind the record at an offset.
    pub(super) fn block(&mut self, key: &str, offset: i64) {
        match self.blocked.get(key) {
            // A consumer without the order has delayed several.
            Some(first) if *first <= offset => return,
            Some(first) => drop(self.firsts.remove(first)),
            None => {}
        }
        self.blocked.insert(key.to_owned(), offset);
        self.firsts.insert(offset, key.to_owned());
    }

    /// Returns whether an earlier record with this order key was delayed, and is not acknowledged.
    pub(super) fn follows(&self, key: Option<&str>, offset: i64) -> bool {
        key.is_some_and(|key| self.blocked.get(key).is_some_and(|first| *first < offset))
    }

    /// Keeps a record that was delayed until its pause ends.
    pub(super) fn delay(&mut self, offset: i64, until: Instant, record: Box<Record>) {
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.delayed.insert(offset, (until, record));
    }

    /// Keeps a record behind the first one of its order key.
    pub(super) fn keep_behind(&mut self, offset: i64, record: Box<Record>) {
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.behind.insert(offset, record);
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

    /// Ends the block behind a record that is acknowledged. Returns the records that waited for it.
    pub(super) fn unblock(&mut self, offset: i64) -> Vec<(i64, Box<Record>)> {
        let Some(key) = self.firsts.remove(&offset) else { return Vec::new() };
        self.blocked.remove(&key);
        let is_of = |_: &i64, record: &mut Box<Record>| record.message.key.as_ref() == Some(&key);
        let freed: Vec<_> = self.behind.extract_if(.., is_of).collect();
        let bytes: usize = freed.iter().map(|(_, record)| record.bytes).sum();
        self.bytes = self.bytes.saturating_sub(bytes);
        freed
    }
}

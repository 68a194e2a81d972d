//! How much may wait for the server at a time.

use std::sync::atomic::{AtomicUsize, Ordering};

use hapax::StoreError;

use crate::error::RedisStoreError;

/// Counts requests, and the bytes of records in them, from when they are let in until their caller
/// has the answer or is gone.
#[derive(Debug)]
pub(crate) struct Door {
    items: Counter,
    bytes: Counter,
}

#[derive(Debug)]
struct Counter {
    inside: AtomicUsize,
    limit: usize,
}

/// Who may come in: new keys are refused first, so that work in hand can still be recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Share {
    /// Up to seven eighths.
    Most,
    /// All of it.
    All,
}

impl Door {
    pub(crate) fn new(items: usize, bytes: usize) -> Self {
        let counter = |limit| Counter { inside: AtomicUsize::new(0), limit };
        Self { items: counter(items), bytes: counter(bytes) }
    }

    /// Requests inside.
    pub(crate) fn inside(&self) -> usize {
        self.items.inside.load(Ordering::Relaxed)
    }

    /// Lets a request with `bytes` of records in. Nothing was sent for one that is refused.
    pub(crate) fn enter(&self, bytes: usize, share: Share) -> Result<Inside<'_>, StoreError> {
        let full = || StoreError::unavailable(RedisStoreError::QueueFull);
        self.items.add(1, share).ok_or_else(full)?;
        // From here on its drop makes room again.
        let mut inside = Inside { door: self, bytes: 0 };
        self.bytes.add(bytes, share).ok_or_else(full)?;
        inside.bytes = bytes;
        Ok(inside)
    }
}

impl Counter {
    fn add(&self, more: usize, share: Share) -> Option<()> {
        let limit = match share {
            Share::Most => self.limit - self.limit / 8,
            Share::All => self.limit,
        };
        let fit = |now: usize| now.checked_add(more).filter(|sum| *sum <= limit);
        self.inside.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit).ok().map(drop)
    }
}

/// A request that was let in.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    door: &'a Door,
    bytes: usize,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.door.items.inside.fetch_sub(1, Ordering::Relaxed);
        self.door.bytes.inside.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{Door, Share};

    #[test]
    fn work_in_hand_is_let_in_where_new_keys_are_not() {
        let door = Door::new(16, 1_000);
        let inside: Vec<_> = (0..14).map(|_| door.enter(10, Share::Most).unwrap()).collect();
        assert!(door.enter(0, Share::Most).is_err());
        assert!(door.enter(861, Share::All).is_err());
        let last = door.enter(860, Share::All).unwrap();
        assert!(door.enter(1, Share::All).is_err());
        drop((inside, last));
        // What was refused left nothing behind.
        let all: Vec<_> = (0..16).map(|_| door.enter(62, Share::All).unwrap()).collect();
        assert_eq!(all.len(), 16);
        assert!(door.enter(0, Share::All).is_err());
    }
}

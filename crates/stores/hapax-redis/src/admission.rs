//! How much may wait for the server at a time.

use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::StoreError;

use crate::error::RedisStoreError;

/// Counts requests, and the bytes of records in them, from when they are let in until their caller
/// has the answer or is gone.
#[derive(Debug)]
pub(crate) struct RequestLimit {
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
pub(crate) enum Admission {
    /// Up to seven eighths.
    NewWork,
    /// All of it.
    Any,
}

impl RequestLimit {
    pub(crate) fn new(items: usize, bytes: usize) -> Self {
        let counter = |limit| Counter { inside: AtomicUsize::new(0), limit };
        Self { items: counter(items), bytes: counter(bytes) }
    }

    /// Requests inside.
    pub(crate) fn inside(&self) -> usize {
        self.items.inside.load(Ordering::Relaxed)
    }

    /// Lets a request with `bytes` of records in. Nothing was sent for one that is refused.
    pub(crate) fn enter(
        &self,
        bytes: usize,
        admission: Admission,
    ) -> Result<RequestPermit<'_>, StoreError> {
        let full = || StoreError::unavailable(RedisStoreError::QueueFull);
        self.items.add(1, admission).ok_or_else(full)?;
        // From here on its drop makes room again.
        let mut inside = RequestPermit { limit: self, bytes: 0 };
        self.bytes.add(bytes, admission).ok_or_else(full)?;
        inside.bytes = bytes;
        Ok(inside)
    }
}

impl Counter {
    fn add(&self, more: usize, admission: Admission) -> Option<()> {
        let limit = match admission {
            Admission::NewWork => self.limit - self.limit / 8,
            Admission::Any => self.limit,
        };
        let fit = |now: usize| now.checked_add(more).filter(|sum| *sum <= limit);
        self.inside.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit).ok().map(drop)
    }
}

/// A request that was let in.
#[derive(Debug)]
pub(crate) struct RequestPermit<'a> {
    limit: &'a RequestLimit,
    bytes: usize,
}

impl Drop for RequestPermit<'_> {
    fn drop(&mut self) {
        self.limit.items.inside.fetch_sub(1, Ordering::Relaxed);
        self.limit.bytes.inside.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{Admission, RequestLimit};

    #[test]
    fn work_in_hand_is_let_in_where_new_keys_are_not() {
        let limit = RequestLimit::new(16, 1_000);
        let inside: Vec<_> =
            (0..14).map(|_| limit.enter(10, Admission::NewWork).unwrap()).collect();
        assert!(limit.enter(0, Admission::NewWork).is_err());
        assert!(limit.enter(861, Admission::Any).is_err());
        let last = limit.enter(860, Admission::Any).unwrap();
        assert!(limit.enter(1, Admission::Any).is_err());
        drop((inside, last));
        // What was refused left nothing behind.
        let all: Vec<_> = (0..16).map(|_| limit.enter(62, Admission::Any).unwrap()).collect();
        assert_eq!(all.len(), 16);
        assert!(limit.enter(0, Admission::Any).is_err());
    }
}

//! Limits of the requests that wait for the server.

use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::StoreError;
use hapax_core::store::parts::{Admission, QueueLimits};

use crate::error::RedisStoreError;

/// Limits of requests, and of the bytes of records in them, from their admission until the caller
/// has the answer or is dropped.
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

impl RequestLimit {
    pub(crate) fn new(limits: QueueLimits) -> Self {
        let counter = |limit| Counter { inside: AtomicUsize::new(0), limit };
        Self { items: counter(limits.items), bytes: counter(limits.bytes) }
    }

    /// Returns the number of requests that one caller may send concurrently, of at most `most`: a part of the
    /// limit, so that others are not rejected because of it.
    pub(crate) fn part(&self, most: usize) -> usize {
        most.min(self.items.limit / QueueLimits::MIN_ITEMS)
    }

    /// Returns the number of admitted requests.
    pub(crate) fn inside(&self) -> usize {
        self.items.inside.load(Ordering::Relaxed)
    }

    /// Admits a request with `bytes` of records. A rejected request was not sent.
    pub(crate) fn enter(
        &self,
        bytes: usize,
        admission: Admission,
    ) -> Result<RequestPermit<'_>, StoreError> {
        let full = || StoreError::unavailable(RedisStoreError::QueueFull);
        self.items.add(1, admission).ok_or_else(full)?;
        // From here on, dropping `inside` releases the request.
        let mut inside = RequestPermit { limit: self, bytes: 0 };
        self.bytes.add(bytes, admission).ok_or_else(full)?;
        inside.bytes = bytes;
        Ok(inside)
    }
}

impl Counter {
    fn add(&self, more: usize, admission: Admission) -> Option<()> {
        let limit = admission.share(self.limit);
        let fit = |now: usize| now.checked_add(more).filter(|sum| *sum <= limit);
        self.inside.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit).ok().map(drop)
    }
}

/// A permit for one request.
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
    use super::{Admission, QueueLimits, RequestLimit};

    #[test]
    fn requests_in_progress_are_admitted_where_new_keys_are_not() {
        let limit = RequestLimit::new(QueueLimits { items: 16, bytes: 1_000 });
        let inside: Vec<_> = (0..14).map(|_| limit.enter(10, Admission::NewKey).unwrap()).collect();
        assert!(limit.enter(0, Admission::NewKey).is_err());
        assert!(limit.enter(861, Admission::Any).is_err());
        let last = limit.enter(860, Admission::Any).unwrap();
        assert!(limit.enter(1, Admission::Any).is_err());
        drop((inside, last));
        // The rejected requests left nothing counted.
        let all: Vec<_> = (0..16).map(|_| limit.enter(62, Admission::Any).unwrap()).collect();
        assert_eq!(all.len(), 16);
        assert!(limit.enter(0, Admission::Any).is_err());
    }
}

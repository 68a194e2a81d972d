//! Counters of a consumer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::memory::{MemoryBudget, MemoryPermit};
use crate::inbox::{Finish, HoldCause};

/// Counters of a consumer since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ConsumerStats {
    /// Messages that were received. One that was returned to the source counts each time.
    pub received: u64,
    /// Messages that were handled.
    pub handled: u64,
    /// Messages that were handled before, and were only acknowledged.
    pub duplicates: u64,
    /// Messages that became dead letters.
    pub parked: u64,
    /// Times that a message was held because its duplicate was in flight, or its outcome unknown.
    pub held_in_flight: u64,
    /// Times that a message was held after a failure of its handler.
    pub held_for_retry: u64,
    /// Times that a message was held because the store or the dead letters were unavailable.
    pub held_by_store: u64,
    /// Times that a message which waits for its next attempt was returned to the source
    /// ([`Delivery::delay`](crate::Delivery::delay)). It is received again.
    pub delayed: u64,
    /// Messages of this process that wait for their next attempts. They are unacknowledged here.
    pub waiting: u64,
    /// The limit that is full of messages which were tried before, and of those that wait behind them: nothing else
    /// that counts for it is received.
    pub full_limit: Option<FullLimit>,
    /// Time for which each check, one every 10 s, has found a limit full; `None` before the first one.
    pub full_limit_age: Option<Duration>,
    /// Messages whose last owner died, or in batch mode may have: they were delivered before.
    pub suspects: u64,
    /// Messages that are received and not acknowledged now.
    pub unacknowledged: u64,
    /// Bytes of these messages.
    pub unacknowledged_bytes: u64,
    /// Times that the source returned an error.
    pub source_failures: u64,
    /// Time since the last of these errors; `None` if there was none, or a message was received since.
    pub source_failure_age: Option<Duration>,
    /// First messages without an id, which are held, or were parked after 30 s; 0 once one had an id
    /// ([`InboxBuilder::expect_ids`](crate::InboxBuilder::expect_ids)).
    pub without_id: u64,
    /// Whether the store, or in batch mode the database, is unavailable: nothing is received.
    pub store_is_down: bool,
}

/// Limits that can be full of messages which were tried before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FullLimit {
    /// `max_unacknowledged` of the consumer.
    Unacknowledged,
    /// `max_unacknowledged_bytes` of the consumer.
    Bytes,
    /// One of the source or its broker: [`MessageSource::full_limit`](crate::MessageSource::full_limit).
    Source,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    received: AtomicU64,
    handled: AtomicU64,
    duplicates: AtomicU64,
    parked: AtomicU64,
    held_in_flight: AtomicU64,
    held_for_retry: AtomicU64,
    held_by_store: AtomicU64,
    delayed: AtomicU64,
    suspects: AtomicU64,
    unacknowledged: Arc<AtomicU64>,
    source_failures: AtomicU64,
    source_failed_at: Mutex<Option<Instant>>,
}

/// The permits of an unacknowledged message, and its part of the counter.
#[derive(Debug)]
pub(crate) struct Slot {
    _permit: OwnedSemaphorePermit,
    _memory: MemoryPermit,
    unacknowledged: Arc<AtomicU64>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.unacknowledged.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    /// Counts a message that was received, and returns its slot.
    pub(crate) fn received(&self, permit: OwnedSemaphorePermit, memory: MemoryPermit) -> Slot {
        self.received.fetch_add(1, Ordering::Relaxed);
        self.unacknowledged.fetch_add(1, Ordering::Relaxed);
        let unacknowledged = Arc::clone(&self.unacknowledged);
        Slot { _permit: permit, _memory: memory, unacknowledged }
    }

    /// Notes whether the source delivered messages or returned an error.
    pub(crate) fn source(&self, failed: bool) {
        if failed {
            self.source_failures.fetch_add(1, Ordering::Relaxed);
        }
        let mut at = self.source_failed_at.lock().unwrap_or_else(PoisonError::into_inner);
        *at = failed.then(Instant::now);
    }

    pub(crate) fn suspect(&self) {
        self.suspects.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn delayed(&self) {
        self.delayed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn held(&self, cause: HoldCause) {
        let counter = match cause {
            HoldCause::InFlight | HoldCause::Unknown => &self.held_in_flight,
            HoldCause::Retry => &self.held_for_retry,
            HoldCause::Store | HoldCause::DeadLetters => &self.held_by_store,
            // `FirstIds` counts the messages.
            HoldCause::NoId => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn finished(&self, finish: Finish) {
        let counter = match finish {
            Finish::Handled => &self.handled,
            Finish::Duplicate => &self.duplicates,
            Finish::Parked(_) => &self.parked,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of messages that are received and not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.unacknowledged.load(Ordering::Relaxed)
    }

    /// Returns the number of messages whose ids this process stored.
    pub(crate) fn stored(&self) -> u64 {
        self.handled.load(Ordering::Relaxed) + self.parked.load(Ordering::Relaxed)
    }

    pub(crate) fn read(&self, memory: &MemoryBudget) -> ConsumerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let failed_at = *self.source_failed_at.lock().unwrap_or_else(PoisonError::into_inner);
        ConsumerStats {
            received: read(&self.received),
            handled: read(&self.handled),
            duplicates: read(&self.duplicates),
            parked: read(&self.parked),
            held_in_flight: read(&self.held_in_flight),
            held_for_retry: read(&self.held_for_retry),
            held_by_store: read(&self.held_by_store),
            delayed: read(&self.delayed),
            waiting: 0,
            full_limit: None,
            full_limit_age: None,
            suspects: read(&self.suspects),
            unacknowledged: read(&self.unacknowledged),
            unacknowledged_bytes: memory.used() as u64,
            source_failures: read(&self.source_failures),
            source_failure_age: failed_at.map(|at| at.elapsed()),
            without_id: 0,
            store_is_down: false,
        }
    }
}

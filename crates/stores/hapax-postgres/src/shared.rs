//! State shared by the store's callers and its tasks.

use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::OperationId;
use hapax_core::StoreError;
use hapax_core::store::parts::QueueLimits;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::link::ConnectionSetup;
use crate::listen::WakeSender;
use crate::queue::{Item, Queue, Ticket};
use crate::record::{RawSwapped, SealedRecord, Write};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) setup: ConnectionSetup,
    pub(crate) lanes: Vec<Queue<SwapJob>>,
    /// Swaps that must be sent alone.
    pub(crate) alone: Queue<SwapJob>,
    pub(crate) loads: Queue<LoadJob>,
    pub(crate) counters: Counters,
    pub(crate) bell: Option<WakeSender>,
}

/// A swap that waits.
#[derive(Debug)]
pub(crate) struct SwapJob {
    pub(crate) write: Write,
    pub(crate) ticket: Ticket,
    /// Time at which its caller's timeout ends.
    pub(crate) deadline: Instant,
    pub(crate) reply: oneshot::Sender<Result<RawSwapped, StoreError>>,
}

/// A load that waits.
#[derive(Debug)]
pub(crate) struct LoadJob {
    pub(crate) key: OperationId,
    pub(crate) ticket: Ticket,
    pub(crate) reply: oneshot::Sender<Result<Loaded, StoreError>>,
}

/// The result of a load, with the record still sealed.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) now: hapax_core::Timestamp,
    pub(crate) found: Option<SealedRecord>,
}

/// Counters since the store was connected.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) batches: AtomicU64,
    pub(crate) swaps: AtomicU64,
    pub(crate) conflicts: AtomicU64,
    pub(crate) again: AtomicU64,
    pub(crate) alone: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) removed: AtomicU64,
}

/// Limit of waiting loads. Each is a key, so their size does not matter.
const LOADS: QueueLimits = QueueLimits { items: 4096, bytes: usize::MAX };

impl Shared {
    pub(crate) fn new(setup: ConnectionSetup, bell: Option<WakeSender>) -> Self {
        let limit = setup.options.queue;
        Self {
            lanes: (0..setup.options.lanes).map(|_| Queue::new(limit)).collect(),
            alone: Queue::new(limit),
            loads: Queue::new(LOADS),
            counters: Counters::default(),
            setup,
            bell,
        }
    }

    /// Returns the lane of `key`. Keys are hashes: any two bytes distribute them.
    pub(crate) fn lane(&self, key: &OperationId) -> &Queue<SwapJob> {
        let [one, two, ..] = key.as_bytes();
        &self.lanes[usize::from(u16::from_be_bytes([*one, *two])) % self.lanes.len()]
    }

    /// Accepts no more requests. Queued ones are still executed.
    pub(crate) fn close(&self) {
        self.lanes.iter().for_each(Queue::close);
        self.loads.close();
    }
}

pub(crate) fn count(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
}

impl Item for SwapJob {
    fn key(&self) -> &OperationId {
        &self.write.key
    }

    fn size(&self) -> usize {
        self.write.size()
    }

    fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl Item for LoadJob {
    fn key(&self) -> &OperationId {
        &self.key
    }

    fn size(&self) -> usize {
        size_of::<Self>()
    }

    fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

//! State shared by the store's callers and its tasks.

use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::OperationId;
use hapax_core::StoreError;
use hapax_core::store::parts::QueueLimits;
use tokio::sync::oneshot;

use crate::link::ConnectionSetup;
use crate::listen::WakeSender;
use crate::queue::{Item, Queue, Ticket};
use crate::record::SealedRecord;
use crate::schedule::write::ScheduleJob;
use crate::swaps::SwapJob;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) setup: ConnectionSetup,
    pub(crate) swaps: WriteQueues<SwapJob>,
    pub(crate) schedule: WriteQueues<ScheduleJob>,
    pub(crate) loads: Queue<LoadJob>,
    pub(crate) counters: Counters,
    pub(crate) bell: Option<WakeSender>,
}

/// The queues of one kind of writes.
#[derive(Debug)]
pub(crate) struct WriteQueues<J> {
    pub(crate) lanes: Vec<Queue<J>>,
    /// Writes that must be sent alone.
    pub(crate) alone: Queue<J>,
    pub(crate) counters: WriteCounters,
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
    pub(crate) conflicts: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) removed: AtomicU64,
}

/// Counters of one kind of writes since the store was connected.
#[derive(Debug, Default)]
pub(crate) struct WriteCounters {
    pub(crate) batches: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) again: AtomicU64,
    pub(crate) alone: AtomicU64,
    pub(crate) lost: AtomicU64,
}

/// Limit of waiting loads. Each is a key, so their size does not matter.
const LOADS: QueueLimits = QueueLimits { items: 4096, bytes: usize::MAX };

impl Shared {
    pub(crate) fn new(setup: ConnectionSetup, bell: Option<WakeSender>) -> Self {
        let limit = setup.options.queue;
        Self {
            swaps: WriteQueues::new(setup.options.lanes, limit),
            schedule: WriteQueues::new(1, limit),
            loads: Queue::new(LOADS),
            counters: Counters::default(),
            setup,
            bell,
        }
    }

    /// Accepts no more requests. Queued ones are still executed.
    pub(crate) fn close(&self) {
        self.swaps.close();
        self.schedule.close();
        self.loads.close();
    }
}

impl<J: Item> WriteQueues<J> {
    fn new(lanes: usize, limit: QueueLimits) -> Self {
        let lanes = (0..lanes).map(|_| Queue::new(limit)).collect();
        Self { lanes, alone: Queue::new(limit), counters: WriteCounters::default() }
    }

    /// Returns the lane of `key`. Keys are hashes: any two bytes distribute them.
    pub(crate) fn lane(&self, key: &OperationId) -> &Queue<J> {
        let [one, two, ..] = key.as_bytes();
        &self.lanes[usize::from(u16::from_be_bytes([*one, *two])) % self.lanes.len()]
    }

    /// Returns the number of writes that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.lanes.iter().map(Queue::len).sum::<usize>() + self.alone.len()
    }

    fn close(&self) {
        self.lanes.iter().for_each(Queue::close);
    }
}

pub(crate) fn count(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
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

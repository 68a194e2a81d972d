//! A source with one partition, whose position is in the database.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use hapax_core::store::BoxFuture;
use hapax_messages::{
    AcquiredPosition, BatchItem, Delivery, Message, MessageId, MessageSource, Partition,
    PositionStep, PositionStore, SourceError, SourceLimits,
};
use tokio::sync::Notify;

/// The partition.
pub(super) fn partition() -> Partition {
    Partition { topic: "orders".into(), number: 0 }
}

/// A log with its reader, which acquires the position when it begins, and when a step was fenced.
#[derive(Clone, Debug)]
pub(super) struct Log {
    positions: Arc<dyn PositionStore>,
    shared: Arc<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    records: Mutex<Vec<Message>>,
    reader: Mutex<Option<AcquiredPosition>>,
    /// Number of times that the position was acquired.
    acquisitions: AtomicU64,
    /// Number of records that are acknowledged.
    acknowledged: AtomicU64,
    changed: Notify,
}

impl Log {
    pub(super) fn new(positions: Arc<dyn PositionStore>) -> Self {
        Self { positions, shared: Arc::default() }
    }

    pub(super) fn publish(&self, message: Message) {
        self.shared.records.lock().unwrap().push(message);
        self.shared.changed.notify_waiters();
    }

    pub(super) fn acquisitions(&self) -> u64 {
        self.shared.acquisitions.load(Ordering::SeqCst)
    }

    /// Waits until this number of records is acknowledged.
    pub(super) async fn acknowledged(&self, count: u64) {
        super::batch::until("records are acknowledged", async || {
            self.shared.acknowledged.load(Ordering::SeqCst) == count
        })
        .await;
    }
}

impl MessageSource for Log {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            loop {
                let changed = self.shared.changed.notified();
                let reader = *self.shared.reader.lock().unwrap();
                let Some(mut position) = reader else {
                    let acquired = self.positions.acquire(&partition(), 0).await;
                    *self.shared.reader.lock().unwrap() = Some(acquired.map_err(SourceError::new)?);
                    self.shared.acquisitions.fetch_add(1, Ordering::SeqCst);
                    continue;
                };
                let first = usize::try_from(position.next).unwrap();
                let found: Vec<_> = {
                    let records = self.shared.records.lock().unwrap();
                    records.iter().skip(first).take(max.get()).cloned().collect()
                };
                if found.is_empty() {
                    changed.await;
                    continue;
                }
                let steps = (position.next..).map(|from| step(position.fence, from));
                let delivery = |(message, step)| -> Arc<dyn Delivery> {
                    Arc::new(Record { shared: Arc::clone(&self.shared), message, step })
                };
                let found: Vec<_> = found.into_iter().zip(steps).map(delivery).collect();
                position.next += found.len() as u64;
                *self.shared.reader.lock().unwrap() = Some(position);
                return Ok(found);
            }
        })
    }

    fn limits(&self) -> SourceLimits {
        SourceLimits::default().with_positions().with_order_keys()
    }
}

/// The step over one record.
pub(super) fn step(fence: u64, from: u64) -> PositionStep {
    PositionStep {
        partition: partition(),
        fence,
        from,
        to: from + 1,
        timestamp_ms: 1_790_000_000_000,
    }
}

/// Returns the item of a record, for an inbox without a consumer.
pub(super) fn item(fence: u64, from: u64) -> BatchItem {
    let message = Message::new("memory://log", format!("payload {from}"));
    let record = Record { shared: Arc::default(), message, step: step(fence, from) };
    BatchItem::new(MessageId::new(format!("m-{from}")).unwrap(), Arc::new(record))
}

#[derive(Debug)]
struct Record {
    shared: Arc<LogState>,
    message: Message,
    step: PositionStep,
}

impl Delivery for Record {
    fn message(&self) -> &Message {
        &self.message
    }

    fn is_redelivery(&self) -> bool {
        false
    }

    fn has_ended(&self) -> bool {
        let reader = self.shared.reader.lock().unwrap();
        reader.is_none_or(|reader| reader.fence != self.step.fence)
    }

    fn step(&self) -> Option<&PositionStep> {
        Some(&self.step)
    }

    fn acquire_position_again(&self) {
        let mut reader = self.shared.reader.lock().unwrap();
        if reader.is_some_and(|reader| reader.fence == self.step.fence) {
            *reader = None;
            self.shared.changed.notify_waiters();
        }
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        self.shared.acknowledged.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Ok(()) })
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async { Ok(()) })
    }
}

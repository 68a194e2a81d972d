//! A record that was delivered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, Message, Partition, PositionStep, SourceError};

use super::state::{Delivered, Shared};

/// A record that was delivered, until it is acknowledged or dropped. It belongs to an assignment.
#[derive(Debug)]
pub(super) struct KafkaDelivery {
    shared: Arc<Shared>,
    delivered: Delivered,
    /// The step over the record, if the position is in a database.
    step: Option<PositionStep>,
    is_acknowledged: AtomicBool,
}

impl KafkaDelivery {
    pub(super) fn new(shared: Arc<Shared>, delivered: Delivered) -> Self {
        let step = step(&delivered);
        Self { shared, delivered, step, is_acknowledged: AtomicBool::new(false) }
    }

    fn stale(&self) -> SourceError {
        let (topic, partition) = &self.delivered.key;
        SourceError::new(format!(
            "expected the partition {partition} of {topic} to be assigned to this process, found that \
             it was revoked or lost: its next owner receives the record {} again",
            self.delivered.offset
        ))
    }
}

fn step(
    Delivered { key: (topic, number), offset, fence, record, .. }: &Delivered,
) -> Option<PositionStep> {
    // A broker counts from 0.
    let position = |offset: i64| u64::try_from(offset).ok();
    Some(PositionStep {
        fence: (*fence)?,
        partition: Partition { topic: Arc::clone(topic), number: u32::try_from(*number).ok()? },
        from: position(record.from)?,
        to: position(offset.saturating_add(1))?,
        timestamp_ms: record.identity.timestamp_ms,
    })
}

impl Delivery for KafkaDelivery {
    fn message(&self) -> &Message {
        &self.delivered.record.message
    }

    fn native(&self) -> Option<Bytes> {
        let Delivered { key: (_, partition), record, .. } = &self.delivered;
        Some(record.native.of(&record.message, *partition).encode())
    }

    fn is_redelivery(&self) -> bool {
        self.delivered.record.is_redelivery
    }

    fn has_ended(&self) -> bool {
        !self.shared.may_begin(&self.delivered.key, self.delivered.assignment_number)
    }

    fn step(&self) -> Option<&PositionStep> {
        self.step.as_ref()
    }

    fn acquire_position_again(&self) {
        self.shared.resolve_again(&self.delivered.key, self.delivered.assignment_number);
    }

    /// Acknowledges the record. The polling thread commits it, once all records before it are acknowledged.
    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            let Delivered { key, assignment_number, offset, record, .. } = &self.delivered;
            // Before the flag: a record with the flag is not returned when it is dropped.
            if !self.shared.acknowledge(key, *assignment_number, *offset, record.bytes) {
                return Err(self.stale());
            }
            self.is_acknowledged.store(true, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Checks the assignment. A member of a group holds its records for as long as it polls.
    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            match self.shared.is_owned(&self.delivered.key, self.delivered.assignment_number) {
                true => Ok(()),
                false => Err(self.stale()),
            }
        })
    }
}

impl Drop for KafkaDelivery {
    fn drop(&mut self) {
        if *self.is_acknowledged.get_mut() {
            return;
        }
        let record = std::mem::take(&mut self.delivered.record);
        let Delivered { key, assignment_number, offset, .. } = &self.delivered;
        self.shared.restore(key, *assignment_number, *offset, record);
    }
}

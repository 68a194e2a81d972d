//! A record that was delivered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, Message, Partition, PositionStep, SourceError};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};

use super::state::{Delivered, Shared};

/// A record that was delivered, until it is acknowledged or dropped. It belongs to an assignment.
#[derive(Debug)]
pub(super) struct KafkaDelivery {
    shared: Arc<Shared>,
    /// Runtime of the source, which may outlive that of its consumer.
    runtime: Handle,
    delivered: Delivered,
    /// The step over the record, if the position is in a database.
    step: Option<PositionStep>,
    is_acknowledged: AtomicBool,
    /// Whether the partition has taken the record back, of which this is a copy then.
    is_returned: AtomicBool,
    is_ordered: bool,
}

impl KafkaDelivery {
    pub(super) fn new(
        shared: Arc<Shared>,
        runtime: Handle,
        delivered: Delivered,
        is_ordered: bool,
    ) -> Self {
        let step = step(&delivered);
        let (is_acknowledged, is_returned) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { shared, runtime, delivered, step, is_acknowledged, is_returned, is_ordered }
    }

    fn is_returned(&self) -> bool {
        self.is_returned.load(Ordering::Relaxed)
    }

    /// Returns whether the delivery has ended by an acknowledgement or a return.
    fn is_done(&self) -> bool {
        self.is_returned() || self.is_acknowledged.load(Ordering::Relaxed)
    }

    /// Returns the order key of the record, if the source is ordered.
    fn order_key(&self) -> Option<&str> {
        self.delivered.record.message.key.as_deref().filter(|_| self.is_ordered)
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

    fn was_delayed(&self) -> bool {
        self.delivered.record.was_delayed
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
            if self.is_returned() {
                return Err(SourceError::new(format!(
                    "expected a delivery that goes on, found that the record {offset} was returned to the source: it \
                     is delivered again"
                )));
            }
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

    /// Returns the record: it waits in the source, and with it later ones of its order key, if the source is ordered. There
    /// is no await: the partition takes the record and blocks its key in one step, in which the delivery ends.
    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        Box::pin(async move {
            let Delivered { key, assignment_number, offset, record, .. } = &self.delivered;
            // With a step, the records behind it wait for it.
            if self.step.is_some() || self.is_done() {
                return Ok(false);
            }
            // The end of a longer pause than the clock has does not come.
            let Some(until) = Instant::now().checked_add(pause) else { return Ok(false) };
            let (assignment_number, offset) = (*assignment_number, *offset);
            let blocked = self.order_key();
            if !self.shared.delay(key, assignment_number, offset, until, record.clone(), blocked) {
                return Err(self.stale());
            }
            self.is_returned.store(true, Ordering::Relaxed);
            let (shared, key) = (Arc::downgrade(&self.shared), key.clone());
            self.runtime.spawn(async move {
                sleep_until(until).await;
                if let Some(shared) = shared.upgrade() {
                    shared.end_delay(&key, assignment_number, offset, until);
                }
            });
            Ok(true)
        })
    }

    fn return_behind_delayed(&self) -> bool {
        let Delivered { key, assignment_number, offset, record, .. } = &self.delivered;
        let is_returned = self.is_ordered
            && !self.is_done()
            && self.shared.keep_behind(key, *assignment_number, *offset, record);
        if is_returned {
            self.is_returned.store(true, Ordering::Relaxed);
        }
        is_returned
    }

    fn keep_followers(&self) -> bool {
        let Delivered { key, assignment_number, offset, .. } = &self.delivered;
        // With a step, the records behind it wait for it.
        let Some(order_key) = self.order_key().filter(|_| self.step.is_none()) else {
            return false;
        };
        !self.is_done() && self.shared.keep_followers(key, *assignment_number, *offset, order_key)
    }
}

impl Drop for KafkaDelivery {
    fn drop(&mut self) {
        if *self.is_acknowledged.get_mut() || *self.is_returned.get_mut() {
            return;
        }
        // With a step, the records behind it wait for it.
        let is_ordered = self.is_ordered && self.step.is_none();
        let record = std::mem::take(&mut self.delivered.record);
        let Delivered { key, assignment_number, offset, .. } = &self.delivered;
        self.shared.restore(key, *assignment_number, *offset, record, is_ordered);
    }
}

#[cfg(test)]
mod tests;

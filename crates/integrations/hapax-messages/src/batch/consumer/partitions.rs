//! Positions mode: the messages of each partition, in order.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;

use super::{AttemptState, BatchState, Unhandled};
use crate::batch::{BatchItem, EntryState};
use crate::consumer::Slot;
use crate::partition::{Partition, PositionStep};
use crate::source::Delivery;

/// A message of a partition.
enum Queued {
    /// A message that may share a transaction with others.
    Batched(BatchItem),
    /// A suspect, which is handled alone.
    Suspect(BatchItem),
    /// A message that becomes a dead letter.
    Unhandled { delivery: Arc<dyn Delivery>, unhandled: Unhandled, _slot: Slot },
}

/// The queues of partitions. A task drives each, until the queues are dropped. The source limits their
/// messages.
#[derive(Default)]
pub(super) struct PartitionQueues(HashMap<Partition, mpsc::UnboundedSender<Queued>>);

impl BatchState {
    /// Appends messages to the queues of their partitions.
    pub(super) fn enqueue(
        self: &Arc<Self>,
        received: Vec<Arc<dyn Delivery>>,
        slots: Vec<OwnedSemaphorePermit>,
        queues: &mut PartitionQueues,
        tasks: &mut JoinSet<()>,
    ) {
        for (identified, delivery, slot) in self.identify(received, slots) {
            let Some(PositionStep { partition, .. }) = delivery.step() else {
                // The source has promised a step. Dropped, the message is delivered again.
                tracing::error!(
                    consumer = self.inbox.consumer(),
                    "a message has no step of a position"
                );
                continue;
            };
            let mut begin = || {
                let (queue, messages) = mpsc::unbounded_channel();
                tasks.spawn(Arc::clone(self).drive_partition(messages));
                queue
            };
            let queue = match queues.0.get_mut(partition) {
                Some(queue) => queue,
                None => queues.0.entry(partition.clone()).or_insert_with(&mut begin),
            };
            if queue.is_closed() {
                // Its task has panicked, and has dropped its messages.
                *queue = begin();
            }
            let is_suspect = delivery.is_redelivery();
            let queued = match identified {
                Err(unhandled) => Queued::Unhandled { delivery, unhandled, _slot: slot },
                Ok((id, dead_letter)) => {
                    // None is too old: the position, and not an id, says that it was not handled.
                    let item = BatchItem::new(id, delivery);
                    let item = item.redriven_from(dead_letter).with_slot(slot);
                    match is_suspect {
                        true => Queued::Suspect(item),
                        false => Queued::Batched(item),
                    }
                }
            };
            if is_suspect {
                self.counters.suspect();
            }
            // A new task receives until the queue is dropped, or the consumer drains.
            let _ = queue.send(queued);
        }
    }

    /// Handles the messages of a partition, one transaction at a time.
    ///
    /// A message that is not acknowledged here, because its assignment has ended, is not passed: the
    /// steps over those behind it do not begin at the position, so that they are fenced.
    async fn drive_partition(self: Arc<Self>, mut messages: mpsc::UnboundedReceiver<Queued>) {
        let mut next = None;
        loop {
            let first = match next.take() {
                Some(queued) => queued,
                None => match messages.recv().await {
                    Some(queued) => queued,
                    None => return,
                },
            };
            match first {
                Queued::Batched(item) => {
                    let mut batch = vec![item];
                    while batch.len() < self.limits.batch.get() {
                        match messages.try_recv() {
                            Ok(Queued::Batched(item)) => batch.push(item),
                            other => {
                                next = other.ok();
                                break;
                            }
                        }
                    }
                    self.apply_in_parts(batch, true).await;
                }
                Queued::Suspect(item) => {
                    self.deliver_single(item, false, AttemptState::default(), None).await;
                }
                Queued::Unhandled { delivery, unhandled, _slot } => {
                    if !delivery.has_ended() {
                        self.park_unhandled(&delivery, &unhandled).await;
                    }
                }
            }
            if *self.is_draining.borrow() {
                return;
            }
        }
    }
}

/// Divides a batch before and after each message that has to be parked. The first part is the last.
pub(super) fn divide(mut batch: Vec<BatchItem>, states: &[EntryState]) -> Vec<Vec<BatchItem>> {
    let is_excluded =
        |state: &EntryState| matches!(state, EntryState::Mismatch | EntryState::Blocked);
    let mut parts = Vec::new();
    for at in (0..states.len().min(batch.len())).rev().filter(|at| is_excluded(&states[*at])) {
        parts.push(batch.split_off(at + 1));
        parts.push(batch.split_off(at));
    }
    parts.push(batch);
    parts.retain(|part| !part.is_empty());
    parts
}

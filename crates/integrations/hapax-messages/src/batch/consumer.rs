//! The consumer of batches.

mod database;
mod partitions;
mod single;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use hapax_core::{Clock, SystemClock, SystemEntropy, Timestamp};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use self::partitions::{PartitionQueues, divide};
use self::single::{AttemptState, Retry, Single, Unhandled, again};
use super::options::{BatchConsumerError, BatchConsumerLimits, BatchOptions};
use super::slots::Slots;
use super::{BatchError, BatchInbox, BatchItem, EntryState};
use crate::consumer::{
    ConsumerStats, Counters, MemoryBudget, Slot, Waits, acquire_all, check_delivery_limit, drain,
    note_ended,
};
use crate::dead_letter::{DeadLetter, DeadLetterReason, MISMATCH, identify};
use crate::failures::FailureLog;
use crate::handler::describe;
use crate::id::{IdRules, MessageId, MessageIdError};
use crate::inbox::{Attempts, Finish, FirstIds, HoldCause, OnTooOld};
use crate::retention::Retention;
use crate::source::{Delivery, MessageSource};

/// The id of a message and that of the dead letter from which it was redriven, or why it is not handled.
type Identified = Result<(MessageId, Option<[u8; 32]>), Unhandled>;

/// Pause after an error of the source or the database.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// Pause before a message whose id an open transaction has inserted is tried again.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(500);

/// Messages that were tried before and wait for all transactions at a time. Batches go between two of them.
const ALONE: usize = 1;

/// Times that a transaction which the database aborted is run again at once.
const RERUNS: u32 = 3;

/// A consumer in batch mode: a source and the inbox of a database. It keeps no order among messages,
/// except in positions mode, in which the messages of a partition are handled in order: one that fails
/// delays those behind it until it succeeds or is a dead letter.
#[derive(Debug)]
pub struct BatchConsumer {
    shared: Arc<BatchState>,
}

/// A handle that reads the counters of a [`BatchConsumer`] while it runs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct BatchMonitor {
    shared: Arc<BatchState>,
}

#[derive(Debug)]
struct BatchState {
    inbox: Arc<dyn BatchInbox>,
    source: Arc<dyn MessageSource>,
    ids: IdRules,
    first_ids: Option<FirstIds>,
    attempts: Attempts,
    on_too_old: OnTooOld,
    limits: BatchConsumerLimits,
    hold_every: Option<Duration>,
    /// Whether the consumer works in positions mode.
    has_positions: bool,
    /// One permit for each transaction. A suspect takes all of them.
    transactions: Arc<Semaphore>,
    slots: Slots,
    memory: Arc<MemoryBudget>,
    waits: Waits,
    database_is_up: watch::Sender<bool>,
    /// Time of the last call of the database.
    database_called_at: Mutex<Instant>,
    is_draining: watch::Sender<bool>,
    counters: Counters,
    failures: FailureLog,
    clock: Arc<dyn Clock>,
    entropy: SystemEntropy,
}

impl BatchConsumer {
    /// Creates a consumer. Nothing is received before [`BatchConsumer::run`].
    ///
    /// # Errors
    /// [`BatchConsumerError`].
    pub fn new(
        inbox: Arc<dyn BatchInbox>,
        source: Arc<dyn MessageSource>,
        options: BatchOptions,
    ) -> Result<Self, BatchConsumerError> {
        let BatchOptions { ids, attempts, on_too_old, expect_ids, limits } = options;
        if ids.is_empty() {
            return Err(BatchConsumerError::NoIdRules);
        }
        if attempts.max.min(attempts.max_crashes).get() < 2 {
            return Err(BatchConsumerError::Attempts);
        }
        if !attempts.are_valid() {
            let Attempts { first_pause: first, longest_pause: longest, .. } = attempts;
            return Err(BatchConsumerError::Pauses { first, longest });
        }
        let of_source = source.limits();
        let has_positions = of_source.has_positions;
        match (has_positions, inbox.advances_positions()) {
            (true, false) => return Err(BatchConsumerError::Positions { found: "source" }),
            (false, true) => return Err(BatchConsumerError::Positions { found: "inbox" }),
            (true, true) | (false, false) => {}
        }
        if of_source.has_order_keys && !has_positions {
            tracing::warn!(
                consumer = inbox.consumer(),
                "the source has order keys, and batch mode keeps no order: use an `ordered` inbox in claim \
                 mode, or the source without an order key"
            );
        }
        if let Some(limit) = of_source.delivery_limit {
            check_delivery_limit(limit, &attempts, inbox.consumer()).map_err(|crashes| {
                BatchConsumerError::DeliveryLimit { crashes, limit: limit.get() }
            })?;
        }
        let mut max_unacknowledged = of_source
            .max_unacknowledged
            .map_or(limits.max_unacknowledged, |it| it.min(limits.max_unacknowledged));
        let (mut places, mut max_bytes) =
            (limits.max_unacknowledged, limits.max_unacknowledged_bytes);
        if has_positions {
            // The source limits each partition, so that one which waits delays no other.
            (max_unacknowledged, max_bytes) = (NonZeroUsize::MAX, NonZeroUsize::MAX);
            places = NonZeroUsize::MAX;
        }
        let transactions = limits.transactions.get().min(Semaphore::MAX_PERMITS);
        let memory = MemoryBudget::new(max_bytes);
        let shared = BatchState {
            hold_every: of_source.hold_every,
            transactions: Arc::new(Semaphore::new(transactions)),
            slots: Slots::new(&limits, max_unacknowledged),
            waits: Waits::new(ALONE, places, attempts.longest_pause, &memory, &of_source),
            memory,
            has_positions,
            inbox,
            source,
            ids,
            first_ids: expect_ids.then(FirstIds::default),
            attempts,
            on_too_old,
            limits,
            database_is_up: watch::Sender::new(true),
            database_called_at: Mutex::new(Instant::now()),
            is_draining: watch::Sender::new(false),
            counters: Counters::default(),
            failures: FailureLog::default(),
            clock: Arc::new(SystemClock),
            entropy: SystemEntropy,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns a handle that reads the counters while the consumer runs.
    #[must_use]
    pub fn monitor(&self) -> BatchMonitor {
        BatchMonitor { shared: Arc::clone(&self.shared) }
    }

    /// Receives and handles messages until `shutdown` ends. Then batches in progress end, and all
    /// other messages are dropped, so that the broker delivers them again. Returns whether every
    /// batch in progress has ended in time, and none by a panic.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> bool {
        let shared = self.shared;
        let mut tasks = JoinSet::new();
        let retention = Retention {
            consumer: shared.inbox.consumer(),
            time: shared.inbox.retention(),
            bytes_per_id: shared.inbox.bytes_per_id(),
        };
        let watching = async {
            match retention.bytes_per_id {
                0 => std::future::pending().await,
                _ => retention.watch(shared.source.limits(), || shared.counters.stored()).await,
            }
        };
        let (consumer, counters) = (shared.inbox.consumer(), &shared.counters);
        tokio::select! {
            never = watching => match never {},
            never = shared.waits.watch(consumer, counters, &*shared.source) => match never {},
            never = shared.purge() => match never {},
            () = shutdown => {}
            () = shared.receive(&mut tasks) => {}
        }
        shared.is_draining.send_replace(true);
        let ended = drain(&mut tasks, shared.limits.drain_timeout, shared.inbox.consumer()).await;
        if !ended {
            tracing::warn!(
                consumer = shared.inbox.consumer(),
                left = tasks.len(),
                "batches are dropped in the shutdown: the broker delivers their messages again"
            );
        }
        tasks.shutdown().await;
        ended
    }
}

impl BatchMonitor {
    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        let BatchState { counters, memory, waits, source, first_ids, database_is_up, .. } =
            &*self.shared;
        let without_id = first_ids.as_ref().map_or(0, FirstIds::without);
        let store_is_down = !*database_is_up.borrow();
        let stats = ConsumerStats { store_is_down, without_id, ..counters.read(memory) };
        waits.read(stats, counters, &**source)
    }

    /// Waits until the rules for ids count as wrong, and returns the error of the messages: none of the first ones has
    /// an id. Does not end without [`BatchOptions::expect_ids`].
    pub async fn until_ids_are_missing(&self) -> MessageIdError {
        FirstIds::until_missing(self.shared.first_ids.as_ref()).await
    }
}

impl BatchState {
    /// Receives messages, each batch driven by a task. Does not end by itself.
    async fn receive(self: &Arc<Self>, tasks: &mut JoinSet<()>) {
        let mut database = self.database_is_up.subscribe();
        let mut partitions = PartitionQueues::default();
        loop {
            while let Some(ended) = tasks.try_join_next() {
                note_ended(ended, self.inbox.consumer());
            }
            self.until_database_is_up(&mut database).await;
            let Some(slots) = self.slots.take(&self.transactions).await else { return };
            let Some(max) = NonZeroUsize::new(slots.len()) else { return };
            let max = self.memory.free(max).await;
            let received = tokio::select! {
                _ = database.wait_for(|is_up| !is_up) => continue,
                received = self.source.receive(max) => received,
            };
            self.counters.source(received.is_err());
            let received = match received {
                Ok(received) => received,
                Err(error) => {
                    let error = describe(&error);
                    tracing::warn!(consumer = self.inbox.consumer(), %error, "receiving failed: it is tried again in 1 s");
                    drop(slots);
                    sleep(AFTER_ERROR).await;
                    continue;
                }
            };
            if self.has_positions {
                self.enqueue(received, slots, &mut partitions, tasks);
            } else {
                self.begin(received, slots, tasks);
            }
        }
    }

    /// Returns the id of each message that was received, with its slot.
    fn identify(
        &self,
        received: Vec<Arc<dyn Delivery>>,
        slots: Vec<OwnedSemaphorePermit>,
    ) -> Vec<(Identified, Arc<dyn Delivery>, Slot)> {
        if let Some(first_ids) = &self.first_ids {
            let readable = received.iter().filter(|it| it.unreadable().is_none());
            let messages = readable.map(|it| it.message());
            first_ids.received(self.inbox.consumer(), &self.ids, messages);
        }
        let sizes: Vec<_> = received.iter().map(|it| it.message().bytes()).collect();
        let slots = slots.into_iter().zip(self.memory.take(&sizes));
        let identify = |(delivery, (slot, memory)): (Arc<dyn Delivery>, _)| {
            let slot = self.counters.received(slot, memory);
            let identified = identify(self.inbox.consumer(), &self.ids, delivery.message());
            let identified = match delivery.unreadable() {
                None => identified.map_err(Unhandled::WithoutId),
                Some(text) => {
                    let id = identified.ok().map(|(id, _)| id);
                    Err(Unhandled::Unreadable(id, text.to_owned()))
                }
            };
            (identified, delivery, slot)
        };
        received.into_iter().zip(slots).map(identify).collect()
    }

    /// Returns whether a message is parked because its id may have been removed.
    fn is_too_old(&self, delivery: &Arc<dyn Delivery>) -> bool {
        self.on_too_old == OnTooOld::Park
            && delivery.message().age(self.clock.now()) > self.inbox.retention()
    }

    fn begin(
        self: &Arc<Self>,
        received: Vec<Arc<dyn Delivery>>,
        slots: Vec<OwnedSemaphorePermit>,
        tasks: &mut JoinSet<()>,
    ) {
        let mut fresh = Vec::new();
        for (identified, delivery, slot) in self.identify(received, slots) {
            let (id, dead_letter) = match identified {
                Ok(identified) => identified,
                Err(unhandled) => {
                    tasks.spawn(Arc::clone(self).drive_unhandled(delivery, unhandled, slot));
                    continue;
                }
            };
            // Of a redriven message too: a copy of it may be delivered after its id was removed.
            let is_old = self.is_too_old(&delivery);
            let is_suspect = delivery.is_redelivery();
            let item = BatchItem::new(id, delivery).redriven_from(dead_letter).with_slot(slot);
            if is_suspect {
                self.counters.suspect();
            }
            if is_suspect || is_old {
                tasks.spawn(Arc::clone(self).drive_single(item, is_old));
            } else {
                fresh.push(item);
            }
        }
        if !fresh.is_empty() {
            tasks.spawn(Arc::clone(self).drive_batch(fresh));
        }
    }

    /// Runs `work`, and meanwhile holds those deliveries that it has not dropped.
    async fn holding(&self, held: Vec<Weak<dyn Delivery>>, work: impl Future<Output = ()>) {
        let holding = async {
            let Some(every) = self.hold_every else { return std::future::pending().await };
            loop {
                sleep(every).await;
                for delivery in held.iter().filter_map(Weak::upgrade) {
                    if let Err(error) = delivery.hold().await {
                        tracing::debug!(error = %describe(&error), "a message may be delivered again");
                    }
                }
            }
        };
        tokio::select! {
            () = holding => {}
            () = work => {}
        }
    }

    /// Pauses. Returns false if the consumer drains.
    async fn pause(&self, pause: Duration) -> bool {
        let mut draining = self.is_draining.subscribe();
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => false,
            () = sleep(pause) => true,
        }
    }

    async fn permits(&self, all: bool) -> Option<OwnedSemaphorePermit> {
        let mut draining = self.is_draining.subscribe();
        let acquire = async {
            if all {
                let (count, consumer) = (self.limits.transactions, self.inbox.consumer());
                return acquire_all(&self.transactions, count, consumer).await;
            }
            Arc::clone(&self.transactions).acquire_owned().await.ok()
        };
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => None,
            permits = acquire => permits,
        }
    }

    async fn drive_batch(self: Arc<Self>, batch: Vec<BatchItem>) {
        let held = batch.iter().map(|item| Arc::downgrade(&item.delivery)).collect();
        let work = async {
            let singles = self.apply_in_parts(batch, false).await;
            let driven = singles.into_iter().map(|retry| self.retry(retry));
            futures_util::future::join_all(driven).await;
        };
        self.holding(held, work).await;
    }

    async fn drive_single(self: Arc<Self>, item: BatchItem, is_old: bool) {
        let held = vec![Arc::downgrade(&item.delivery)];
        let work = async {
            let (consumer, may_delay) = (self.inbox.consumer(), !self.has_positions);
            let admitted = self.waits.admit(&item.delivery, may_delay, consumer, &self.counters);
            let Ok(retry) = admitted.await else { return };
            self.deliver_single(item, is_old, AttemptState::default(), retry).await;
        };
        self.holding(held, work).await;
    }

    async fn drive_unhandled(
        self: Arc<Self>,
        delivery: Arc<dyn Delivery>,
        unhandled: Unhandled,
        _slot: Slot,
    ) {
        let held = vec![Arc::downgrade(&delivery)];
        self.holding(held, self.park_unhandled(&delivery, &unhandled)).await;
    }

    /// Applies a batch, and divides it while it fails. Returns the messages to try alone; with
    /// `in_order` they are tried at once, before those behind them, and none is returned.
    async fn apply_in_parts(&self, batch: Vec<BatchItem>, in_order: bool) -> Vec<Retry> {
        let mut singles = Vec::new();
        let mut parts = vec![batch];
        while let Some(mut part) = parts.pop() {
            let Some(permit) = self.permits(false).await else { return Vec::new() };
            // They are delivered again, here or to another process.
            part.retain(|item| !item.delivery.has_ended());
            if part.is_empty() {
                continue;
            }
            let applied = self.apply(&part, false).await;
            drop(permit);
            let mut retries = Vec::new();
            let failure = match applied {
                Ok(states) => {
                    singles.extend(self.end(part, states).await);
                    continue;
                }
                Err(failure) => failure,
            };
            match failure {
                BatchError::MustPark(states) if part.len() > 1 => {
                    parts.extend(divide(part, &states))
                }
                BatchError::MustPark(states) => {
                    for (item, state) in part.into_iter().zip(states) {
                        let single = self.park_excluded(&item, state, self.clock.now()).await;
                        let pause = self.conclude(&item, single).await;
                        retries.extend(pause.map(|pause| Retry::new(item, pause)));
                    }
                }
                BatchError::Fenced => {
                    if let Some(item) = part.first() {
                        item.delivery.acquire_position_again();
                    }
                }
                BatchError::Handler(_) | BatchError::InProgress if part.len() > 1 => {
                    let rest = part.split_off(part.len() / 2);
                    parts.push(rest);
                    parts.push(part);
                }
                BatchError::Handler(failure) => {
                    for item in part {
                        let (mut attempt_state, now) = (AttemptState::default(), self.clock.now());
                        let single = self.failed(&item, &failure, 1, now, &mut attempt_state).await;
                        let pause = self.conclude(&item, single).await;
                        retries.extend(pause.map(|pause| Retry { item, pause, attempt_state }));
                    }
                }
                BatchError::InProgress => {
                    self.counters.held(HoldCause::InFlight);
                    retries.extend(part.into_iter().map(|item| Retry::new(item, IN_FLIGHT_PAUSE)));
                }
                BatchError::Aborted(_) | BatchError::Unavailable(_) => {
                    // The same batch again, so that an outage does not make suspects of its
                    // messages.
                    self.counters.held(HoldCause::Store);
                    if !self.pause(AFTER_ERROR).await {
                        return Vec::new();
                    }
                    parts.push(part);
                }
            }
            for retry in retries {
                match in_order {
                    true => self.retry(retry).await,
                    false => singles.push(retry),
                }
            }
        }
        singles
    }

    /// Applies a batch, and again at once if the database aborted its transaction.
    async fn apply(
        &self,
        batch: &[BatchItem],
        clear_attempts: bool,
    ) -> Result<Vec<EntryState>, BatchError> {
        let mut runs = 0;
        loop {
            let applied = self.inbox.apply(batch.to_vec(), clear_attempts).await;
            self.note_database(&applied);
            match applied {
                Err(BatchError::Aborted(_)) if runs < RERUNS => runs += 1,
                applied => return applied,
            }
        }
    }

    /// Acknowledges or parks the messages of a batch by their states. Returns those that have to be
    /// tried again.
    async fn end(&self, batch: Vec<BatchItem>, states: Vec<EntryState>) -> Vec<Retry> {
        let (mut acknowledged, mut mismatches, mut again) = (Vec::new(), Vec::new(), Vec::new());
        for (item, state) in batch.into_iter().zip(states) {
            match state {
                EntryState::New => acknowledged.push((item, Finish::Handled)),
                EntryState::Duplicate => acknowledged.push((item, Finish::Duplicate)),
                // A blocked one is reported by `BatchError::MustPark` only.
                EntryState::Mismatch | EntryState::Blocked => mismatches.push(item),
            }
        }
        // At once, since each acknowledgement is a round trip to the broker.
        let finishing = acknowledged.into_iter().map(|(item, finish)| async move {
            self.finish(&item.delivery, finish).await;
        });
        futures_util::future::join_all(finishing).await;
        for item in mismatches {
            let (id, reason, now) = (Some(&item.id), DeadLetterReason::Mismatch, self.clock.now());
            let single = self.park(id, &item.delivery, reason, 0, MISMATCH, now).await;
            again.extend(self.conclude(&item, single).await.map(|it| Retry::new(item, it)));
        }
        again
    }

    async fn park(
        &self,
        id: Option<&MessageId>,
        delivery: &Arc<dyn Delivery>,
        reason: DeadLetterReason,
        attempts: u32,
        error: &str,
        first_at: Timestamp,
    ) -> Single {
        let message = delivery.message();
        let first_at = message.published_at.map_or(first_at, |published| published.min(first_at));
        let consumer = self.inbox.consumer();
        let mut dead_letter =
            DeadLetter::new(consumer, id, message.clone(), reason, error, self.clock.now())
                .native(delivery.native())
                .attempts(attempts)
                .first_at(first_at);
        if !self.source.limits().has_order_keys || !self.has_positions {
            // The dead letter parks no other message.
            dead_letter.message.key = None;
        }
        let inserts_id = id.is_some() && reason != DeadLetterReason::Mismatch;
        let step = delivery.step();
        let mut parked = self.inbox.park(&dead_letter, inserts_id, step).await;
        if matches!(parked, Ok(EntryState::Mismatch)) {
            dead_letter.reason = DeadLetterReason::Mismatch;
            dead_letter.error = MISMATCH.to_owned();
            parked = self.inbox.park(&dead_letter, false, step).await;
        }
        self.note_database(&parked);
        match parked {
            // Another process has handled or parked it meanwhile.
            Ok(EntryState::Duplicate) => Single::Done(Finish::Duplicate),
            Ok(EntryState::New | EntryState::Mismatch | EntryState::Blocked) => {
                let (id, reason) = (dead_letter.id_hex(), dead_letter.reason);
                tracing::warn!(consumer, dead_letter = id, origin = %message.origin, %reason, attempts, "a message became a dead letter");
                Single::Done(Finish::Parked(reason))
            }
            Err(error) => again(&error),
        }
    }

    /// Acknowledges a message. If that fails, it is delivered again, and is a duplicate then.
    async fn finish(&self, delivery: &Arc<dyn Delivery>, finish: Finish) {
        self.counters.finished(finish);
        if let Err(error) = delivery.acknowledge().await {
            tracing::debug!(error = %describe(&error), "an acknowledgement failed");
        }
    }
}

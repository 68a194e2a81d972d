//! The consumer of batches.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hapax_core::{Clock, Entropy, SystemClock, SystemEntropy, Timestamp};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::options::{BatchConsumerError, BatchConsumerLimits, BatchOptions};
use super::{BatchError, BatchInbox, BatchItem, EntryState};
use crate::consumer::{ConsumerStats, Counters, Slot, acquire_all, drain, note_ended};
use crate::dead_letter::{DeadLetter, DeadLetterReason, identify};
use crate::handler::{MessageFailure, describe};
use crate::id::{IdRules, MessageId};
use crate::inbox::{Attempts, Finish, HoldCause, TooOld};
use crate::retention::Retention;
use crate::source::{Delivery, MessageSource};

/// Pause after an error of the source or the database.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// Pause before a message whose id an open transaction has inserted is tried again.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Times that a transaction which lost against another is run again at once.
const RERUNS: u32 = 3;

/// A consumer in batch mode: a source and the inbox of a database. It keeps no order among
/// messages.
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
    attempts: Attempts,
    too_old: TooOld,
    limits: BatchConsumerLimits,
    hold_every: Option<Duration>,
    /// One permit for each transaction. A suspect takes all of them.
    transactions: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    database_is_up: watch::Sender<bool>,
    is_draining: watch::Sender<bool>,
    counters: Counters,
    clock: Arc<dyn Clock>,
    entropy: SystemEntropy,
}

/// Result for a message that was handled alone.
enum Single {
    Done(Finish),
    Again(Duration, HoldCause),
}

/// Facts about a message that last while it is tried alone.
#[derive(Default)]
struct Tried {
    /// The attempt that was counted, and in which the handler has not failed: it is not counted again
    /// after an outage.
    counted: Option<u32>,
    last_error: Option<String>,
}

/// Error of the letter of a message whose id belongs to another one.
const CONFLICT: &str = "the id belongs to a message with another payload";

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
        let BatchOptions { ids, attempts, too_old, limits } = options;
        if ids.is_empty() {
            return Err(BatchConsumerError::NoIdRules);
        }
        if attempts.max.get() < 2 {
            return Err(BatchConsumerError::Attempts);
        }
        if !attempts.are_valid() {
            return Err(BatchConsumerError::Pauses);
        }
        let of_source = source.limits();
        let in_hand =
            of_source.max_unacknowledged.map_or(limits.in_hand, |it| it.min(limits.in_hand));
        let permits =
            |count: NonZeroUsize| Arc::new(Semaphore::new(count.get().min(Semaphore::MAX_PERMITS)));
        let shared = BatchState {
            hold_every: of_source.hold_every,
            transactions: permits(limits.transactions),
            slots: permits(in_hand),
            inbox,
            source,
            ids,
            attempts,
            too_old,
            limits,
            database_is_up: watch::Sender::new(true),
            is_draining: watch::Sender::new(false),
            counters: Counters::default(),
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

    /// Receives and handles messages until `shutdown` ends. Then batches under way end, and all other
    /// messages are dropped, so that the broker delivers them again. Returns whether every batch
    /// under way has ended in time, and none by a panic.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> bool {
        let shared = self.shared;
        let mut tasks = JoinSet::new();
        let retention = Retention {
            consumer: shared.inbox.consumer(),
            time: shared.inbox.retention(),
            bytes_per_id: shared.inbox.bytes_per_id(),
        };
        let watching = retention.watch(shared.source.limits(), || shared.counters.stored());
        tokio::select! {
            never = watching => match never {},
            () = shutdown => {}
            () = shared.receive(&mut tasks) => {}
        }
        shared.is_draining.send_replace(true);
        let ended = drain(&mut tasks, shared.limits.drain_timeout, shared.inbox.consumer()).await;
        tasks.shutdown().await;
        ended
    }
}

impl BatchMonitor {
    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        self.shared.counters.read()
    }
}

impl BatchState {
    /// Receives messages, each batch driven by a task. Does not end by itself.
    async fn receive(self: &Arc<Self>, tasks: &mut JoinSet<()>) {
        let mut database = self.database_is_up.subscribe();
        loop {
            while let Some(ended) = tasks.try_join_next() {
                note_ended(ended, self.inbox.consumer());
            }
            // The sender is in `self`.
            let _ = database.wait_for(|is_up| *is_up).await;
            let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else { return };
            let mut slots = vec![slot];
            while slots.len() < self.limits.batch.get()
                && let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned()
            {
                slots.push(slot);
            }
            let Some(most) = NonZeroUsize::new(slots.len()) else { return };
            let received = tokio::select! {
                _ = database.wait_for(|is_up| !is_up) => continue,
                received = self.source.receive(most) => received,
            };
            let received = match received {
                Ok(received) => received,
                Err(error) => {
                    let error = describe(&error);
                    tracing::warn!(consumer = self.inbox.consumer(), %error, "no messages are received");
                    drop(slots);
                    sleep(AFTER_ERROR).await;
                    continue;
                }
            };
            self.begin(received, slots, tasks);
        }
    }

    fn begin(
        self: &Arc<Self>,
        received: Vec<Box<dyn Delivery>>,
        slots: Vec<OwnedSemaphorePermit>,
        tasks: &mut JoinSet<()>,
    ) {
        let (now, retention) = (self.clock.now(), self.inbox.retention());
        let mut fresh = Vec::new();
        for (delivery, slot) in received.into_iter().zip(slots) {
            let slot = self.counters.received(slot);
            let delivery: Arc<dyn Delivery> = Arc::from(delivery);
            let identified = identify(self.inbox.consumer(), &self.ids, delivery.message());
            let (id, letter) = match identified {
                Ok(identified) => identified,
                Err(error) => {
                    let error = error.to_string();
                    tasks.spawn(Arc::clone(self).drive_without_id(delivery, error, slot));
                    continue;
                }
            };
            let is_old = self.too_old == TooOld::Reject && delivery.message().age(now) > retention;
            let is_suspect = delivery.is_redelivery();
            let item = BatchItem::new(id, delivery).with_letter(letter).with_slot(slot);
            if is_suspect || is_old {
                self.counters.suspect();
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
            let singles = self.settle(batch).await;
            let driven = singles.into_iter().map(|(item, pause)| self.retry(item, pause));
            futures_util::future::join_all(driven).await;
        };
        self.holding(held, work).await;
    }

    async fn retry(&self, item: BatchItem, pause: Duration) {
        if self.pause(pause).await {
            self.deliver_single(item, false).await;
        }
    }

    async fn drive_single(self: Arc<Self>, item: BatchItem, is_old: bool) {
        let held = vec![Arc::downgrade(&item.delivery)];
        self.holding(held, self.deliver_single(item, is_old)).await;
    }

    async fn drive_without_id(
        self: Arc<Self>,
        delivery: Arc<dyn Delivery>,
        error: String,
        _slot: Slot,
    ) {
        let held = vec![Arc::downgrade(&delivery)];
        let work = async {
            loop {
                let reason = DeadLetterReason::NoId;
                match self.park(None, &delivery, reason, 0, &error, self.clock.now()).await {
                    Single::Done(finish) => return self.finish(&delivery, finish).await,
                    Single::Again(pause, cause) => {
                        self.counters.held(cause);
                        if !self.pause(pause).await {
                            return;
                        }
                    }
                }
            }
        };
        self.holding(held, work).await;
    }

    /// Applies a batch, and halves it while it fails. Returns the messages to try alone, each
    /// after a pause.
    async fn settle(&self, batch: Vec<BatchItem>) -> Vec<(BatchItem, Duration)> {
        let mut singles = Vec::new();
        let mut parts = vec![batch];
        while let Some(mut part) = parts.pop() {
            let Some(permit) = self.permits(false).await else { return Vec::new() };
            let applied = self.apply(&part, false).await;
            drop(permit);
            let failure = match applied {
                Ok(states) => {
                    for (item, state) in part.into_iter().zip(states) {
                        if let Some(pause) = self.entered(&item, state).await {
                            singles.push((item, pause));
                        }
                    }
                    continue;
                }
                Err(failure) => failure,
            };
            match failure {
                BatchError::Handler(_) | BatchError::InProgress if part.len() > 1 => {
                    let rest = part.split_off(part.len() / 2);
                    parts.push(rest);
                    parts.push(part);
                }
                BatchError::Handler(failure) => {
                    for item in part {
                        if let Some(pause) = self.failed_first(&item, &failure).await {
                            singles.push((item, pause));
                        }
                    }
                }
                BatchError::InProgress => {
                    self.counters.held(HoldCause::InFlight);
                    singles.extend(part.into_iter().map(|item| (item, LOOK_AGAIN)));
                }
                BatchError::Conflict(_) | BatchError::Unavailable(_) => {
                    // The same batch again, so that an outage does not make suspects of its messages.
                    self.counters.held(HoldCause::Store);
                    if !self.pause(AFTER_ERROR).await {
                        return Vec::new();
                    }
                    parts.push(part);
                }
            }
        }
        singles
    }

    /// Applies a batch, again at once if it lost against another.
    async fn apply(
        &self,
        batch: &[BatchItem],
        is_counted: bool,
    ) -> Result<Vec<EntryState>, BatchError> {
        let mut runs = 0;
        loop {
            let applied = self.inbox.apply(batch.to_vec(), is_counted).await;
            self.note_database(&applied);
            match applied {
                Err(BatchError::Conflict(_)) if runs < RERUNS => runs += 1,
                applied => return applied,
            }
        }
    }

    /// Acknowledges or parks a message by its state. Returns a pause if that has to be tried again.
    async fn entered(&self, item: &BatchItem, state: EntryState) -> Option<Duration> {
        let single = match state {
            EntryState::New => Single::Done(Finish::Handled),
            EntryState::Duplicate => Single::Done(Finish::Duplicate),
            EntryState::Conflict => {
                let (id, reason) = (Some(&item.id), DeadLetterReason::Conflict);
                self.park(id, &item.delivery, reason, 0, CONFLICT, self.clock.now()).await
            }
        };
        self.conclude(item, single).await
    }

    /// Counts the first failure of a message that was alone. Returns the pause before the next
    /// attempt.
    async fn failed_first(&self, item: &BatchItem, failure: &MessageFailure) -> Option<Duration> {
        let single = self.failed(item, failure, 1, self.clock.now()).await;
        self.conclude(item, single).await
    }

    async fn conclude(&self, item: &BatchItem, single: Single) -> Option<Duration> {
        match single {
            Single::Done(finish) => {
                self.finish(&item.delivery, finish).await;
                None
            }
            Single::Again(pause, cause) => {
                self.counters.held(cause);
                Some(pause)
            }
        }
    }

    /// Handles a message alone until it is acknowledged, or the consumer drains.
    async fn deliver_single(&self, item: BatchItem, is_old: bool) {
        let first_at = self.clock.now();
        let mut tried = Tried::default();
        loop {
            let single = {
                let Some(_alone) = self.permits(true).await else { return };
                self.single(&item, is_old, first_at, &mut tried).await
            };
            let Some(pause) = self.conclude(&item, single).await else { return };
            if !self.pause(pause).await {
                return;
            }
        }
    }

    /// Counts an attempt and makes it.
    async fn single(
        &self,
        item: &BatchItem,
        is_old: bool,
        first_at: Timestamp,
        tried: &mut Tried,
    ) -> Single {
        let counted = match tried.counted {
            Some(attempt) => Ok(attempt),
            None => {
                let counted = self.inbox.attempt(&item.id).await;
                self.note_database(&counted);
                counted
            }
        };
        let attempt = match counted {
            // It was handled, or its id belongs to another payload: inserting the id decides.
            Ok(0) => 1,
            Ok(attempt) => *tried.counted.insert(attempt),
            Err(error) => return again(&error),
        };
        if is_old && tried.counted.is_some() {
            let text = "the message is older than the retention of ids: it may have been handled";
            let (id, reason) = (Some(&item.id), DeadLetterReason::TooOld);
            return self.park(id, &item.delivery, reason, 0, text, first_at).await;
        }
        if attempt > self.attempts.max.get() {
            let text = "each attempt ended with its process";
            let text = tried.last_error.as_deref().unwrap_or(text);
            let (id, reason) = (Some(&item.id), DeadLetterReason::Attempts);
            return self.park(id, &item.delivery, reason, attempt - 1, text, first_at).await;
        }
        match self.apply(std::slice::from_ref(item), true).await {
            Ok(states) => match states.first() {
                Some(EntryState::New) => Single::Done(Finish::Handled),
                Some(EntryState::Conflict) => {
                    let (id, reason) = (Some(&item.id), DeadLetterReason::Conflict);
                    self.park(id, &item.delivery, reason, 0, CONFLICT, first_at).await
                }
                Some(EntryState::Duplicate) | None => Single::Done(Finish::Duplicate),
            },
            Err(BatchError::Handler(failure)) => {
                *tried = Tried { counted: None, last_error: Some(failure.text()) };
                self.failed(item, &failure, attempt, first_at).await
            }
            Err(error) => again(&error),
        }
    }

    /// Notes the failure of an attempt, and parks the message after the last one.
    async fn failed(
        &self,
        item: &BatchItem,
        failure: &MessageFailure,
        attempt: u32,
        first_at: Timestamp,
    ) -> Single {
        let text = failure.text();
        let is_last = attempt >= self.attempts.max.get();
        let (reason, after) = match failure {
            MessageFailure::Reject { .. } => (Some(DeadLetterReason::Rejected), None),
            MessageFailure::Retry { .. } | MessageFailure::Unknown { .. } if is_last => {
                (Some(DeadLetterReason::Attempts), None)
            }
            MessageFailure::Retry { after, .. } => (None, *after),
            MessageFailure::Unknown { .. } => (None, None),
        };
        if let Some(reason) = reason {
            return self
                .park(Some(&item.id), &item.delivery, reason, attempt, &text, first_at)
                .await;
        }
        let noted = self.inbox.note_failure(&item.id, &text).await;
        self.note_database(&noted);
        if let Err(error) = noted {
            return again(&error);
        }
        let pause = after.map_or_else(
            || self.attempts.backoff().pause(attempt, &self.entropy as &dyn Entropy),
            |after| after.min(self.attempts.longest_pause),
        );
        Single::Again(pause, HoldCause::Retry)
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
        let mut letter =
            DeadLetter::new(consumer, id, message.clone(), reason, error, self.clock.now())
                .attempts(attempts)
                .first_at(first_at);
        // The letter parks no other message.
        letter.message.key = None;
        let enters = id.is_some() && reason != DeadLetterReason::Conflict;
        let mut parked = self.inbox.park(&letter, enters).await;
        if matches!(parked, Ok(EntryState::Conflict)) {
            letter.reason = DeadLetterReason::Conflict;
            letter.error = CONFLICT.to_owned();
            parked = self.inbox.park(&letter, false).await;
        }
        self.note_database(&parked);
        match parked {
            // Another process has handled or parked it meanwhile.
            Ok(EntryState::Duplicate) => Single::Done(Finish::Duplicate),
            Ok(EntryState::New | EntryState::Conflict) => {
                let (id, reason) = (letter.id_hex(), letter.reason);
                tracing::warn!(consumer, letter = id, origin = %message.origin, %reason, attempts, "a message is a dead letter");
                Single::Done(Finish::Parked(reason))
            }
            Err(error) => again(&error),
        }
    }

    fn note_database<T>(&self, result: &Result<T, BatchError>) {
        let (is_up, error) = match result {
            Err(BatchError::Unavailable(error)) => (false, describe(&**error)),
            _ => (true, String::new()),
        };
        self.database_is_up.send_if_modified(|was_up| {
            let changed = *was_up != is_up;
            if changed && !is_up {
                tracing::warn!(
                    consumer = self.inbox.consumer(),
                    error,
                    "the database is unavailable: no messages are received, those in hand are held"
                );
            }
            *was_up = is_up;
            changed
        });
    }

    /// Acknowledges a message. If that fails, it is delivered again, and is a duplicate then.
    async fn finish(&self, delivery: &Arc<dyn Delivery>, finish: Finish) {
        self.counters.finished(finish);
        if let Err(error) = delivery.acknowledge().await {
            tracing::debug!(error = %describe(&error), "an acknowledgement failed");
        }
    }
}

fn again(error: &BatchError) -> Single {
    match error {
        BatchError::InProgress => Single::Again(LOOK_AGAIN, HoldCause::InFlight),
        BatchError::Handler(_) => Single::Again(AFTER_ERROR, HoldCause::Retry),
        BatchError::Conflict(_) | BatchError::Unavailable(_) => {
            Single::Again(AFTER_ERROR, HoldCause::Store)
        }
    }
}

//! Consumers: they receive messages, handle them through an inbox, and acknowledge them.

mod key_queues;
mod memory;
mod pauses;
mod stats;
mod waits;

use std::num::{NonZeroU32, NonZeroUsize};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use self::key_queues::{KeyQueues, KeyTurn};
use crate::handler::{MessageHandler, describe};
use crate::id::MessageIdError;
use crate::inbox::{Attempts, Disposition, Finish, FirstIds, HoldCause, Inbox, Progress};
use crate::retention::{RECORD_BYTES, Retention};
use crate::source::{Delivery, MessageSource};

pub(crate) use self::memory::MemoryBudget;
pub use self::stats::{ConsumerStats, FullLimit};
pub(crate) use self::stats::{Counters, Slot};
pub(crate) use self::waits::{CountedRetry, Waits, share_of};

/// Pause after an error of the source.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// Time after which a suspect that waits for handlers is logged, and then each time.
const LONG_WAIT: Duration = Duration::from_secs(60);

/// Number of attempts to acknowledge a message; after that the broker delivers it again.
const ACKNOWLEDGE_ATTEMPTS: u32 = 3;

/// Interval at which a message that waits checks whether its delivery has ended.
const CHECK_ENDED_EVERY: Duration = Duration::from_millis(250);

/// Least ratio of the broker's delivery limit to the crashes after which a message is parked, under which
/// a warning is logged: so many messages that end their process may be among those that were received.
const LIMIT_FACTOR: NonZeroU32 = NonZeroU32::MIN.saturating_add(3);

/// Default of the bytes of unacknowledged messages.
pub(crate) const DEFAULT_BYTES: NonZeroUsize =
    NonZeroUsize::MIN.saturating_add(64 * 1024 * 1024 - 1);

/// Limits of a [`Consumer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConsumerLimits {
    /// Largest number of handlers at a time. Default 16.
    pub handlers: NonZeroUsize,
    /// Largest number of messages that are received and not acknowledged: being handled, waiting
    /// for a handler, held, or being acknowledged. Default 256. A lower limit of the source applies instead.
    pub max_unacknowledged: NonZeroUsize,
    /// Bytes of unacknowledged messages at which the consumer stops receiving. The messages that it
    /// received last, or a single large one, may exceed them. Default 64 MiB.
    pub max_unacknowledged_bytes: NonZeroUsize,
    /// Time for messages in progress to end in a shutdown. Default 25 s. After that they are dropped,
    /// as in a crash.
    pub drain_timeout: Duration,
}

impl Default for ConsumerLimits {
    fn default() -> Self {
        Self {
            handlers: NonZeroUsize::MIN.saturating_add(15),
            max_unacknowledged: NonZeroUsize::MIN.saturating_add(255),
            max_unacknowledged_bytes: DEFAULT_BYTES,
            drain_timeout: Duration::from_secs(25),
        }
    }
}

/// Errors of the configuration of a [`Consumer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The inbox is ordered, and the messages of the source have no order keys.
    #[error(
        "expected a source with order keys for an `ordered` inbox, found one without: set the order key \
         of the source (`NatsSourceBuilder::order_key`, `KafkaSourceBuilder::order_by_key`, \
         `RabbitSourceBuilder::order_key`), or build the inbox without `ordered`"
    )]
    OrderKeys,
    /// The positions of the source would never advance.
    #[error(
        "expected a source whose positions are those of its broker, found one with positions in a \
         database: build the source without `positions`, or use a `BatchConsumer`"
    )]
    Positions,
    /// The broker removes a message before it becomes a dead letter.
    #[error(
        "expected a broker that delivers a message more than {crashes} times, the lower one of \
         `max_crashes` and `max`, found a delivery limit of {limit}: raise the limit of the queue, or lower `max_crashes`; the \
         broker would remove a message that ends its process, and no dead letter would have it"
    )]
    DeliveryLimit {
        /// Crashes after which the consumer parks a message.
        crashes: u32,
        /// Deliveries after which the broker removes it.
        limit: u32,
    },
}

/// A consumer: a source, an inbox and a handler.
///
/// 1. A message's id is claimed when a handler is free for it.
/// 2. A message is acknowledged after the record says that it was handled or parked.
/// 3. A message whose owner died, a *suspect*, is handled while no other one is: if it ends the
///    process again, only its own attempts are counted.
/// 4. While the store is unavailable nothing is received, and unacknowledged messages are held.
/// 5. Nothing begins with a message whose delivery [has ended](Delivery::has_ended).
/// 6. A message that waits for its next attempt is returned to the source, if it
///    [takes messages back](Delivery::delay). Messages that were delayed before have no more than three quarters of the
///    handlers, and of the unacknowledged messages and their bytes.
#[derive(Debug)]
pub struct Consumer {
    shared: Arc<ConsumerState>,
}

struct ConsumerState {
    inbox: Inbox,
    source: Arc<dyn MessageSource>,
    handler: Arc<dyn MessageHandler>,
    limits: ConsumerLimits,
    hold_every: Option<Duration>,
    /// One permit for each handler. A suspect takes all of them.
    handlers: Arc<Semaphore>,
    /// One permit for each message that may be unacknowledged.
    slots: Arc<Semaphore>,
    memory: Arc<MemoryBudget>,
    waits: Waits,
    /// False while the store is unavailable.
    store_is_up: watch::Sender<bool>,
    is_draining: watch::Sender<bool>,
    key_queues: KeyQueues,
    counters: Counters,
}

impl std::fmt::Debug for ConsumerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer")
            .field("inbox", &self.inbox.consumer())
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

impl Consumer {
    /// Creates a consumer. Nothing is received before [`Consumer::run`]. Logs a warning if the source
    /// has order keys and the inbox is not ordered.
    ///
    /// # Errors
    /// [`ConsumerError`]: an ordered inbox has a source without order keys, the positions of the source are
    /// in a database, or its delivery limit is too low.
    pub fn new(
        inbox: Inbox,
        source: Arc<dyn MessageSource>,
        handler: impl MessageHandler,
        limits: ConsumerLimits,
    ) -> Result<Self, ConsumerError> {
        let of_source = source.limits();
        if of_source.has_positions {
            return Err(ConsumerError::Positions);
        }
        match (inbox.shared.is_ordered, of_source.has_order_keys) {
            (true, false) => return Err(ConsumerError::OrderKeys),
            (false, true) => tracing::warn!(
                consumer = inbox.consumer(),
                "the source has order keys and the inbox is not ordered: messages with one key are \
                 handled at the same time, and also those behind a dead letter; build the inbox with \
                 `ordered`, or the source without an order key"
            ),
            (true, true) | (false, false) => {}
        }
        if let Some(limit) = of_source.delivery_limit {
            check_delivery_limit(limit, &inbox.shared.attempts(), inbox.consumer())
                .map_err(|crashes| ConsumerError::DeliveryLimit { crashes, limit: limit.get() })?;
        }
        let max_unacknowledged = match of_source.max_unacknowledged {
            Some(max) => limits.max_unacknowledged.min(max),
            None => limits.max_unacknowledged,
        };
        // More permits than a semaphore has cannot be used.
        let permits =
            |count: NonZeroUsize| Arc::new(Semaphore::new(count.get().min(Semaphore::MAX_PERMITS)));
        let memory = MemoryBudget::new(limits.max_unacknowledged_bytes);
        let (share, most) = (share_of(limits.handlers), limits.max_unacknowledged);
        let longest = inbox.shared.attempts().longest_pause;
        Ok(Self {
            shared: Arc::new(ConsumerState {
                hold_every: of_source.hold_every,
                handlers: permits(limits.handlers),
                slots: permits(max_unacknowledged),
                waits: Waits::new(share, most, longest, &memory, &of_source),
                memory,
                inbox,
                source,
                handler: Arc::new(handler),
                limits,
                store_is_up: watch::Sender::new(true),
                is_draining: watch::Sender::new(false),
                key_queues: KeyQueues::default(),
                counters: Counters::default(),
            }),
        })
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        self.shared.stats()
    }

    /// Returns a handle that reads the counters while the consumer runs.
    #[must_use]
    pub fn monitor(&self) -> ConsumerMonitor {
        ConsumerMonitor { shared: Arc::clone(&self.shared) }
    }

    /// Receives and handles messages until `shutdown` ends. Then nothing more is received; messages
    /// in progress end, and all others are dropped, so that the broker delivers them again. Returns
    /// whether every message in progress has ended in time, and none by a panic.
    ///
    /// Drain the engine afterwards: [`Idempotency::drain`](hapax_core::Idempotency::drain).
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> bool {
        let shared = self.shared;
        let mut tasks = JoinSet::new();
        {
            let receiving = shared.receive(&mut tasks);
            let retention = Retention {
                consumer: shared.inbox.consumer(),
                time: shared.inbox.retention(),
                bytes_per_id: RECORD_BYTES,
            };
            let watching = retention.watch(shared.source.limits(), || shared.counters.stored());
            let (consumer, counters) = (shared.inbox.consumer(), &shared.counters);
            tokio::select! {
                never = watching => match never {},
                never = shared.waits.watch(consumer, counters, &*shared.source) => match never {},
                () = shutdown => {}
                () = receiving => {}
            }
        }
        shared.is_draining.send_replace(true);
        let ended = drain(&mut tasks, shared.limits.drain_timeout, shared.inbox.consumer()).await;
        if !ended {
            let left = tasks.len();
            tracing::warn!(
                consumer = %shared.inbox.consumer(),
                left,
                "messages are dropped in the shutdown: their leases lapse, as after a crash"
            );
        }
        tasks.shutdown().await;
        ended
    }
}

/// A handle that reads the counters of a [`Consumer`] while it runs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ConsumerMonitor {
    shared: Arc<ConsumerState>,
}

impl ConsumerMonitor {
    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        self.shared.stats()
    }

    /// Waits until the rules for ids count as wrong, and returns the error of the messages: none of the first ones has
    /// an id. Does not end for an inbox without [`InboxBuilder::expect_ids`](crate::InboxBuilder::expect_ids).
    pub async fn until_ids_are_missing(&self) -> MessageIdError {
        FirstIds::until_missing(self.shared.inbox.shared.first_ids.as_ref()).await
    }
}

/// Compares the broker's limit of deliveries with the crashes after which a message is parked, and logs
/// a warning if it is near: a crash counts as a delivery of every message that was received. Fails with the
/// number of crashes.
pub(crate) fn check_delivery_limit(
    limit: NonZeroU32,
    attempts: &Attempts,
    consumer: &str,
) -> Result<(), u32> {
    let crashes = attempts.max_crashes.min(attempts.max);
    if limit <= crashes {
        return Err(crashes.get());
    }
    if limit < crashes.saturating_mul(LIMIT_FACTOR) {
        tracing::warn!(
            consumer,
            limit,
            crashes,
            "expected a delivery limit of at least {LIMIT_FACTOR} times the crashes after which a message is \
             parked, the lower one of `max_crashes` and `max`, found a lower limit: each crash counts as a \
             delivery of every message that was received, and the broker removes those that reach the \
             limit; raise the limit of the queue, or lower `max_crashes`"
        );
    }
    Ok(())
}

/// Awaits the tasks of messages for a time. Returns whether all of them have ended, without a
/// panic.
pub(crate) async fn drain(tasks: &mut JoinSet<()>, max: Duration, consumer: &str) -> bool {
    let ended = async {
        let mut all = true;
        while let Some(ended) = tasks.join_next().await {
            all &= note_ended(ended, consumer);
        }
        all
    };
    timeout(max, ended).await.unwrap_or(false)
}

/// Logs the panic of a task. Returns whether there was none.
pub(crate) fn note_ended(ended: Result<(), JoinError>, consumer: &str) -> bool {
    let Err(error) = ended else { return true };
    tracing::error!(consumer, %error, "a task panicked: the broker delivers its messages again");
    false
}

/// Acquires all permits of handlers or transactions, for a suspect. Logs a warning each minute while
/// it waits, because nothing else begins meanwhile. Returns `None` if the semaphore is closed.
pub(crate) async fn acquire_all(
    permits: &Arc<Semaphore>,
    count: NonZeroUsize,
    consumer: &str,
) -> Option<OwnedSemaphorePermit> {
    let count = count.get().min(Semaphore::MAX_PERMITS);
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    // A semaphore gives its permits in the order of requests, so this one is not overtaken.
    let mut all = pin!(Arc::clone(permits).acquire_many_owned(count));
    loop {
        match timeout(LONG_WAIT, &mut all).await {
            Ok(all) => return all.ok(),
            Err(_) => tracing::warn!(
                consumer,
                "a message whose owner died waits for handlers in progress, one of which may hang: \
                 nothing else is handled meanwhile"
            ),
        }
    }
}

impl ConsumerState {
    fn stats(&self) -> ConsumerStats {
        let stats = self.counters.read(&self.memory);
        let without_id = self.inbox.shared.first_ids.as_ref().map_or(0, FirstIds::without);
        let stats =
            ConsumerStats { store_is_down: !*self.store_is_up.borrow(), without_id, ..stats };
        self.waits.read(stats, &self.counters, &*self.source)
    }

    /// Receives messages, each driven by a task. Does not end by itself; a future that is dropped
    /// loses no message, because the broker delivers it again.
    async fn receive(self: &Arc<Self>, tasks: &mut JoinSet<()>) {
        let mut store = self.store_is_up.subscribe();
        let is_ordered = self.inbox.shared.is_ordered;
        loop {
            while let Some(ended) = tasks.try_join_next() {
                note_ended(ended, self.inbox.consumer());
            }
            // The sender is in `self`.
            let _ = store.wait_for(|is_up| *is_up).await;
            let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else { return };
            let mut slots = vec![slot];
            while let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
                slots.push(slot);
            }
            let Some(max) = NonZeroUsize::new(slots.len()) else { return };
            let max = self.memory.free(max).await;
            let received = tokio::select! {
                // Another process may be able to handle what would arrive here. Messages that have
                // arrived are dropped, and come later than those behind them.
                _ = store.wait_for(|is_up| !is_up), if !is_ordered => continue,
                received = self.source.receive(max) => received,
            };
            self.counters.source(received.is_err());
            let received = match received {
                Ok(received) => received,
                Err(error) => {
                    let error = describe(&error);
                    tracing::warn!(consumer = %self.inbox.consumer(), %error, "receiving failed: it is tried again in 1 s");
                    drop(slots);
                    sleep(AFTER_ERROR).await;
                    continue;
                }
            };
            self.inbox.shared.received(&received);
            let sizes: Vec<_> = received.iter().map(|it| it.message().bytes()).collect();
            let slots = slots.into_iter().zip(self.memory.take(&sizes));
            for (delivery, (slot, memory)) in received.into_iter().zip(slots) {
                let slot = self.counters.received(slot, memory);
                let key = delivery.message().key.as_deref().filter(|_| is_ordered);
                // In the order in which they were received.
                let turn = key.map(|key| self.key_queues.append(key));
                // In a box, because a future is moved several times while it is spawned.
                tasks.spawn(Box::pin(Arc::clone(self).drive(turn, delivery, slot)));
            }
        }
    }

    /// Drives one message until it is acknowledged, and holds it meanwhile.
    ///
    /// The delivery is dropped before the turn, also after a panic: the source blocks the order key then, before the next
    /// message of the key has its turn.
    async fn drive(
        self: Arc<Self>,
        mut turn: Option<KeyTurn>,
        delivery: Arc<dyn Delivery>,
        _slot: Slot,
    ) {
        let holding = async {
            let Some(every) = self.hold_every else { return std::future::pending().await };
            loop {
                sleep(every).await;
                if let Err(error) = delivery.hold().await {
                    let error = describe(&error);
                    tracing::debug!(%error, "a message may be delivered again");
                }
            }
        };
        let mut draining = self.is_draining.subscribe();
        tokio::select! {
            () = holding => {}
            () = self.deliver(&delivery, &mut turn, &mut draining) => {}
        }
    }

    async fn deliver(
        &self,
        delivery: &Arc<dyn Delivery>,
        turn: &mut Option<KeyTurn>,
        draining: &mut watch::Receiver<bool>,
    ) {
        let inbox = &self.inbox.shared;
        // Before a handler is free, which then does not wait for it.
        let identity = inbox.identify(delivery.message());
        if let Some(turn) = turn
            && !self.takes_turn(delivery, turn, draining).await
        {
            return;
        }
        let may_delay = turn.is_none() || self.source.limits().delays_in_order;
        let (consumer, counters) = (self.inbox.consumer(), &self.counters);
        let admitted = self.waits.admit(delivery, may_delay, consumer, counters).await;
        let Ok(mut retry) = admitted else { return };
        let mut progress = Progress::new(inbox.now());
        let (mut is_suspect, mut is_first) = (false, true);
        loop {
            let (pause, cause) = {
                let permits = tokio::select! {
                    biased;
                    _ = draining.wait_for(|draining| *draining) => return,
                    permits = self.permits(is_suspect, retry.is_some()) => permits,
                };
                let Some(permits) = permits else { return };
                // It is delivered again, here or to another process, which may have begun. One that
                // was begun here goes on: a dead letter may have to be removed.
                if is_first && delivery.has_ended() {
                    return;
                }
                is_first = false;
                let handler = &*self.handler;
                let disposition =
                    inbox.process(delivery, &identity, handler, is_suspect, &mut progress).await;
                self.note_store(&disposition);
                match disposition {
                    Disposition::Finished(finish) => {
                        // The outcome or the dead letter is stored: another message begins during the
                        // acknowledgement, but none with the same key.
                        drop(permits);
                        return self.finish(delivery, finish).await;
                    }
                    Disposition::Suspect => {
                        is_suspect = true;
                        self.counters.suspect();
                        continue;
                    }
                    Disposition::Held(pause, cause) => {
                        self.counters.held(cause);
                        (pause, cause)
                    }
                }
            };
            // A message with an order key stays, unless the source keeps later ones: they wait for it.
            let may_delay = may_delay && progress.is_recorded(cause);
            let held = (pause, cause);
            let paused = self.pause_before(delivery, held, may_delay, &mut retry, turn, draining);
            if !paused.await {
                return;
            }
        }
    }

    /// Notes whether the store is up. Messages whose dead letters are not stored are held, and no
    /// others.
    fn note_store(&self, disposition: &Disposition) {
        let is_up = !matches!(disposition, Disposition::Held(_, HoldCause::Store));
        self.store_is_up.send_if_modified(|was_up| {
            let changed = *was_up != is_up;
            if changed && is_up {
                tracing::info!(consumer = %self.inbox.consumer(), "messages are received again");
            } else if changed && self.inbox.shared.is_paused() {
                tracing::warn!(
                    consumer = %self.inbox.consumer(),
                    "a quarantine is in force, or the register of the store was not written: no messages are received, and \
                     unacknowledged ones are held"
                );
            } else if changed {
                tracing::warn!(
                    consumer = %self.inbox.consumer(),
                    "the store is unavailable: no messages are received, and unacknowledged ones are held"
                );
            }
            *was_up = is_up;
            changed
        });
    }

    /// Acknowledges a message. If that fails, it is delivered again, and is a duplicate then.
    async fn finish(&self, delivery: &Arc<dyn Delivery>, finish: Finish) {
        self.counters.finished(finish);
        for _ in 0..ACKNOWLEDGE_ATTEMPTS {
            let Err(error) = delivery.acknowledge().await else { return };
            let error = describe(&error);
            tracing::debug!(consumer = %self.inbox.consumer(), %error, "an acknowledgement failed");
            if delivery.has_ended() {
                return;
            }
            sleep(AFTER_ERROR).await;
        }
    }
}

/// Waits until a delivery has ended. A source may wait for messages that are not dropped: a member of a Kafka
/// group, before it gives up its partitions.
pub(crate) async fn until_ended(delivery: &dyn Delivery) {
    while !delivery.has_ended() {
        sleep(CHECK_ENDED_EVERY).await;
    }
}

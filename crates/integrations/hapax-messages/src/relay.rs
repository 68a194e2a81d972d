//! The relay: it publishes the messages of an outbox.
//!
//! 1. A message is published at least once, under one id, and deleted once the sink has acknowledged
//!    it. There is no cursor: a message that a transaction commits late is found by the next poll.
//! 2. A shard belongs to one relay at a time, by a lease of the engine, which is checked before each
//!    message is sent. Of the messages with one order key, one is unacknowledged at a time, unless
//!    the sink keeps order.
//! 3. A relay that was suspended between the check and the send may repeat an earlier message late.
//!    Inboxes drop it as a duplicate. It does not skip or reorder messages.
//! 4. No transaction is open while a message is sent.

mod floors;
mod queue;
mod shards;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::{Backoff, Entropy, Idempotency, SystemEntropy};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use self::floors::Floors;
use self::queue::Queue;
use self::shards::Shards;
use crate::handler::describe;
use crate::outbox::{OUTBOX_SHARDS, Outbox, OutboxError, OutboxLag, OutboxMessage, OutboxPlace};
use crate::sink::{MessageSink, PublishError};

/// Pauses between polls: they double while nothing is found.
const FIRST_POLL: Duration = Duration::from_millis(10);
const LAST_POLL: Duration = Duration::from_secs(1);

/// Pause of a relay without a shard.
const STANDBY: Duration = Duration::from_millis(250);

/// Time between two readings of the lag.
const LAG_EVERY: Duration = Duration::from_secs(10);

/// Least time between two warnings about the sink.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Limits of a [`Relay`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLimits {
    /// Messages that are sent and not acknowledged. Default 256.
    pub in_flight: NonZeroUsize,
    /// Messages in memory: in flight, or waiting for an earlier one with their order key. Default
    /// 2048.
    pub in_hand: NonZeroUsize,
    /// Time for the sink to acknowledge a message. Default 10 s.
    pub publish_timeout: Duration,
    /// Lease of a shard: the time for which a relay that died blocks its messages. Default 15 s.
    pub lease: Duration,
    /// Bound of the pause after a message was not acknowledged, unless the sink sets a longer one.
    /// Default 30 s.
    pub longest_pause: Duration,
    /// Bound of the pause that a sink can set. Default 15 min.
    pub longest_retry_after: Duration,
}

impl Default for RelayLimits {
    fn default() -> Self {
        Self {
            in_flight: NonZeroUsize::MIN.saturating_add(255),
            in_hand: NonZeroUsize::MIN.saturating_add(2047),
            publish_timeout: Duration::from_secs(10),
            lease: Duration::from_secs(15),
            longest_pause: Duration::from_secs(30),
            longest_retry_after: Duration::from_secs(15 * 60),
        }
    }
}

/// Errors of the configuration of a relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The lease is shorter than a second.
    #[error("expected a lease of at least 1 s, found {0:?}")]
    Lease(Duration),
    /// The timeout is zero.
    #[error("expected a publish timeout of at least 1 ms, found zero")]
    PublishTimeout,
}

/// Counters of a relay since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RelayStats {
    /// Messages that were published and acknowledged.
    pub published: u64,
    /// Times that a message was not acknowledged.
    pub failures: u64,
    /// Messages that became dead letters.
    pub parked: u64,
    /// Polls.
    pub polls: u64,
    /// Shards that this relay has now.
    pub shards: u64,
    /// State of the outbox, read every 10 s.
    pub lag: OutboxLag,
}

#[derive(Debug, Default)]
struct RelayCounters {
    published: AtomicU64,
    failures: AtomicU64,
    parked: AtomicU64,
    polls: AtomicU64,
}

/// A relay of one outbox to one sink. Several relays of an outbox share its shards.
#[derive(Debug)]
pub struct Relay {
    state: Arc<RelayState>,
}

/// A handle that reads the counters of a [`Relay`] while it runs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RelayMonitor {
    state: Arc<RelayState>,
}

#[derive(Debug)]
struct RelayState {
    outbox: Arc<dyn Outbox>,
    sink: Arc<dyn MessageSink>,
    shards: Arc<Shards>,
    limits: RelayLimits,
    backoff: Backoff,
    entropy: SystemEntropy,
    counters: RelayCounters,
    lag: watch::Sender<OutboxLag>,
}

impl Relay {
    /// Creates a relay. `engine` has the leases of the shards, in any store that all relays of this
    /// outbox use; `name` is the outbox's name in it.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn new(
        name: &str,
        outbox: Arc<dyn Outbox>,
        sink: Arc<dyn MessageSink>,
        engine: Idempotency,
        limits: RelayLimits,
    ) -> Result<Self, RelayError> {
        if limits.lease < Duration::from_secs(1) {
            return Err(RelayError::Lease(limits.lease));
        }
        if limits.publish_timeout < Duration::from_millis(1) {
            return Err(RelayError::PublishTimeout);
        }
        let state = RelayState {
            outbox,
            sink,
            shards: Arc::new(Shards::new(name, engine, limits.lease)),
            limits,
            backoff: Backoff::new(Duration::from_millis(100), limits.longest_pause),
            entropy: SystemEntropy,
            counters: RelayCounters::default(),
            lag: watch::Sender::default(),
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Returns a handle that reads the counters while the relay runs.
    #[must_use]
    pub fn monitor(&self) -> RelayMonitor {
        RelayMonitor { state: Arc::clone(&self.state) }
    }

    /// Publishes messages until `shutdown` ends. Then messages that were sent are awaited, for at most
    /// the publish timeout, and the shards are released to other relays.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let state = self.state;
        let stop = watch::Sender::new(false);
        let mut leases = JoinSet::new();
        for shard in 0..OUTBOX_SHARDS {
            leases.spawn(Arc::clone(&state.shards).hold(shard, stop.subscribe()));
        }
        let mut work = Work::new(&state);
        tokio::select! {
            () = shutdown => {}
            () = work.run() => {}
        }
        work.end().await;
        drop(work);
        stop.send_replace(true);
        while leases.join_next().await.is_some() {}
    }
}

impl RelayMonitor {
    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> RelayStats {
        let counters = &self.state.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RelayStats {
            published: read(&counters.published),
            failures: read(&counters.failures),
            parked: read(&counters.parked),
            polls: read(&counters.polls),
            shards: self.state.shards.owned().len() as u64,
            lag: *self.state.lag.borrow(),
        }
    }
}

type Sent = (OutboxMessage, u32, Result<(), PublishError>);

/// The messages in hand, and the times of the next steps.
struct Work {
    state: Arc<RelayState>,
    queue: Queue,
    floors: Floors,
    sends: JoinSet<Sent>,
    /// Published, and to be deleted.
    published: Vec<OutboxPlace>,
    pause: Duration,
    poll_at: Instant,
    lag_at: Instant,
    warn_at: Instant,
}

impl Work {
    fn new(state: &Arc<RelayState>) -> Self {
        let now = Instant::now();
        Self {
            state: Arc::clone(state),
            queue: Queue::new(state.sink.keeps_order()),
            floors: Floors::new(),
            sends: JoinSet::new(),
            published: Vec::new(),
            pause: FIRST_POLL,
            poll_at: now,
            lag_at: now,
            warn_at: now,
        }
    }

    /// Publishes messages. A future that is dropped leaves messages that are in flight, which
    /// [`Work::end`] awaits.
    async fn run(&mut self) {
        loop {
            if let Err(error) = self.step().await {
                let error = describe(&error);
                tracing::warn!(%error, "the relay waits for the outbox");
                self.pause = LAST_POLL;
                self.poll_at = Instant::now() + LAST_POLL;
            }
            self.send();
            let next = self.queue.due().map_or(self.poll_at, |due| due.min(self.poll_at));
            tokio::select! {
                () = sleep_until(next) => {}
                Some(sent) = self.sends.join_next() => self.take(sent).await,
            }
        }
    }

    /// Deletes published messages, and polls if that is due.
    async fn step(&mut self) -> Result<(), OutboxError> {
        while let Some(sent) = self.sends.try_join_next() {
            self.take(sent).await;
        }
        self.remove().await?;
        let shards = self.state.shards.owned();
        self.queue.keep_only(&shards);
        let now = Instant::now();
        if now < self.poll_at {
            return Ok(());
        }
        if shards.is_empty() {
            self.poll_at = now + STANDBY;
            return Ok(());
        }
        let room = self.state.limits.in_hand.get().saturating_sub(self.queue.len());
        if room == 0 {
            self.poll_at = now + FIRST_POLL;
            return Ok(());
        }
        self.poll(&shards, room).await?;
        if self.floors.is_due() {
            let writers = self.state.outbox.writers().await?;
            if let Some(settled) = self.floors.take_writers(writers) {
                let least = self.state.outbox.least(&self.floors.of(&shards)).await?;
                self.floors.raise(settled, &least);
            }
        }
        if now >= self.lag_at {
            self.lag_at = now + LAG_EVERY;
            self.state.lag.send_replace(self.state.outbox.lag().await?);
        }
        Ok(())
    }

    async fn poll(
        &mut self,
        shards: &std::collections::HashSet<u16>,
        room: usize,
    ) -> Result<(), OutboxError> {
        let floors = self.queue.rotated(self.floors.of(shards));
        // Messages in hand are found again, and must not keep others from being found.
        let batch = room.min(self.state.limits.in_flight.get());
        let most = u32::try_from(self.queue.len() + batch).unwrap_or(u32::MAX);
        let page = self.state.outbox.poll(&floors, &self.queue.full_keys(), most).await?;
        self.state.counters.polls.fetch_add(1, Ordering::Relaxed);
        if !self.floors.take_epoch(page.epoch) {
            // The page may lack earlier messages of its order keys.
            self.poll_at = Instant::now();
            return Ok(());
        }
        let mut found = 0;
        for message in page.messages {
            found += usize::from(self.queue.add(message));
        }
        self.pause = if found > 0 { FIRST_POLL } else { (self.pause * 2).min(LAST_POLL) };
        self.poll_at = Instant::now() + if found == batch { Duration::ZERO } else { self.pause };
        Ok(())
    }

    /// Sends what may be sent.
    fn send(&mut self) {
        while self.sends.len() < self.state.limits.in_flight.get()
            && let Some((message, attempt)) = self.queue.next()
        {
            let state = Arc::clone(&self.state);
            self.sends.spawn(async move {
                // Checked in the task, just before the message is sent: this process may have been
                // suspended since it was polled.
                if !state.shards.is_held(message.place.shard) {
                    let lost = PublishError::not_acknowledged("the lease of the shard is lost");
                    return (message, attempt, Err(lost));
                }
                let sent =
                    timeout(state.limits.publish_timeout, state.sink.publish(&message.message));
                let sent = sent.await.unwrap_or_else(|_| {
                    Err(PublishError::not_acknowledged("no acknowledgement within the timeout"))
                });
                (message, attempt, sent)
            });
        }
    }

    async fn take(&mut self, sent: Result<Sent, tokio::task::JoinError>) {
        let (message, attempt, result) = match sent {
            Ok(sent) => sent,
            Err(error) if error.is_cancelled() => return,
            Err(error) => {
                // The sink panicked, and its message is not known here: all are polled again.
                tracing::error!(%error, "the sink panicked");
                self.queue = Queue::new(self.state.sink.keeps_order());
                self.sends.abort_all();
                return;
            }
        };
        let counters = &self.state.counters;
        match result {
            Ok(()) => {
                counters.published.fetch_add(1, Ordering::Relaxed);
                self.published.push(message.place);
                self.queue.published(&message);
            }
            Err(PublishError::Rejected(cause)) => {
                let error = describe(&*cause);
                tracing::warn!(place = ?message.place, %error, "a message of the outbox is a dead letter");
                match self.state.outbox.park(&message, &error, attempt).await {
                    Ok(()) => {
                        counters.parked.fetch_add(1, Ordering::Relaxed);
                        self.queue.parked(&message);
                    }
                    Err(error) => {
                        tracing::warn!(error = %describe(&error), "a dead letter was not stored");
                        self.queue.failed(message, attempt, Instant::now() + LAST_POLL);
                    }
                }
            }
            Err(PublishError::NotAcknowledged { source, retry_after }) => {
                counters.failures.fetch_add(1, Ordering::Relaxed);
                let pause = self.state.backoff.pause(attempt, &self.state.entropy as &dyn Entropy);
                let longest = self.state.limits.longest_retry_after;
                let pause = retry_after.map_or(pause, |after| after.min(longest).max(pause));
                let error = describe(&*source);
                tracing::debug!(place = ?message.place, %error, ?pause, "a message was not acknowledged");
                let now = Instant::now();
                if now >= self.warn_at {
                    self.warn_at = now + WARN_EVERY;
                    tracing::warn!(%error, "the sink does not acknowledge: messages are published again");
                }
                self.queue.failed(message, attempt, Instant::now() + pause);
            }
        }
    }

    async fn remove(&mut self) -> Result<(), OutboxError> {
        if !self.published.is_empty() {
            self.state.outbox.remove(&self.published).await?;
            for place in self.published.drain(..) {
                self.queue.removed(place);
            }
        }
        Ok(())
    }

    /// Awaits the messages in flight, and deletes those that were published.
    async fn end(&mut self) {
        let state = Arc::clone(&self.state);
        let ending = async {
            while let Some(sent) = self.sends.join_next().await {
                self.take(sent).await;
            }
            if let Err(error) = self.remove().await {
                tracing::warn!(error = %describe(&error), "published messages stay in the outbox, and are published again");
            }
        };
        if timeout(state.limits.publish_timeout, ending).await.is_err() {
            tracing::warn!("messages in flight are dropped, and are published again");
        }
        self.sends.shutdown().await;
    }
}

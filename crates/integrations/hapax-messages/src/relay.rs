//! The relay: it publishes the messages of an outbox.
//!
//! 1. A message is published at least once, under one id, and deleted once the sink has
//!    acknowledged it. There is no cursor: a message that a transaction commits late is found by
//!    the next poll.
//! 2. A shard belongs to one relay at a time, by a lease of the engine, which is checked before
//!    each message is sent. Of the messages with one order key, one is unacknowledged at a time,
//!    unless the sink keeps order.
//! 3. A relay that was suspended between the check and the send may repeat an earlier message late.
//!    Inboxes drop it as a duplicate. It does not skip or reorder messages.
//! 4. No transaction is open while a message is sent.

mod floors;
mod queue;
mod run;
mod shards;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::{Backoff, Idempotency, SystemEntropy};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use self::run::RelayLoop;
use self::shards::Shards;
use crate::outbox::{OUTBOX_SHARDS, Outbox, OutboxError, OutboxFuture, OutboxLag};
use crate::sink::MessageSink;

/// Least time between two warnings of one kind.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Limits of a [`Relay`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLimits {
    /// Largest number of messages that are sent and not acknowledged. Default 256.
    pub in_flight: NonZeroUsize,
    /// Largest number of messages in memory: in flight, or waiting for an earlier one with their
    /// order key. Default 2048.
    pub max_buffered: NonZeroUsize,
    /// Bytes of messages in memory at which the relay stops reading. The last message may exceed them.
    /// Default 64 MiB.
    pub max_buffered_bytes: usize,
    /// Time for the sink to acknowledge a message. Default 10 s.
    pub publish_timeout: Duration,
    /// Time for the outbox to answer a call. Default 10 s.
    pub outbox_timeout: Duration,
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
            max_buffered: NonZeroUsize::MIN.saturating_add(2047),
            max_buffered_bytes: 64 * 1024 * 1024,
            publish_timeout: Duration::from_secs(10),
            outbox_timeout: Duration::from_secs(10),
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
    #[error("expected a lease of at least 1 s, found {0:?}: set a longer one")]
    Lease(Duration),
    /// The timeout is shorter than a millisecond.
    #[error("expected a publish timeout of at least 1 ms, found {0:?}: set a longer one")]
    PublishTimeout(Duration),
    /// There is no memory for a message.
    #[error("expected `max_buffered_bytes` of at least 1, found 0: set a larger number")]
    BufferedBytes,
    /// The timeout is shorter than a millisecond.
    #[error("expected an outbox timeout of at least 1 ms, found {0:?}: set a longer one")]
    OutboxTimeout(Duration),
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
    /// Time since `lag` was read; since the relay was created, if it was not read yet.
    pub lag_age: Duration,
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
    /// The state of the outbox, and when it was read.
    lag: watch::Sender<(OutboxLag, Instant)>,
}

impl Relay {
    /// Creates a relay. `engine` has the leases of the shards, in a store that all relays of this outbox
    /// share. `name` identifies the outbox in that store: all its relays pass the same name, and those of
    /// another outbox pass another one. Of two outboxes with one name only one is published. For an
    /// outbox in PostgreSQL `PgOutbox::identity` returns such a name.
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
            return Err(RelayError::PublishTimeout(limits.publish_timeout));
        }
        if limits.max_buffered_bytes == 0 {
            return Err(RelayError::BufferedBytes);
        }
        if limits.outbox_timeout < Duration::from_millis(1) {
            return Err(RelayError::OutboxTimeout(limits.outbox_timeout));
        }
        let state = RelayState {
            outbox,
            sink,
            shards: Arc::new(Shards::new(name, engine, limits.lease)),
            limits,
            backoff: Backoff::new(Duration::from_millis(100), limits.longest_pause),
            entropy: SystemEntropy,
            counters: RelayCounters::default(),
            lag: watch::Sender::new((OutboxLag::default(), Instant::now())),
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Returns a handle that reads the counters while the relay runs.
    #[must_use]
    pub fn monitor(&self) -> RelayMonitor {
        RelayMonitor { state: Arc::clone(&self.state) }
    }

    /// Publishes messages until `shutdown` ends. Then messages that were sent are awaited, for at
    /// most the publish timeout, published ones are deleted, and the shards are released to other
    /// relays.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let state = self.state;
        let stop = watch::Sender::new(false);
        let mut leases = JoinSet::new();
        for shard in 0..OUTBOX_SHARDS {
            leases.spawn(Arc::clone(&state.shards).hold(shard, stop.subscribe()));
        }
        let mut running = RelayLoop::new(&state);
        tokio::select! {
            () = shutdown => {}
            () = running.run() => {}
        }
        running.end().await;
        drop(running);
        stop.send_replace(true);
        while leases.join_next().await.is_some() {}
    }
}

impl RelayState {
    /// Awaits a call of the outbox. After the timeout its future is dropped, so that the outbox
    /// uses another connection for the next one.
    async fn call<T>(&self, call: OutboxFuture<'_, T>) -> Result<T, OutboxError> {
        let longest = self.limits.outbox_timeout;
        timeout(longest, call).await.unwrap_or_else(|_| {
            Err(OutboxError::new(format!("expected an answer within {longest:?}, found none")))
        })
    }
}

impl RelayMonitor {
    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> RelayStats {
        let counters = &self.state.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (lag, read_at) = *self.state.lag.borrow();
        RelayStats {
            published: read(&counters.published),
            failures: read(&counters.failures),
            parked: read(&counters.parked),
            polls: read(&counters.polls),
            shards: self.state.shards.owned().len() as u64,
            lag,
            lag_age: read_at.elapsed(),
        }
    }
}

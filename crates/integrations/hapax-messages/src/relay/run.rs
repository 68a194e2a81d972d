//! The loop of a relay: it polls, sends and deletes messages.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use hapax_core::Entropy;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::floors::Floors;
use super::queue::Queue;
use super::{RelayState, WARN_EVERY};
use crate::handler::describe;
use crate::outbox::{OutboxError, OutboxMessage, OutboxPosition, OutboxQuery};
use crate::sink::PublishError;

/// Pauses between polls: they double while nothing is found.
const FIRST_POLL: Duration = Duration::from_millis(10);
const LAST_POLL: Duration = Duration::from_secs(1);

/// Pause of a relay without a shard.
const STANDBY: Duration = Duration::from_millis(250);

/// Time between two readings of the lag.
const LAG_EVERY: Duration = Duration::from_secs(10);

/// A page of messages, and those of one key, have at most this part of the bytes in memory.
const PARTS: usize = 8;

type Sent = (OutboxMessage, u32, Result<(), PublishError>);

/// The buffered messages, and the times of the next steps.
pub(super) struct RelayLoop {
    state: Arc<RelayState>,
    queue: Queue,
    floors: Floors,
    sends: JoinSet<Sent>,
    /// Published, and to be deleted.
    published: Vec<OutboxPosition>,
    pause: Duration,
    poll_at: Instant,
    lag_at: Instant,
    warn_at: Instant,
    /// Time at which it is logged that this relay has no shard.
    standby_at: Instant,
}

impl RelayLoop {
    pub(super) fn new(state: &Arc<RelayState>) -> Self {
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
            standby_at: now + WARN_EVERY,
        }
    }

    /// Publishes messages. A future that is dropped leaves messages that are in flight, which
    /// [`RelayLoop::end`] awaits.
    pub(super) async fn run(&mut self) {
        loop {
            if let Err(error) = self.step().await {
                let error = describe(&error);
                tracing::warn!(%error, "the outbox cannot be read: it is polled again in 1 s");
                self.floors.begin_anew();
                self.pause = LAST_POLL;
                self.poll_at = Instant::now() + LAST_POLL;
            }
            self.send();
            tokio::select! {
                () = sleep_until(self.next_step_at()) => {}
                Some(sent) = self.sends.join_next() => self.take(sent).await,
            }
        }
    }

    /// Returns the time of the next step, unless a message that was sent ends before.
    fn next_step_at(&self) -> Instant {
        // A paused message that is due waits while no further one may be sent.
        let may_send = self.sends.len() < self.state.limits.in_flight.get();
        let due = self.queue.due().filter(|_| may_send);
        due.map_or(self.poll_at, |due| due.min(self.poll_at))
    }

    /// Reads the lag, deletes published messages, and polls, each if it is due.
    async fn step(&mut self) -> Result<(), OutboxError> {
        // First: it is needed most when there is no free, no shard, or an error.
        self.read_lag().await?;
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
            if now >= self.standby_at {
                self.standby_at = now + WARN_EVERY * 60;
                tracing::info!(
                    "this relay has no shard, and publishes nothing: other relays of the outbox have \
                     them, or their leases cannot be claimed"
                );
            }
            return Ok(());
        }
        self.standby_at = now + WARN_EVERY;
        let free = self.state.limits.max_buffered.get().saturating_sub(self.queue.len());
        let bytes = self.state.limits.max_buffered_bytes.saturating_sub(self.queue.bytes());
        if free == 0 || bytes == 0 {
            self.poll_at = now + FIRST_POLL;
            return Ok(());
        }
        self.poll(&shards, free, bytes).await?;
        let state = &self.state;
        if self.floors.is_due() {
            let writers = state.call(state.outbox.writers()).await?;
            if let Some(settled) = self.floors.take_writers(writers) {
                let floors = self.floors.of(&shards);
                let least = state.call(state.outbox.first_above(&floors)).await?;
                self.floors.raise(settled, &least);
            }
        }
        Ok(())
    }

    async fn read_lag(&mut self) -> Result<(), OutboxError> {
        let now = Instant::now();
        if now >= self.lag_at {
            self.lag_at = now + LAG_EVERY;
            let lag = self.state.call(self.state.outbox.lag()).await?;
            self.state.lag.send_replace((lag, now));
        }
        Ok(())
    }

    async fn poll(
        &mut self,
        shards: &HashSet<u16>,
        free: usize,
        bytes: usize,
    ) -> Result<(), OutboxError> {
        let limits = &self.state.limits;
        let floors = self.queue.rotated(self.floors.of(shards));
        let batch = free.min(limits.in_flight.get());
        // The messages of one key do not take the memory of the others.
        let part = (limits.max_buffered_bytes / PARTS).max(1);
        let query = OutboxQuery {
            shards: &floors,
            known: &self.queue.known(),
            skipped: &self.queue.full_keys(part),
            max: u32::try_from(batch).unwrap_or(u32::MAX),
            bytes: bytes.min(part) as u64,
        };
        let page = self.state.call(self.state.outbox.poll(query)).await?;
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
                if !state.shards.is_held(message.position.shard) {
                    let text = "expected the lease of the shard, found that it lapsed: the message is not \
                                sent, and another relay publishes it";
                    let lost = PublishError::not_acknowledged(text);
                    return (message, attempt, Err(lost));
                }
                if let Some(reason) = &message.unpublishable {
                    let rejected = PublishError::rejected(reason.clone());
                    return (message, attempt, Err(rejected));
                }
                // Caught here, where the message is known: others may be published already.
                let sending = async { state.sink.publish(&message.message).await };
                let sending = AssertUnwindSafe(sending).catch_unwind();
                let longest = state.limits.publish_timeout;
                let sent = match timeout(longest, sending).await {
                    Ok(Ok(sent)) => sent,
                    Ok(Err(_)) => Err(PublishError::not_acknowledged("the sink panicked")),
                    Err(_) => {
                        let text = format!("expected an acknowledgement within {longest:?}, found none");
                        Err(PublishError::not_acknowledged(text))
                    }
                };
                (message, attempt, sent)
            });
        }
    }

    async fn take(&mut self, sent: Result<Sent, tokio::task::JoinError>) {
        // The task does not panic. One that was aborted leaves its message to the next relay.
        let Ok((message, attempt, result)) = sent else { return };
        let counters = &self.state.counters;
        match result {
            Ok(()) => {
                counters.published.fetch_add(1, Ordering::Relaxed);
                self.published.push(message.position);
                self.queue.published(&message);
            }
            Err(PublishError::Rejected(cause)) => {
                let error = describe(&*cause);
                tracing::warn!(
                    position = ?message.position,
                    destination = message.message.destination,
                    %error,
                    "a message of the outbox cannot be published: it becomes a dead letter"
                );
                let parking = self.state.outbox.park(&message, &error, attempt);
                match self.state.call(parking).await {
                    Ok(()) => {
                        counters.parked.fetch_add(1, Ordering::Relaxed);
                        self.queue.parked(&message);
                    }
                    Err(error) => {
                        tracing::warn!(error = %describe(&error), "a dead letter was not stored");
                        self.floors.begin_anew();
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
                tracing::debug!(position = ?message.position, %error, ?pause, "a message was not acknowledged");
                let now = Instant::now();
                if now >= self.warn_at {
                    self.warn_at = now + WARN_EVERY;
                    let destination = message.message.destination.as_str();
                    tracing::warn!(destination, %error, "the sink does not acknowledge: messages are published again");
                }
                self.queue.failed(message, attempt, Instant::now() + pause);
            }
        }
    }

    async fn remove(&mut self) -> Result<(), OutboxError> {
        if !self.published.is_empty() {
            self.state.call(self.state.outbox.remove(&self.published)).await?;
            for position in self.published.drain(..) {
                self.queue.removed(position);
            }
        }
        Ok(())
    }

    /// Awaits the messages in flight, and deletes those that were published.
    pub(super) async fn end(&mut self) {
        let longest = self.state.limits.publish_timeout;
        let ending = async {
            while let Some(sent) = self.sends.join_next().await {
                self.take(sent).await;
            }
        };
        if timeout(longest, ending).await.is_err() {
            tracing::warn!("messages in flight are dropped, and are published again");
        }
        self.sends.shutdown().await;
        // With a timeout of its own: a message that hangs takes all of the other one.
        if let Err(error) = self.remove().await {
            tracing::warn!(error = %describe(&error), "published messages stay in the outbox, and are published again");
        }
    }
}

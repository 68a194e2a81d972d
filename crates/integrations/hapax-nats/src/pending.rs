//! What the server has of a consumer's unacknowledged messages, as it was last read.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::consumer::{Info, PullConsumer};
use hapax_messages::SourceError;
use tokio::time::{Instant, timeout};

use crate::source::{TIMEOUT, no_reply};

/// Time after which the state is read again while messages wait at the server.
const READ_EVERY: Duration = Duration::from_secs(1);

/// Time after which the limit of deliveries is read again before a message is delayed.
const READ_LIMIT_EVERY: Duration = Duration::from_secs(10);

/// The state of a consumer at the server.
pub(crate) struct Pending {
    consumer: PullConsumer,
    /// `max_ack_pending`.
    max: i64,
    /// Whether so many messages are unacknowledged, some of them wait for their next attempts, and the server has further
    /// ones. It is read after a pull without messages, and ends with a message that is delivered for the first time.
    is_full: AtomicBool,
    /// Whether a limit of deliveries was set since the start, towards which a delay counts.
    is_limited: AtomicBool,
    times: Mutex<Times>,
}

#[derive(Debug)]
struct Times {
    read_at: Instant,
    /// The last end of the pauses for which this process has delayed messages.
    delayed_until: Instant,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("max", &self.max).finish_non_exhaustive()
    }
}

impl Pending {
    pub(crate) fn new(consumer: PullConsumer) -> Self {
        let (max, now) = (consumer.cached_info().config.max_ack_pending, Instant::now());
        Self {
            consumer,
            max,
            is_full: AtomicBool::new(false),
            is_limited: AtomicBool::new(false),
            times: Mutex::new(Times { read_at: now, delayed_until: now }),
        }
    }

    /// Returns the name and value of the limit that is full.
    pub(crate) fn full_limit(&self) -> Option<String> {
        let name = &self.consumer.cached_info().name;
        let is_full = self.is_full.load(Ordering::Relaxed);
        is_full.then(|| format!("max_ack_pending of the consumer {name}, {}", self.max))
    }

    /// Notes that the server has delivered a message for the first time.
    pub(crate) fn note_first_delivery(&self) {
        self.is_full.store(false, Ordering::Relaxed);
    }

    /// Notes that a message waits at the server.
    pub(crate) fn note_delay(&self, pause: Duration) {
        let mut times = self.times();
        if let Some(until) = Instant::now().checked_add(pause) {
            times.delayed_until = times.delayed_until.max(until);
        }
    }

    /// Reads the state after a pull without messages.
    pub(crate) async fn read(&self) -> Result<(), SourceError> {
        let info = self.info().await?;
        let is_reached = i64::try_from(info.num_ack_pending).is_ok_and(|found| found >= self.max);
        let waits = self.times().delayed_until > Instant::now();
        // With one message at a time this is normal.
        let is_full = is_reached && waits && info.num_pending > 0 && self.max > 1;
        self.is_full.store(is_full, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the state after a pull without messages, if messages wait or waited, and it was not read for a time. An error
    /// does not end the pull.
    pub(crate) async fn read_if_due(&self) {
        let waits = self.times().delayed_until > Instant::now();
        if (waits || self.is_full.load(Ordering::Relaxed))
            && self.is_due(READ_EVERY)
            && let Err(error) = self.read().await
        {
            tracing::debug!(%error, "the number of unacknowledged messages was not read");
        }
    }

    /// Returns whether the server takes messages back without a limit of deliveries, as far as is known.
    pub(crate) async fn may_delay(&self) -> bool {
        if self.is_due(READ_LIMIT_EVERY)
            && let Err(error) = self.info().await
        {
            tracing::debug!(%error, "the limit of deliveries was not read");
        }
        !self.is_limited.load(Ordering::Relaxed)
    }

    /// Returns whether the state was not read for a time, and notes that it is: the caller does, alone.
    fn is_due(&self, every: Duration) -> bool {
        let mut times = self.times();
        let is_due = times.read_at.elapsed() >= every;
        if is_due {
            times.read_at = Instant::now();
        }
        is_due
    }

    async fn info(&self) -> Result<Info, SourceError> {
        let answered = timeout(TIMEOUT, self.consumer.get_info()).await;
        let info = answered.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)?;
        let found = info.config.max_deliver;
        if !self.is_limited.swap(found > 0, Ordering::Relaxed) && found > 0 {
            tracing::error!(
                consumer = info.name,
                found,
                "expected unlimited deliveries, found max_deliver: unset it, since the server drops messages after the \
                 limit; messages that wait for their next attempts stay with this process"
            );
        }
        Ok(info)
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

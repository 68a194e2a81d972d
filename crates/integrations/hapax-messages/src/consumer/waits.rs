//! Messages that wait for their next attempts, and the share of the limits that they may have.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use super::memory::MemoryBudget;
use super::stats::{ConsumerStats, Counters, FullLimit};
use crate::handler::describe;
use crate::source::{Delivery, MessageSource, SourceLimits};

/// Pause of a redelivered message that finds half of the unacknowledged messages waiting.
pub(super) const CROWDED_PAUSE: Duration = Duration::from_secs(5);

/// Interval at which the limits are checked.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Time between two warnings about a limit.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Messages that wait, unacknowledged. Those that failed have no more than three quarters of the handlers, and once
/// half of the unacknowledged messages wait, a source that takes messages back gets them also for pauses that are
/// shorter than its own.
#[derive(Debug)]
pub(crate) struct Waits {
    /// Permits of handlers for messages that were tried before.
    share: Arc<Semaphore>,
    waiting: AtomicUsize,
    /// Messages that wait for one before them with their order key.
    behind: AtomicUsize,
    max_unacknowledged: usize,
    /// Whether this limit is the source's, which is lower than the consumer's.
    is_of_source: bool,
    delays_from: Option<Duration>,
}

/// A message that waits, until it is dropped.
#[derive(Debug)]
pub(crate) struct Wait<'a>(&'a AtomicUsize);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waits {
    /// Creates the state of a consumer with these limits, of which a lower one of the source replaces the second.
    pub(crate) fn new(
        handlers: NonZeroUsize,
        max_unacknowledged: NonZeroUsize,
        source: &SourceLimits,
    ) -> Self {
        let of_source = source.max_unacknowledged;
        let most = of_source.map_or(max_unacknowledged, |max| max.min(max_unacknowledged));
        let handlers = handlers.get().min(Semaphore::MAX_PERMITS);
        let for_first = handlers.div_ceil(4);
        Self {
            share: Arc::new(Semaphore::new((handlers - for_first).max(1))),
            waiting: AtomicUsize::new(0),
            behind: AtomicUsize::new(0),
            max_unacknowledged: most.get().min(Semaphore::MAX_PERMITS),
            is_of_source: of_source.is_some_and(|max| max < max_unacknowledged),
            delays_from: source.delays_from,
        }
    }

    /// Counts a message that waits for its next attempt.
    pub(crate) fn begin(&self) -> Wait<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Wait(&self.waiting)
    }

    /// Counts a message that waits for one before it.
    pub(super) fn begin_behind(&self) -> Wait<'_> {
        self.behind.fetch_add(1, Ordering::Relaxed);
        Wait(&self.behind)
    }

    /// Returns whether half of the unacknowledged messages wait.
    pub(super) fn is_crowded(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= self.max_unacknowledged.div_ceil(2)
    }

    pub(super) fn try_share(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.share).try_acquire_owned().ok()
    }

    pub(super) async fn share(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.share).acquire_owned().await.ok()
    }

    /// Returns a message to the source for a pause. Returns false if it stays unacknowledged. After an error the
    /// broker may have a second copy of it, which is a duplicate.
    pub(crate) async fn delay(
        &self,
        delivery: &Arc<dyn Delivery>,
        pause: Duration,
        consumer: &str,
        counters: &Counters,
    ) -> bool {
        let pause = match self.delays_from.filter(|_| self.is_crowded()) {
            Some(from) => pause.max(from),
            None => pause,
        };
        match delivery.delay(pause).await {
            Ok(is_delayed) => {
                if is_delayed {
                    counters.delayed();
                }
                is_delayed
            }
            Err(error) => {
                let error = describe(&error);
                tracing::debug!(consumer, %error, "a message was not delayed: it is held");
                false
            }
        }
    }

    /// Completes the counters of a consumer.
    pub(crate) fn read(
        &self,
        stats: ConsumerStats,
        counters: &Counters,
        memory: &MemoryBudget,
        source: &dyn MessageSource,
    ) -> ConsumerStats {
        let of_source = || source.full_limit().map(|_| FullLimit::Source);
        let full_limit = self.full_limit(counters, memory).or_else(of_source);
        ConsumerStats { waiting: self.waiting.load(Ordering::Relaxed) as u64, full_limit, ..stats }
    }

    /// Returns the limit of the consumer that is full of messages which wait.
    pub(crate) fn full_limit(
        &self,
        counters: &Counters,
        memory: &MemoryBudget,
    ) -> Option<FullLimit> {
        let unacknowledged = usize::try_from(counters.unacknowledged()).unwrap_or(usize::MAX);
        let waiting = self.waiting.load(Ordering::Relaxed);
        let all_wait = waiting + self.behind.load(Ordering::Relaxed) >= unacknowledged;
        if waiting == 0 || !all_wait {
            return None;
        }
        match unacknowledged >= self.max_unacknowledged {
            true if self.is_of_source => Some(FullLimit::Source),
            true => Some(FullLimit::Unacknowledged),
            false => memory.is_used_up().then_some(FullLimit::Bytes),
        }
    }
}

/// Logs a warning each minute in which a limit is full of messages that wait. Does not end.
pub(crate) async fn watch_limits(
    consumer: &str,
    source: &dyn MessageSource,
    full: impl Fn() -> Option<FullLimit>,
) -> Infallible {
    let mut warned_at: Option<Instant> = None;
    loop {
        sleep(CHECK_EVERY).await;
        if warned_at.is_some_and(|at| at.elapsed() < WARN_EVERY) {
            continue;
        }
        let limit = match full() {
            Some(FullLimit::Unacknowledged) => "max_unacknowledged of the consumer".to_owned(),
            Some(FullLimit::Bytes) => "max_unacknowledged_bytes of the consumer".to_owned(),
            of_source => match (source.full_limit(), of_source) {
                (Some(limit), _) => limit,
                (None, Some(_)) => "max_unacknowledged of the source".to_owned(),
                (None, None) => continue,
            },
        };
        warned_at = Some(Instant::now());
        tracing::warn!(
            consumer,
            limit,
            "a limit is full of messages that wait for their next attempts, or behind one with their order \
             key: nothing else is received; correct what makes them fail, or raise the limit"
        );
    }
}

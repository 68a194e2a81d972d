//! Messages that were tried before, and the share of the limits that they may have.

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

/// Pause of a message that was delayed before, and finds three quarters of the places taken by such messages.
const RETURNED_FOR: Duration = Duration::from_secs(5);

/// Interval at which the limits are checked.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Time between two warnings about a limit.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Messages that were tried before. They have no more than three quarters of the handlers, and of the places that
/// unacknowledged messages have, if the source takes messages back. Once half of the places are of messages that wait, or
/// the memory is used up, the source gets them also for pauses that are shorter than its own.
#[derive(Debug)]
pub(crate) struct Waits {
    /// Permits of handlers for messages that were tried before.
    share: Arc<Semaphore>,
    /// Messages that were tried before: in progress, waiting for the share, or for their next attempts.
    retries: AtomicUsize,
    /// Those of them that wait for their next attempts.
    waiting: AtomicUsize,
    /// Messages that wait for one before them with their order key.
    behind: AtomicUsize,
    /// Unacknowledged messages that the consumer may have.
    places: usize,
    /// Whether this limit is the source's, which is lower than the consumer's.
    is_of_source: bool,
    delays_from: Option<Duration>,
    memory: Arc<MemoryBudget>,
}

/// The message was returned to the source.
#[derive(Debug)]
pub(crate) struct Returned;

/// A message that counts, until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the handlers that messages which were tried before may have at a time.
pub(crate) const fn share_of(handlers: NonZeroUsize) -> usize {
    let others = handlers.get() - handlers.get().div_ceil(4);
    if others == 0 { 1 } else { others }
}

impl Waits {
    /// Creates the state of a consumer with this share of the handlers and these limits. A lower one of the source replaces
    /// that of messages.
    pub(crate) fn new(
        share: usize,
        max_unacknowledged: NonZeroUsize,
        memory: &Arc<MemoryBudget>,
        source: &SourceLimits,
    ) -> Self {
        let of_source = source.max_unacknowledged;
        let most = of_source.map_or(max_unacknowledged, |max| max.min(max_unacknowledged));
        Self {
            share: Arc::new(Semaphore::new(share.min(Semaphore::MAX_PERMITS))),
            retries: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            behind: AtomicUsize::new(0),
            places: most.get().min(Semaphore::MAX_PERMITS),
            is_of_source: of_source.is_some_and(|max| max < max_unacknowledged),
            delays_from: source.delays_from,
            memory: Arc::clone(memory),
        }
    }

    /// Counts a message that waits for its next attempt.
    pub(crate) fn begin(&self) -> Counted<'_> {
        Counted::new(&self.waiting)
    }

    /// Counts a message that waits for one before it.
    pub(super) fn begin_behind(&self) -> Counted<'_> {
        Counted::new(&self.behind)
    }

    /// Counts a message that was tried.
    pub(crate) fn begin_retry(&self) -> Counted<'_> {
        Counted::new(&self.retries)
    }

    /// Counts a message that has arrived, if it was [delayed before](Delivery::was_delayed).
    ///
    /// # Errors
    /// [`Returned`]: the places that are left are those of messages which are delivered for the first time.
    pub(crate) async fn admit(
        &self,
        delivery: &Arc<dyn Delivery>,
        may_delay: bool,
        consumer: &str,
        counters: &Counters,
    ) -> Result<Option<Counted<'_>>, Returned> {
        if !delivery.was_delayed() {
            return Ok(None);
        }
        // One that is larger than the whole memory has it alone.
        let most = match self.memory.is_used_up() {
            true => 1,
            false => self.places_of_retries(),
        };
        let add = |retries: usize| (retries < most).then_some(retries + 1);
        if self.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok() {
            return Ok(Some(Counted(&self.retries)));
        }
        if may_delay && self.delay(delivery, RETURNED_FOR, consumer, counters).await {
            return Err(Returned);
        }
        Ok(Some(self.begin_retry()))
    }

    /// Returns three quarters of the places, and at least one.
    fn places_of_retries(&self) -> usize {
        (self.places - self.places.div_ceil(4)).max(1)
    }

    /// Returns whether half of the places are of messages that wait for their next attempts, the memory is used up, or
    /// messages that were tried before have their three quarters. Those that wait for the share are not in the half.
    fn is_crowded(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= self.places.div_ceil(2)
            || self.memory.is_used_up()
            || self.retries.load(Ordering::Relaxed) >= self.places_of_retries()
    }

    /// Waits for a permit of the share.
    pub(crate) async fn share(&self) -> Option<OwnedSemaphorePermit> {
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
        source: &dyn MessageSource,
    ) -> ConsumerStats {
        let of_source = || source.full_limit().map(|_| FullLimit::Source);
        let full_limit = self.full_limit(counters).or_else(of_source);
        ConsumerStats { waiting: self.waiting.load(Ordering::Relaxed) as u64, full_limit, ..stats }
    }

    /// Returns the limit of the consumer that is full of messages which were tried before, and of those behind them.
    pub(crate) fn full_limit(&self, counters: &Counters) -> Option<FullLimit> {
        let unacknowledged = usize::try_from(counters.unacknowledged()).unwrap_or(usize::MAX);
        let retries = self.retries.load(Ordering::Relaxed);
        if retries == 0 || retries + self.behind.load(Ordering::Relaxed) < unacknowledged {
            return None;
        }
        match unacknowledged >= self.places {
            true if self.is_of_source => Some(FullLimit::Source),
            true => Some(FullLimit::Unacknowledged),
            false => self.memory.is_used_up().then_some(FullLimit::Bytes),
        }
    }
}

/// Logs a warning each minute in which a limit is full of messages that were tried before. Does not end.
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
            "a limit is full of messages that were tried before, or wait behind one with their order key: nothing else is \
             received; correct what makes them fail, or raise the limit"
        );
    }
}

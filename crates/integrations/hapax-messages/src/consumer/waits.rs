//! Messages that were tried before, and the share of the limits that they may have.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{Backoff, SystemEntropy};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use super::memory::MemoryBudget;
use super::stats::{ConsumerStats, Counters, FullLimit};
use crate::handler::describe;
use crate::source::{Delivery, MessageSource, SourceLimits};

/// Bound of the first pause of messages that were delayed before, and find the share of such messages full. It doubles while
/// that lasts.
const RETURNED_FOR: Duration = Duration::from_secs(5);

/// Interval at which the limits are checked.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Time between two warnings about a limit.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Messages that were tried before. They have no more than three quarters of the handlers, and of the places and bytes that
/// unacknowledged messages have, if the source takes messages back. Once they have these, the source gets them also for
/// pauses that are shorter than its own.
#[derive(Debug)]
pub(crate) struct Waits {
    /// Permits of handlers for messages that were tried before.
    share: Arc<Semaphore>,
    retries: Mutex<Retries>,
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
    /// Bound of all pauses.
    longest_pause: Duration,
    /// The first of the checks in a row that found a limit full.
    full_since: Mutex<Option<Instant>>,
}

/// Messages that were tried before: in progress, waiting for the share, or for their next attempts.
#[derive(Debug, Default)]
struct Retries {
    count: usize,
    bytes: usize,
    /// Bound of the pauses of those that find no room, and the end of the time in which it holds.
    returned_for: Duration,
    returned_until: Option<Instant>,
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

/// A message that was tried before and counts as such, until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedRetry<'a> {
    waits: &'a Waits,
    bytes: usize,
}

impl Drop for CountedRetry<'_> {
    fn drop(&mut self) {
        let mut retries = self.waits.retries();
        retries.count = retries.count.saturating_sub(1);
        retries.bytes = retries.bytes.saturating_sub(self.bytes);
    }
}

impl Retries {
    /// Returns the pause of a message that finds no room. Its bound doubles each time that it has passed.
    fn next_pause(&mut self, longest: Duration) -> Duration {
        let now = Instant::now();
        if self.returned_until.is_none_or(|until| now >= until) {
            let doubled = self.returned_for.saturating_mul(2);
            self.returned_for = doubled.clamp(RETURNED_FOR, longest.max(RETURNED_FOR));
            self.returned_until = now.checked_add(self.returned_for);
        }
        let half = self.returned_for / 2;
        half + Backoff::new(half, half).pause(1, &SystemEntropy)
    }
}

/// Returns the handlers that messages which were tried before may have at a time.
pub(crate) fn share_of(handlers: NonZeroUsize) -> usize {
    three_quarters(handlers.get()).max(1)
}

const fn three_quarters(of: usize) -> usize {
    of - of.div_ceil(4)
}

impl Waits {
    /// Creates the state of a consumer with this share of the handlers, these limits and this bound of pauses. A lower
    /// limit of the source replaces that of messages.
    pub(crate) fn new(
        share: usize,
        max_unacknowledged: NonZeroUsize,
        longest_pause: Duration,
        memory: &Arc<MemoryBudget>,
        source: &SourceLimits,
    ) -> Self {
        let of_source = source.max_unacknowledged;
        let most = of_source.map_or(max_unacknowledged, |max| max.min(max_unacknowledged));
        Self {
            share: Arc::new(Semaphore::new(share.min(Semaphore::MAX_PERMITS))),
            retries: Mutex::default(),
            waiting: AtomicUsize::new(0),
            behind: AtomicUsize::new(0),
            places: most.get().min(Semaphore::MAX_PERMITS),
            is_of_source: of_source.is_some_and(|max| max < max_unacknowledged),
            delays_from: source.delays_from,
            memory: Arc::clone(memory),
            longest_pause,
            full_since: Mutex::new(None),
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
    pub(crate) fn begin_retry(&self, delivery: &dyn Delivery) -> CountedRetry<'_> {
        self.count(&mut self.retries(), delivery)
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
    ) -> Result<Option<CountedRetry<'_>>, Returned> {
        if !delivery.was_delayed() {
            return Ok(None);
        }
        let pause = {
            let mut retries = self.retries();
            if self.has_room(&retries, 1) || !may_delay {
                if self.has_room(&retries, 2) {
                    retries.returned_for = Duration::ZERO;
                    retries.returned_until = None;
                }
                return Ok(Some(self.count(&mut retries, &**delivery)));
            }
            let shortest = self.delays_from.unwrap_or_default();
            retries.next_pause(self.longest_pause).max(shortest)
        };
        match return_to_source(delivery, pause, consumer, counters).await {
            true => Err(Returned),
            false => Ok(Some(self.begin_retry(&**delivery))),
        }
    }

    fn count(&self, retries: &mut Retries, delivery: &dyn Delivery) -> CountedRetry<'_> {
        let bytes = delivery.message().bytes();
        retries.count += 1;
        retries.bytes = retries.bytes.saturating_add(bytes);
        CountedRetry { waits: self, bytes }
    }

    /// Returns whether messages that were tried before have less than a part of their three quarters. One of them always has
    /// room.
    fn has_room(&self, retries: &Retries, part: usize) -> bool {
        retries.count == 0
            || (retries.count < three_quarters(self.places) / part
                && retries.bytes < three_quarters(self.memory.limit()) / part)
    }

    /// Waits for a permit of the share.
    pub(crate) async fn share(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.share).acquire_owned().await.ok()
    }

    /// Returns a message that counts as tried to the source for a pause. Returns false if it stays unacknowledged.
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
        return_to_source(delivery, pause, consumer, counters).await
    }

    /// Returns whether messages that were tried before have more than their three quarters.
    fn is_crowded(&self) -> bool {
        let retries = self.retries();
        retries.count > 1
            && (retries.count > three_quarters(self.places)
                || retries.bytes > three_quarters(self.memory.limit()))
    }

    /// Completes the counters of a consumer.
    pub(crate) fn read(
        &self,
        stats: ConsumerStats,
        counters: &Counters,
        source: &dyn MessageSource,
    ) -> ConsumerStats {
        let full_limit = self.full_limit(counters, source).map(|(limit, _)| limit);
        let full_since = *self.full_since.lock().unwrap_or_else(PoisonError::into_inner);
        ConsumerStats {
            waiting: self.waiting.load(Ordering::Relaxed) as u64,
            full_limit,
            full_limit_age: full_since.filter(|_| full_limit.is_some()).map(|at| at.elapsed()),
            ..stats
        }
    }

    /// Returns the limit that is full of messages which were tried before, and of those behind them, and its name.
    fn full_limit(
        &self,
        counters: &Counters,
        source: &dyn MessageSource,
    ) -> Option<(FullLimit, String)> {
        let of_source = || source.full_limit().map(|name| (FullLimit::Source, name));
        let unacknowledged = usize::try_from(counters.unacknowledged()).unwrap_or(usize::MAX);
        let retries = self.retries().count;
        if retries == 0 || retries + self.behind.load(Ordering::Relaxed) < unacknowledged {
            return of_source();
        }
        let (limit, name) = match unacknowledged >= self.places {
            true if self.is_of_source => (FullLimit::Source, "max_unacknowledged of the source"),
            true => (FullLimit::Unacknowledged, "max_unacknowledged of the consumer"),
            false if self.memory.is_used_up() => {
                (FullLimit::Bytes, "max_unacknowledged_bytes of the consumer")
            }
            false => return of_source(),
        };
        Some((limit, name.to_owned()))
    }

    /// Logs a warning each minute in which a limit is full of messages that were tried before. Does not end.
    pub(crate) async fn watch(
        &self,
        consumer: &str,
        counters: &Counters,
        source: &dyn MessageSource,
    ) -> Infallible {
        let mut warned_at: Option<Instant> = None;
        loop {
            sleep(CHECK_EVERY).await;
            let full = self.full_limit(counters, source);
            {
                let mut since = self.full_since.lock().unwrap_or_else(PoisonError::into_inner);
                *since = full.as_ref().map(|_| since.unwrap_or_else(Instant::now));
            }
            let Some((_, limit)) = full else { continue };
            if warned_at.is_some_and(|at| at.elapsed() < WARN_EVERY) {
                continue;
            }
            warned_at = Some(Instant::now());
            tracing::warn!(
                consumer,
                limit,
                "a limit is full of messages that were tried before, or wait behind one with their order key: nothing else \
                 that counts for it is received; correct what makes them fail, or raise the limit"
            );
        }
    }

    fn retries(&self) -> MutexGuard<'_, Retries> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a message to the source for a pause. Returns false if it stays unacknowledged. After an error the broker may
/// have a second copy of it, which is a duplicate.
async fn return_to_source(
    delivery: &Arc<dyn Delivery>,
    pause: Duration,
    consumer: &str,
    counters: &Counters,
) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_messages_that_are_delivered_for_the_first_time_take_no_room_of_others() {
        let number = |number| NonZeroUsize::new(number).unwrap();
        let memory = MemoryBudget::new(number(1_000));
        let longest = Duration::from_secs(60);
        let waits = Waits::new(1, number(64), longest, &memory, &SourceLimits::default());
        let _first = memory.take(&[1_000]);
        assert!(memory.is_used_up());
        for (count, bytes, has_room) in
            [(0, 1_000, true), (1, 749, true), (47, 749, true), (48, 0, false), (1, 750, false)]
        {
            let retries = Retries { count, bytes, ..Retries::default() };
            assert_eq!(waits.has_room(&retries, 1), has_room, "{count} of {bytes} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_doubles_once_it_has_passed_up_to_the_longest_one() {
        let (mut retries, longest) = (Retries::default(), Duration::from_secs(18));
        for bound in [5, 10, 18, 18].map(Duration::from_secs) {
            for _ in 0..20 {
                let pause = retries.next_pause(longest);
                assert!((bound / 2..=bound).contains(&pause), "{pause:?} of {bound:?}");
            }
            sleep(bound).await;
        }
    }
}

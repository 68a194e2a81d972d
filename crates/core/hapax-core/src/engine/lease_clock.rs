//! The clock of leases: the monotonic clock, plus the time for which it stood still.
//!
//! Linux's monotonic clock stands still while a machine is suspended, and that of a virtual machine while
//! it is paused. By it alone a lease would seem held, and a downstream key young, days after the store let
//! them lapse. The wall clock does not stand still, but it may step. So a time counts as passed if
//! either clock shows it:
//!
//! 1. *Safety*: a lease is held no longer, and a key no younger, than by the monotonic clock alone. A time
//!    that the wall clock showed once stays counted if it steps back.
//! 2. *A step of the wall clock forward* costs liveness only. Leases of this process seem lapsed, until
//!    their next write: the store decides by its own clock whether they are, and the reply sets them anew.
//! 3. *A step back* begins the comparison anew, so that a later suspension is found all the same.
//!
//! Not covered: a suspension after which the wall clock is not set, as in a virtual machine that is
//! resumed or restored without a time service, or one during which it is set back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::{Clock, Timestamp};

/// Changes of the distance of the clocks that are no step back, in microseconds: time may pass between
/// the readings of the two.
const JITTER: i128 = 1_000_000;

/// The clock of leases in one engine.
#[derive(Debug)]
pub(super) struct LeaseClock {
    wall: Arc<dyn Clock>,
    begin: Instant,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Wall clock minus monotonic clock, in microseconds: the greatest since the last step back.
    ahead: i128,
    /// Time for which the monotonic clock stood still, or the wall clock stepped forward.
    stood_still: Duration,
}

impl LeaseClock {
    pub(super) fn new(wall: Arc<dyn Clock>) -> Self {
        let ahead = distance(wall.now(), Duration::ZERO);
        let seen = Mutex::new(Seen { ahead, stood_still: Duration::ZERO });
        Self { wall, begin: Instant::now(), seen }
    }

    /// Returns the time since the clock was created. It never shrinks.
    pub(super) fn now(&self) -> Duration {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock, in which readings are in order.
        let passed = self.begin.elapsed();
        let ahead = distance(self.wall.now(), passed);
        let gained = ahead.saturating_sub(seen.ahead);
        if gained > 0 {
            let gained = Duration::from_micros(u64::try_from(gained).unwrap_or(u64::MAX));
            *seen = Seen { ahead, stood_still: seen.stood_still.saturating_add(gained) };
        } else if gained < -JITTER {
            seen.ahead = ahead;
        }
        passed.saturating_add(seen.stood_still)
    }
}

/// The time of one lease.
#[derive(Debug)]
pub(super) struct LeaseTime {
    /// Time of the clock at which the claim was sent.
    sent_at: Duration,
    /// Microseconds after `sent_at` until which the lease is held by the last write.
    held_for: AtomicU64,
}

impl LeaseTime {
    pub(super) fn new(sent_at: Duration, left: Duration) -> Self {
        Self { sent_at, held_for: AtomicU64::new(micros(left)) }
    }

    pub(super) fn elapsed(&self, clock: &LeaseClock) -> Duration {
        clock.now().saturating_sub(self.sent_at)
    }

    pub(super) fn remaining(&self, clock: &LeaseClock) -> Duration {
        let held_for = Duration::from_micros(self.held_for.load(Ordering::Acquire));
        held_for.saturating_sub(self.elapsed(clock))
    }

    /// Counts what is `left` of the lease from `sent_at`, the time at which its last write was sent.
    ///
    /// The reply of the store alone decides it. So a renewal sets a lease anew that only seemed to have
    /// lapsed, because the wall clock stepped forward.
    pub(super) fn hold_from(&self, sent_at: Duration, left: Duration) {
        let since = sent_at.saturating_sub(self.sent_at);
        self.held_for.store(micros(since.saturating_add(left)), Ordering::Release);
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn distance(wall: Timestamp, passed: Duration) -> i128 {
    i128::from(wall.as_micros()) - i128::try_from(passed.as_micros()).unwrap_or(i128::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);

    #[derive(Debug)]
    struct Wall(AtomicU64);

    impl Wall {
        fn set(&self, hours: u64) {
            self.0.store(hours * 3600, Ordering::SeqCst);
        }
    }

    impl Clock for Wall {
        fn now(&self) -> Timestamp {
            Timestamp::default().after(Duration::from_secs(self.0.load(Ordering::SeqCst)))
        }
    }

    fn clocks() -> (Arc<Wall>, LeaseClock) {
        let wall = Arc::new(Wall(AtomicU64::new(1000 * 3600)));
        (wall.clone(), LeaseClock::new(wall))
    }

    #[tokio::test(start_paused = true)]
    async fn time_passes_by_the_clock_that_shows_more() {
        let (wall, clock) = clocks();
        tokio::time::advance(SECOND).await;
        assert_eq!(clock.now(), SECOND);
        wall.set(1063);
        assert_eq!(clock.now(), 63 * HOUR);
        tokio::time::advance(HOUR).await;
        assert_eq!(clock.now(), 64 * HOUR);
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_that_was_shown_once_stays_and_later_time_is_added() {
        let (wall, clock) = clocks();
        wall.set(1005);
        assert_eq!(clock.now(), 5 * HOUR);
        wall.set(1000);
        tokio::time::advance(HOUR).await;
        assert_eq!(clock.now(), 6 * HOUR);
    }

    #[tokio::test(start_paused = true)]
    async fn a_suspension_after_a_step_back_is_counted() {
        let (wall, clock) = clocks();
        wall.set(100);
        assert_eq!(clock.now(), Duration::ZERO);
        wall.set(163);
        assert_eq!(clock.now(), 63 * HOUR);
    }
}

//! The clock of a database, which never shows an earlier time than one that it has written.
//!
//! The age of a key decides whether it may be sent again. If the clock of the machine steps back, by a
//! boot without a battery or a time service, a key would be younger than it is. So the file has a mark, a
//! time that no written time exceeds, and the clock begins with it.
//!
//! 1. *Not far behind*, as after a small correction or a crash: the clock stands still until that of the
//!    machine has caught up.
//! 2. *Far behind*: it continues from its latest time, by the monotonic clock or the clock of the machine,
//!    whichever has advanced more since then; between two openings by the latter, of which the file has the
//!    time too. So no lease, retention or pause stands still for as long as the clock of the machine is
//!    behind, also if it was the latest time that was wrong, and keys age while the machine is suspended or
//!    the file is closed.
//!
//! The mark is ahead of the time of its commit by [`LEAD`], so that most commits of a busy store do not
//! write it. In the second case it is not: each opening would advance the clock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hapax_core::{Clock, Timestamp};

/// Time by which a mark is ahead.
const LEAD: Duration = Duration::from_secs(1);
/// Time from which on the clock of the machine is far behind.
const FAR: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct DatabaseClock {
    machine: Arc<dyn Clock>,
    shown: Mutex<Shown>,
}

/// The mark of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ClockMark {
    /// A time that no written time exceeds.
    pub(crate) time: Timestamp,
    /// Time of the machine at which it was written.
    pub(crate) machine: Timestamp,
}

#[derive(Debug)]
struct Shown {
    latest: Timestamp,
    /// Set while the clock continues by itself.
    continued: Option<Continued>,
}

/// The beginning of a continuation, by each clock.
#[derive(Clone, Copy, Debug)]
struct Continued {
    latest: Timestamp,
    monotonic: Instant,
    machine: Timestamp,
}

impl DatabaseClock {
    /// Creates the clock of a database with this mark; zero is that of one without.
    pub(crate) fn new(machine: Arc<dyn Clock>, mark: ClockMark) -> Self {
        let now = machine.now();
        let is_far = now.after(FAR) < mark.time && mark.machine != Timestamp::default();
        let closed = if is_far { now.since(mark.machine) } else { Duration::ZERO };
        let shown = Mutex::new(Shown { latest: mark.time.after(closed), continued: None });
        let clock = Self { machine, shown };
        let (found, behind) = clock.behind();
        if behind > FAR {
            tracing::warn!(
                found_unix_s = found.as_micros() / 1_000_000,
                latest_unix_s = mark.time.as_micros() / 1_000_000,
                behind_s = behind.as_secs(),
                "expected a clock that is not behind the latest time in the file, found one that is: \
                 set the clock of the machine; until then the store continues from the latest time, so \
                 that no key seems younger than it is; if the latest time was the wrong one, nothing \
                 is to be done, and times that the store reports stay ahead by this much"
            );
        }
        clock
    }

    pub(crate) fn now(&self) -> Timestamp {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.machine.now();
        if now.after(FAR) >= shown.latest {
            *shown = Shown { latest: shown.latest.max(now), continued: None };
        } else {
            let latest = shown.latest;
            let begin = || Continued { latest, monotonic: monotonic(), machine: now };
            let begin = *shown.continued.get_or_insert_with(begin);
            let advanced = begin.monotonic.elapsed().max(now.since(begin.machine));
            shown.latest = latest.max(begin.latest.after(advanced));
        }
        shown.latest
    }

    /// Returns the mark to write with a commit, at least every time that was shown; `None` if `mark`
    /// serves.
    pub(crate) fn next_mark(&self, mark: Timestamp) -> Option<ClockMark> {
        let now = self.now();
        let (machine, behind) = self.behind();
        let lead = if behind > FAR { Duration::ZERO } else { LEAD };
        (now > mark).then(|| ClockMark { time: now.after(lead), machine })
    }

    /// Returns the time of the machine, and how far it is behind.
    fn behind(&self) -> (Timestamp, Duration) {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.machine.now();
        (found, shown.latest.since(found))
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "this is the only access to the monotonic clock, from threads of any runtime"
)]
fn monotonic() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use hapax_testkit::ManualClock;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn clock(mark: Duration) -> (Arc<ManualClock>, DatabaseClock, Timestamp) {
        let machine = Arc::new(ManualClock::default());
        let begin = machine.now();
        let mark = ClockMark { time: begin.after(mark), machine: begin };
        (machine.clone(), DatabaseClock::new(machine, mark), begin)
    }

    #[test]
    fn a_clock_that_is_a_little_behind_stands_still_until_it_has_caught_up() {
        let (machine, clock, begin) = clock(FAR);
        assert_eq!(clock.now(), begin.after(FAR));
        machine.advance(FAR);
        assert_eq!((clock.now(), clock.next_mark(begin.after(FAR))), (begin.after(FAR), None));
        machine.advance(HOUR);
        assert_eq!(clock.now(), begin.after(FAR + HOUR));
        machine.set(begin.after(HOUR));
        assert_eq!(clock.now(), begin.after(FAR + HOUR));
        let time = begin.after(FAR + HOUR + LEAD);
        assert_eq!(clock.next_mark(begin), Some(ClockMark { time, machine: begin.after(HOUR) }));
    }

    #[test]
    fn a_clock_that_is_far_behind_continues_from_the_latest_time() {
        let (machine, clock, begin) = clock(30 * HOUR);
        let first = clock.now();
        assert!(first >= begin.after(30 * HOUR));
        while clock.now() == first {
            std::thread::yield_now();
        }
        let mark = clock.next_mark(first).unwrap().time;
        assert!(mark < begin.after(31 * HOUR) && mark <= clock.now(), "without a lead");
        // Of the machine, while it was suspended.
        machine.advance(2 * HOUR);
        assert!(clock.now() >= begin.after(32 * HOUR));
        machine.advance(38 * HOUR);
        assert_eq!(clock.now(), begin.after(40 * HOUR));
        machine.set(begin);
        assert!(clock.now() >= begin.after(40 * HOUR), "also if it steps back while it is open");
    }

    #[test]
    fn a_clock_that_is_far_behind_counts_the_time_for_which_the_file_was_closed() {
        let (machine, clock, begin) = clock(48 * HOUR);
        let mark = ClockMark { time: clock.now(), machine: machine.now() };
        machine.advance(30 * HOUR);
        let again = DatabaseClock::new(machine.clone(), mark);
        assert!(again.now() >= begin.after((48 + 30) * HOUR));
        // A file of a version without the time of the machine, and a machine that stepped back.
        let mark = ClockMark { machine: Timestamp::default(), ..mark };
        assert!(DatabaseClock::new(machine.clone(), mark).now() < begin.after(49 * HOUR));
        let mark = ClockMark { machine: begin.after(31 * HOUR), ..mark };
        assert!(DatabaseClock::new(machine, mark).now() < begin.after(49 * HOUR));
    }
}

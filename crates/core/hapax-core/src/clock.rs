//! The only door to wall-clock time.

use std::fmt;
use std::time::Duration;

/// A moment on a store's clock, in microseconds since the Unix epoch.
///
/// Moments of two different stores cannot be compared: each store's clock is its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The last moment that can be written: what is due then is never due.
    pub const MAX: Self = Self(u64::MAX);

    /// The moment `micros` microseconds after the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// This moment and `duration` more; stops at [`Timestamp::MAX`] instead of overflowing.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// How long after `earlier` this moment is; zero if it is not after it.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}µs", self.0)
    }
}

/// Where a store without a clock of its own reads the time.
///
/// It may step backwards or forwards, as wall clocks do; a step forward is a lapse of leases.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Timestamp;
}

/// The clock of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "this is the door")]
    fn now(&self) -> Timestamp {
        // A clock set before 1970 reads as the epoch: leases then lapse late, never early.
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Timestamp::default().after(since.unwrap_or_default())
    }
}

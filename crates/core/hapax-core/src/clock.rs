//! The only place that reads wall-clock time.

use std::fmt;
use std::time::Duration;

/// A time on a store's clock, in microseconds since the Unix epoch.
///
/// Times of two stores cannot be compared: each store has its own clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The last time that is represented: a record due then is never due.
    pub const MAX: Self = Self(u64::MAX);

    /// Creates the time `micros` microseconds after the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns the microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns this time plus `duration`, at most [`Timestamp::MAX`].
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// Returns the duration since `earlier`; zero if this time is not after it.
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

/// The time source of a store without its own clock.
///
/// It may step backwards or forwards, as wall clocks do; a step forward makes leases lapse.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the present time.
    fn now(&self) -> Timestamp;
}

/// The clock of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "this is the only access to the clock")]
    fn now(&self) -> Timestamp {
        // A clock before 1970 reads as the epoch: leases then lapse late, never early.
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Timestamp::default().after(since.unwrap_or_default())
    }
}

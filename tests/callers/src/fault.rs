//! Faults of the service, which the seed assigns to operations. Each happens once.

use std::fmt;

use crate::{ServerKind, number};

/// One in this number of operations has a fault.
const ONE_IN: u64 = 6;

/// A fault of the service.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CallFault {
    /// 409 before the effect; in Stripe's manner `idempotency_key_in_use`.
    Conflict,
    /// 425 before the effect.
    TooEarly,
    /// 429 before the effect.
    TooManyRequests,
    /// 500 before the effect.
    Error,
    /// 503 before the effect.
    Unavailable,
    /// 503 before the effect, which is marked as retryable.
    Declined,
    /// 429 `lock_timeout` before the effect.
    LockTimeout,
    /// 400 with `Stripe-Should-Retry: true` before the effect.
    ShouldRetry,
    /// The connection is closed before the effect.
    Drop,
    /// The service stalls before the effect.
    Stall,
    /// 500 after the effect; in Stripe's manner it is the answer, and is replayed.
    ErrorAfter,
    /// 503 with `Stripe-Should-Retry: false` after the effect, which is the answer.
    ShouldNotRetry,
    /// The connection is closed after the effect.
    DropAfter,
    /// The body of the answer breaks off.
    CutAnswer,
    /// The service stalls after the effect.
    StallAfter,
}

const OF_SERVICE: [CallFault; 12] = [
    CallFault::Conflict,
    CallFault::TooEarly,
    CallFault::TooManyRequests,
    CallFault::Error,
    CallFault::Unavailable,
    CallFault::Declined,
    CallFault::Drop,
    CallFault::Stall,
    CallFault::ErrorAfter,
    CallFault::DropAfter,
    CallFault::CutAnswer,
    CallFault::StallAfter,
];

const OF_STRIPE: [CallFault; 12] = [
    CallFault::Conflict,
    CallFault::LockTimeout,
    CallFault::TooManyRequests,
    CallFault::ShouldRetry,
    CallFault::Unavailable,
    CallFault::Drop,
    CallFault::Stall,
    CallFault::ErrorAfter,
    CallFault::ShouldNotRetry,
    CallFault::DropAfter,
    CallFault::CutAnswer,
    CallFault::StallAfter,
];

impl CallFault {
    /// Returns the faults of a kind of server.
    #[must_use]
    pub const fn all(kind: ServerKind) -> &'static [Self] {
        match kind {
            ServerKind::Hapax => &OF_SERVICE,
            ServerKind::Stripe => &OF_STRIPE,
        }
    }

    /// Returns the fault that the seed assigns to an operation.
    pub(crate) fn of(kind: ServerKind, seed: u64, name: &str) -> Option<Self> {
        let place = number(name)?.wrapping_add(seed);
        let all = Self::all(kind);
        let at = usize::try_from(place / ONE_IN % all.len() as u64).ok()?;
        (place % ONE_IN == 0).then(|| all[at])
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::TooEarly => "too-early",
            Self::TooManyRequests => "too-many-requests",
            Self::Error => "error",
            Self::Unavailable => "unavailable",
            Self::Declined => "declined",
            Self::LockTimeout => "lock-timeout",
            Self::ShouldRetry => "should-retry",
            Self::Drop => "drop",
            Self::Stall => "stall",
            Self::ErrorAfter => "error-after",
            Self::ShouldNotRetry => "should-not-retry",
            Self::DropAfter => "drop-after",
            Self::CutAnswer => "cut-answer",
            Self::StallAfter => "stall-after",
        }
    }
}

impl fmt::Display for CallFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

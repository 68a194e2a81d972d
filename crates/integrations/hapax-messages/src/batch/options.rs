//! Options of consumers in batch mode.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::id::IdRules;
use crate::inbox::{Attempts, TooOld};

/// Limits of a [`BatchConsumer`](crate::BatchConsumer).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchConsumerLimits {
    /// Messages in one transaction. Default 100.
    pub batch: NonZeroUsize,
    /// Transactions at a time. Default 4.
    pub transactions: NonZeroUsize,
    /// Messages that were received and are not acknowledged. Default 1000; the limit of the source
    /// prevails.
    pub in_hand: NonZeroUsize,
    /// Time for batches under way to end in a shutdown. Default 25 s.
    pub drain_timeout: Duration,
}

impl Default for BatchConsumerLimits {
    fn default() -> Self {
        Self {
            batch: NonZeroUsize::MIN.saturating_add(99),
            transactions: NonZeroUsize::MIN.saturating_add(3),
            in_hand: NonZeroUsize::MIN.saturating_add(999),
            drain_timeout: Duration::from_secs(25),
        }
    }
}

/// Options of a [`BatchConsumer`](crate::BatchConsumer).
#[derive(Clone, Debug, Default)]
pub struct BatchOptions {
    /// Rules for ids.
    pub ids: IdRules,
    /// Number of attempts, at least 2, and the pauses between them. The first delivery counts as one,
    /// because it is not counted in the database.
    pub attempts: Attempts,
    /// Handling of messages that are older than the retention of ids.
    pub too_old: TooOld,
    /// Limits.
    pub limits: BatchConsumerLimits,
}

/// Errors of the configuration of a [`BatchConsumer`](crate::BatchConsumer).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchConsumerError {
    /// There is no rule for ids.
    #[error("expected at least one rule for ids, found none")]
    NoIdRules,
    /// A message that was delivered twice would be parked, although it may never have been handled.
    #[error("expected at least 2 attempts, found 1: the first delivery counts as one")]
    Attempts,
    /// The pauses are out of range.
    #[error("expected a first pause of at most the longest, and a longest pause of 1 ms to 7 d")]
    Pauses,
}

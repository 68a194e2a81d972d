//! Options of consumers in batch mode.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::consumer::DEFAULT_BYTES;
use crate::id::IdRules;
use crate::inbox::{Attempts, OnTooOld};

/// Limits of a [`BatchConsumer`](crate::BatchConsumer). A source with positions has limits of its own for
/// each partition, in the place of `max_unacknowledged` and `max_unacknowledged_bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchConsumerLimits {
    /// Largest number of messages in one transaction. Default 100.
    pub batch: NonZeroUsize,
    /// Largest number of transactions at a time. Default 4.
    pub transactions: NonZeroUsize,
    /// Largest number of messages that are received and not acknowledged. Default 1000. A lower
    /// limit of the source applies instead.
    pub max_unacknowledged: NonZeroUsize,
    /// Bytes of unacknowledged messages at which the consumer stops receiving. The messages that it
    /// received last, or a single large one, may exceed them. Default 64 MiB.
    pub max_unacknowledged_bytes: NonZeroUsize,
    /// Time for batches in progress to end in a shutdown. Default 25 s.
    pub drain_timeout: Duration,
}

impl Default for BatchConsumerLimits {
    fn default() -> Self {
        Self {
            batch: NonZeroUsize::MIN.saturating_add(99),
            transactions: NonZeroUsize::MIN.saturating_add(3),
            max_unacknowledged: NonZeroUsize::MIN.saturating_add(999),
            max_unacknowledged_bytes: DEFAULT_BYTES,
            drain_timeout: Duration::from_secs(25),
        }
    }
}

/// Options of a [`BatchConsumer`](crate::BatchConsumer).
#[derive(Clone, Debug, Default)]
pub struct BatchOptions {
    /// Rules for ids.
    pub ids: IdRules,
    /// Limits of attempts, each at least 2, and the pauses between attempts. The first delivery is
    /// not counted in the database, so a message that is delivered again is at attempt 2, and the first
    /// counts as a crash unless its failure was noted.
    pub attempts: Attempts,
    /// Action for messages that are older than the retention of ids; none in positions mode.
    pub on_too_old: OnTooOld,
    /// Sets that the first messages are held, instead of parked, until a rule finds an id in one of them: if none has
    /// an id, the rules are probably wrong. See [`InboxBuilder::expect_ids`](crate::InboxBuilder::expect_ids).
    /// Default: false.
    pub expect_ids: bool,
    /// Limits.
    pub limits: BatchConsumerLimits,
}

/// Errors of the configuration of a [`BatchConsumer`](crate::BatchConsumer).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchConsumerError {
    /// The broker removes a message before it becomes a dead letter.
    #[error(
        "expected a broker that delivers a message more than {crashes} times, the lower one of \
         `max_crashes` and `max`, found a delivery limit of {limit}: raise the limit of the queue, or lower `max_crashes`; the \
         broker would remove a message that ends its process, and no dead letter would have it"
    )]
    DeliveryLimit {
        /// Crashes after which the consumer parks a message.
        crashes: u32,
        /// Deliveries after which the broker removes it.
        limit: u32,
    },
    /// Only one of inbox and source has positions: records would be handled again, or never be finished.
    #[error(
        "expected source and inbox both with positions or both without, found positions of the \
         {found} only: give the source the positions of the inbox (`KafkaSourceBuilder::positions`), and let \
         the inbox advance them (`PgInbox::advance_positions`)"
    )]
    Positions {
        /// The part that has positions.
        found: &'static str,
    },
    /// There is no rule for ids.
    #[error("expected at least one rule for ids, found none: set `ids`, or keep the default")]
    NoIdRules,
    /// A message that was delivered twice would be parked, although it may never have been handled.
    #[error(
        "expected at least 2 attempts, found 1: set `attempts.max` and `attempts.max_crashes` to 2 or \
         more, since the first delivery counts as one"
    )]
    Attempts,
    /// The pauses are out of range.
    #[error(
        "expected `first_pause` <= `longest_pause`, and `longest_pause` from 1 ms to 7 days, \
         found {first:?} and {longest:?}: change `attempts`"
    )]
    Pauses {
        /// The first pause.
        first: Duration,
        /// The longest pause.
        longest: Duration,
    },
}

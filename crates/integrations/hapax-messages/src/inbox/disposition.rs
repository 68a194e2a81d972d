//! Results of processing a message.

use std::time::Duration;

use crate::dead_letter::DeadLetterReason;

/// Result of processing a message.
#[derive(Debug)]
pub(crate) enum Disposition {
    /// The message is acknowledged.
    Finished(Finish),
    /// The message is processed again after a pause.
    Held(Duration, HoldCause),
    /// The last owner of the message died: it is processed again, while no other message is.
    Suspect,
}

/// Reasons for an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Finish {
    Handled,
    Duplicate,
    Parked(DeadLetterReason),
}

/// Reasons to hold a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HoldCause {
    /// A duplicate is in flight.
    InFlight,
    /// The handler failed.
    Retry,
    /// Whether the message was handled is unknown, or cannot be read from its record.
    Unknown,
    /// The store is unavailable.
    Store,
    /// The dead letter was not stored.
    DeadLetters,
    /// The message has no id, and no message had one yet.
    NoId,
}

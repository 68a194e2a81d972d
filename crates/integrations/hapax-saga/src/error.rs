//! Errors of builders, starts, ends and signals.

use std::time::Duration;

use hapax_core::{CanonicalValueError, ClaimError, EntropyError, StoreError, value};

use crate::log::MAX_LOG;

/// Errors of [`SagasBuilder::build`](crate::SagasBuilder::build).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SagasBuildError {
    /// The store has no schedule.
    #[error(
        "expected a store with a schedule, found none: use memory, a file, Redis or PostgreSQL; in PostgreSQL, run the SQL of `hapax sql --part store`"
    )]
    NoSchedule,
    /// The lease is too short to be renewed.
    #[error("expected a lease of at least 100ms, found {found:?}: change `SagasBuilder::lease`")]
    Lease {
        /// The lease.
        found: Duration,
    },
    /// A saga writes in the database of the records, which was not set.
    #[error(
        "expected a database for the steps of `{name}` of the kind `within`, found none: set `SagasBuilder::transactions`"
    )]
    NoTransactions {
        /// The name of the saga.
        name: &'static str,
    },
    /// The number of sagas that run at the same time is out of range.
    #[error(
        "expected 1 to 100,000 sagas that run at the same time, found {found}: change `SagasBuilder::max_running`"
    )]
    MaxRunning {
        /// The limit.
        found: usize,
    },
    /// The name of a definition is too long beside the namespace of the engine.
    #[error(
        "expected the name of a saga and the namespace to fit together into the name of a queue (192 characters), found the saga `{name}`: shorten one of them"
    )]
    LongName {
        /// The name of the saga.
        name: &'static str,
    },
    /// The retention of a definition is too short for the lease: the entry of a start in a transaction could
    /// outlive the outcome, and begin the saga again.
    #[error(
        "expected a retention of `{name}` of at least ten leases, {least:?}, found {retention:?}: raise `retention` of the definition, or lower `SagasBuilder::lease`"
    )]
    Retention {
        /// The name of the saga.
        name: &'static str,
        /// The retention.
        retention: Duration,
        /// The shortest one.
        least: Duration,
    },
    /// Two definitions have one name and version.
    #[error("expected one definition of `{name}` version {version}, found two: change the version")]
    Twice {
        /// The name.
        name: &'static str,
        /// The version.
        version: u32,
    },
}

/// Errors of a start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SagaStartError {
    /// The saga is not registered here.
    #[error(
        "expected the definition that was registered, found another one of `{name}`, or none is: pass the value that was given to `SagasBuilder::register`, or a clone of it"
    )]
    NotRegistered {
        /// Its name.
        name: &'static str,
    },
    /// The key belongs to another input. The saga of that input has an effect, or will have one.
    #[error(
        "expected the input of the first start under this key, found another: that saga may have happened, so find it by its key before you start this one under another key"
    )]
    KeyReused,
    /// The input has no canonical form.
    #[error(transparent)]
    Input(#[from] CanonicalValueError),
    /// The input is too large, or cannot be serialized.
    #[error(transparent)]
    Value(#[from] value::ValueError),
    /// The saga could not be claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The entry could not be inserted. The saga may run nevertheless: start it again under the same
    /// key.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There was no randomness for an id.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The runtime is shutting down.
    #[error("the runtime is shutting down: start the saga again under the same key")]
    Shutdown,
}

/// The end of a saga without an output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SagaError<E> {
    /// The flow returned this error, and what had happened was undone.
    #[error("the flow returned an error, and the steps that had happened were undone")]
    Undone(E),
    /// The saga was cancelled, and what had happened was undone.
    #[error("the saga was cancelled: {reason}")]
    Cancelled {
        /// The reason.
        reason: String,
    },
    /// The outcome does not have the type of this definition.
    #[error(
        "expected an outcome of the types of this definition, found another: use the version that wrote it, or read it with the earlier types"
    )]
    Unreadable,
    /// There is no record: it has expired, or the saga was not started.
    #[error(
        "expected a record of the saga, found none: its retention has passed, or the start was withdrawn; start it again only if it may have a second effect"
    )]
    Gone,
    /// The store is unavailable.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Errors of a signal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// The name is empty.
    #[error(
        "expected a name of the signal, found an empty one: pass the name that the flow waits for"
    )]
    Name,
    /// There is no saga under the key: it was not started, or its outcome has expired.
    #[error("expected an unfinished saga, found none: start it before")]
    NotFound,
    /// The saga has ended, and receives no further signal. One that was sent before may have been
    /// received.
    #[error("expected an unfinished saga, found one that has ended: read its outcome")]
    Ended,
    /// The value is too large, or cannot be serialized.
    #[error(transparent)]
    Value(#[from] value::ValueError),
    /// The signal could not be stored, or the saga not be woken. Send it again.
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

/// Errors of a definition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// A name is empty, too long, or has other characters.
    #[error(
        "expected a name of 1 to 100 letters, digits, `-`, `_` and `.`, found `{name}`: rename it"
    )]
    Name {
        /// The name.
        name: &'static str,
    },
    /// Two steps have one name.
    #[error("expected one step named `{name}`, found two: rename one")]
    Twice {
        /// The name.
        name: &'static str,
    },
    /// The limit of the log is too large.
    #[error("expected a log of at most {MAX_LOG} bytes, found {found}: lower `max_log`")]
    MaxLog {
        /// The limit.
        found: usize,
    },
    /// A step, or its undo, has no try.
    #[error("expected at least one try of `{name}` and of its undo, found none: raise `tries`")]
    Tries {
        /// The name.
        name: &'static str,
    },
    /// A try of a step, or of its undo, would end before its call.
    #[error(
        "expected a timeout of `{name}` and of its undo above zero, found zero: raise the timeout of `retry` or `undo_retry`"
    )]
    Timeout {
        /// The name.
        name: &'static str,
    },
    /// A key may be forgotten while a try of its step, or of its undo, is still in progress.
    #[error(
        "expected a lifetime of the key of `{name}` above the timeout of a try, {timeout:?}, found {lifetime:?}: lower the timeout of `retry` or `undo_retry`"
    )]
    Lifetime {
        /// The name.
        name: &'static str,
        /// The lifetime.
        lifetime: Duration,
        /// The timeout.
        timeout: Duration,
    },
    /// The retention is zero.
    #[error(
        "expected a retention above zero, found zero: a retry would start the saga again; change `retention`"
    )]
    Retention,
    /// The key of a step outlives the outcome. The next saga under the key would be answered with the
    /// effect of this one.
    #[error(
        "expected a retention of at least {lifetime:?}, the lifetime of the key of `{step}`, found {retention:?}: raise the retention"
    )]
    KeyOutlives {
        /// The name of the step.
        step: &'static str,
        /// The lifetime of its key.
        lifetime: Duration,
        /// The retention.
        retention: Duration,
    },
}

//! Errors of builders, starts, ends and signals.

use std::time::Duration;

use hapax_core::{CanonicalValueError, ClaimError, EntropyError, StoreError, value};

/// Errors of a [`SagasBuilder`](crate::SagasBuilder).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SagasError {
    /// The store has no schedule.
    #[error(
        "expected a store with a schedule, found none: use memory, file, Redis or PostgreSQL, and run its migrations"
    )]
    NoSchedule,
    /// The lease is too short to be renewed.
    #[error(
        "expected a lease of at least 100ms, found {found:?}: it would lapse before it is renewed"
    )]
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
    /// The limit is out of range.
    #[error("expected a limit of 1 to 100,000 sagas, found {found}")]
    Limit {
        /// The limit.
        found: usize,
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
    #[error("expected a registered saga, found `{name}`: add it by `SagasBuilder::register`")]
    NotRegistered {
        /// Its name.
        name: &'static str,
    },
    /// The key belongs to another input.
    #[error("expected the input of the first request under this key, found another: use a new key")]
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
    #[error("the saga was undone")]
    Undone(E),
    /// The saga was cancelled, and what had happened was undone.
    #[error("the saga was cancelled: {reason}")]
    Cancelled {
        /// The reason.
        reason: String,
    },
    /// The outcome does not have the type of this definition.
    #[error("the outcome of the saga does not have the types of this definition")]
    Unreadable,
    /// There is no record: it has expired, or the saga was not started.
    #[error("there is no record of the saga: it has expired, or the saga was not started")]
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
    #[error("expected a name of the signal, found an empty one")]
    Name,
    /// The value is too large, or cannot be serialized.
    #[error(transparent)]
    Value(#[from] value::ValueError),
    /// The signal could not be stored, or the saga not be woken. Send it again.
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

//! Errors of the register.

use std::time::Duration;

use hapax_core::StoreError;

use super::UserDifference;
use super::live::MAX_CONFLICTS;

/// Errors of an entry into the register.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// A running process cannot share the namespace.
    #[error(transparent)]
    Difference(#[from] Box<UserDifference>),
    /// The register could not be read or written.
    #[error(
        "expected to read and write the register of the store, found an error: {0}: check the store"
    )]
    Store(#[from] StoreError),
}

/// Reasons for which a register is not read or written although the store answers.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegisterFault {
    #[error(
        "expected a register of this version, found another encoding: run the version that wrote it: {0}"
    )]
    Content(#[source] serde_json::Error),
    #[error(
        "expected to change the register within {MAX_CONFLICTS} swaps, found a change of another process before each: \
         repeat the command, or start the process again"
    )]
    Conflicts,
    #[error(
        "expected fewer than 1000 processes in the register, found 1000: end processes that use this store, or wait 10 s \
         for entries of ended ones to lapse"
    )]
    Full,
    #[error(transparent)]
    Difference(Box<UserDifference>),
}

impl From<RegisterFault> for StoreError {
    fn from(fault: RegisterFault) -> Self {
        Self::unavailable(fault)
    }
}

fn fault_in(error: &StoreError) -> Option<&RegisterFault> {
    std::error::Error::source(error)?.downcast_ref()
}

/// Returns whether the store did not answer. One whose register this process cannot open has answered: others protect keys on
/// it, and a route with `store_outage = "open"` would execute beside them.
pub(super) fn is_outage(error: &StoreError) -> bool {
    fault_in(error).is_none() && !matches!(error, StoreError::Corrupt(_))
}

/// Returns the difference for which an entry was not written.
pub(super) fn difference_in(error: &StoreError) -> Option<Box<UserDifference>> {
    match fault_in(error)? {
        RegisterFault::Difference(difference) => Some(difference.clone()),
        _ => None,
    }
}

/// Returns since when the store has not answered, after a failure at `now`; `None` if it answers.
pub(super) fn unanswered_since(
    error: &StoreError,
    since: Option<Duration>,
    now: Duration,
) -> Option<Duration> {
    is_outage(error).then(|| since.unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_begins_with_the_first_call_that_the_store_does_not_answer() {
        let [one, two, three] = [1, 2, 3].map(Duration::from_secs);
        let refused = StoreError::unavailable("refused");
        let conflicts = StoreError::from(RegisterFault::Conflicts);
        assert_eq!(unanswered_since(&conflicts, None, one), None);
        assert_eq!(unanswered_since(&refused, None, two), Some(two));
        assert_eq!(unanswered_since(&refused, Some(two), three), Some(two));
        assert_eq!(unanswered_since(&conflicts, Some(two), three), None);
        let sealed = StoreError::corrupt("sealed by another secret");
        assert_eq!(unanswered_since(&sealed, Some(two), three), None);
    }
}

//! Completions that commit with a caller's own writes, and the check of their COMMIT.

use std::time::Duration;

use super::{Next, Ownership, stored_record};
use crate::entropy::{Entropy, EntropyError};
use crate::machine::{Event, OwnerAction, Step, step};
use crate::record::Outcome;
use crate::store::{Snapshot, Stamped, Swap};

/// An owner's completion, as the last statement of a transaction with other writes.
///
/// While the result of the transaction is unknown, its owner renews, expecting the record as it was
/// before: that swap waits for the transaction. If it is stored, the transaction was not committed
/// and never will be, because it had written the row that the renewal replaced. If it conflicts,
/// [`Completion::status`] interprets the conflict.
#[derive(Clone, Debug)]
pub struct Completion {
    swap: Swap,
    event: Event<'static>,
}

/// The record that is there instead of the one that a completion expected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CommitStatus {
    /// The outcome of this completion: it was committed.
    Committed(Snapshot),
    /// A record of the same owner. The transaction was not committed and never will be.
    Owned(Snapshot),
    /// A record of another execution. The transaction was not committed and never will be.
    Lost,
    /// No record of this generation: the result is unknown.
    Gone,
}

impl Ownership {
    /// Returns the swap that stores `outcome`, for a transaction of the caller's. `None`: the
    /// record that the owner last saw is no longer its own.
    ///
    /// # Errors
    /// [`EntropyError`]; there is no swap.
    pub fn completion(
        &self,
        outcome: Outcome,
        retention: Option<Duration>,
        entropy: &dyn Entropy,
    ) -> Result<Option<Completion>, EntropyError> {
        let action = OwnerAction::Complete { outcome, retention };
        let (writing, next) = self.write(action, entropy)?;
        Ok(match next {
            Next::Send(swap) => Some(Completion { swap, event: writing.event }),
            Next::Ready(_) => None,
        })
    }
}

impl Completion {
    /// Returns the swap to write within the transaction.
    #[must_use]
    pub const fn swap(&self) -> &Swap {
        &self.swap
    }

    /// Returns the record after the commit.
    #[must_use]
    pub fn snapshot(&self, stamped: Stamped) -> Snapshot {
        let Swap { write_id, draft, .. } = self.swap.clone();
        Snapshot { now: stamped.now, stored: Some(stored_record(write_id, draft, stamped)) }
    }

    /// Interprets `seen`, the record in place of the one that the swap, or a renewal after it,
    /// expected.
    #[must_use]
    pub fn status(&self, seen: Snapshot) -> CommitStatus {
        match step(&seen, &self.event) {
            Step::Recorded => CommitStatus::Committed(seen),
            // The same lease id, and unfinished. A completed record becomes neither in flight nor
            // unknown again under its lease id, so it never was completed.
            Step::Write(_) => CommitStatus::Owned(seen),
            Step::Lost => CommitStatus::Lost,
            _ => CommitStatus::Gone,
        }
    }
}

//! A completion that commits with a caller's own writes, and what became of it.

use std::time::Duration;

use super::{Next, Ownership, stored_record};
use crate::entropy::{Entropy, EntropyError};
use crate::machine::{Event, OwnerAction, Step, step};
use crate::record::Outcome;
use crate::store::{Snapshot, Stamped, Swap};

/// A holder's completion, as the last statement of a transaction that it shares with other writes.
///
/// While the transaction is in doubt its holder renews, with a bet on the cell as it was before:
/// that swap waits for the transaction. If it is stored, the transaction was not committed and
/// never will be, because it had written the row that the renewal replaced. If it is a conflict,
/// [`Completion::status`] says what that means.
#[derive(Clone, Debug)]
pub struct Completion {
    swap: Swap,
    event: Event<'static>,
}

/// What is there instead of what a completion expected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CommitStatus {
    /// This very outcome: it was committed.
    Committed(Snapshot),
    /// A record that is still the holder's. The transaction was not committed and never will be.
    Owned(Snapshot),
    /// Another execution's. Likewise.
    Lost,
    /// The record of this life is gone. Nobody can tell.
    Gone,
}

impl Ownership {
    /// The swap that keeps `outcome`, for a transaction of the caller's. `None`: what the holder
    /// last saw is not its own any more.
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
    /// What to write within the transaction.
    #[must_use]
    pub const fn swap(&self) -> &Swap {
        &self.swap
    }

    /// What is there once the transaction has committed.
    #[must_use]
    pub fn snapshot(&self, stamped: Stamped) -> Snapshot {
        let Swap { write_id, draft, .. } = self.swap.clone();
        Snapshot { now: stamped.now, stored: Some(stored_record(write_id, draft, stamped)) }
    }

    /// What `seen` says, which is there in place of what the swap, or a renewal after it, expected.
    #[must_use]
    pub fn status(&self, seen: Snapshot) -> CommitStatus {
        match step(&seen, &self.event) {
            Step::Recorded => CommitStatus::Committed(seen),
            // Its own grant, and unfinished. What is done becomes neither in flight nor unknown
            // again under its grant, so it never was.
            Step::Write(_) => CommitStatus::Owned(seen),
            Step::Lost => CommitStatus::Lost,
            _ => CommitStatus::Gone,
        }
    }
}

//! A write of an owner that commits with a caller's own writes, and its commit status.

use super::{Next, Ownership, stored_record, write_id_of};
use crate::entropy::{Entropy, EntropyError};
use crate::machine::{Event, OwnerAction, Step, step};
use crate::record::RecordState;
use crate::store::{Snapshot, Stamped, Swap};

/// An owner's completion or checkpoint, as the last statement of a transaction that it shares with
/// other writes.
///
/// While the result of the transaction is unknown, its owner renews with a swap that expects the
/// record as it was before: that swap waits for the transaction. If it is stored, the transaction
/// was not committed and never will be, because it had written the row that the renewal replaced.
/// If it is a conflict, the exchange of the renewal decides again: a checkpoint that was committed
/// left the record in flight, and is renewed. So a renewal that is stored proves nothing alone:
/// [`Completion::renewed`] returns the result by the record that it replaced,
/// [`Completion::status`] that of a renewal that is not stored.
#[derive(Clone, Debug)]
pub struct Completion {
    swap: Swap,
    event: Event<'static>,
}

/// The record that is stored instead of the one that a completion expected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CommitStatus {
    /// The write itself: the transaction was committed.
    Committed(Snapshot),
    /// A record that the owner still owns. The transaction was not committed and never will be.
    Owned(Snapshot),
    /// Another execution's record. The completion was not committed and never will be. A checkpoint
    /// may have been, before the other execution began.
    Lost,
    /// The record of this generation is gone. It is unknown whether the transaction was committed.
    Gone,
}

impl Ownership {
    /// Returns the swap of a completion or checkpoint, for a transaction of the caller. `None`: the
    /// owner does not own the record that it last saw.
    ///
    /// # Errors
    /// [`EntropyError`]; there is no swap.
    pub fn completion(
        &self,
        action: OwnerAction,
        entropy: &dyn Entropy,
    ) -> Result<Option<Completion>, EntropyError> {
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

    /// Returns the snapshot after the transaction has committed.
    #[must_use]
    pub fn snapshot(&self, stamped: Stamped) -> Snapshot {
        let Swap { write_id, draft, .. } = self.swap.clone();
        Snapshot { now: stamped.now, stored: Some(stored_record(write_id, draft, stamped)) }
    }

    /// Returns the status that follows from a renewal that was stored as `renewed` and replaced the
    /// record `replaced`.
    #[must_use]
    pub fn renewed(&self, replaced: &Snapshot, renewed: Snapshot) -> CommitStatus {
        let replaced = write_id_of(replaced);
        if replaced == Some(self.swap.write_id) {
            CommitStatus::Committed(renewed)
        } else if replaced == self.swap.expected || self.completes() {
            CommitStatus::Owned(renewed)
        } else {
            // The owner alone writes after its checkpoint: it cannot be excluded that it was committed.
            CommitStatus::Gone
        }
    }

    /// Returns whether it ends the execution, so that no renewal is stored after it.
    fn completes(&self) -> bool {
        self.swap.draft.record.state != RecordState::InFlight
    }

    /// Returns the status that follows from `seen`, which is stored instead of the record that the
    /// swap, or a renewal after it, expected.
    #[must_use]
    pub fn status(&self, seen: Snapshot) -> CommitStatus {
        // Nothing was written since.
        if seen.stored.as_ref().is_some_and(|stored| stored.write_id == self.swap.write_id) {
            return CommitStatus::Committed(seen);
        }
        match step(&seen, &self.event) {
            Step::Recorded => CommitStatus::Committed(seen),
            // Its own lease id, and unfinished. A done record never becomes in flight or unknown
            // again under the same lease id, so it was not done.
            Step::Write(_) => CommitStatus::Owned(seen),
            Step::Lost => CommitStatus::Lost,
            _ => CommitStatus::Gone,
        }
    }
}

//! The ownership of a key, from which its owner's writes begin.

use std::sync::Arc;
use std::time::Duration;

use super::executions::ExecutionEntry;
use super::{Next, WriteExchange, WriteResult};
use crate::entropy::{Entropy, EntropyError};
use crate::machine::{Event, Owner, OwnerAction};
use crate::record::{FencingToken, LeaseId, Record, Terms};
use crate::scope::OperationId;
use crate::store::Snapshot;

/// Ownership of a key, as of the owner's last write. While it or a clone of it exists, claims of
/// the same process do not take the key over.
#[derive(Clone, Debug)]
pub struct Ownership {
    pub(super) key: OperationId,
    pub(super) seen: Snapshot,
    pub(super) owner: Owner,
    pub(super) fence: FencingToken,
    pub(super) attempt: u32,
    pub(super) terms: Terms,
    pub(super) keep_released: Duration,
    pub(super) entered: Option<Arc<ExecutionEntry>>,
}

impl Ownership {
    /// Returns the operation id.
    #[must_use]
    pub const fn id(&self) -> &OperationId {
        &self.key
    }

    /// Returns the fence of this execution.
    #[must_use]
    pub const fn fence(&self) -> FencingToken {
        self.fence
    }

    /// Returns the generation of the record: the first lease id since it was absent, released or
    /// expired.
    #[must_use]
    pub const fn generation(&self) -> LeaseId {
        self.owner.generation
    }

    /// Returns the number of this execution within its record, from 1.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns whether an earlier owner's lease lapsed without an end.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.owner.generation != self.owner.lease_id
    }

    /// Returns the terms of the claim.
    #[must_use]
    pub const fn terms(&self) -> Terms {
        self.terms
    }

    /// Returns the part of the lease that was left when the store replied to the last write.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let Snapshot { now, stored } = &self.seen;
        stored.as_ref().map_or(Duration::ZERO, |stored| stored.lease_until.since(*now))
    }

    /// Returns the time for which a release keeps the number of attempts.
    #[must_use]
    pub const fn keep_released(&self) -> Duration {
        self.keep_released
    }

    /// Returns the action that ends an execution which did not happen.
    #[must_use]
    pub const fn release(&self) -> OwnerAction {
        OwnerAction::Release { keep: self.keep_released }
    }

    /// Returns the action that ends a claim without an execution.
    #[must_use]
    pub const fn withdraw(&self) -> OwnerAction {
        OwnerAction::Withdraw { keep: self.keep_released }
    }

    /// Returns the checkpoint that this or an earlier owner saved.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&bytes::Bytes> {
        self.record()?.checkpoint.as_ref()
    }

    /// Returns the record as of the owner's last write.
    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        self.seen.stored.as_ref().map(|stored| &stored.record)
    }

    /// Sets the owner's last write, after a [`WriteResult::Recorded`].
    pub fn update(&mut self, seen: Snapshot) {
        self.seen = seen;
    }

    /// Begins a write that expects the owner's last write.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn write(
        &self,
        action: OwnerAction,
        entropy: &dyn Entropy,
    ) -> Result<(WriteExchange, Next<WriteResult>), EntropyError> {
        let event = Event::Owner(self.owner, action);
        WriteExchange::start(self.key, self.seen.clone(), event, entropy)
    }
}

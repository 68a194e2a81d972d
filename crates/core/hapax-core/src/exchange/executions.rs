//! The executions in progress in one process, by key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{ClaimExchange, Ownership};
use crate::machine::{LocalExecution, runs_here};
use crate::record::{LeaseId, RecordState};
use crate::scope::OperationId;
use crate::store::{Snapshot, StoredRecord};

/// A registry of the executions in progress in one process, and of the claims that may become one.
///
/// A claim enters before the first copy of its swap is sent, and leaves when its result is not an
/// execution; an execution leaves when its last [`Ownership`] is dropped. So if a record has a
/// lease id of this process, the lease id is here or its execution has ended. A clock that steps or
/// a process that paused makes a lease lapse, but starts no second execution beside the first.
#[derive(Clone, Default)]
pub struct Executions {
    keys: Arc<Mutex<HashMap<OperationId, Vec<LocalExecution>>>>,
}

impl fmt::Debug for Executions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executions").field("keys", &self.lock().len()).finish()
    }
}

impl Executions {
    /// Returns whether an execution of `key` is in progress, so that its claim has a result.
    #[must_use]
    pub fn executes(&self, key: &OperationId) -> bool {
        self.lock().get(key).is_some_and(|locals| locals.iter().any(|local| local.executes))
    }

    /// Returns whether `seen` is the record of an execution in progress here, or lacks the record of
    /// one.
    #[must_use]
    pub fn runs(&self, key: &OperationId, seen: &Snapshot) -> bool {
        self.lock().get(key).is_some_and(|locals| runs_here(seen, locals, &[]))
    }

    /// Returns the executions and claims in progress for `key`.
    pub(super) fn of(&self, key: &OperationId) -> Vec<LocalExecution> {
        self.lock().get(key).cloned().unwrap_or_default()
    }

    /// Enters a claim until the returned entry is dropped.
    pub(super) fn enter(&self, key: OperationId, lease_id: LeaseId) -> Arc<ExecutionEntry> {
        self.lock().entry(key).or_default().push(LocalExecution { lease_id, executes: false });
        Arc::new(ExecutionEntry { executions: self.clone(), key, lease_id })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<OperationId, Vec<LocalExecution>>> {
        // Each change is one call of a collection: the map stays consistent after a panic.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claim or execution in the registry, which leaves it when it is dropped.
pub(super) struct ExecutionEntry {
    executions: Executions,
    key: OperationId,
    lease_id: LeaseId,
}

impl fmt::Debug for ExecutionEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entered").field(&self.lease_id).finish()
    }
}

impl ExecutionEntry {
    pub(super) fn lease_id(&self) -> LeaseId {
        self.lease_id
    }

    /// Marks the claim as an execution, from now on.
    pub(super) fn executes(&self) {
        let mut keys = self.executions.lock();
        let locals = keys.get_mut(&self.key).into_iter().flatten();
        for local in locals.filter(|local| local.lease_id == self.lease_id) {
            local.executes = true;
        }
    }
}

impl Drop for ExecutionEntry {
    fn drop(&mut self) {
        let mut keys = self.executions.lock();
        if let Entry::Occupied(mut locals) = keys.entry(self.key) {
            locals.get_mut().retain(|local| local.lease_id != self.lease_id);
            if locals.get().is_empty() {
                locals.remove();
            }
        }
    }
}

impl ClaimExchange {
    /// Leaves the executions in progress, as dropping the claim does: for a claim that ends without a
    /// reply to its last swap, which was not applied.
    pub fn unregister(&mut self) {
        self.entered.clear();
    }
}

impl Ownership {
    /// Marks the claim as an execution, from now on.
    pub(super) fn executes(self) -> Self {
        if let Some(entered) = &self.entered {
            entered.executes();
        }
        self
    }

    /// Takes note of the record that prevented a write with the result
    /// [`Lost`](super::WriteResult::Lost) or [`Gone`](super::WriteResult::Gone). Another owner's
    /// record, or a released one, ends the execution for claims of the same process. A record that
    /// merely expired does not.
    pub fn note_conflict(&mut self, seen: &Snapshot) {
        let unfinished = |stored: &StoredRecord| {
            stored.record.lease_id == self.owner.lease_id
                && stored.record.state != RecordState::Released
        };
        if !seen.stored.as_ref().is_none_or(unfinished) {
            self.entered = None;
        }
    }
}

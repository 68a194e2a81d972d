//! The terms of steps and runs, as a definition sets them.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::DefinitionError;
use crate::retry::StepRetry;

/// The promise of the system that a step calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The system honors the step's key for this time: a repeated call has no second effect.
    Keyed {
        /// The time.
        lifetime: Duration,
    },
    /// The system honors no key: the step is called once, unless it is known that it did not happen.
    Once,
    /// The step may be repeated.
    Again,
    /// The step writes rows in the database of the records. They commit with the log, so that a try
    /// whose outcome is not in the log has left nothing.
    Within,
}

/// The terms of a step, as its definition sets them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepTerms {
    /// The promise of the called system.
    pub kind: Kind,
    /// How often it is tried.
    pub retry: StepRetry,
    /// How often its undo is tried.
    pub undo_retry: StepRetry,
    /// Time after a try's timeout in which it may still take effect.
    pub settle: Duration,
    /// True if it has an undo.
    pub has_undo: bool,
    /// True if it has a reconcile function.
    pub reconciles: bool,
    /// True if it has a function that prepares its tries.
    pub prepares: bool,
}

impl StepTerms {
    /// Rejects terms that cannot be kept.
    pub(crate) fn check(&self, name: &'static str) -> Result<(), DefinitionError> {
        let undo = self.has_undo.then_some(self.undo_retry);
        for StepRetry { tries, timeout, .. } in [self.retry].into_iter().chain(undo) {
            if tries == 0 {
                return Err(DefinitionError::Tries { name });
            }
            if timeout.is_zero() {
                return Err(DefinitionError::Timeout { name });
            }
            if let Kind::Keyed { lifetime } = self.kind
                && lifetime <= timeout
            {
                return Err(DefinitionError::Lifetime { name, lifetime, timeout });
            }
        }
        Ok(())
    }
}

/// The part of a definition that a run needs.
#[derive(Clone, Debug)]
pub struct RunTerms {
    /// The steps, by name.
    pub steps: BTreeMap<&'static str, StepTerms>,
    /// The longest pause for which the process keeps the saga; a longer one parks it.
    pub park_after: Duration,
    /// Time for which a stuck saga is parked before a node looks at it again.
    pub stuck_for: Duration,
    /// The largest argument, prepared value, result or error of a step, in bytes.
    pub max_value: usize,
    /// The largest log to which a step is added, in bytes.
    pub max_log: usize,
}

//! The payload of a saga's entry, the outcome of a saga, and the keys of steps and signals.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    EntryId, Fingerprint, FingerprintScheme, Idempotency, Key, LeaseId, Namespace, OnUnknown,
    OperationId, OperationRequest, Outcome, Policy, Scope, Terms, canonicalize_value, value,
};
use serde::{Deserialize, Serialize};

use crate::flow::{SIGNAL, SLEEP};
use crate::log::{Blob, Direction, Failure, Log, LoggedDecision, StepOutcome, UndoEnd};
use crate::run::SagaEnd;

/// Retention of a record while its saga is unfinished: it never expires before the saga ends. Its
/// completion sets the retention of the outcome.
const UNFINISHED: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Time for which the record of a withdrawn start is kept. If it expired while copies of the claim and
/// of the entry are in progress, both could arrive later and start the saga.
const WITHDRAWN: Duration = Duration::from_secs(24 * 60 * 60);

/// The format of outcomes.
pub(crate) const FORMAT: &str = "saga/1";

/// Returns the policy of a saga's claims: after a crash the next claim executes (`reexecute`).
pub(crate) fn policy(lease: Duration) -> Policy {
    let terms = Terms { lease, retention: UNFINISHED, on_unknown: OnUnknown::Reexecute };
    Policy { terms, keep_released: WITHDRAWN, ..Policy::default() }
}

/// The note of an entry: the input, written once.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The input of the flow.
    pub(crate) input: Blob,
    /// The fingerprint of the request, without a key.
    pub(crate) fingerprint: [u8; 32],
    /// True if the entry was inserted in a transaction of its caller, so that there may be no record
    /// yet.
    pub(crate) transactional: bool,
    /// The key of the start, for operators; only where entries and records are sealed. Entries of earlier
    /// versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
}

impl Note {
    pub(crate) fn decode(note: &[u8]) -> Result<Self, value::ValueError> {
        value::read(note)
    }

    pub(crate) fn encode(&self) -> Result<Bytes, value::ValueError> {
        value::write(self, hapax_core::schedule::MAX_NOTE)
    }
}

/// The request of a saga is its input in canonical JSON.
impl OperationRequest for Note {
    fn scheme(&self) -> FingerprintScheme {
        scheme()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (*scheme == self.scheme()).then(|| Fingerprint::from_bytes(self.fingerprint))
    }

    fn description(&self) -> Option<Bytes> {
        #[derive(Serialize)]
        struct Description<'a> {
            key: &'a str,
        }
        let description = Description { key: self.key.as_deref()? };
        canonicalize_value(&description).ok().map(Bytes::from)
    }
}

#[allow(clippy::expect_used, reason = "the name is short")]
fn scheme() -> FingerprintScheme {
    FingerprintScheme::new(FORMAT).expect("the name is short")
}

/// Returns the fingerprint of an input in canonical JSON.
pub(crate) fn fingerprint(input: &[u8]) -> [u8; 32] {
    *Fingerprint::builder(FORMAT).field(input).finish().as_bytes()
}

/// The outcome of a saga.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct FinalOutcome {
    pub(crate) end: FinalEnd,
    pub(crate) history: Vec<EndedStep>,
    /// The decisions of operators. Outcomes of earlier releases have none.
    #[serde(default)]
    pub(crate) decisions: Vec<LoggedDecision>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum FinalEnd {
    Done(Blob),
    Undone(Failure),
}

/// A step of a saga that has ended, without its argument and result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EndedStep {
    /// Its name.
    pub name: String,
    /// Its number among the requests of this name.
    pub nth: u32,
    /// Tries to run it.
    pub tries: u32,
    /// True if it happened, false if it was rejected; `None` if that is unknown.
    pub happened: Option<bool>,
    /// Tries to undo it.
    pub undo_tries: u32,
    /// The end of its undo.
    pub undone: Option<UndoEnd>,
}

impl EndedStep {
    /// Returns the key of its calls in a direction; `None` of a pause.
    #[must_use]
    pub fn key(&self, saga: &OperationId, direction: Direction) -> Option<Key> {
        called_key(saga, direction, &self.name, self.nth)
    }
}

impl FinalOutcome {
    pub(crate) fn new(log: &Log, end: SagaEnd) -> Self {
        let history = log.steps.iter().map(|step| EndedStep {
            name: step.name.clone(),
            nth: step.nth,
            tries: step.forward.begun,
            happened: step.outcome.as_ref().map(|it| matches!(it, StepOutcome::Happened(_))),
            undo_tries: step.undo.begun,
            undone: step.undone,
        });
        let end = match end {
            SagaEnd::Done(value) => FinalEnd::Done(value),
            SagaEnd::Undone(failure) => FinalEnd::Undone(failure),
        };
        Self { end, history: history.collect(), decisions: log.decisions.clone() }
    }

    pub(crate) fn encode(&self) -> Result<Outcome, value::ValueError> {
        let bytes = value::write(self, hapax_core::codec::MAX_OUTCOME)?;
        Ok(Outcome::new(FORMAT, bytes))
    }

    /// Decodes an outcome; `None` if it is none of a saga.
    pub(crate) fn decode(outcome: &Outcome) -> Option<Self> {
        (outcome.format() == FORMAT).then(|| value::read(outcome.bytes()).ok())?
    }
}

/// Returns the key of a step's calls: the same in every try, on every node and in every version.
pub(crate) fn step_key(saga: &OperationId, direction: Direction, name: &str, nth: u32) -> Key {
    let scope = Scope::of([
        (&b"saga"[..], &saga.as_bytes()[..]),
        (b"direction", direction.as_str().as_bytes()),
        (b"step", name.as_bytes()),
    ]);
    OperationId::derive(None, &Namespace::default(), &scope, &number(nth)).downstream()
}

/// Returns the key of a step's calls; `None` of a pause, which calls nothing.
pub(crate) fn called_key(
    saga: &OperationId,
    direction: Direction,
    name: &str,
    nth: u32,
) -> Option<Key> {
    (!is_pause(name)).then(|| step_key(saga, direction, name, nth))
}

/// Returns whether a step sleeps or waits for a signal.
pub(crate) fn is_pause(name: &str) -> bool {
    name.starts_with(SLEEP) || name.starts_with(SIGNAL)
}

/// Returns the operation id of a saga. The version of the definition is not part of it: a retry after an
/// upgrade finds the saga.
pub(crate) fn saga_id(
    engine: &Idempotency,
    definition: &str,
    scope: &Scope,
    key: &Key,
) -> OperationId {
    engine.operation_id(&scope.within("saga", definition), key)
}

/// Returns the id of the entry to which a rejected start moves.
pub(crate) fn rejected_id(entry: EntryId) -> EntryId {
    let digest = Fingerprint::builder("saga/rejected").field(entry.as_bytes()).finish();
    let mut id = [0; 16];
    id.copy_from_slice(&digest.as_bytes()[..16]);
    EntryId::from_bytes(id)
}

/// Returns the operation id of a signal to the saga of a generation.
pub(crate) fn signal_id(saga: &OperationId, generation: LeaseId, name: &str) -> OperationId {
    let scope = Scope::of([
        (&b"saga"[..], &saga.as_bytes()[..]),
        (b"generation", generation.as_bytes()),
        (b"signal", name.as_bytes()),
    ]);
    OperationId::derive(None, &Namespace::default(), &scope, &number(0))
}

/// Name of the signal that cancels a saga. A flow cannot wait for it: names of signals are not empty.
pub(crate) const CANCEL: &str = "";

#[allow(clippy::expect_used, reason = "digits are valid in a key")]
fn number(number: u32) -> Key {
    Key::new(number.to_string()).expect("digits are valid in a key")
}

//! Data of a saga outside of its log: the note of its entry in the schedule, and its outcome.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Fingerprint, FingerprintScheme, Key, OnUnknown, OperationId, OperationRequest, Outcome, Policy,
    Scope, Terms, value,
};
use serde::{Deserialize, Serialize};

use crate::log::{Blob, Direction, Failure, Log, StepOutcome, UndoEnd};
use crate::run::SagaEnd;

/// Retention of a record while its saga is unfinished: it never expires before the saga ends. Its
/// completion sets the retention of the outcome.
const UNFINISHED: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Time for which the record of a withdrawn start is kept. A copy of its claim that arrives later than
/// that would leave a record, with which an entry that arrives late too would begin the saga.
const WITHDRAWN: Duration = Duration::from_secs(24 * 60 * 60);

/// The format of outcomes.
pub(crate) const FORMAT: &str = "saga/1";

/// Returns the policy of a saga's claims. A crash always continues: `reexecute`.
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
    pub(crate) history: Vec<HistoryStep>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum FinalEnd {
    Done(Blob),
    Undone(Failure),
}

/// A step of a saga that has ended, without its contents.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HistoryStep {
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

impl FinalOutcome {
    pub(crate) fn new(log: &Log, end: SagaEnd) -> Self {
        let history = log.steps.iter().map(|step| HistoryStep {
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
        Self { end, history: history.collect() }
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
    OperationId::derive(None, &scope, &number(nth)).downstream()
}

/// Returns the operation id of a signal to a saga.
pub(crate) fn signal_id(saga: &OperationId, name: &str) -> OperationId {
    let scope = Scope::of([(&b"saga"[..], &saga.as_bytes()[..]), (b"signal", name.as_bytes())]);
    OperationId::derive(None, &scope, &number(0))
}

/// Name of the signal that cancels a saga. A flow cannot wait for it: names of signals are not empty.
pub(crate) const CANCEL: &str = "";

#[allow(clippy::expect_used, reason = "digits are valid in a key")]
fn number(number: u32) -> Key {
    Key::new(number.to_string()).expect("digits are valid in a key")
}

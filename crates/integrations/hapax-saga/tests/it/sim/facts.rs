//! What is true of each saga, whoever knows it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use hapax_core::{Fingerprint, OperationId, Timestamp};
use hapax_saga::log::Log;

use super::store::Note;

/// A signal, or a cancellation.
#[derive(Clone, Debug)]
pub(crate) struct SignalFacts {
    pub(crate) value: u64,
    pub(crate) stored: Timestamp,
    pub(crate) answered: bool,
}

/// The end of a saga, as its record has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Done(Vec<u64>),
    Failed(u64),
    Cancelled,
}

/// The facts of one saga.
#[derive(Debug)]
pub(crate) struct SagaFacts {
    pub(crate) id: OperationId,
    /// The requests under its key: that of its client, and one with another input.
    pub(crate) notes: Vec<Rc<Note>>,
    /// True once a start was answered: it has to end.
    pub(crate) accepted: Option<Fingerprint>,
    /// Starts that got no definite answer.
    pub(crate) unclear: u32,
    /// Starts that were answered with the promise that they begin nothing.
    pub(crate) withdrawn: u32,
    /// The last log in the store, and the request that it is of.
    pub(crate) log: Option<Log>,
    pub(crate) request: Option<Fingerprint>,
    pub(crate) end: Option<End>,
    /// By name; the cancellation has the empty name.
    pub(crate) signals: BTreeMap<String, SignalFacts>,
    /// Decisions that operators were told to be stored.
    pub(crate) decisions: Vec<String>,
    /// Steps whose undo an operator skipped.
    pub(crate) skipped: BTreeSet<(String, u32)>,
}

impl SagaFacts {
    pub(crate) fn is_unfinished(&self) -> bool {
        self.end.is_none() && (self.accepted.is_some() || self.log.is_some())
    }
}

/// The facts of a schedule.
#[derive(Default, Debug)]
pub(crate) struct Facts {
    pub(crate) sagas: Vec<SagaFacts>,
}

/// Returns the operation id of a saga.
pub(crate) fn saga_id(saga: usize) -> OperationId {
    let mut bytes = [0; 32];
    bytes[0] = saga as u8 + 1;
    OperationId::from_bytes(bytes)
}

/// Returns the operation id of a signal; with an empty name, of the cancellation.
pub(crate) fn signal_id(saga: usize, name: &str) -> OperationId {
    let mut bytes = [0; 32];
    bytes[0] = 200;
    bytes[1] = saga as u8;
    for (to, from) in bytes[2..].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    OperationId::from_bytes(bytes)
}

/// Returns the saga of an operation id; `None` for a signal.
pub(crate) fn saga_of(id: &OperationId) -> Option<usize> {
    let first = usize::from(id.as_bytes()[0]);
    (1..100).contains(&first).then(|| first - 1)
}

/// Returns the saga and the name of a signal's operation id.
pub(crate) fn signal_of(id: &OperationId) -> Option<(usize, String)> {
    let bytes = id.as_bytes();
    let name = bytes[2..].iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte));
    (bytes[0] == 200).then(|| (usize::from(bytes[1]), name.collect()))
}

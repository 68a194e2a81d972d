//! The truth about each saga, as the simulator records it; no simulated process reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use hapax_core::{Fingerprint, LeaseId, OperationId, Timestamp};
use hapax_saga::log::Log;

use super::store::Note;

/// A signal, or a cancellation.
#[derive(Clone, Debug)]
pub(crate) struct SignalFacts {
    pub(crate) value: u64,
    pub(crate) stored: Timestamp,
    pub(crate) answered: bool,
    pub(crate) answered_at: Option<u64>,
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
    /// The generation of its record.
    pub(crate) generation: Option<LeaseId>,
    /// The request of the next saga under its key, once it has ended and expired.
    pub(crate) next: Option<Rc<Note>>,
    /// The requests under its key: that of its client, and one with another input.
    pub(crate) notes: Vec<Rc<Note>>,
    /// True once a start was answered: it has to end.
    pub(crate) accepted: Option<Fingerprint>,
    /// Starts that got no definite answer.
    pub(crate) unclear: u32,
    /// Starts that were answered with the promise that they begin nothing.
    pub(crate) withdrawn: u32,
    /// True once a step was called.
    pub(crate) called: bool,
    /// The last log in the store, and the request that it is of.
    pub(crate) log: Option<Log>,
    pub(crate) request: Option<Fingerprint>,
    pub(crate) end: Option<End>,
    /// By name; the cancellation has the empty name.
    pub(crate) signals: BTreeMap<String, SignalFacts>,
    /// Decisions whose operators got the reply that they are stored.
    pub(crate) decisions: Vec<String>,
    /// Steps whose undo an operator skipped.
    pub(crate) skipped: BTreeSet<(String, u32)>,
}

impl SagaFacts {
    pub(crate) fn new(saga: usize, notes: Vec<Rc<Note>>) -> Self {
        Self {
            id: saga_id(saga),
            generation: None,
            next: None,
            notes,
            accepted: None,
            unclear: 0,
            withdrawn: 0,
            called: false,
            log: None,
            request: None,
            end: None,
            signals: BTreeMap::new(),
            decisions: Vec::new(),
            skipped: BTreeSet::new(),
        }
    }

    pub(crate) fn is_unfinished(&self) -> bool {
        let is_inserted = self.log.as_ref().is_some_and(|log| log.inserted);
        self.end.is_none() && (self.accepted.is_some() || self.called || is_inserted)
    }
}

/// The facts of a schedule.
#[derive(Default, Debug)]
pub(crate) struct Facts {
    pub(crate) sagas: Vec<SagaFacts>,
    /// Starts of a next saga under a key that are still to come.
    pub(crate) to_come: u32,
}

/// Returns the operation id of a saga.
pub(crate) fn saga_id(saga: usize) -> OperationId {
    let mut bytes = [0; 32];
    bytes[0] = saga as u8 + 1;
    OperationId::from_bytes(bytes)
}

/// Returns the operation id of a signal to the saga of a generation; with an empty name, of the
/// cancellation.
pub(crate) fn signal_id(saga: usize, generation: LeaseId, name: &str) -> OperationId {
    let mut bytes = [0; 32];
    bytes[0] = 200;
    bytes[1] = saga as u8;
    bytes[2..18].copy_from_slice(generation.as_bytes());
    for (to, from) in bytes[18..].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    OperationId::from_bytes(bytes)
}

/// Returns the saga of an operation id; `None` for a signal.
pub(crate) fn saga_of(id: &OperationId) -> Option<usize> {
    let first = usize::from(id.as_bytes()[0]);
    (1..100).contains(&first).then(|| first - 1)
}

/// Returns the saga, the generation and the name of a signal's operation id.
pub(crate) fn signal_of(id: &OperationId) -> Option<(usize, LeaseId, String)> {
    let bytes = id.as_bytes();
    let generation = LeaseId::from_bytes(*bytes[2..].first_chunk()?);
    let name = bytes[18..].iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte));
    (bytes[0] == 200).then(|| (usize::from(bytes[1]), generation, name.collect()))
}

/// The generation of a signal that is sent without one.
pub(crate) const ANY_GENERATION: LeaseId = LeaseId::from_bytes([0; 16]);

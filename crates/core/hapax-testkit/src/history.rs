//! Whether what concurrent callers were told could have been told by one store, one swap at a
//! time.
//!
//! 1. Each caller notes when it called and when it was answered, by a [`Recorder`].
//! 2. The operations on one key are put in an order that keeps those apart that did not overlap,
//!    and in which every answer is right. If there is no such order, the store is not atomic.
//! 3. An operation without a definite answer may have happened at any time after its call, or not
//!    at all. A swap that is sent again is an operation of its own.
//!
//! The search is Wing and Gong's, with a memory of what was tried; a history of a key has at most
//! [`MAX_OPERATIONS`], so that this is a set of bits. It is quick, also where many answers were
//! lost, because of what need not be tried: see `Search::run`.

use std::collections::HashSet;
use std::fmt;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::WriteId;
use hapax_core::store::{Snapshot, Swap, Swapped};
use hapax_core::{OperationId, StoreError};

/// The longest history that can be checked, for one key.
pub const MAX_OPERATIONS: usize = 64;

/// What was asked of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invocation {
    /// A swap.
    Swap {
        /// What it expected.
        expected: Option<WriteId>,
        /// What it leaves.
        write_id: WriteId,
    },
    /// A load.
    Load,
}

/// What the store answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreReply {
    /// The swap was stored.
    Stored,
    /// The load or the conflict found this tag.
    Found(Option<WriteId>),
    /// Nobody knows.
    Ambiguous,
}

/// A call and its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HistoryEntry {
    /// When it was called, by the [`Recorder`]'s count.
    pub called: u64,
    /// When it was answered.
    pub returned: u64,
    /// What was asked.
    pub call: Invocation,
    /// What was answered.
    pub answer: StoreReply,
}

/// Notes operations while they happen, by key. Shared by the tasks that call the store.
#[derive(Debug, Default)]
pub struct Recorder {
    clock: AtomicU64,
    operations: Mutex<Vec<(OperationId, HistoryEntry)>>,
}

impl Recorder {
    /// The moment of a call, to be passed on with its answer.
    #[must_use]
    pub fn called(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Notes the answer to a swap. One that is promised not to have happened leaves no trace.
    pub fn swapped(&self, called: u64, swap: &Swap, answer: &Result<Swapped, StoreError>) {
        let call = Invocation::Swap { expected: swap.expected, write_id: swap.write_id };
        match answer {
            Ok(Swapped::Stored(_)) => self.note(swap.id, called, call, StoreReply::Stored),
            Ok(Swapped::Conflict(seen)) => self.note(swap.id, called, call, found(seen)),
            Err(StoreError::Unavailable(_)) => {}
            Err(_) => self.note(swap.id, called, call, StoreReply::Ambiguous),
        }
    }

    /// Notes what a load found.
    pub fn loaded(&self, called: u64, key: OperationId, seen: &Snapshot) {
        self.note(key, called, Invocation::Load, found(seen));
    }

    /// Checks what was noted, each key by itself.
    ///
    /// # Errors
    /// The first [`HistoryViolation`].
    pub fn check(&self) -> Result<(), HistoryViolation> {
        let mut noted = self.operations.lock().unwrap_or_else(PoisonError::into_inner).clone();
        noted.sort_by_key(|(key, _)| *key);
        noted.chunk_by(|(one, _), (other, _)| one == other).try_for_each(|of_key| {
            linearizable(&of_key.iter().map(|(_, operation)| *operation).collect::<Vec<_>>())
        })
    }

    fn note(&self, key: OperationId, called: u64, call: Invocation, answer: StoreReply) {
        let returned = self.clock.fetch_add(1, Ordering::SeqCst);
        let operation = HistoryEntry { called, returned, call, answer };
        let mut operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        operations.push((key, operation));
    }
}

fn found(seen: &Snapshot) -> StoreReply {
    StoreReply::Found(seen.stored.as_ref().map(|stored| stored.write_id))
}

/// A history that no atomic store tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HistoryViolation {
    /// It has more than [`MAX_OPERATIONS`] operations: check shorter runs.
    TooLong(usize),
    /// There is no order in which all answers are right.
    NotLinearizable {
        /// The whole history, by time of call.
        history: Vec<HistoryEntry>,
        /// The longest order that was right so far, as indices into `history`.
        longest: Vec<usize>,
    },
}

impl std::error::Error for HistoryViolation {}

impl fmt::Display for HistoryViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(length) => {
                write!(
                    f,
                    "a history of {length} operations, at most {MAX_OPERATIONS} can be checked"
                )
            }
            Self::NotLinearizable { history, longest } => {
                writeln!(f, "no order of these makes every answer right:")?;
                for (index, operation) in history.iter().enumerate() {
                    let HistoryEntry { called, returned, call, answer } = operation;
                    writeln!(f, "{index:3} {called:5}..{returned:<5} {call:?} -> {answer:?}")?;
                }
                write!(f, "the longest order found: {longest:?}")
            }
        }
    }
}

/// Whether an atomic store, on which nothing else happened, can have given the answers of
/// `history`, whose operations are all on one key that was absent at first.
///
/// # Errors
/// A [`HistoryViolation`] that shows the history.
pub fn linearizable(history: &[HistoryEntry]) -> Result<(), HistoryViolation> {
    if history.len() > MAX_OPERATIONS {
        return Err(HistoryViolation::TooLong(history.len()));
    }
    let mut history = history.to_vec();
    history.sort_by_key(|operation| operation.called);
    let mut search = Search::over(&history);
    if search.run(0, None) {
        return Ok(());
    }
    let longest = search.longest;
    Err(HistoryViolation::NotLinearizable { history, longest })
}

struct Search<'a> {
    history: &'a [HistoryEntry],
    /// The operations that have an answer, as bits: those that must have happened.
    definite: u64,
    /// Those without one that left a tag which somebody met: the others may as well not have
    /// happened, since after one of them everybody would have met its tag.
    met: u64,
    tried: HashSet<(u64, Option<WriteId>)>,
    order: Vec<usize>,
    longest: Vec<usize>,
}

impl<'a> Search<'a> {
    fn over(history: &'a [HistoryEntry]) -> Self {
        let bits = |chosen: &dyn Fn(&HistoryEntry) -> bool| {
            let chosen = (0..history.len()).filter(|at| chosen(&history[*at]));
            chosen.fold(0, |bits, at| bits | 1 << at)
        };
        let mut tags = HashSet::new();
        for operation in history {
            match (operation.call, operation.answer) {
                (Invocation::Swap { expected, write_id }, StoreReply::Stored) => {
                    tags.extend([expected, Some(write_id)])
                }
                (Invocation::Swap { expected, .. }, StoreReply::Found(found)) => {
                    tags.extend([expected, found]);
                }
                (Invocation::Swap { expected, .. }, StoreReply::Ambiguous) => {
                    tags.extend([expected])
                }
                (Invocation::Load, StoreReply::Found(found)) => tags.extend([found]),
                (Invocation::Load, StoreReply::Stored | StoreReply::Ambiguous) => {}
            }
        }
        let definite = bits(&|operation| operation.answer != StoreReply::Ambiguous);
        let met = bits(&|operation| match (operation.call, operation.answer) {
            (Invocation::Swap { write_id, .. }, StoreReply::Ambiguous) => {
                tags.contains(&Some(write_id))
            }
            _ => false,
        });
        let (tried, order, longest) = (HashSet::new(), Vec::new(), Vec::new());
        Self { history, definite, met, tried, order, longest }
    }

    /// Whether what is not among `happened` can follow, now that the key bears `tag`. Recursion
    /// ends at [`MAX_OPERATIONS`].
    ///
    /// What found this tag comes next, without trying anything else: it changes nothing, so that in
    /// any order in which it comes later it may as well come now. What has no answer is tried only
    /// where it would change something.
    fn run(&mut self, happened: u64, write_id: Option<WriteId>) -> bool {
        if happened & self.definite == self.definite {
            return true;
        }
        if !self.tried.insert((happened, write_id)) {
            return false;
        }
        if self.order.len() > self.longest.len() {
            self.longest.clone_from(&self.order);
        }
        let mut writes = Vec::new();
        for (at, next) in self.possible(happened, write_id) {
            match self.history[at].answer {
                StoreReply::Found(_) => return self.follow(happened, at, next),
                StoreReply::Ambiguous if next == write_id => {}
                StoreReply::Stored | StoreReply::Ambiguous => writes.push((at, next)),
            }
        }
        writes.into_iter().any(|(at, next)| self.follow(happened, at, next))
    }

    fn follow(&mut self, happened: u64, at: usize, next: Option<WriteId>) -> bool {
        self.order.push(at);
        let right = self.run(happened | 1 << at, next);
        if !right {
            self.order.pop();
        }
        right
    }

    /// What may come next, with the tag after it.
    fn possible(&self, happened: u64, write_id: Option<WriteId>) -> Vec<(usize, Option<WriteId>)> {
        // Whoever called after another was answered comes after it.
        let horizon = (0..self.history.len())
            .filter(|at| self.definite & !happened & (1 << at) != 0)
            .map(|at| self.history[at].returned)
            .fold(u64::MAX, u64::min);
        (0..self.history.len())
            .filter(|at| (self.definite | self.met) & !happened & (1 << at) != 0)
            .filter(|at| self.history[*at].called <= horizon)
            .filter_map(|at| Some((at, apply(write_id, &self.history[at])?)))
            .collect()
    }
}

/// The tag after `operation` on a key that bears `tag`; `None` if its answer would be wrong.
fn apply(write_id: Option<WriteId>, operation: &HistoryEntry) -> Option<Option<WriteId>> {
    let (next, answer) = match operation.call {
        Invocation::Load => (write_id, StoreReply::Found(write_id)),
        Invocation::Swap { write_id: new, .. } if write_id == Some(new) => {
            (write_id, StoreReply::Stored)
        }
        Invocation::Swap { expected, write_id: new } if write_id == expected => {
            (Some(new), StoreReply::Stored)
        }
        Invocation::Swap { .. } => (write_id, StoreReply::Found(write_id)),
    };
    (operation.answer == answer || operation.answer == StoreReply::Ambiguous).then_some(next)
}

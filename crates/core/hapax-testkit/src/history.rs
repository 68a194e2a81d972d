//! A checker of histories: it decides whether the replies to concurrent callers are possible for
//! one store that executes one swap at a time.
//!
//! 1. A [`Recorder`] notes the times of each call and of its reply.
//! 2. The checker looks for an order of the operations on one key in which every reply is right,
//!    and in which an operation that returned before another was called comes first. If there is no
//!    such order, the store is not atomic.
//! 3. An operation without a definite reply may have happened at any time after its call, or never.
//!    A swap that is sent again is a separate operation.
//!
//! The search is that of Wing and Gong, with a set of the states that were tried. A history of one
//! key has at most [`MAX_OPERATIONS`] operations, so that a set of operations is a bit set. The
//! search is fast even if many replies were lost, because of the steps that it leaves out: see
//! `Search::run`.

use std::collections::HashSet;
use std::fmt;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::WriteId;
use hapax_core::store::{Snapshot, Swap, Swapped};
use hapax_core::{OperationId, StoreError};

/// Limit of operations in a history of one key.
pub const MAX_OPERATIONS: usize = 64;

/// A call of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invocation {
    /// A swap.
    Swap {
        /// Write id that the swap expects.
        expected: Option<WriteId>,
        /// Write id that the swap leaves.
        write_id: WriteId,
    },
    /// A load.
    Load,
}

/// Reply of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreReply {
    /// The swap was stored.
    Stored,
    /// The load or the conflict found this write id, or no record.
    Found(Option<WriteId>),
    /// The swap may have happened.
    Ambiguous,
}

/// A call and its reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HistoryEntry {
    /// Time of the call, by the [`Recorder`]'s count.
    pub called: u64,
    /// Time of the reply.
    pub returned: u64,
    /// The call.
    pub call: Invocation,
    /// The reply.
    pub answer: StoreReply,
}

/// Records operations while they happen, by key. The tasks that call the store share it.
#[derive(Debug, Default)]
pub struct Recorder {
    clock: AtomicU64,
    operations: Mutex<Vec<(OperationId, HistoryEntry)>>,
}

impl Recorder {
    /// Returns the time of a call; pass it on with the reply.
    #[must_use]
    pub fn called(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Notes the reply to a swap. A swap that certainly did not happen is left out.
    pub fn swapped(&self, called: u64, swap: &Swap, answer: &Result<Swapped, StoreError>) {
        let call = Invocation::Swap { expected: swap.expected, write_id: swap.write_id };
        match answer {
            Ok(Swapped::Stored(_)) => self.note(swap.id, called, call, StoreReply::Stored),
            Ok(Swapped::Conflict(seen)) => self.note(swap.id, called, call, found(seen)),
            Err(StoreError::Unavailable(_)) => {}
            Err(_) => self.note(swap.id, called, call, StoreReply::Ambiguous),
        }
    }

    /// Notes the result of a load.
    pub fn loaded(&self, called: u64, key: OperationId, seen: &Snapshot) {
        self.note(key, called, Invocation::Load, found(seen));
    }

    /// Checks the recorded operations of each key.
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

/// A history that is impossible for an atomic store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HistoryViolation {
    /// The history has more than [`MAX_OPERATIONS`] operations: check shorter runs.
    TooLong(usize),
    /// There is no order in which all replies are right.
    NotLinearizable {
        /// The whole history, by time of call.
        history: Vec<HistoryEntry>,
        /// The longest order without a wrong reply, as indices into `history`.
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

/// Checks that `history` is possible for an atomic store on which nothing else happened. All
/// operations are on one key, which was absent at first.
///
/// # Errors
/// A [`HistoryViolation`] with the history.
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
    /// Bits of the operations that have a definite reply, and so must have happened.
    definite: u64,
    /// Bits of the ambiguous swaps whose write id another operation expected or found. Every other
    /// ambiguous swap can be left out: after it, every later operation would have found its write
    /// id.
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

    /// Returns whether the operations outside `happened` can follow, now that the record has
    /// `write_id`. Recursion ends at [`MAX_OPERATIONS`].
    ///
    /// An operation that found this write id comes next, and no other is tried: it changes nothing,
    /// so that any order in which it comes later is also right if it comes now. An ambiguous swap
    /// is tried only where it would change the record.
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

    /// Returns the operations that can come next, each with the write id after it.
    fn possible(&self, happened: u64, write_id: Option<WriteId>) -> Vec<(usize, Option<WriteId>)> {
        // An operation that was called after another one returned comes after it.
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

/// Returns the write id after `operation` on a record with `write_id`; `None` if the reply would be
/// wrong.
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

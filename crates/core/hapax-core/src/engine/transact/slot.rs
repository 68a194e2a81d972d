//! The slot through which an operation takes and returns its transaction.

use std::any::Any;
use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::time::timeout;

use super::{TxOptions, TxOptionsError};
use crate::engine::lease::{FinishError, LeaseState};
use crate::transaction::{AnyTransactions, AnyTx, TxError};

/// Errors of taking a transaction. Nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeTxError {
    /// Another part of the operation has it.
    #[error("the transaction is taken")]
    Taken,
    /// The run of the transaction has ended.
    #[error("the run of the transaction has ended")]
    Ended,
    /// The transaction has another type.
    #[error("the transaction is of another type")]
    OtherType,
    /// The options of transactions are invalid.
    #[error(transparent)]
    Terms(#[from] TxOptionsError),
    /// No transaction began in time: the pool has no free connection, or the database does not
    /// answer.
    #[error("no transaction began in time")]
    TimedOut,
    /// The lease could not be renewed for it.
    #[error("the lease could not be renewed: {0}")]
    Lease(#[from] FinishError),
    /// The database returned an error.
    #[error(transparent)]
    Begin(#[from] TxError),
    /// The runtime is shutting down.
    #[error("the runtime is shutting down")]
    Shutdown,
}

/// The handle by which one run of an operation takes its transaction. Cheap to clone; no
/// transaction begins before it is taken.
#[derive(Clone)]
pub struct TxHandle {
    slot: Arc<Slot>,
}

struct Slot {
    lease: Arc<LeaseState>,
    database: Arc<dyn AnyTransactions>,
    terms: TxOptions,
    state: Mutex<State>,
    ended: Arc<AtomicBool>,
    /// True if the operation has or had the transaction.
    taken: AtomicBool,
}

enum State {
    Idle,
    /// The transaction is being begun.
    Beginning,
    Out,
    Back(AnyTx),
    /// The run has ended: a transaction that arrives later is dropped, and so rolled back.
    Closed,
}

/// State of the slot at the end of a run.
pub(in crate::engine) enum ClosedSlot {
    /// No transaction was taken.
    Unused,
    Back(AnyTx),
    /// The operation still has it.
    Kept,
}

/// A transaction, with its connection, while the operation has it. Dropping it returns it to the
/// engine, which commits it; it cannot be committed here.
///
/// An operation that keeps it beyond its end prevents the commit: see [`ExecutionResult::Kept`].
///
/// [`ExecutionResult::Kept`]: super::super::ExecutionResult::Kept
pub struct Tx<T: Send + 'static> {
    tx: Option<Box<T>>,
    slot: Arc<Slot>,
}

impl TxHandle {
    pub(in crate::engine) fn new(
        lease: Arc<LeaseState>,
        database: Arc<dyn AnyTransactions>,
        terms: TxOptions,
    ) -> Self {
        let (state, ended, taken) =
            (Mutex::new(State::Idle), Arc::default(), AtomicBool::default());
        Self { slot: Arc::new(Slot { lease, database, terms, state, ended, taken }) }
    }

    /// Returns whether the operation has or had a transaction in this run.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.slot.taken.load(Ordering::Relaxed)
    }

    /// Takes the transaction of the run, which begins with the first call. After it was dropped it
    /// can be taken again, and is the same.
    ///
    /// Dropping this future takes none, and neither does one that takes longer than
    /// [`TxOptions::begin`]. A transaction that is being begun then returns to the slot; until it
    /// has, none can be taken.
    ///
    /// # Errors
    /// [`TakeTxError`].
    pub async fn take<T: Send + 'static>(&self) -> Result<Tx<T>, TakeTxError> {
        self.slot.terms.check()?;
        if let Some(there) = self.slot.reserve::<T>()? {
            return Ok(Tx { tx: Some(there), slot: Arc::clone(&self.slot) });
        }
        let slot = Arc::clone(&self.slot);
        let task = self.slot.lease.inner.runtime.spawn(async move {
            let begun = slot.begin().await;
            let begun = begun.and_then(|tx| tx.downcast().map_err(|_| TakeTxError::OtherType));
            let tx = begun.and_then(|tx| slot.hand_out(tx));
            if tx.is_err() {
                slot.give_up().await;
            }
            // If the caller is gone, the guard is dropped with the task's output, which returns the
            // transaction.
            tx.map(|tx| Tx { tx: Some(tx), slot })
        });
        match timeout(self.slot.terms.begin, task).await {
            Ok(Ok(Ok(tx))) => match self.slot.receive() {
                true => Ok(tx),
                // Dropped here, it is rolled back.
                false => Err(TakeTxError::Ended),
            },
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(_)) => Err(TakeTxError::Shutdown),
            Err(_) => Err(TakeTxError::TimedOut),
        }
    }

    /// Ends the run, and returns the state of the slot.
    pub(in crate::engine) fn close(&self) -> ClosedSlot {
        self.slot.ended.store(true, Ordering::Relaxed);
        let mut state = self.slot.lock();
        match mem::replace(&mut *state, State::Closed) {
            // A transaction that is being begun was not used, and will not be.
            State::Idle | State::Beginning | State::Closed => ClosedSlot::Unused,
            State::Out if !self.is_taken() => ClosedSlot::Unused,
            State::Out => ClosedSlot::Kept,
            State::Back(tx) => ClosedSlot::Back(tx),
        }
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Held for an assignment only.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the transaction that is in the slot, or `None` if the caller has to begin one.
    fn reserve<T: Send + 'static>(&self) -> Result<Option<Box<T>>, TakeTxError> {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Beginning) {
            State::Idle => Ok(None),
            State::Back(tx) => match tx.downcast() {
                Ok(tx) => {
                    *state = State::Out;
                    self.taken.store(true, Ordering::Relaxed);
                    Ok(Some(tx))
                }
                Err(tx) => {
                    *state = State::Back(tx);
                    Err(TakeTxError::OtherType)
                }
            },
            State::Closed => {
                *state = State::Closed;
                Err(TakeTxError::Ended)
            }
            taken @ (State::Out | State::Beginning) => {
                *state = taken;
                Err(TakeTxError::Taken)
            }
        }
    }

    async fn begin(&self) -> Result<AnyTx, TakeTxError> {
        // The connection first: while the pool makes it wait, the lease is renewed as usual.
        let mut tx = self.database.any_connect().await?;
        if matches!(*self.lock(), State::Closed) {
            return Err(TakeTxError::Ended);
        }
        self.lease.pause_renewal(self.terms.lease, &self.ended).await?;
        self.database.any_begin(&mut tx).await?;
        Ok(tx)
    }

    /// Marks the transaction as taken, and returns true, unless the run has ended meanwhile.
    fn receive(&self) -> bool {
        let state = self.lock();
        let open = !matches!(*state, State::Closed);
        // Under the lock, because the end of the run reads it there.
        self.taken.fetch_or(open, Ordering::Relaxed);
        open
    }

    /// Notes that no transaction has begun, so that another attempt is possible.
    async fn give_up(&self) {
        self.lease.resume_renewal_unless(&self.ended).await;
        let mut state = self.lock();
        if matches!(*state, State::Beginning) {
            *state = State::Idle;
        }
    }

    /// Returns the transaction to its taker, unless the run has ended meanwhile: nothing of it
    /// would be committed.
    fn hand_out<T>(&self, tx: Box<T>) -> Result<Box<T>, TakeTxError> {
        let mut state = self.lock();
        if !matches!(*state, State::Beginning) {
            return Err(TakeTxError::Ended);
        }
        *state = State::Out;
        Ok(tx)
    }
}

impl<T: Send + 'static> Drop for Tx<T> {
    fn drop(&mut self) {
        let Some(tx) = self.tx.take() else { return };
        // An operation that panics has not written everything, even if the panic is caught: its
        // transaction counts as kept, and is not committed.
        let whole = !thread::panicking();
        let mut state = self.slot.lock();
        if whole && matches!(*state, State::Out) {
            *state = State::Back(tx);
        } else {
            // The rollback does not happen under the lock.
            drop(state);
            drop(tx as Box<dyn Any + Send>);
        }
    }
}

#[allow(clippy::unreachable, reason = "only `drop` takes it")]
impl<T: Send + 'static> Deref for Tx<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.tx {
            Some(tx) => tx,
            None => unreachable!("a transaction that was given back"),
        }
    }
}

#[allow(clippy::unreachable, reason = "only `drop` takes it")]
impl<T: Send + 'static> DerefMut for Tx<T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.tx {
            Some(tx) => tx,
            None => unreachable!("a transaction that was given back"),
        }
    }
}

impl fmt::Debug for TxHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxHandle").field("lease", &self.slot.lease).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> fmt::Debug for Tx<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx").field("lease", &self.slot.lease).finish_non_exhaustive()
    }
}

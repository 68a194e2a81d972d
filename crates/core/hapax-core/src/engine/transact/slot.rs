//! Access of an operation to its transaction, and its return.

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
    /// The transaction is in use.
    #[error("the transaction is taken: drop it before taking it again")]
    Taken,
    /// The run of the transaction has ended.
    #[error("the run of the transaction has ended: take it while the operation runs")]
    Ended,
    /// The operation has no transactions.
    #[error("expected an operation with transactions, found one without: configure them")]
    NoTransactions,
    /// The transaction has another type.
    #[error("the transaction has another type: take that of its database")]
    OtherType,
    /// The options for transactions are invalid.
    #[error(transparent)]
    Terms(#[from] TxOptionsError),
    /// No transaction began in time: the pool has no free connection, or the database does not
    /// answer.
    #[error("no transaction began in time")]
    TimedOut,
    /// The lease could not be renewed before the transaction.
    #[error("the lease could not be renewed: {0}")]
    Lease(#[from] FinishError),
    /// The database could not begin a transaction.
    #[error(transparent)]
    Begin(#[from] TxError),
    /// The runtime is shutting down.
    #[error("the runtime is shutting down")]
    Shutdown,
}

/// Source of the transaction of one run of the operation. Cheap to clone; nothing begins before the
/// transaction is taken.
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
    /// True if the operation has received the transaction.
    taken: AtomicBool,
}

enum State {
    Idle,
    /// The transaction is on its way to the caller that takes it.
    Beginning,
    HandedOut,
    Returned(AnyTx),
    /// The run has ended: a transaction that arrives now is dropped, and so rolled back.
    Closed,
}

/// State of the slot at the end of a run.
pub(in crate::engine) enum ClosedSlot {
    /// None was taken.
    Unused,
    Returned(AnyTx),
    /// The operation still has it.
    Kept,
}

/// A transaction, with its connection, for the operation. Dropping it returns it to be committed;
/// it cannot be committed here.
///
/// A transaction that is not dropped when the operation ends is not committed: see
/// [`ExecutionResult::Kept`].
///
/// [`ExecutionResult::Kept`]: crate::ExecutionResult::Kept
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

    /// Returns whether the operation has a transaction in this run, or had it.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.slot.taken.load(Ordering::Relaxed)
    }

    /// Takes the run's transaction, which begins with the first call. Once dropped it may be taken
    /// again, and is the same one then.
    ///
    /// Dropping this future takes no transaction, and neither does a call that takes longer than
    /// [`TxOptions::begin`]. A transaction that is then on its way is returned automatically; until
    /// then none can be taken.
    ///
    /// # Errors
    /// [`TakeTxError`].
    pub async fn take<T: Send + 'static>(&self) -> Result<Tx<T>, TakeTxError> {
        self.slot.terms.check()?;
        if let Some(tx) = self.slot.reserve::<T>()? {
            return Ok(Tx { tx: Some(tx), slot: Arc::clone(&self.slot) });
        }
        let slot = Arc::clone(&self.slot);
        let task = self.slot.lease.inner.runtime.spawn(async move {
            let begun = slot.begin().await;
            let begun = begun.and_then(|tx| tx.downcast().map_err(|_| TakeTxError::OtherType));
            let tx = begun.and_then(|tx| slot.hand_out(tx));
            if tx.is_err() {
                slot.reset().await;
            }
            // If the receiver is gone, the guard is dropped with the task's output, which returns
            // the transaction.
            tx.map(|tx| Tx { tx: Some(tx), slot })
        });
        match timeout(self.slot.terms.begin, task).await {
            Ok(Ok(Ok(tx))) => match self.slot.mark_received() {
                true => Ok(tx),
                // Dropped here, it is rolled back.
                false => Err(TakeTxError::Ended),
            },
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(_)) => Err(TakeTxError::Shutdown),
            Err(_) => Err(TakeTxError::TimedOut),
        }
    }

    /// Ends the run.
    pub(in crate::engine) fn close(&self) -> ClosedSlot {
        self.slot.ended.store(true, Ordering::Relaxed);
        let mut state = self.slot.lock();
        match mem::replace(&mut *state, State::Closed) {
            // A transaction on its way was not used for anything, and will not be.
            State::Idle | State::Beginning | State::Closed => ClosedSlot::Unused,
            State::HandedOut if !self.is_taken() => ClosedSlot::Unused,
            State::HandedOut => ClosedSlot::Kept,
            State::Returned(tx) => ClosedSlot::Returned(tx),
        }
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Locked for an assignment only.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the transaction if it has begun, or `None` if the caller has to begin it.
    fn reserve<T: Send + 'static>(&self) -> Result<Option<Box<T>>, TakeTxError> {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Beginning) {
            State::Idle => Ok(None),
            State::Returned(tx) => match tx.downcast() {
                Ok(tx) => {
                    *state = State::HandedOut;
                    self.taken.store(true, Ordering::Relaxed);
                    Ok(Some(tx))
                }
                Err(tx) => {
                    *state = State::Returned(tx);
                    Err(TakeTxError::OtherType)
                }
            },
            State::Closed => {
                *state = State::Closed;
                Err(TakeTxError::Ended)
            }
            taken @ (State::HandedOut | State::Beginning) => {
                *state = taken;
                Err(TakeTxError::Taken)
            }
        }
    }

    async fn begin(&self) -> Result<AnyTx, TakeTxError> {
        // The connection first: during the wait for the pool the lease is renewed as usual.
        let mut tx = self.database.any_connect().await?;
        if matches!(*self.lock(), State::Closed) {
            return Err(TakeTxError::Ended);
        }
        self.lease.pause_renewal(&self.ended).await?;
        self.database.any_begin(&mut tx).await?;
        Ok(tx)
    }

    /// Marks the transaction as received by the operation, unless the run has ended meanwhile.
    /// Returns whether it was marked.
    fn mark_received(&self) -> bool {
        let state = self.lock();
        let open = !matches!(*state, State::Closed);
        // Under the lock, with which the end of the run reads it.
        self.taken.fetch_or(open, Ordering::Relaxed);
        open
    }

    /// Resets the slot after a failed begin: the transaction may be taken again.
    async fn reset(&self) {
        self.lease.resume_renewal_unless(&self.ended).await;
        let mut state = self.lock();
        if matches!(*state, State::Beginning) {
            *state = State::Idle;
        }
    }

    /// Returns the transaction for the caller that takes it, unless the run has ended meanwhile:
    /// then nothing of it would be committed.
    fn hand_out<T>(&self, tx: Box<T>) -> Result<Box<T>, TakeTxError> {
        let mut state = self.lock();
        if !matches!(*state, State::Beginning) {
            return Err(TakeTxError::Ended);
        }
        *state = State::HandedOut;
        Ok(tx)
    }
}

impl<T: Send + 'static> Drop for Tx<T> {
    fn drop(&mut self) {
        let Some(tx) = self.tx.take() else { return };
        // An operation that panics has not made all of its writes, even if the panic is caught: the
        // transaction counts as kept, and is not committed.
        let whole = !thread::panicking();
        let mut state = self.slot.lock();
        if whole && matches!(*state, State::HandedOut) {
            *state = State::Returned(tx);
        } else {
            // The rollback is not done under the lock.
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
            None => unreachable!("a transaction that was returned"),
        }
    }
}

#[allow(clippy::unreachable, reason = "only `drop` takes it")]
impl<T: Send + 'static> DerefMut for Tx<T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.tx {
            Some(tx) => tx,
            None => unreachable!("a transaction that was returned"),
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

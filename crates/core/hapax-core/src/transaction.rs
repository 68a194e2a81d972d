//! Transactions that contain an operation and its record: both are committed, or neither is.
//!
//! For operations whose effects are rows in the database that also stores the records. The claim
//! commits separately, so that duplicates see it at once and do not wait for a transaction of the
//! caller. Then, in order:
//!
//! 1. A connection is taken from the caller's pool. Duplicates take none: only an owner gets this
//!    far.
//! 2. The lease is renewed once, for the time of the policy, and not again until the transaction has
//!    ended: a renewal would change the write id that the transaction expects. The transaction's
//!    first statement, and with it its snapshot, comes after that.
//! 3. The operation writes.
//! 4. Its outcome is swapped in, as the transaction's last statement ([`Transactional`]): the row
//!    must have the write id of the renewal, and stays locked from there on.
//! 5. COMMIT, on a separate task. The caller gets its result after the reply to it.
//!
//! *A lease that lapses* does no harm, because a takeover changes the write id. If the takeover
//! comes before 4, the swap finds another write id, and the transaction is rolled back. If it comes
//! after 4, it waits for the row, and then finds the outcome. At no time can both commit.
//!
//! *A COMMIT without a reply* is resolved by a renewal that expects the write id of 2. That swap
//! waits for the ambiguous transaction, which has, or had, the row locked. If the swap is stored,
//! the transaction was rolled back; if it conflicts with the outcome, the transaction was
//! committed. As long as neither is known, the result is that it may have happened
//! ([`ExecutionResult::Unknown`]), and the operation does not run again here. It cannot run
//! elsewhere either, because a takeover is a swap of the same row.
//!
//! *A transaction that lost against another* (SQLSTATE 40001, 40P01) did not happen: the operation
//! runs again from the beginning, in a new transaction under the same lease id, up to
//! [`TxOptions::reruns`] times.
//!
//! *If the process is killed* between any of these, the database rolls back what was not committed,
//! and the record stays as it was: a claim whose lease lapses. With
//! [`OnUnknown::Reexecute`](crate::OnUnknown) the next request executes, exactly once in effect,
//! because the earlier execution left nothing.
//!
//! *The operation must not end its transaction*, by a statement or otherwise, nor keep it. If it
//! does, it is unknown which of its writes were committed. The record states that where it can be
//! detected: it cannot if the operation began a second transaction that failed, or if the database
//! does not answer.
//!
//! Effects of the operation outside of the transaction are not undone, and may be repeated: have
//! none.
//!
//! [`Transactional`]: crate::Transactional

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;

use crate::scope::OperationId;
use crate::store::{BoxFuture, Swap, Swapped};

#[cfg(feature = "tokio")]
pub use crate::engine::{
    CheckpointCommit, Execution, ExecutionEnd, ExecutionResult, TakeTxError, TransactResult,
    TransactionBackend, Tx, TxHandle, TxOptions, TxOptionsError,
};
#[cfg(feature = "function")]
pub use crate::engine::{OperationError, Receipt, TransactError};

/// Error of a database.
pub type Source = Box<dyn StdError + Send + Sync>;

/// Errors of a step of a transaction, by what is then known of the transaction.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// The transaction was rolled back in favour of another, and may be tried again.
    #[error("the transaction lost against another")]
    Conflict(#[source] Source),
    /// The transaction was not committed and never will be.
    #[error("the transaction was not committed and never will be")]
    Failed(#[source] Source),
    /// COMMIT was sent, and its result is unknown.
    #[error("whether the transaction was committed is not known")]
    Unknown(#[source] Source),
    /// The operation has ended the transaction itself, and it is unknown which writes were
    /// committed.
    #[error("the operation has ended its transaction")]
    EndedEarly(#[source] Source),
}

impl TxError {
    /// Returns [`TxError::Conflict`] because of `source`.
    pub fn conflict(source: impl Into<Source>) -> Self {
        Self::Conflict(source.into())
    }

    /// Returns [`TxError::Failed`] because of `source`.
    pub fn failed(source: impl Into<Source>) -> Self {
        Self::Failed(source.into())
    }

    /// Returns [`TxError::Unknown`] because of `source`.
    pub fn unknown(source: impl Into<Source>) -> Self {
        Self::Unknown(source.into())
    }

    /// Returns [`TxError::EndedEarly`] because of `source`.
    pub fn ended_early(source: impl Into<Source>) -> Self {
        Self::EndedEarly(source.into())
    }
}

/// A transaction that lost against another, as the operation itself has found: a row that it read
/// has a newer version. Returned as an error, or as the source of one, it makes the operation run
/// again from the beginning, as the database's own errors of that kind do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LostRace;

impl fmt::Display for LostRace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the transaction lost against another")
    }
}

impl StdError for LostRace {
    /// Returns a private error: of an error that is transparent to this one, only its source is
    /// visible.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&Race)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a row changed since the operation read it: the operation must run again")]
struct Race;

/// A database whose transactions contain records, and the pool of its connections. For
/// implementors.
///
/// None of these futures is dropped before it resolves, except those of `swap_in` and `rollback` if
/// they take too long. The transaction is dropped with them, and must then be rolled back.
pub trait Transactions: fmt::Debug + Send + Sync + 'static {
    /// A transaction, with its connection. If it is dropped before it is committed, it is rolled
    /// back, and its connection returns to the pool in no transaction.
    type Tx: Send + 'static;

    /// Takes a connection from the pool. Nothing has been read on it.
    ///
    /// # Errors
    /// [`TxError`] if there is no connection within a time that the pool limits.
    fn connect(&self) -> BoxFuture<'_, Result<Self::Tx, TxError>>;

    /// Begins the transaction, unless that was done already; reads nothing.
    ///
    /// # Errors
    /// [`TxError`]; `tx` is dropped.
    fn begin<'a>(&'a self, tx: &'a mut Self::Tx) -> BoxFuture<'a, Result<(), TxError>>;

    /// Writes the record as [`Transactional::swap_in`](crate::Transactional::swap_in) does, with
    /// the errors of this trait.
    ///
    /// # Errors
    /// [`TxError`], never [`TxError::Unknown`]; `tx` is rolled back. [`TxError::EndedEarly`] if it
    /// is another transaction than was begun, or none.
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Self::Tx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>>;

    /// Sends COMMIT.
    ///
    /// # Errors
    /// [`TxError`]; [`TxError::Unknown`] unless the server replied that it was rolled back.
    fn commit(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Sends ROLLBACK. If that does not arrive, COMMIT does not either.
    ///
    /// # Errors
    /// [`TxError::EndedEarly`] if it is another transaction than was begun, or none, where that can
    /// be detected. Any other error means that the database did not answer.
    fn rollback(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Returns whether the operation failed because its transaction lost against another.
    fn is_conflict(&self, error: &(dyn StdError + 'static)) -> bool;

    /// Notifies that a transaction committed the record of `key`, in a store that sends
    /// notifications ([`Notify`](crate::Notify)).
    fn committed(&self, _key: &OperationId) {}
}

/// A transaction of some database.
pub type AnyTx = Box<dyn Any + Send>;

/// [`Transactions`] of any database, for integrations that do not have its type. Every
/// implementation of [`Transactions`] implements it.
pub trait AnyTransactions: fmt::Debug + Send + Sync + 'static {
    /// Calls [`Transactions::connect`].
    fn any_connect(&self) -> BoxFuture<'_, Result<AnyTx, TxError>>;

    /// Calls [`Transactions::begin`].
    fn any_begin<'a>(&'a self, tx: &'a mut AnyTx) -> BoxFuture<'a, Result<(), TxError>>;

    /// Calls [`Transactions::swap_in`].
    fn any_swap_in<'a>(
        &'a self,
        tx: &'a mut AnyTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>>;

    /// Calls [`Transactions::commit`].
    fn any_commit(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Calls [`Transactions::rollback`].
    ///
    /// # Errors
    /// [`TxError`].
    fn any_rollback(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Returns [`Transactions::is_conflict`], or true for a [`LostRace`].
    fn any_is_conflict(&self, error: &(dyn StdError + 'static)) -> bool;

    /// Calls [`Transactions::committed`].
    fn any_committed(&self, key: &OperationId);
}

impl<D: Transactions> AnyTransactions for D {
    fn any_connect(&self) -> BoxFuture<'_, Result<AnyTx, TxError>> {
        Box::pin(async move { Ok(Box::new(self.connect().await?) as AnyTx) })
    }

    fn any_begin<'a>(&'a self, tx: &'a mut AnyTx) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async move { self.begin(tx.downcast_mut().ok_or_else(wrong_database)?).await })
    }

    fn any_swap_in<'a>(
        &'a self,
        tx: &'a mut AnyTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(
            async move { self.swap_in(tx.downcast_mut().ok_or_else(wrong_database)?, swap).await },
        )
    }

    fn any_commit(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move { self.commit(*tx.downcast().map_err(|_| wrong_database())?).await })
    }

    fn any_rollback(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>> {
        // A transaction of another database is rolled back by being dropped.
        Box::pin(async move { self.rollback(*tx.downcast().map_err(|_| wrong_database())?).await })
    }

    fn any_is_conflict(&self, error: &(dyn StdError + 'static)) -> bool {
        let mut causes = std::iter::successors(Some(error), |error| (**error).source());
        causes.any(<dyn StdError>::is::<Race>) || self.is_conflict(error)
    }

    fn any_committed(&self, key: &OperationId) {
        self.committed(key);
    }
}

fn wrong_database() -> TxError {
    TxError::failed("the transaction belongs to another database")
}

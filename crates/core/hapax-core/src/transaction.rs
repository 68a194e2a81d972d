//! Operations that commit in one transaction with their records: both are stored, or neither.
//!
//! For operations whose effects are rows in the database that has the records too. The claim
//! commits separately, so that duplicates see it at once and wait for nothing in the caller's
//! transaction. Then, in order:
//!
//! 1. A connection is taken from the caller's pool. Duplicates take none: only an owner gets that
//!    far.
//! 2. The lease is renewed once, for [`TxOptions::lease`], and not again until the transaction has
//!    ended: a renewal would change the write id that the transaction expects. Its first statement,
//!    and with it its snapshot, comes after that.
//! 3. The operation writes.
//! 4. The outcome is swapped in, as the last statement of the transaction ([`Transactional`]): the
//!    row must have the write id of the renewal, and stays locked from there on.
//! 5. COMMIT, on its own task. The caller gets a result after the reply to it.
//!
//! *A lease that lapses* is safe: a takeover changes the write id. Before step 4, the swap finds
//! another write id, and the transaction is rolled back; after step 4, the takeover waits for the
//! row, and then finds the outcome. There is no moment at which both can commit.
//!
//! *A COMMIT without a reply* is resolved by a renewal that expects the write id of step 2. That
//! swap waits for the transaction in question, which has or had the row locked. If it is stored,
//! the transaction was rolled back; if it conflicts with the outcome, it was committed. While
//! neither is known the result is [`ExecutionResult::Unknown`], and the operation does not run
//! again here; nor can it elsewhere, because a takeover is a swap of that row as well.
//!
//! *A transaction that lost a race* (SQLSTATE 40001, 40P01) did not happen: the operation runs
//! again, from the beginning, in a new one under the same lease, up to [`TxOptions::reruns`] times.
//!
//! *After a crash* between any of these steps, the database rolls back the transaction, and the
//! record is a claim whose lease lapses. With [`OnUnknown::Reexecute`](crate::OnUnknown) the next
//! request executes, with one effect in total, because the earlier execution left none.
//!
//! *The operation neither ends its transaction*, by a statement or otherwise, nor keeps it.
//! Otherwise it is unknown what of it was committed. The record states that where it can be
//! detected: not for a second transaction, begun by the operation, that has failed, nor if the
//! database does not answer.
//!
//! Effects outside of the transaction are not rolled back, and may happen again: avoid them.
//!
//! [`Transactional`]: crate::Transactional

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;

use crate::scope::OperationId;
use crate::store::{BoxFuture, Swap, Swapped};

#[cfg(feature = "tokio")]
pub use crate::engine::{
    Execution, ExecutionEnd, ExecutionResult, TakeTxError, TransactResult, TransactionBackend, Tx,
    TxHandle, TxOptions, TxOptionsError,
};
#[cfg(feature = "function")]
pub use crate::engine::{OperationError, Receipt, TransactError};

/// An error of a database.
pub type Source = Box<dyn StdError + Send + Sync>;

/// Errors of a step of a transaction, by the resulting state of the transaction.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// The transaction was rolled back in favour of another, and may be tried again.
    #[error("the transaction lost a race")]
    Conflict(#[source] Source),
    /// The transaction was not committed and never will be.
    #[error("the transaction failed")]
    Failed(#[source] Source),
    /// COMMIT was sent, and its result is unknown.
    #[error("it is unknown whether the transaction was committed")]
    Unknown(#[source] Source),
    /// The operation ended the transaction itself, so it is unknown what of it was committed.
    #[error("the operation ended its transaction itself")]
    EndedEarly(#[source] Source),
}

impl TxError {
    /// Creates a [`TxError::Conflict`].
    pub fn conflict(source: impl Into<Source>) -> Self {
        Self::Conflict(source.into())
    }

    /// Creates a [`TxError::Failed`].
    pub fn failed(source: impl Into<Source>) -> Self {
        Self::Failed(source.into())
    }

    /// Creates a [`TxError::Unknown`].
    pub fn unknown(source: impl Into<Source>) -> Self {
        Self::Unknown(source.into())
    }

    /// Creates a [`TxError::EndedEarly`].
    pub fn ended_early(source: impl Into<Source>) -> Self {
        Self::EndedEarly(source.into())
    }
}

/// A race that the operation itself found lost: a row that it read has another version now.
/// Returned as an error, or as the source of one, it makes the operation run again from the
/// beginning, as the database's own errors of that kind do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LostRace;

impl fmt::Display for LostRace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the transaction lost a race")
    }
}

impl StdError for LostRace {
    /// An error that is transparent to this one exposes only its source.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&Race)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the transaction is to run again")]
struct Race;

/// A database whose transactions contain records, and the pool of its connections. For
/// implementors.
///
/// None of these futures is dropped early except those of `swap_in` and `rollback`, after a
/// timeout; the transaction is dropped with them, and must then be rolled back.
pub trait Transactions: fmt::Debug + Send + Sync + 'static {
    /// A transaction, with its connection. Dropping it before the commit rolls it back, and its
    /// connection returns to the pool outside of a transaction.
    type Tx: Send + 'static;

    /// Returns a connection on which nothing was read yet.
    ///
    /// # Errors
    /// [`TxError`] if there is none within the time limit of the pool.
    fn connect(&self) -> BoxFuture<'_, Result<Self::Tx, TxError>>;

    /// Begins the transaction, unless it has begun; reads nothing.
    ///
    /// # Errors
    /// [`TxError`]; `tx` is dropped.
    fn begin<'a>(&'a self, tx: &'a mut Self::Tx) -> BoxFuture<'a, Result<(), TxError>>;

    /// Writes the record, as [`Transactional::swap_in`](crate::Transactional::swap_in) does.
    ///
    /// # Errors
    /// [`TxError`], never [`Unknown`](TxError::Unknown); `tx` is rolled back.
    /// [`TxError::EndedEarly`] if the connection is in another transaction, or in none.
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Self::Tx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>>;

    /// Commits.
    ///
    /// # Errors
    /// [`TxError`]; [`Unknown`](TxError::Unknown) unless the server reported a rollback.
    fn commit(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Rolls back. If that does not reach the server, no COMMIT does either.
    ///
    /// # Errors
    /// [`TxError::EndedEarly`] if the connection is in another transaction, or in none, as far as
    /// that can be detected. Any other error means that the database did not answer.
    fn rollback(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Returns whether the operation failed because its transaction lost a race.
    fn is_conflict(&self, error: &(dyn StdError + 'static)) -> bool;

    /// Is called after a transaction committed the record of `key`: a store with notifications
    /// ([`Notify`](crate::Notify)) sends one.
    fn committed(&self, _key: &OperationId) {}
}

/// A transaction of any database.
pub type AnyTx = Box<dyn Any + Send>;

/// [`Transactions`] of any database, for integrations that are not generic over it. Every
/// implementor of that trait implements this one.
pub trait AnyTransactions: fmt::Debug + Send + Sync + 'static {
    /// [`Transactions::connect`].
    fn any_connect(&self) -> BoxFuture<'_, Result<AnyTx, TxError>>;

    /// [`Transactions::begin`].
    fn any_begin<'a>(&'a self, tx: &'a mut AnyTx) -> BoxFuture<'a, Result<(), TxError>>;

    /// [`Transactions::swap_in`].
    fn any_swap_in<'a>(
        &'a self,
        tx: &'a mut AnyTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>>;

    /// [`Transactions::commit`].
    fn any_commit(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>>;

    /// [`Transactions::rollback`].
    ///
    /// # Errors
    /// [`TxError`].
    fn any_rollback(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Calls [`Transactions::is_conflict`], and recognises [`LostRace`].
    fn any_is_conflict(&self, error: &(dyn StdError + 'static)) -> bool;

    /// [`Transactions::committed`].
    fn any_committed(&self, key: &OperationId);
}

impl<D: Transactions> AnyTransactions for D {
    fn any_connect(&self) -> BoxFuture<'_, Result<AnyTx, TxError>> {
        Box::pin(async move { Ok(Box::new(self.connect().await?) as AnyTx) })
    }

    fn any_begin<'a>(&'a self, tx: &'a mut AnyTx) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async move { self.begin(tx.downcast_mut().ok_or_else(stranger)?).await })
    }

    fn any_swap_in<'a>(
        &'a self,
        tx: &'a mut AnyTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(async move { self.swap_in(tx.downcast_mut().ok_or_else(stranger)?, swap).await })
    }

    fn any_commit(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move { self.commit(*tx.downcast().map_err(|_| stranger())?).await })
    }

    fn any_rollback(&self, tx: AnyTx) -> BoxFuture<'_, Result<(), TxError>> {
        // A transaction of another database is rolled back by being dropped.
        Box::pin(async move { self.rollback(*tx.downcast().map_err(|_| stranger())?).await })
    }

    fn any_is_conflict(&self, error: &(dyn StdError + 'static)) -> bool {
        let mut causes = std::iter::successors(Some(error), |error| (**error).source());
        causes.any(<dyn StdError>::is::<Race>) || self.is_conflict(error)
    }

    fn any_committed(&self, key: &OperationId) {
        self.committed(key);
    }
}

fn stranger() -> TxError {
    TxError::failed("a transaction of another database")
}

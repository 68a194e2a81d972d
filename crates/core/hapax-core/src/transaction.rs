//! An operation in one transaction with its record: both are there, or neither is.
//!
//! For work whose effects are rows in the database that keeps the records too. The claim commits by
//! itself, so that copies see it at once and wait for nothing of the caller's. Then, in order:
//!
//! 1. A connection is had from the caller's pool. Copies have none: only an owner gets that far.
//! 2. The lease is renewed once, for [`TxOptions::lease`], and not again until the transaction has
//!    ended: a renewal would change the tag that the transaction bets on. Its first statement, and
//!    with it its snapshot, comes after that.
//! 3. The work writes.
//! 4. Its outcome is swapped in, as the transaction's last statement ([`Transactional`]): the row
//!    must bear the tag of the renewal, and stays locked from there on.
//! 5. COMMIT, on a task of its own. What the caller hears comes after its reply.
//!
//! *A lease that lapses* does no harm: whoever takes over changes the tag. Before 4, and the swap
//! finds another tag, and the work is rolled back; after 4, and the taker waits for the row, and
//! then finds the outcome. There is no moment at which both can commit.
//!
//! *A COMMIT without a reply* is settled by renewing with the tag of 2. That swap waits for the
//! transaction in doubt, which has the row locked, or had. Stored: it was rolled back. A conflict
//! with the outcome: it was committed. As long as neither is known the answer is that it may have
//! happened ([`ExecutionResult::Unknown`]), and nothing is run again here; nobody else can either, for a
//! takeover is a swap of that row as well.
//!
//! *A transaction that lost against another* (SQLSTATE 40001, 40P01) did not happen: the work runs
//! again, from the beginning, in a new one under the same grant, up to [`TxOptions::reruns`] times.
//!
//! *Killed* between any of these, the database rolls back what was not committed, and the record is
//! what it was: a claim whose lease lapses. With [`OnUnknown::Reexecute`](crate::OnUnknown) the
//! next request executes, exactly once in effect, because what was there before left nothing.
//!
//! *The work does not end its transaction*, by a statement or otherwise, nor keep it. What of it was
//! committed then nobody knows; the record says so, where that can be told: not of a second
//! transaction, begun by the work, that has failed, nor where the database does not answer.
//!
//! What the work does outside of the transaction is not undone, and may be done again: do nothing
//! there.
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

/// Whatever a database has to say of a failure.
pub type Source = Box<dyn StdError + Send + Sync>;

/// Why a step of a transaction failed, and what is then known of the transaction.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// It was rolled back in favour of another, and may be tried again.
    #[error("the transaction lost against another")]
    Conflict(#[source] Source),
    /// It was not committed and never will be.
    #[error("the transaction failed")]
    Failed(#[source] Source),
    /// COMMIT was sent, and nobody knows.
    #[error("whether the transaction was committed is not known")]
    Unknown(#[source] Source),
    /// The work has ended it by itself, and nobody knows what of it was committed.
    #[error("the work has ended its transaction")]
    EndedEarly(#[source] Source),
}

impl TxError {
    /// [`TxError::Conflict`] because of `source`.
    pub fn conflict(source: impl Into<Source>) -> Self {
        Self::Conflict(source.into())
    }

    /// [`TxError::Failed`] because of `source`.
    pub fn failed(source: impl Into<Source>) -> Self {
        Self::Failed(source.into())
    }

    /// [`TxError::Unknown`] because of `source`.
    pub fn unknown(source: impl Into<Source>) -> Self {
        Self::Unknown(source.into())
    }

    /// [`TxError::EndedEarly`] because of `source`.
    pub fn ended_early(source: impl Into<Source>) -> Self {
        Self::EndedEarly(source.into())
    }
}

/// The transaction of some work lost against another, as the work itself has found: a row that it
/// read is no longer of the version that it was. Returned as an error, or as the source of one, it
/// has the work run again from the beginning, as the database's own errors to that effect do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LostRace;

impl fmt::Display for LostRace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another transaction was in the way")
    }
}

impl StdError for LostRace {
    /// An error that is transparent to this one shows nothing of it but its source.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&Race)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the transaction is to run again")]
struct Race;

/// A database whose transactions carry records, and the pool that its connections come from. For
/// implementors.
///
/// None of these futures is dropped half-way but those of `swap_in` and `rollback`, when they take
/// too long; the transaction is dropped with them, and must then be rolled back.
pub trait Transactions: fmt::Debug + Send + Sync + 'static {
    /// A transaction, with its connection. Dropped before it is committed it is rolled back, and
    /// its connection goes back to the pool in no transaction.
    type Tx: Send + 'static;

    /// A connection. Nothing has been read on it.
    ///
    /// # Errors
    /// [`TxError`]: there is none to be had, in a time that the pool bounds.
    fn connect(&self) -> BoxFuture<'_, Result<Self::Tx, TxError>>;

    /// Begins the transaction, unless that was done already; reads nothing.
    ///
    /// # Errors
    /// [`TxError`]; `tx` is dropped.
    fn begin<'a>(&'a self, tx: &'a mut Self::Tx) -> BoxFuture<'a, Result<(), TxError>>;

    /// As [`Transactional::swap_in`](crate::Transactional::swap_in), in the words of this trait.
    ///
    /// # Errors
    /// [`TxError`], never of doubt; `tx` is rolled back. [`TxError::EndedEarly`] if it is another
    /// transaction than was begun, or none.
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Self::Tx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>>;

    /// COMMIT.
    ///
    /// # Errors
    /// [`TxError`]. It is of doubt unless the server said that it was rolled back.
    fn commit(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>>;

    /// ROLLBACK. Where that does not arrive, COMMIT does not either.
    ///
    /// # Errors
    /// [`TxError::EndedEarly`] if it is another transaction than was begun, or none, as far as that
    /// can be told. Any other means that the database gave no answer.
    fn rollback(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>>;

    /// Whether the work failed because its transaction lost against another.
    fn is_conflict(&self, error: &(dyn StdError + 'static)) -> bool;

    /// The record of `key` was committed by a transaction: a store that tells of writes
    /// ([`Notify`](crate::Notify)) tells of this one.
    fn committed(&self, _key: &OperationId) {}
}

/// A transaction of some database.
pub type AnyTx = Box<dyn Any + Send>;

/// [`Transactions`] of some database, for doors that do not know which. Whatever implements those
/// implements this.
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

    /// [`Transactions::is_conflict`], or a [`LostRace`].
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
        // Another database's is rolled back by being dropped.
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

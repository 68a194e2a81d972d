//! Transactions of executions: how long they may take, how an operation takes one, and how they end.

mod checkpoint;
pub(super) mod commit;
#[cfg(feature = "function")]
mod function;
mod run;
pub(super) mod slot;

use std::sync::Arc;
use std::time::Duration;

use crate::transaction::{AnyTransactions, Transactions};

pub use self::checkpoint::CheckpointCommit;
#[cfg(feature = "function")]
pub use self::function::{OperationError, TransactError};
pub use self::run::TransactResult;
pub use self::slot::{TakeTxError, Tx, TxHandle};

/// Time limits of transactions, and the number of reruns.
///
/// The lease is that of the policy under which the operation was claimed. It is renewed before a
/// transaction begins, and not within. If the process crashes, the key is in flight for at most this
/// time. A transaction that takes longer is not stopped, and commits only if there was no takeover.
/// (The database may end one that idles: `hapax_postgres::PgTransactions::idle`.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxOptions {
    /// Time limit for the transaction to begin, with a connection from the pool. From 1 ms to an
    /// hour. Default 10 s.
    pub begin: Duration,
    /// Number of times that the operation is run again if its transaction lost against another.
    /// Default 3.
    pub reruns: u32,
    /// Time for which a COMMIT without a reply is checked. At most an hour. Default 10 s.
    pub commit_check: Duration,
}

/// Errors of [`TxOptions`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TxOptionsError {
    /// There is no time to begin a transaction, or too much.
    #[error("`begin` of transactions has to be 1 ms to an hour")]
    Begin,
    /// The time to check a COMMIT is too long.
    #[error("`commit_check` of transactions has to be at most an hour")]
    CommitCheck,
}

impl TxOptions {
    /// Checks the limits. Taking a transaction checks them too.
    ///
    /// # Errors
    /// [`TxOptionsError`] for a value out of its range.
    pub fn check(&self) -> Result<(), TxOptionsError> {
        const HOUR: Duration = Duration::from_secs(60 * 60);
        if self.begin < Duration::from_millis(1) || self.begin > HOUR {
            return Err(TxOptionsError::Begin);
        }
        if self.commit_check > HOUR {
            return Err(TxOptionsError::CommitCheck);
        }
        Ok(())
    }
}

impl Default for TxOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(10);
        Self { begin: timeout, reruns: 3, commit_check: timeout }
    }
}

/// The database of transactions, which must be the one with the engine's records, and their
/// options. Cheap to clone.
#[derive(Debug)]
pub struct TransactionBackend<D: ?Sized = dyn AnyTransactions> {
    /// The database, such as `hapax_postgres::PgTransactions`.
    pub database: Arc<D>,
    /// Time limits and number of reruns.
    pub terms: TxOptions,
}

impl<D: ?Sized> TransactionBackend<D> {
    /// Creates a backend for transactions of `database`, with the default options.
    pub fn new(database: Arc<D>) -> Self {
        Self { database, terms: TxOptions::default() }
    }
}

impl<D: ?Sized> Clone for TransactionBackend<D> {
    fn clone(&self) -> Self {
        Self { database: Arc::clone(&self.database), terms: self.terms }
    }
}

impl<D: Transactions> TransactionBackend<D> {
    /// Returns the same backend without the type of its database, for integrations that do not have
    /// it.
    #[must_use]
    pub fn any(&self) -> TransactionBackend {
        TransactionBackend { database: Arc::clone(&self.database) as Arc<_>, terms: self.terms }
    }
}

//! Transactions of executions: how long they may take, how an operation takes one, and how they end.

pub(super) mod commit;
#[cfg(feature = "function")]
mod function;
mod run;
pub(super) mod slot;

use std::sync::Arc;
use std::time::Duration;

use crate::transaction::{AnyTransactions, Transactions};

#[cfg(feature = "function")]
pub use self::function::{OperationError, TransactError};
pub use self::run::TransactResult;
pub use self::slot::{TakeTxError, Tx, TxHandle};

/// How long transactions may take, and how often they are tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxOptions {
    /// For how long the lease is renewed before a transaction begins; it is not renewed within. A
    /// transaction that takes longer is not stopped for it, and commits only if nobody took over. (The
    /// database may end one that idles: `hapax_postgres::PgTransactions::idle`.) If the
    /// process dies, the key is in flight for so long. From 100 ms to an hour; not less than the
    /// policy's lease counts. Default 30 s.
    pub lease: Duration,
    /// How long the work waits for its transaction to begin, with a connection from the pool: not
    /// longer than until then. At least 1 ms. Default 10 s.
    pub begin: Duration,
    /// How often the work runs again whose transaction lost against another. Default 3.
    pub reruns: u32,
    /// For how long it is asked what became of a COMMIT without a reply. At most an hour. Default
    /// 10 s.
    pub commit_check: Duration,
}

/// Why terms are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TxOptionsError {
    /// A lease that lapses before anything is done, or for which a dead process blocks its keys.
    #[error("`lease` of transactions has to be 100 ms to an hour")]
    Lease,
    /// There is no time for it.
    #[error("`begin` of transactions has to be 1 ms to an hour")]
    Begin,
    /// Nobody waits that long.
    #[error("`doubt` of transactions has to be at most an hour")]
    CommitCheck,
}

impl TxOptions {
    /// # Errors
    /// [`TxOptionsError`]. Whoever takes a transaction under such terms gets that.
    pub fn check(&self) -> Result<(), TxOptionsError> {
        const HOUR: Duration = Duration::from_secs(60 * 60);
        if self.lease < Duration::from_millis(100) || self.lease > HOUR {
            return Err(TxOptionsError::Lease);
        }
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
        let (lease, timeout) = (Duration::from_secs(30), Duration::from_secs(10));
        Self { lease, begin: timeout, reruns: 3, commit_check: timeout }
    }
}

/// The database that transactions are in, which must be the one with the engine's records, and how
/// long they may take. Cheap to clone.
#[derive(Debug)]
pub struct TransactionBackend<D: ?Sized = dyn AnyTransactions> {
    /// Where they come from, such as `hapax_postgres::PgTransactions`.
    pub database: Arc<D>,
    /// How long they may take.
    pub terms: TxOptions,
}

impl<D: ?Sized> TransactionBackend<D> {
    /// Transactions of `database`, under the usual terms.
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
    /// The same, for doors that do not know which database it is.
    #[must_use]
    pub fn any(&self) -> TransactionBackend {
        TransactionBackend { database: Arc::clone(&self.database) as Arc<_>, terms: self.terms }
    }
}

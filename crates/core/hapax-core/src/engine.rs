//! The engine: conversations with a store, carried on tasks of their own.

mod backlog;
mod claim;
#[cfg(feature = "function")]
mod function;
mod idempotency;
mod lease;
mod retry;
mod transact;
mod waiters;

pub use claim::{Claim, ClaimError, OperationRequest, Reconciliation};
#[cfg(feature = "function")]
pub use function::{
    Function, FunctionBuilder, FunctionError, OperationKey, Receipt, ReconcileCall, RunError,
};
pub use idempotency::{EngineError, EngineLimits, EngineStats, Idempotency, IdempotencyBuilder};
pub use lease::{FinishError, Lease, LeaseHandle};
#[cfg(feature = "function")]
pub use transact::{OperationError, TransactError};
pub use transact::{
    TakeTxError, TransactResult, TransactionBackend, TransactionEnd, TransactionResult,
    TransactionalLease, Tx, TxHandle, TxOptions, TxOptionsError,
};

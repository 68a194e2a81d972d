//! The engine: exchanges with a store, which their callers may drop.

mod backlog;
mod claim;
mod detach;
mod execution;
#[cfg(feature = "function")]
mod function;
mod idempotency;
mod lease;
mod lease_clock;
mod quarantine;
mod reconciliation;
mod renewal;
mod request;
mod resume;
mod retry;
mod timer;
mod transact;
mod unretried;
mod waiters;

pub use claim::{Claim, ClaimError};
pub use detach::{DetachOnDrop, DetachSwitch};
pub use execution::{Execution, ExecutionEnd, ExecutionResult, OperationPanicked};
#[cfg(feature = "function")]
pub use function::{
    Function, FunctionBuilder, FunctionError, OperationKey, Receipt, ReconcileCall, RunError,
};
pub use idempotency::{EngineError, EngineLimits, EngineStats, Idempotency, IdempotencyBuilder};
pub use lease::{FinishError, Lease, LeaseHandle};
pub use quarantine::{Quarantine, Quarantines};
pub use reconciliation::Reconciliation;
pub use request::OperationRequest;
pub use transact::{
    CheckpointCommit, TakeTxError, TransactResult, TransactionBackend, Tx, TxHandle, TxOptions,
    TxOptionsError,
};
#[cfg(feature = "function")]
pub use transact::{OperationError, TransactError};
pub use unretried::{Reconciled, UndecidedOperation};

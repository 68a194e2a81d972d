//! The engine: conversations with a store, carried on tasks of their own.

mod background;
mod carry;
mod claim;
mod idempotency;
mod lease;
mod transact;
mod waiters;

pub use claim::{Claim, ClaimError, Question, Request};
pub use idempotency::{Idempotency, IdempotencyBuilder, Limits, Stats};
pub use lease::{FinishError, Lease, LeaseHandle};
#[cfg(feature = "function")]
pub use transact::{Answer, Fault, TransactError};
pub use transact::{Ended, Ending, InDatabase, Ran, TakeError, Transacting, Tx, TxHandle, TxTerms};

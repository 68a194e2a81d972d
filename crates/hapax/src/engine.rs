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
pub use transact::{Ended, Ending, Ran, TakeError, Transacting, Tx, TxHandle, TxTerms};

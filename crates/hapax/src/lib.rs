//! Idempotency: an operation, however often it is asked for, has one effect and one answer.

mod clock;
pub mod codec;
#[cfg(feature = "tokio")]
mod engine;
mod entropy;
pub mod exchange;
mod fingerprint;
mod key;
pub mod machine;
mod memory;
mod policy;
mod record;
mod scope;
mod seal;
mod secret;
pub mod store;

pub use clock::{Clock, SystemClock, Timestamp};
#[cfg(feature = "tokio")]
pub use engine::{
    Claim, ClaimError, FinishError, Idempotency, IdempotencyBuilder, Lease, LeaseHandle, Limits,
    Question, Request, Stats,
};
pub use entropy::{Entropy, EntropyError, SystemEntropy};
pub use fingerprint::{
    Fingerprint, FingerprintBuilder, NotCanonical, Scheme, SchemeTooLong, canonicalize,
};
pub use key::{Key, KeyError};
pub use memory::{MemoryCapacity, MemoryFull, MemoryStore};
pub use policy::{InFlight, Policy, PolicyError};
pub use record::{FencingToken, Grant, OnUnknown, Outcome, Record, State, Tag, Terms};
pub use scope::{Scope, StoreKey};
pub use seal::{SealError, Sealer};
pub use secret::Secret;
pub use store::{Inspect, Store, StoreError};

//! Idempotency: an operation, however often it is asked for, has one effect and one answer.
//!
//! A network loses replies. Who gets none cannot tell whether the operation happened, asks again,
//! and it happens twice. With Hapax the caller names the operation with an *idempotency key*, and
//! asking again under that key is safe: the first request executes, copies are told that it is in
//! flight or wait for it, and later ones are answered with what it answered.
//!
//! # The tour
//!
//! 1. A [`Key`] names an operation within a [`Scope`], the caller's identity. A [`Fingerprint`]
//!    says what was asked, so that a key is not reused for something else.
//! 2. [`Idempotency::claim`] asks whether it was asked before. The answer is a [`Claim`]: execute,
//!    replay, in flight, mismatch, unknown, or ask a hook.
//! 3. Whoever executes holds a [`Lease`], renewed while the work runs. It carries a
//!    [`FencingToken`] for systems downstream, which grows with every takeover.
//! 4. The lease ends with an outcome that is kept ([`Lease::complete`]), with a release
//!    ([`Lease::release`]: it did not happen, the next one executes) or in doubt
//!    ([`Lease::abandon`], a crash, a lapse). [`OnUnknown`] says what a retry gets then.
//! 5. A [`Store`] keeps the records. It is one compare-and-swap; every decision is taken by
//!    [`machine::step`], which is pure, and carried out by [`exchange`], which does no I/O.
//! 6. Where an operation writes in the database that keeps the records, both commit in one
//!    [`transaction`].
//!
//! ```
//! # #[derive(Clone)] struct Order;
//! # async fn place(_: &Order) -> String { "order 17".into() }
//! use std::sync::Arc;
//! use hapax_core::{
//!     Claim, Fingerprint, Idempotency, Key, MemoryStore, Outcome, Policy, OperationRequest, FingerprintScheme, Scope,
//! };
//!
//! struct Asked(&'static str);
//!
//! impl OperationRequest for Asked {
//!     fn scheme(&self) -> FingerprintScheme {
//!         FingerprintScheme::new("order/1").expect("it is short")
//!     }
//!     fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
//!         (*scheme == self.scheme())
//!             .then(|| Fingerprint::builder("order/1").field(self.0.as_bytes()).finish())
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let order = Order;
//! let idempotency = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
//! let scope = Scope::of([("customer", "c-1")]);
//! let key: Key = "8e03978e-40d5-43dd-bc93-6894a57f9324".parse()?;
//! let policy = Policy::default();
//!
//! for attempt in 1..=2 {
//!     match idempotency.claim(&scope, &key, &Asked("two apples"), &policy).await? {
//!         Claim::Execute(lease) => {
//!             let answer = lease.keep_alive(place(&order)).await;
//!             lease.complete(Outcome::new("text", answer), None).await?;
//!             assert_eq!(attempt, 1);
//!         }
//!         Claim::Replay(replay) => {
//!             assert_eq!(replay.outcome.bytes(), "order 17");
//!             assert_eq!(attempt, 2);
//!         }
//!         other => panic!("{other:?}"),
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! What is claimed here by hand, [`Idempotency::at_most_once`] does around a function: see
//! [`functions`](manual::functions).
//!
//! # Features
//!
//! None is on by default: the crate is then the state machine, the conversations and the [`Store`]
//! seam, for stores and simulators.
//!
//! - `tokio`: the engine, [`Idempotency`] and [`Lease`].
//! - `function`: [`Idempotency::at_most_once`], [`Idempotency::at_least_once`], [`Function`] and
//!   [`Idempotency::transact`]; brings `tokio` and `serde`.
//! - `keys`: keys made from clock and dice ([`KeyMaker`]), and of payloads; brings `serde`.
//! - `serde`: [`canonicalize_value`], and [`value`], which keeps what serde can write.
//!
//! The [`manual`] gives the reasons: why each default is what it is, what can fail and what then
//! happens, what is not promised, and how to choose a policy.
// The tour speaks of features, which are documented where they are on.
#![cfg_attr(
    not(all(feature = "function", feature = "keys")),
    allow(rustdoc::broken_intra_doc_links)
)]

mod clock;
pub mod codec;
pub mod diagnose;
pub mod driver;
#[cfg(feature = "tokio")]
mod engine;
mod entropy;
pub mod exchange;
mod fingerprint;
mod key;
pub mod machine;
pub mod manual;
mod memory;
mod policy;
mod record;
mod scope;
mod seal;
mod secret;
pub mod store;
pub mod transaction;
#[cfg(feature = "serde")]
pub mod value;

pub use clock::{Clock, SystemClock, Timestamp};
#[cfg(feature = "tokio")]
pub use engine::{
    Claim, ClaimError, EngineError, EngineLimits, EngineStats, Execution, ExecutionEnd,
    ExecutionResult, FinishError, Idempotency, IdempotencyBuilder, Lease, LeaseHandle,
    OperationPanicked, OperationRequest, Reconciliation,
};
#[cfg(feature = "function")]
pub use engine::{
    Function, FunctionBuilder, FunctionError, OperationKey, Receipt, ReconcileCall, RunError,
};
pub use entropy::{Entropy, EntropyError, SystemEntropy};
pub use exchange::{Replay, Resolved, WriteResult};
pub use fingerprint::{
    CanonicalJsonError, Fingerprint, FingerprintBuilder, FingerprintScheme, JsonPointers,
    PointerError, SchemeTooLong, canonicalize, canonicalize_except, canonicalize_only,
};
#[cfg(feature = "serde")]
pub use fingerprint::{CanonicalValueError, canonicalize_value};
pub use key::{
    BucketError, CompositeKey, Key, KeyError, KeyMaker, KeyPart, MakeKeyError, NaturalKey,
};
pub use machine::{HookTiming, Resolution, Resolve, Verdict};
pub use memory::{MemoryCapacity, MemoryFull, MemoryStore};
pub use policy::{InFlight, Policy, PolicyError};
pub use record::{
    FencingToken, LeaseId, Notes, OnUnknown, Outcome, OutcomeClass, Record, RecordState, Terms,
    WriteId,
};
pub use scope::{OperationId, Scope};
pub use seal::{SealError, Sealer};
pub use secret::{KeyRing, KeyRingError, Secret};
pub use store::{BoxFuture, Inspect, Notify, Store, StoreError, Transactional};

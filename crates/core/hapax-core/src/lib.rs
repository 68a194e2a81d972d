//! Idempotency: an operation has one effect and one outcome, however often it is requested.
//!
//! A network loses replies. A client without a reply cannot know whether the operation happened, so
//! it retries, and the operation happens twice. With Hapax the client names the operation with an
//! *idempotency key*, and a retry with that key is safe: the first request executes, a duplicate
//! waits or is rejected while that one is in flight, and a retry gets the stored outcome.
//!
//! # The tour
//!
//! 1. A [`Key`] names an operation within a [`Scope`], the caller's identity. A [`Fingerprint`] of
//!    the request keeps a key from being reused for another request.
//! 2. [`Idempotency::claim`] looks for an earlier request. The result is a [`Claim`]: execute,
//!    replay, in flight, mismatch, unknown, or reconcile.
//! 3. The owner of a key has a [`Lease`], which is renewed while the operation executes. It has a
//!    [`FencingToken`] for downstream systems, which grows with every takeover.
//! 4. The lease ends with an outcome that is stored ([`Lease::complete`]), with a release
//!    ([`Lease::release`]: the operation did not happen, and the next claim executes) or with an
//!    unknown outcome ([`Lease::abandon`], a crash, a lapse). [`OnUnknown`] states what a retry
//!    gets then.
//! 5. A [`Store`] has the records. It is one compare-and-swap; [`machine::step`], which is pure,
//!    makes every decision, and [`exchange`], which does no I/O, turns it into swaps.
//! 6. If an operation writes to the database that has the records, both commit in one
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
//! [`Idempotency::at_most_once`] does the same around a function: see
//! [`functions`](manual::functions).
//!
//! # Features
//!
//! None is on by default: the crate is then the state machine, the exchanges and the [`Store`]
//! trait, for stores and simulators.
//!
//! - `tokio`: the engine, [`Idempotency`] and [`Lease`].
//! - `function`: [`Idempotency::at_most_once`], [`Idempotency::at_least_once`], [`Function`] and
//!   [`Idempotency::transact`]; brings `tokio` and `serde`.
//! - `keys`: keys made of time and randomness ([`KeyMaker`]), and of payloads; brings `serde`.
//! - `serde`: [`canonicalize_value`], and [`value`], which encodes serializable values.
//! - `unstable-store`: shows the modules for implementors of stores in the documentation: [`codec`],
//!   [`exchange`], [`machine`] and [`value`]. They may change in any release.
//!
//! The [`manual`] has the reasons for each default, the failures and their consequences, the
//! limits, and how to choose a policy.
// The tour names features, which are documented where they are on.
#![cfg_attr(
    not(all(feature = "function", feature = "keys")),
    allow(rustdoc::broken_intra_doc_links)
)]

mod backoff;
mod clock;
#[cfg_attr(not(feature = "unstable-store"), doc(hidden))]
pub mod codec;
pub mod diagnose;
pub mod driver;
#[cfg(feature = "tokio")]
mod engine;
mod entropy;
#[cfg_attr(not(feature = "unstable-store"), doc(hidden))]
pub mod exchange;
mod fingerprint;
mod key;
#[cfg_attr(not(feature = "unstable-store"), doc(hidden))]
pub mod machine;
pub mod manual;
mod memory;
mod namespace;
mod policy;
mod record;
pub mod schedule;
mod scope;
mod seal;
mod secret;
pub mod sequence;
pub mod store;
pub mod transaction;
#[cfg(feature = "serde")]
#[cfg_attr(not(feature = "unstable-store"), doc(hidden))]
pub mod value;

pub use backoff::Backoff;
pub use clock::{Clock, SystemClock, Timestamp};
#[cfg(feature = "tokio")]
pub use engine::{
    Claim, ClaimError, DetachOnDrop, DetachSwitch, EngineError, EngineLimits, EngineStats,
    Execution, ExecutionEnd, ExecutionResult, FinishError, Idempotency, IdempotencyBuilder, Lease,
    LeaseHandle, OperationPanicked, OperationRequest, Quarantine, Quarantines, Reconciled,
    Reconciliation, UndecidedOperation,
};
#[cfg(feature = "function")]
pub use engine::{
    Function, FunctionBuilder, FunctionError, OperationKey, Receipt, ReconcileCall, RunError,
};
pub use entropy::{BufferedEntropy, Entropy, EntropyError, SystemEntropy};
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
pub use machine::{
    Amendment, DefiniteVerdict, HookTiming, Resolve, SETTLE_MARGIN, Verdict, may_execute_until,
};
pub use memory::{MemoryCapacity, MemoryFull, MemoryStore};
pub use namespace::{Namespace, NamespaceError, NamespacedSchedule};
pub use policy::{InFlight, Policy, PolicyError};
pub use record::{
    EntryId, Extensions, FencingToken, LeaseId, Notes, OnUnknown, Outcome, OutcomeClass, Record,
    RecordState, Redirect, Terms, WriteId,
};
pub use scope::{OperationId, Scope};
pub use seal::{SealError, Sealer};
pub use secret::{KeyRing, KeyRingError, Secret};
pub use store::{BoxFuture, Inspect, Notify, Store, StoreError, Transactional};

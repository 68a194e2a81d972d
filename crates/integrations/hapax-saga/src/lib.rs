//! Sagas: several steps under one idempotency key, resumed after a crash, with compensation.
//!
//! A [`Saga`] is a definition: steps, most of which call other systems, and a flow, which is an async
//! function that requests them. [`Sagas::start`] starts one under a key; [`Sagas::run`] drives those
//! that are due. One record has all of it: the checkpoint is the log of the steps.
//!
//! # Guarantees
//! 1. A saga whose start has returned runs to its end, in this process or in another one that has its
//!    definition, whatever crashes. The same start again finds it; one with another input is
//!    rejected.
//! 2. A try of a step is in the stored log before the step is called. Its result is in the stored log
//!    before the next call, or before the flow waits for anything. After a crash the flow runs again
//!    from the top, and gets the logged results by the names of the steps.
//! 3. A step is called again only as its kind allows; a try whose process died counts as one that may
//!    have arrived:
//!
//!    | kind | the called system | a try that may have arrived |
//!    | --- | --- | --- |
//!    | [`keyed`](SagaBuilder::keyed) | honors the step's key for a time | is repeated, as long as it ends within that time since the first, and begins within 0.9 of it |
//!    | [`once`](SagaBuilder::once) | honors no key | is not repeated: its reconcile function decides, or an operator |
//!    | [`again`](SagaBuilder::again) | may be called any number of times | is repeated |
//!    | [`within`](SagaBuilder::within) | is the database of the records | is repeated: what did not commit with the log did not happen |
//!
//! 4. The key of a step, [`StepContext::key`], is the same in every try, process and version of the
//!    definition. That of its undo is another one.
//! 5. If the flow returns an error, or the saga is cancelled, every step that happened or may have
//!    happened is undone, in reverse order, one at a time. No step runs forward after that. Then the
//!    error is the outcome, and is replayed like an output.
//! 6. A step of which it is unknown whether it happened is undone once its last try can no longer take
//!    effect ([`settle`](StepBuilder::settle)). Its undo gets [`StepEffect::Unknown`], unless the reconcile
//!    function knows.
//! 7. At most one process calls steps of a saga at a time. One that was frozen, or whose machine was
//!    suspended, until its lease may have lapsed calls nothing until it has renewed it. A call that was frozen
//!    in its middle past its timeout goes no further. [`StepContext::fence`] grows with each takeover, for
//!    systems that can reject an earlier one.
//! 8. A saga that cannot continue is stuck: with the step, the reason, the last error and the time.
//!    No step of it runs until an operator decides ([`SagaOperator`]). Others continue: of those whose
//!    last two executions ended with their process, one runs at a time, so that one that ends its
//!    process makes no other one stuck.
//! 9. A saga that waits for more than ten seconds ([`park_after`](SagaBuilder::park_after)) is parked.
//!    It has no task then and costs no renewal. [`FlowContext::sleep`] and [`FlowContext::signal`]
//!    survive restarts; the first signal of a name counts. Signals and cancellations belong to one
//!    saga: the next one under its key does not receive them.
//!
//! # Not promised
//! - *A kind that is not true.* A `keyed` step has a second effect if its system forgets the key before
//!   the lifetime that the definition states, an `again` step if it may not be repeated.
//! - *Isolation.* Other sagas and readers see the effects of steps before the end, and before an undo.
//! - *That an undo restores the past.* It is an action of its own, and may fail; it is tried for a day,
//!   and then the saga is stuck. [`StepEffect::Unknown`] must be right if nothing happened, and must ensure
//!   that nothing will: a call under the step's key may still be on its way.
//! - *A flow that differs between two runs.* Times, random values, look-ups, configuration and the
//!   order of a `HashSet` or of what iterates over a `HashMap` are steps, or sorted; a `HashMap` as an
//!   argument is compared without its order. A difference that shows in a request makes the saga stuck
//!   before anything is called; one that shows in no request is not detected. The feature `rehearsal`
//!   finds both in tests.
//! - *Progress without a process.* A version whose last process has ended leaves its sagas unfinished:
//!   [`SagaOperator::definitions`] lists them.
//! - *That nothing is sent by a task which a step has spawned*, once its call has ended or was given up: a step
//!   awaits what it starts.
//! - *A suspended machine whose wall clock is not set afterwards*, such as a virtual machine without a time
//!   service: leases seem held and keys young. A wall clock that steps forward makes keys older, ends pauses and
//!   settle times in progress early, and gives up calls in progress if it steps by more than their timeout. A pause
//!   that is set after the step may last longer by it.
//! - *More than the store promises.* With a record that the store loses, the saga is lost, and the same
//!   start begins another one.
//!
//! # Limits
//! | limit | value | beyond it |
//! | --- | --- | --- |
//! | input | 2 MiB | the start is rejected |
//! | argument, prepared value, result or error of a step | 64 KiB ([`max_value`](SagaBuilder::max_value)) | stuck; a result that is too large is resolved by an operator |
//! | error of a flow | the larger of `max_value` and `max_log` | stuck |
//! | log | 256 KiB ([`max_log`](SagaBuilder::max_log), at most 1 MiB), 1,000 steps | stuck: split the saga |
//! | executions without progress (a crash, a lost lease) | 5 in a row | stuck |
//! | tries of a step | 20 within an hour ([`StepRetry`]) | reconcile, or stuck |
//! | calls of a reconcile function | as many, within as long a time | stuck; on the way back the undo gets [`StepEffect::Unknown`] |
//! | signal that no wait has received | 365 days | it is lost |
//! | sagas of a process that run | 64 ([`SagasBuilder::max_running`]) | they wait in the schedule |
//! | outcome | 30 days ([`retention`](SagaBuilder::retention)), at least ten leases | the key is free |
//!
//! A step costs one write of the log, a `once` step two; start and end cost four.
//!
//! # Example
//! ```
//! use std::time::Duration;
//! use hapax_core::{Idempotency, Key, MemoryStore, Scope};
//! use hapax_saga::{StepContext, Saga, Sagas, StepError, StepEffect, UndoError};
//! use serde::{Deserialize, Serialize};
//!
//! const DAY: Duration = Duration::from_secs(24 * 60 * 60);
//!
//! /// Clients of the systems that the steps call.
//! struct Clients;
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! enum Rejection { SoldOut, Declined }
//!
//! async fn reserve(_: StepContext<Clients>, article: String) -> Result<u32, StepError<Rejection>> {
//!     if article == "none" { Err(StepError::Rejected(Rejection::SoldOut)) } else { Ok(17) }
//! }
//!
//! async fn free(_: StepContext<Clients>, _article: String, _place: StepEffect<u32>) -> Result<(), UndoError> {
//!     Ok(())
//! }
//!
//! async fn charge(at: StepContext<Clients>, cents: u64) -> Result<String, StepError<Rejection>> {
//!     // The bank has one charge for each key. An error of the connection would be
//!     // `StepError::not_sent` or `StepError::unknown`, and the step is tried again.
//!     let _key = at.key();
//!     if cents == 13 { Err(StepError::Rejected(Rejection::Declined)) } else { Ok(format!("ch_{cents}")) }
//! }
//!
//! async fn refund(_: StepContext<Clients>, _cents: u64, charge: StepEffect<String>) -> Result<(), UndoError> {
//!     match charge {
//!         StepEffect::Happened(_id) => Ok(()), // refund it
//!         StepEffect::Unknown => Ok(()),       // void the key of the charge, whether or not there is one
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut order = Saga::define("place-order", 1, Clients);
//! let reserve = order.keyed("reserve", DAY, reserve).undo(free);
//! let charge = order.keyed("charge", DAY, charge).undo(refund);
//! let order = order.flow(move |op, (article, cents): (String, u64)| async move {
//!     let place = op.run(reserve, article).await?;
//!     let charge = op.run(charge, cents).await?;
//!     Ok::<_, Rejection>(format!("{charge} from place {place}"))
//! })?;
//!
//! let engine = Idempotency::builder(MemoryStore::default()).build()?;
//! let sagas = Sagas::builder(engine).register(&order).build()?;
//! let driving = sagas.clone();
//! tokio::spawn(async move { driving.run(std::future::pending(), DAY).await });
//!
//! let customer = Scope::of([("customer", "c-1")]);
//! let (key, input): (Key, _) = ("order-17".parse()?, ("lamp".to_owned(), 1999));
//! for _ in 0..2 {
//!     let started = sagas.start(&order, &customer, &key, &input).await?;
//!     assert_eq!(started.outcome().await?, "ch_1999 from place 17");
//! }
//!
//! // Declined: the place is free again, and the error is the outcome.
//! let (key, input): (Key, _) = ("order-18".parse()?, ("lamp".to_owned(), 13));
//! let started = sagas.start(&order, &customer, &key, &input).await?;
//! let declined = started.outcome().await.unwrap_err();
//! assert!(declined.to_string().contains("were undone"));
//! # Ok(())
//! # }
//! ```
//!
//! # Operation
//! [`Sagas::stats`] has the counters of a process by definition and step, [`SagaOperator::census`]
//! those of a store; both as text for Prometheus. Each execution has a span `saga`, and each call of a step, an undo or a reconcile
//! function a span `call`, with definition, operation id, step and try, and without keys, scopes and
//! contents.

mod admission;
mod aside;
mod call;
mod census;
mod clock;
mod definition;
mod driver;
mod error;
mod flow;
mod handle;
#[doc(hidden)]
pub mod log;
mod metrics;
mod node;
mod note;
mod operator;
#[cfg(feature = "rehearsal")]
pub mod rehearsal;
mod retry;
#[cfg(feature = "axum")]
pub mod routes;
#[doc(hidden)]
pub mod run;
mod sagas;
mod schedule;
mod stats;
mod unfinished;

pub use admission::AdmissionDenied;
pub use call::{StepContext, StepEffect, StepError, UndoError};
pub use census::{SagaCensus, SagaCensusStep};
pub use definition::{Saga, SagaBuilder, StepBuilder};
pub use error::{DefinitionError, SagaError, SagaStartError, SagasBuildError, SignalError};
pub use flow::{FlowContext, StepHandle};
pub use handle::SagaHandle;
pub use log::StuckReason;
pub use note::EndedStep;
pub use operator::{
    DecisionMismatch, EndedSaga, SagaDecision, SagaLookup, SagaOperator, SagaOperatorError,
    SagaView, UnacceptedStart,
};
pub use retry::StepRetry;
pub use sagas::{Sagas, SagasBuilder};
pub use stats::{DefinitionStats, SagaStats, StepStats};
pub use unfinished::{UnfinishedPage, UnreadableSaga};

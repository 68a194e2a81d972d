//! Sagas: several steps under one idempotency key, resumed after a crash, with compensation.

mod census;
mod clock;
mod definition;
mod driver;
#[cfg(feature = "axum")]
pub mod endpoint;
mod flow;
#[doc(hidden)]
pub mod log;
mod node;
mod note;
mod operator;
#[cfg(feature = "rehearsal")]
pub mod rehearsal;
mod retry;
#[doc(hidden)]
pub mod run;
mod sagas;
mod schedule;
mod stats;

pub use census::{SagaCensus, SagaCensusStep};
pub use definition::{
    At, DefinitionError, Saga, SagaBuilder, Source, StepBuilder, StepError, Undo, UndoError,
};
pub use flow::{Op, Step};
pub use note::HistoryStep;
pub use operator::{
    DecisionMismatch, SagaDecision, SagaLookup, SagaOperator, SagaOperatorError, SagaView,
};
pub use retry::Retry;
pub use sagas::{SagaError, Sagas, SagasBuilder, SagasError, SignalError, StartError, Started};
pub use stats::{DefinitionStats, SagaStats, StepStats};

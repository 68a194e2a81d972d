//! Sagas: several steps under one idempotency key, resumed after a crash, with compensation.

mod definition;
mod flow;
#[doc(hidden)]
pub mod log;
mod note;
mod retry;
#[doc(hidden)]
pub mod run;

pub use definition::{
    At, DefinitionError, Saga, SagaBuilder, Source, StepBuilder, StepError, Undo, UndoError,
};
pub use flow::{Op, Step};
pub use note::HistoryStep;
pub use retry::Retry;

//! What is kept of a function's answer, and what becomes of it when it is asked for again.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::execution::ExecutionEnd;
use super::declared::Errors;
use super::error::RunError;
use crate::codec::MAX_OUTCOME;
use crate::record::Outcome;
use crate::record::OutcomeClass;
use crate::value::{self, ValueError};

/// A value, in the bytes of `crate::value`. Another way of writing them is another name.
const VALUE: &str = "function/1";
/// Likewise an error that is an answer.
const ERROR: &str = "function-error/1";
/// Why nothing is kept, as text.
const NOTHING: &str = "function-nothing/1";

pub(super) fn of_value<T: Serialize>(value: &T) -> Outcome {
    kept(VALUE, value::write(value, MAX_OUTCOME))
}

pub(super) fn of_error<E: Serialize>(error: &E) -> Outcome {
    kept(ERROR, value::write(error, MAX_OUTCOME))
}

/// It happened, whether or not its answer can be kept: what is recorded then is that.
fn kept(format: &'static str, written: Result<Bytes, ValueError>) -> Outcome {
    match written {
        Ok(bytes) => Outcome::new(format, bytes),
        Err(error) => {
            // Not in the log: it may quote what was answered.
            tracing::warn!(format, "what a function answered cannot be kept, nor replayed");
            let why: String = error.to_string().chars().take(256).collect();
            Outcome::new(NOTHING, why)
        }
    }
}

/// What was kept, as the call would have got it.
pub(super) fn replayed<T: DeserializeOwned, E>(
    outcome: &Outcome,
    errors: Option<&Errors<E>>,
) -> Result<Result<T, E>, RunError<T, E>> {
    let undecodable = |why: String| {
        // Not why: that may quote what was kept.
        tracing::error!(format = outcome.format(), "what was kept cannot be replayed");
        RunError::Undecodable { format: outcome.format().to_owned(), why }
    };
    match (outcome.format(), errors.and_then(|errors| errors.keep.as_ref())) {
        (VALUE, _) => {
            let value = value::read(outcome.bytes());
            value.map(Ok).map_err(|error| undecodable(error.to_string()))
        }
        (ERROR, Some(keep)) => {
            let error = (keep.read)(outcome.bytes());
            error.map(Err).map_err(|error| undecodable(error.to_string()))
        }
        (ERROR, None) => Err(undecodable("it is an error, and errors are not kept here".into())),
        (NOTHING, _) => Err(RunError::NotRetained {
            why: String::from_utf8_lossy(outcome.bytes()).into_owned(),
        }),
        _ => {
            Err(undecodable("it was kept by something that is no function of this version".into()))
        }
    }
}

/// What an execution's result means for its key.
pub(super) fn judge<T: Serialize, E>(
    result: &Result<T, E>,
    errors: Option<&Errors<E>>,
) -> (OutcomeClass, ExecutionEnd) {
    let complete = |outcome| ExecutionEnd::Complete { outcome, retention: None };
    match (result, errors) {
        (Ok(value), _) => (OutcomeClass::Final, complete(of_value(value))),
        (Err(_), None) => (OutcomeClass::Unknown, ExecutionEnd::Abandon { seen: None }),
        (Err(error), Some(errors)) => {
            let kept = || errors.keep.as_ref().map(|keep| (keep.write)(error));
            match (errors.class)(error) {
                OutcomeClass::Final => match kept() {
                    Some(outcome) => (OutcomeClass::Final, complete(outcome)),
                    None => (OutcomeClass::Unknown, ExecutionEnd::Abandon { seen: None }),
                },
                OutcomeClass::Retryable => (OutcomeClass::Retryable, ExecutionEnd::Release),
                OutcomeClass::Unknown => {
                    (OutcomeClass::Unknown, ExecutionEnd::Abandon { seen: kept() })
                }
            }
        }
    }
}

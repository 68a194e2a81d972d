//! The stored results of functions, and their replay.

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

/// Format of values, in the encoding of `crate::value`. Another encoding needs another name.
const VALUE: &str = "function/1";
/// Format of final errors, in the same encoding.
const ERROR: &str = "function-error/1";
/// Format of a text that states why no value is stored.
const NOTHING: &str = "function-nothing/1";

pub(super) fn of_value<T: Serialize>(value: &T) -> Outcome {
    kept(VALUE, value::write(value, MAX_OUTCOME))
}

pub(super) fn of_error<E: Serialize>(error: &E) -> Outcome {
    kept(ERROR, value::write(error, MAX_OUTCOME))
}

/// Returns the outcome of an operation that happened, even if its value cannot be stored.
fn kept(format: &'static str, written: Result<Bytes, ValueError>) -> Outcome {
    match written {
        Ok(bytes) => Outcome::new(format, bytes),
        Err(error) => {
            // The cause is not logged: it may quote the value.
            tracing::warn!(
                format,
                "the value of a function cannot be stored, so it will not be replayed"
            );
            let why: String = error.to_string().chars().take(256).collect();
            Outcome::new(NOTHING, why)
        }
    }
}

/// Returns the stored result, as the first call got it.
pub(super) fn replayed<T: DeserializeOwned, E>(
    outcome: &Outcome,
    errors: Option<&Errors<E>>,
) -> Result<Result<T, E>, RunError<T, E>> {
    let undecodable = |why: String| {
        // The cause is not logged: it may quote the stored value.
        tracing::error!(format = outcome.format(), "a stored value cannot be replayed");
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
        (ERROR, None) => {
            Err(undecodable("it is an error, and this function does not store errors".into()))
        }
        (NOTHING, _) => Err(RunError::NotRetained {
            why: String::from_utf8_lossy(outcome.bytes()).into_owned(),
        }),
        _ => Err(undecodable("it is no value of a function of this version".into())),
    }
}

/// Returns the class of a result, and the end of its execution.
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

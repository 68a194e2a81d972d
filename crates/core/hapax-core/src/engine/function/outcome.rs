//! Stored outcomes of functions, and their replay.

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

/// Format of a value, in the bytes of `crate::value`. Another encoding gets another name.
const VALUE: &str = "function/1";
/// Format of a final error, in the same bytes.
const ERROR: &str = "function-error/1";
/// Format of a result that could not be stored: the reason as text.
const NOTHING: &str = "function-nothing/1";

pub(super) fn value_outcome<T: Serialize>(value: &T) -> Outcome {
    outcome(VALUE, value::write(value, MAX_OUTCOME))
}

pub(super) fn error_outcome<E: Serialize>(error: &E) -> Outcome {
    outcome(ERROR, value::write(error, MAX_OUTCOME))
}

/// Returns the outcome to store. The operation happened even if its result cannot be stored: then
/// the reason is stored.
fn outcome(format: &'static str, written: Result<Bytes, ValueError>) -> Outcome {
    match written {
        Ok(bytes) => Outcome::new(format, bytes),
        Err(error) => {
            // The reason is not logged: it may quote the result.
            tracing::warn!(format, "the result of a function cannot be stored, nor replayed");
            let why: String = error.to_string().chars().take(256).collect();
            Outcome::new(NOTHING, why)
        }
    }
}

/// Returns the stored result, as the first call returned it.
pub(super) fn replayed<T: DeserializeOwned, E>(
    outcome: &Outcome,
    errors: Option<&Errors<E>>,
) -> Result<Result<T, E>, RunError<T, E>> {
    let undecodable = |why: String| {
        // The reason is not logged: it may quote the outcome.
        tracing::error!(format = outcome.format(), "a stored outcome cannot be replayed");
        RunError::Undecodable { format: outcome.format().to_owned(), why }
    };
    match (outcome.format(), errors.and_then(|errors| errors.codec.as_ref())) {
        (VALUE, _) => {
            let value = value::read(outcome.bytes());
            value.map(Ok).map_err(|error| undecodable(error.to_string()))
        }
        (ERROR, Some(codec)) => {
            let error = (codec.read)(outcome.bytes());
            error.map(Err).map_err(|error| undecodable(error.to_string()))
        }
        (ERROR, None) => Err(undecodable(
            "it is an error, and this function stores none: declare `classify`".into(),
        )),
        (NOTHING, _) => Err(RunError::NotRetained {
            why: String::from_utf8_lossy(outcome.bytes()).into_owned(),
        }),
        _ => Err(undecodable("no function of this version wrote it".into())),
    }
}

/// Returns the class of a result, and the end of its execution.
pub(super) fn classify<T: Serialize, E>(
    result: &Result<T, E>,
    errors: Option<&Errors<E>>,
) -> (OutcomeClass, ExecutionEnd) {
    let complete = |outcome| ExecutionEnd::Complete { outcome, retention: None };
    match (result, errors) {
        (Ok(value), _) => (OutcomeClass::Final, complete(value_outcome(value))),
        (Err(_), None) => (OutcomeClass::Unknown, ExecutionEnd::Abandon { seen: None }),
        (Err(error), Some(errors)) => {
            let stored = || errors.codec.as_ref().map(|codec| (codec.write)(error));
            match (errors.class)(error) {
                OutcomeClass::Final => match stored() {
                    Some(outcome) => (OutcomeClass::Final, complete(outcome)),
                    None => (OutcomeClass::Unknown, ExecutionEnd::Abandon { seen: None }),
                },
                OutcomeClass::Retryable => (OutcomeClass::Retryable, ExecutionEnd::Release),
                OutcomeClass::Unknown => {
                    (OutcomeClass::Unknown, ExecutionEnd::Abandon { seen: stored() })
                }
            }
        }
    }
}

//! Errors of the database as errors of a batch.

use std::error::Error as StdError;

use hapax_messages::{BatchError, MessageFailure};
use hapax_postgres_data::StatementError;

pub(super) fn unavailable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> BatchError {
    BatchError::Unavailable(error.into())
}

pub(super) fn failed(error: StatementError) -> BatchError {
    match error {
        error if error.is("55P03") => BatchError::InProgress,
        error if error.is("40001") || error.is("40P01") => BatchError::Aborted(error.into()),
        error => unavailable(error),
    }
}

/// Returns whether an error of a handler, or a source of it, states that the database
/// aborted its transaction.
pub(super) fn is_aborted(error: &(dyn StdError + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| (**error).source());
    causes.any(|cause| {
        let code = cause.downcast_ref::<tokio_postgres::Error>().and_then(|error| error.code());
        code.is_some_and(|code| ["40001", "40P01"].contains(&code.code()))
            || cause
                .downcast_ref::<StatementError>()
                .is_some_and(|error| error.is("40001") || error.is("40P01"))
            || is_aborted_of_sqlx(cause)
    })
}

#[cfg(feature = "sqlx")]
fn is_aborted_of_sqlx(error: &(dyn StdError + 'static)) -> bool {
    let database = error.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    database
        .and_then(sqlx::error::DatabaseError::code)
        .is_some_and(|code| ["40001", "40P01"].contains(&&*code))
}

#[cfg(not(feature = "sqlx"))]
const fn is_aborted_of_sqlx(_: &(dyn StdError + 'static)) -> bool {
    false
}

/// Returns the error of a statement that this inbox runs after the handler, or of COMMIT. If the
/// server rejected it, the transaction had failed in the handler, which ignored that, or a deferred
/// constraint rejects its rows; else the connection is lost.
pub(super) fn handler_error(error: StatementError) -> BatchError {
    match failed(error) {
        BatchError::Unavailable(error)
            if matches!(error.downcast_ref(), Some(StatementError::Rejected(_))) =>
        {
            BatchError::Handler(MessageFailure::retry(error))
        }
        other => other,
    }
}

pub(super) fn other_rows() -> BatchError {
    unavailable(
        "expected the rows of the inbox's functions, found others: run the SQL of `hapax sql`",
    )
}

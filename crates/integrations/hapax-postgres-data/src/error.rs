//! Errors, and the state of the data after each.

use std::error::Error;

/// A driver's error.
pub type DriverError = Box<dyn Error + Send + Sync>;

/// An error of the server, by its code.
#[derive(Debug, thiserror::Error)]
#[error("the database rejected the statement ({code}): {message}")]
pub struct ServerError {
    /// The SQLSTATE.
    pub code: String,
    /// The message, in the language of the server.
    pub message: String,
    /// The constraint that was violated, if one was.
    pub constraint: Option<String>,
    /// The driver's error.
    #[source]
    pub source: DriverError,
}

/// Errors of a call.
///
/// Where the server answered with an error (all that have a [`ServerError`]), that statement did
/// nothing, and a transaction is over; on a plain connection earlier statements of the same call
/// were committed, and calling again finds what they did. After [`Lost`](Self::Lost),
/// [`Contended`](Self::Contended), [`NoUniqueConstraint`](Self::NoUniqueConstraint),
/// [`NoVersion`](Self::NoVersion), [`Row`](Self::Row) and [`OtherRows`](Self::OtherRows) the writes
/// of the call may have been made; in a transaction, roll back to undo them. After any other error
/// nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// An item does not fit the layout; nothing was sent.
    #[error("item {index}: {problem}")]
    Item {
        /// The index of the item, from 0.
        index: usize,
        /// The reason.
        #[source]
        problem: ItemError,
    },
    /// More than [`BatchLimits::items`](crate::BatchLimits::items) items; nothing was sent.
    #[error("expected at most {most} items in a call, found {items}: split the call")]
    TooMany {
        /// How many.
        items: usize,
        /// How many may be.
        most: usize,
    },
    /// More than [`BatchLimits::bytes`](crate::BatchLimits::bytes); nothing was sent.
    #[error("expected at most {most} bytes in a call, found {bytes}: split the call")]
    TooLarge {
        /// How many.
        bytes: usize,
        /// How many may be.
        most: usize,
    },
    /// The table does not have the unique constraint that this rests on (SQLSTATE 42P10): none, or one
    /// that takes other values for equal than the columns do, by a collation of its own. Or two
    /// rows have one key: in a table that lost its constraint; or, under REPEATABLE READ and
    /// SERIALIZABLE, where a transaction has written what others have deleted and it still sees.
    #[error(
        "{table} needs a unique constraint on exactly ({columns}), not deferrable, not partial, by \
         the columns' own collations"
    )]
    NoUniqueConstraint {
        /// The table, quoted.
        table: String,
        /// The columns, quoted.
        columns: String,
    },
    /// `json` or `jsonb` that is [read as text](crate::Column::read_as_text) and written too; nothing
    /// was sent but a question about the table.
    #[error("{column} of {table} is JSON, which is not written as text: do not read it as text")]
    JsonAsText {
        /// The table, quoted.
        table: String,
        /// The column.
        column: String,
    },
    /// Another unique constraint than that of the layout does not allow the row (SQLSTATE 23505).
    #[error("the unique constraint {constraint:?} does not allow it")]
    UniqueViolation {
        /// The item of a batch of rows, from 0. Without it, and with other faults, the same call
        /// has results for the others. Unknown for events.
        item: Option<usize>,
        /// Its name.
        constraint: String,
        /// The error of the server.
        #[source]
        source: Box<ServerError>,
    },
    /// The server rolled the transaction back in favour of another: under REPEATABLE READ and
    /// SERIALIZABLE it began before what it meets was committed, and does not see it (SQLSTATE
    /// 40001); or there was a deadlock (40P01). Run the transaction again, from BEGIN. On a plain
    /// connection the call did that by itself, and gave up. (If others have taken a position
    /// without a conflict, results describe an earlier state: see [the crate](crate#isolation).)
    #[error(
        "the server rolled the transaction back in favour of another: run it again from BEGIN ({0})"
    )]
    Again(#[source] ServerError),
    /// No round out of [`BatchLimits::rounds`](crate::BatchLimits::rounds) had a result: other
    /// transactions deleted the conflicting rows each time, or the conflicting row is not visible
    /// here, for instance because of row level security or a trigger that drops rows.
    #[error(
        "no result in {rounds} rounds, because other transactions changed the same rows: retry"
    )]
    Contended {
        /// How many.
        rounds: u32,
    },
    /// The server rejected the statement for another reason.
    #[error(transparent)]
    Rejected(ServerError),
    /// The connection was lost, or the server does not report the result (SQLSTATE 40003). On a
    /// plain connection the statement may have been executed, or may still be: call again.
    #[error("the connection to the database is lost")]
    Lost(#[source] DriverError),
    /// A row cannot be deserialized as the requested type.
    #[error("a row cannot be read: {0}")]
    Row(#[source] serde_json::Error),
    /// The result does not belong to the statement: a trigger or a rule changes keys.
    #[error(
        "expected the rows of the given keys, found others: remove the trigger or rule that changes keys"
    )]
    OtherRows,
    /// A row has no version: null, or below 0.
    #[error(
        "expected a version of at least 0, found {0:?}: make the column NOT NULL and correct the row"
    )]
    NoVersion(Option<String>),
    /// The id of the operation was used before, for another row, another table or another
    /// [request](crate::UpdateId::for_request).
    #[error("the operation id {0:?} was used for another row or request: use a new id")]
    OperationReused(String),
}

/// Reasons for which an item does not fit its layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ItemError {
    /// The item cannot be serialized as JSON.
    #[error("it cannot be written as JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// The request of an operation cannot be compared.
    #[error("it has no canonical form: {0}")]
    NoCanonicalForm(#[source] hapax_core::CanonicalValueError),
    /// The item is no struct or map.
    #[error("the item is no struct or map")]
    NotAnObject,
    /// The item has no field for a column of the layout. For a null, the field must be present with
    /// a null.
    #[error("it has no field {0:?}")]
    Missing(String),
    /// A field of it is no column of the layout.
    #[error("its field {0:?} is no column of the layout")]
    Unknown(String),
    /// A column of the key is null, and nulls are not unique.
    #[error("{0:?} is null, and is part of the key")]
    NullKey(String),
    /// Two events of one call have the same id.
    #[error("an earlier event has the same id")]
    DuplicateId,
    /// A version or position past what `bigint` holds.
    #[error("a position past 2⁶³ - 1")]
    Position,
    /// The change modified the key.
    #[error("its key was changed")]
    KeyChanged,
}

impl ItemError {
    pub(crate) const fn at(self, index: usize) -> DataError {
        DataError::Item { index, problem: self }
    }
}

/// Errors of a statement.
#[derive(Debug, thiserror::Error)]
pub enum StatementError {
    /// The server rejected the statement, which did nothing. The connection is good.
    #[error(transparent)]
    Rejected(ServerError),
    /// The connection is lost: it is unknown whether the statement was executed.
    #[error("the connection to the database is lost: {0}")]
    Lost(#[source] DriverError),
}

/// SQLSTATE of a statement in a transaction that has failed already.
const IN_FAILED_TRANSACTION: &str = "25P02";
const UNIQUE_VIOLATION: &str = "23505";
const NO_SUCH_CONSTRAINT: &str = "42P10";

impl StatementError {
    /// Classifies an error of the server; `is_error` is true if its severity is ERROR, so that the
    /// connection is good.
    ///
    /// By code and severity alone, because texts are translated. A server, or a pooler between,
    /// that ends the connection (FATAL, PANIC; 08, 57P) does not report the result of the
    /// statement; 40003 says that it is unknown.
    #[must_use]
    pub fn of(server: ServerError, is_error: bool) -> Self {
        let unknown = ["08", "57P", "40003"].iter().any(|code| server.code.starts_with(code));
        if is_error && !unknown { Self::Rejected(server) } else { Self::Lost(server.source) }
    }

    /// Returns whether the server rejected the statement with this SQLSTATE.
    #[must_use]
    pub fn is(&self, code: &str) -> bool {
        matches!(self, Self::Rejected(server) if server.code == code)
    }

    pub(crate) fn lacks_constraint(&self) -> bool {
        self.is(NO_SUCH_CONSTRAINT)
    }

    pub(crate) fn into_error(self) -> DataError {
        let server = match self {
            Self::Rejected(server) => server,
            Self::Lost(source) => return DataError::Lost(source),
        };
        match server.code.as_str() {
            "40001" | "40P01" => DataError::Again(server),
            UNIQUE_VIOLATION => {
                let constraint = server.constraint.clone().unwrap_or_default();
                DataError::UniqueViolation { item: None, constraint, source: server.into() }
            }
            _ => DataError::Rejected(server),
        }
    }
}

impl DataError {
    /// Returns whether another attempt may succeed. Besides races, that includes temporary
    /// rejections: locks, timeouts of the server, resources.
    pub(crate) fn passes(&self) -> bool {
        match self {
            Self::Again(_) | Self::Lost(_) => true,
            Self::Rejected(ServerError { code, .. }) => {
                matches!(&code[..], "55P03" | "57014") || code.starts_with("53")
            }
            _ => false,
        }
    }
}

/// Lost races; the last one is the error if there is no better one.
///
/// After a race a plain connection tries again. Within a transaction the next statement fails
/// (25P02), and the race is the error: so the caller need not distinguish whether there is a
/// transaction.
#[derive(Debug, Default)]
pub(crate) struct LostRaces(Option<DataError>);

impl LostRaces {
    /// Records a failure after which another attempt may succeed.
    ///
    /// # Errors
    /// Returns any other failure as an error.
    pub(crate) fn lost(&mut self, failure: StatementError) -> Result<(), DataError> {
        self.lost_by(failure, None)
    }

    /// The same of a statement that was about one item.
    pub(crate) fn lost_by(
        &mut self,
        failure: StatementError,
        about: Option<usize>,
    ) -> Result<(), DataError> {
        if failure.is(IN_FAILED_TRANSACTION)
            && let Some(race) = self.0.take()
        {
            return Err(race);
        }
        let mut error = failure.into_error();
        if let DataError::UniqueViolation { item, .. } = &mut error {
            *item = about;
        }
        match error {
            race @ (DataError::Again(_) | DataError::UniqueViolation { .. }) => {
                self.0 = Some(race);
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Clears the race: the conflicting row is a duplicate of the item.
    pub(crate) fn explained(&mut self) {
        self.0.take_if(|race| matches!(race, DataError::UniqueViolation { .. }));
    }

    /// A unique constraint that is not ours was in the way of a statement that the constraint of
    /// the layout was not.
    pub(crate) fn violation(&mut self) -> Result<(), DataError> {
        match self.0.take() {
            Some(violation @ DataError::UniqueViolation { .. }) => Err(violation),
            other => {
                self.0 = other;
                Ok(())
            }
        }
    }

    pub(crate) fn into_error(self, rounds: u32) -> DataError {
        self.0.unwrap_or(DataError::Contended { rounds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_ends_the_connection_leaves_the_result_unknown() {
        let refused = |code: &str, is_error| {
            let (code, message, source) = (code.into(), String::new(), "it".into());
            let server = ServerError { code, message, constraint: None, source };
            matches!(StatementError::of(server, is_error), StatementError::Rejected(_))
        };
        for code in ["40001", "57014", "53100"] {
            assert!(refused(code, true) && !refused(code, false), "{code}");
        }
        // Of a pooler, as an error, too.
        for code in ["08006", "08P01", "57P01", "57P03", "40003"] {
            assert!(!refused(code, true), "{code}");
        }
    }
}

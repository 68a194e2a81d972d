//! Updates that happen once, by the id of the operation.

mod id;
mod retrying;
mod statements;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use self::id::UpdateId;
pub use self::retrying::{Retried, RetryError};
use self::statements::Statements;
use crate::error::{DataError, LostRaces};
use crate::executor::{Executor, Rows, TextQueries as _};
use crate::items::{number, row, text};
use crate::layout::{Column, LayoutError, TableName, check_columns};
use crate::verified::{Check, Verified};
use crate::versioned::{VersionedRow, VersionedRows, made, sent, version};

/// Result of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum IdentifiedUpdate<R> {
    /// The row was updated, by this call.
    Applied {
        /// The version that it has now.
        version: u64,
    },
    /// The row was updated before, by this operation. Nothing was written now, whatever the item.
    AlreadyApplied {
        /// The version that it had after that.
        version: u64,
    },
    /// There is no such row.
    NotFound,
    /// The row has another version than the expected one, and not by this operation. Nothing was
    /// written.
    Conflict {
        /// The row that is there.
        current: VersionedRow<R>,
    },
}

/// Updates of [`VersionedRows`] with ids, which are written in the statement that updates the row.
/// A caller that gets no reply calls again with the same id, and with the row's present version,
/// and the update is applied once.
///
/// Ids are kept in a table of the caller's, one for any number of tables of rows: the id, of any type,
/// unique; what it was used for, as JSON in a `text`: the table with its schema, the row's key, and what
/// was [asked](UpdateId::for_request); the version that it made, a `bigint`.
///
/// ```sql
/// CREATE TABLE operations (operation text PRIMARY KEY, target text NOT NULL, version bigint NOT NULL,
///     at timestamptz NOT NULL DEFAULT now());
/// ```
///
/// Delete ids that are older than the longest time after which a caller retries. If a table or the
/// columns of its key are renamed, earlier ids count as ids of other operations.
///
/// # Guarantees
/// - Those of [`VersionedRows`].
/// - An id is stored if and only if its update is made: one statement does both.
/// - This suffices after a lost reply, even if the statement is still in progress, because the
///   statement expects a version. If it is executed before the operation is sent again, the
///   repetition finds the id. If it is executed afterwards, it finds another version and does
///   nothing.
/// - The same id for another row, of this table or another, or for another
///   [request](UpdateId::for_request), is [`DataError::OperationReused`], and changes nothing.
#[derive(Debug)]
pub struct UpdateLog {
    rows: VersionedRows,
    layout: UpdateLogBuilder,
    statements: Statements,
    verified: Verified,
}

/// Collects the columns of [`UpdateLog`].
#[derive(Clone, Debug)]
pub struct UpdateLogBuilder {
    table: TableName,
    operation: Column,
    target: Column,
    version: Column,
}

/// The result of `look`, from one snapshot of the tables.
#[derive(Debug)]
enum Seen<R> {
    Noted(u64),
    Nothing,
    There(VersionedRow<R>),
}

impl UpdateLog {
    /// Begins with the table of ids; its columns are `operation`, `target` and `version` unless
    /// others are named.
    #[must_use]
    pub fn in_table(table: TableName) -> UpdateLogBuilder {
        let [operation, target, version] = ["operation", "target", "version"].map(Column::from);
        UpdateLogBuilder { table, operation, target, version }
    }

    /// Returns the layout of the rows, to load rows or to update them without an id.
    #[must_use]
    pub const fn rows(&self) -> &VersionedRows {
        &self.rows
    }

    /// Returns the statements by name. Their parameters are the item as a JSON object; for
    /// `update`, the expected version; the operation id as a JSON object; the fingerprint of the
    /// request, or an empty text.
    #[must_use]
    pub fn sql(&self) -> [(&'static str, &str); 2] {
        [("update", &self.statements.update), ("look", &self.statements.look)]
    }

    /// Has the server plan the statements, without running them. The first update does it anyway;
    /// at the start of a service it shows earlier what is missing.
    ///
    /// # Errors
    /// [`DataError::NoUniqueConstraint`], [`DataError::JsonAsText`], [`DataError::Rejected`],
    /// [`DataError::Lost`].
    pub async fn verify(&self, mut executor: impl Executor) -> Result<(), DataError> {
        self.verified.now(&mut executor).await
    }

    /// Updates the fields of the row with the item's key, if its version is `expected` and the
    /// operation was not applied before. In a transaction, the id commits with it.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn update<T, R>(
        &self,
        mut executor: impl Executor,
        operation: impl Into<UpdateId>,
        expected: u64,
        item: &T,
    ) -> Result<IdentifiedUpdate<R>, DataError>
    where
        T: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let fields = self.rows.shape.fields(item).map_err(|problem| problem.at(0))?;
        let (item, version, operation) =
            (self.rows.item(&fields)?, sent(expected)?, operation.into());
        let (id, asked) = (self.id(&operation), operation.request_fingerprint());
        self.verified.once(&mut executor).await?;
        let mut races = LostRaces::default();
        let rounds = self.rows.shape.limits.rounds;
        for _ in 0..rounds {
            match executor.query(&self.statements.update, &[&item, &version, &id, &asked]).await {
                Ok(rows) => {
                    if let Some(version) = made(&rows)? {
                        return Ok(IdentifiedUpdate::Applied { version });
                    }
                }
                Err(failure) => races.lost(failure)?,
            }
            match executor.query(&self.statements.look, &[&item, &id, &asked]).await {
                Ok(rows) => match seen(&rows, &operation)? {
                    Seen::Noted(version) => {
                        return Ok(IdentifiedUpdate::AlreadyApplied { version });
                    }
                    Seen::Nothing => return Ok(IdentifiedUpdate::NotFound),
                    Seen::There(current) if current.version != expected => {
                        return Ok(IdentifiedUpdate::Conflict { current });
                    }
                    Seen::There(_) => races.violation()?,
                },
                Err(failure) => races.lost(failure)?,
            }
        }
        Err(races.into_error(rounds))
    }

    fn id(&self, operation: &UpdateId) -> String {
        let id = (self.layout.operation.name.clone(), Value::from(operation.as_str()));
        Value::from_iter([id]).to_string()
    }
}

/// Result of `look`.
fn seen<R: DeserializeOwned>(rows: &Rows, operation: &UpdateId) -> Result<Seen<R>, DataError> {
    let there = rows.first().ok_or(DataError::OtherRows)?;
    if text(there, 1).is_some() {
        return Err(DataError::OperationReused(operation.as_str().into()));
    }
    if text(there, 0).is_some() {
        return number(there, 0).map(Seen::Noted).ok_or(DataError::OtherRows);
    }
    if text(there, 3).is_none() {
        return Ok(Seen::Nothing);
    }
    Ok(Seen::There(VersionedRow { version: version(there, 2)?, row: row(text(there, 3))? }))
}

impl UpdateLogBuilder {
    /// Sets the column of the id.
    #[must_use]
    pub fn operation(mut self, column: impl Into<Column>) -> Self {
        self.operation = column.into();
        self
    }

    /// Sets the column, of type `text`, that contains the target of an id as JSON: table, key and
    /// request.
    #[must_use]
    pub fn target(mut self, column: impl Into<Column>) -> Self {
        self.target = column.into();
        self
    }

    /// Sets the column, of type `bigint`, of the version that the operation created.
    #[must_use]
    pub fn version(mut self, column: impl Into<Column>) -> Self {
        self.version = column.into();
        self
    }

    /// Builds the log of updates of `rows`.
    ///
    /// # Errors
    /// [`LayoutError`], if names cannot be names, or one is there twice.
    pub fn of(self, rows: VersionedRows) -> Result<UpdateLog, LayoutError> {
        let Self { table, operation, target, version } = &self;
        table.check()?;
        check_columns([operation, target, version])?;
        let statements = Statements::new(&rows, &self);
        let (of, key) = (&rows.layout.table, &rows.layout.key);
        let mut checks = vec![
            Check::plan(&statements.update, ["{}", "0", "{}", ""], of, key),
            Check::plan(&statements.look, ["{}", "{}", ""], of, key),
            Check::unique(of, key),
            Check::unique(table, [operation]),
        ];
        checks.extend(Check::no_json_as_text(of, rows.layout.columns()));
        Ok(UpdateLog { verified: Verified::new(checks), rows, statements, layout: self })
    }
}

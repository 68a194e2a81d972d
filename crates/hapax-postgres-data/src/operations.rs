//! Updates that happen once, by the id of the operation.

mod retrying;

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::retrying::{Retried, RetryError};
use crate::error::{DataError, Races};
use crate::executor::Executor;
use crate::items::{number, row, text};
use crate::layout::{Column, LayoutError, Table, check_columns};
use crate::sql;
use crate::verified::{Check, Verified};
use crate::versioned::{Loaded, VersionedRows, version};

/// What became of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Operation<R> {
    /// The row was updated, by this call.
    Applied {
        /// The version that it has now.
        version: u64,
    },
    /// It was updated before, by this operation. Nothing was written.
    AlreadyApplied {
        /// The version that it had after that.
        version: u64,
    },
    /// There is no such row.
    NotFound,
    /// The row has another version than the expected one, and not by this operation. Nothing was
    /// written.
    Conflict {
        /// What is there.
        current: Loaded<R>,
    },
}

/// Updates of [`VersionedRows`] that each have an id, which is written in the statement that
/// updates the row. Whoever does not hear what became of an update asks again under the same id,
/// with whatever version the row has by then, and it is applied once.
///
/// Ids are kept in a table of the caller's, one for any number of tables of rows: the id, of any type,
/// unique; the row it was used for, as JSON in a `text`; the version that it made, a `bigint`.
///
/// ```sql
/// CREATE TABLE operations (operation text PRIMARY KEY, target text NOT NULL, version bigint NOT NULL,
///     at timestamptz NOT NULL DEFAULT now());
/// ```
///
/// Remove from it what is older than the longest time after which anybody asks again.
///
/// # Guarantees
/// - Those of [`VersionedRows`].
/// - An id is there if and only if its update is: they are one statement.
/// - Why that is enough after a lost reply, even where the statement is still on its way: it expects a
///   version. Either it is carried out before the same operation is sent again, which then
///   finds its id or another version; or afterwards, and then it finds another version.
/// - The same id for another row of the table is [`DataError::OperationReused`], and changes nothing.
#[derive(Debug)]
pub struct Operations {
    rows: VersionedRows,
    operation: Column,
    statements: Arc<Statements>,
    verified: Verified,
}

#[derive(Debug)]
struct Statements {
    update: String,
    look: String,
}

/// Collects the columns of [`Operations`].
#[derive(Clone, Debug)]
pub struct OperationsBuilder {
    table: Table,
    operation: Column,
    target: Column,
    version: Column,
}

/// What one view of the tables shows.
#[derive(Debug)]
enum Seen<R> {
    Noted(u64),
    Nothing,
    There(Loaded<R>),
}

impl Operations {
    /// Begins with the table of ids; its columns are `operation`, `target` and `version` unless
    /// others are named.
    #[must_use]
    pub fn in_table(table: Table) -> OperationsBuilder {
        let [operation, target, version] = ["operation", "target", "version"].map(Column::from);
        OperationsBuilder { table, operation, target, version }
    }

    /// The rows, to load them or to update them without an id.
    #[must_use]
    pub const fn rows(&self) -> &VersionedRows {
        &self.rows
    }

    /// The statements, each under a name. Their parameters are JSON objects: the item, with the
    /// expected version; the operation's id.
    #[must_use]
    pub fn sql(&self) -> [(&'static str, &str); 2] {
        [("update", &self.statements.update), ("look", &self.statements.look)]
    }

    /// Has the server plan the statements, without running them. The first update does it anyway;
    /// at the start of a service it shows earlier what is missing.
    ///
    /// # Errors
    /// [`DataError::NoUniqueConstraint`], [`DataError::Refused`], [`DataError::Lost`].
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
        operation: &str,
        expected: u64,
        item: &T,
    ) -> Result<Operation<R>, DataError>
    where
        T: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let fields = self.rows.shape.fields(item).map_err(|problem| problem.at(0))?;
        let (item, id) = (self.rows.item(fields, expected)?, self.id(operation));
        self.verified.once(&mut executor).await?;
        let mut races = Races::default();
        let rounds = self.rows.shape.limits.rounds;
        for _ in 0..rounds {
            match executor.query(&self.statements.update, &[&item, &id]).await {
                Ok(rows) => {
                    if let Some(version) = version(&rows)? {
                        return Ok(Operation::Applied { version });
                    }
                }
                Err(failure) => races.lost(failure)?,
            }
            match executor.query(&self.statements.look, &[&item, &id]).await {
                Ok(rows) => match seen(&rows, operation)? {
                    Seen::Noted(version) => return Ok(Operation::AlreadyApplied { version }),
                    Seen::Nothing => return Ok(Operation::NotFound),
                    Seen::There(current) if current.version != expected => {
                        return Ok(Operation::Conflict { current });
                    }
                    Seen::There(_) => races.violation()?,
                },
                Err(failure) => races.lost(failure)?,
            }
        }
        Err(races.into_error(rounds))
    }

    fn id(&self, operation: &str) -> String {
        let id = (self.operation.name.clone(), serde_json::Value::from(operation));
        serde_json::Value::from_iter([id]).to_string()
    }
}

/// What `look` answered.
fn seen<R: DeserializeOwned>(
    rows: &[Vec<Option<String>>],
    operation: &str,
) -> Result<Seen<R>, DataError> {
    let there = rows.first().ok_or(DataError::OtherRows)?;
    if text(there, 0).is_some() {
        if text(there, 1).is_some() {
            return Err(DataError::OperationReused(operation.into()));
        }
        return number(there, 0).map(Seen::Noted).ok_or(DataError::OtherRows);
    }
    if text(there, 3).is_none() {
        return Ok(Seen::Nothing);
    }
    let version = number(there, 2).ok_or(DataError::OtherRows)?;
    Ok(Seen::There(Loaded { version, row: row(text(there, 3))? }))
}

impl OperationsBuilder {
    /// The column of the id.
    #[must_use]
    pub fn operation(mut self, column: impl Into<Column>) -> Self {
        self.operation = column.into();
        self
    }

    /// The column of the row's key, as JSON: `text`.
    #[must_use]
    pub fn target(mut self, column: impl Into<Column>) -> Self {
        self.target = column.into();
        self
    }

    /// The column of the version that the operation made: `bigint`.
    #[must_use]
    pub fn version(mut self, column: impl Into<Column>) -> Self {
        self.version = column.into();
        self
    }

    /// Puts the statements together, for `rows`.
    ///
    /// # Errors
    /// [`LayoutError`], if names cannot be names, or one is there twice.
    pub fn of(self, rows: VersionedRows) -> Result<Operations, LayoutError> {
        let Self { table, operation, target, version } = &self;
        table.check()?;
        check_columns([operation, target, version])?;
        let statements = Statements { update: update(&rows, &self), look: look(&rows, &self) };
        let key = &rows.layout.key;
        let plan = |text: &str| Check::plan(text, ["{}", "{}"], &rows.layout.table, key);
        let checks = vec![
            plan(&statements.update),
            plan(&statements.look),
            Check::unique(&rows.layout.table, key),
            Check::unique(table, std::slice::from_ref(operation)),
        ];
        Ok(Operations {
            rows,
            operation: operation.clone(),
            statements: Arc::new(statements),
            verified: Verified::new(checks),
        })
    }
}

/// Answers with the new version, if there is one.
fn update(rows: &VersionedRows, layout: &OperationsBuilder) -> String {
    let OperationsBuilder { table, operation, target, version } = layout;
    let given = sql::record("given", &rows.layout.table, 1);
    let (asked, names) = (sql::record("asked", table, 2), sql::names([operation, target, version]));
    let (update, made) = (rows.layout.update(", asked AS a"), rows.layout.version.of("t"));
    let (key, id) = (sql::json("t", &rows.layout.key), operation.of("(a.item)"));
    let noted = sql::equal("o", "(a.item)", [operation]);
    format!(
        "WITH {given}, {asked}, updated AS (
{update}
    AND NOT EXISTS (SELECT FROM {table} AS o WHERE {noted})
RETURNING {made} AS version, {key} AS target
), noted AS (
    INSERT INTO {table} ({names})
    SELECT {id}, u.target, u.version
    FROM updated AS u, asked AS a
)
SELECT u.version::text FROM updated AS u"
    )
}

/// Answers with: the version that the operation made, if it was applied; whether to another row; and
/// version and row, if there is one.
fn look(rows: &VersionedRows, layout: &OperationsBuilder) -> String {
    let OperationsBuilder { table, operation, target, version } = layout;
    let (of, key) = (&rows.layout.table, &rows.layout.key);
    let (given, asked) = (sql::record("given", of, 1), sql::record("asked", table, 2));
    let (made, current) = (version.of("o"), rows.layout.version.of("t"));
    let target = format!("(json_populate_record(NULL::{of}, {}::json))", target.of("o"));
    let same = sql::equal(&target, "(g.item)", key);
    let row = sql::json("t", rows.layout.columns());
    let (noted, found) =
        (sql::equal("o", "(a.item)", [operation]), sql::equal("t", "(g.item)", key));
    let there = rows.layout.key[0].of("t");
    format!(
        "WITH {given}, {asked}
SELECT {made}::text,
    CASE WHEN NOT ({same}) THEN 'another' END,
    {current}::text,
    CASE WHEN {there} IS NOT NULL THEN {row} END
FROM given AS g CROSS JOIN asked AS a
LEFT JOIN {table} AS o ON {noted}
LEFT JOIN {of} AS t ON {found}"
    )
}

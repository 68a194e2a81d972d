//! Rows with a version, which is compared when they are updated.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{DataError, ItemError, LostRaces};
use crate::executor::{Executor, Rows, TextQueries as _};
use crate::items::{Fields, Shape, number, row, text, written};
use crate::layout::{BatchLimits, Column, LayoutError, TableName, check_columns};
use crate::sql;
use crate::verified::{Check, Verified};

/// A row with its version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VersionedRow<R> {
    /// Grows by one with every update.
    pub version: u64,
    /// Its key and fields.
    pub row: R,
}

/// Result of an update.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UpdateResult<R> {
    /// The row was updated, by this call.
    Updated {
        /// The version that it has now.
        version: u64,
    },
    /// There is no such row.
    NotFound,
    /// The row has another version than the expected one. Nothing was written.
    Conflict {
        /// The row that is there.
        current: VersionedRow<R>,
    },
}

/// Optimistic locking: a table whose rows have a version, a number that every update
/// increments, and that every update compares with the version that it was made from.
///
/// An item is any serde value with a field for each column of the key and each field, without the
/// version; an update writes all of the fields. If you delete a row and insert it again, give it a
/// larger version than it ever had; otherwise a delayed update may match the new row. Triggers must
/// not change key and version.
///
/// # Statements
/// 1. `UPDATE … WHERE` key and version are the expected ones. It waits while another transaction
///    holds the row, and then compares with what that has made of it.
/// 2. If nothing was updated, a second statement reads the row. (The first statement sees the data
///    as of its beginning.)
/// 3. Where that is the expected version after all: again, in at most [`BatchLimits::rounds`] rounds.
///
/// # Guarantees
/// - Of any number of updates that expect one version, exactly one gets [`UpdateResult::Updated`].
/// - After a lost reply to an update, or to the COMMIT after it, it is unknown whether this one
///   created the next version: [`UpdateLog`](crate::UpdateLog) can find out.
///
/// # Isolation
/// Under READ COMMITTED all of the above holds. Under REPEATABLE READ and SERIALIZABLE, a
/// transaction that began before the row's last update was committed gets [`DataError::Again`] if
/// it expects the version from before; if it expects one that it cannot see, the
/// [`UpdateResult::Conflict`] or [`UpdateResult::NotFound`] describes what it sees. Two
/// transactions that update two rows in opposite order deadlock: update in the order of keys, or
/// begin again after `Again`.
#[derive(Debug)]
pub struct VersionedRows {
    pub(crate) layout: VersionedRowsBuilder,
    pub(crate) shape: Shape,
    load: String,
    update: String,
    verified: Verified,
}

/// Collects the columns of [`VersionedRows`].
#[derive(Clone, Debug)]
pub struct VersionedRowsBuilder {
    pub(crate) table: TableName,
    pub(crate) key: Vec<Column>,
    pub(crate) version: Column,
    pub(crate) fields: Vec<Column>,
    limits: BatchLimits,
}

impl VersionedRows {
    /// Begins with the table; the version is in the column `version` unless another is named.
    #[must_use]
    pub fn in_table(table: TableName) -> VersionedRowsBuilder {
        VersionedRowsBuilder {
            table,
            key: Vec::new(),
            version: "version".into(),
            fields: Vec::new(),
            limits: BatchLimits::default(),
        }
    }

    /// Returns the statements by name. Their parameters are the item as a JSON object and, for
    /// `update`, the expected version.
    #[must_use]
    pub fn sql(&self) -> [(&'static str, &str); 2] {
        [("load", &self.load), ("update", &self.update)]
    }

    /// Makes the server plan the statements without executing them. It fails if a table, a column
    /// or a permission is missing, or if the key is not unique. The first update makes the same
    /// check; call this at the start of a service to find the error earlier.
    ///
    /// # Errors
    /// [`DataError::NoUniqueConstraint`], [`DataError::JsonAsText`], [`DataError::Rejected`],
    /// [`DataError::Lost`].
    pub async fn verify(&self, mut executor: impl Executor) -> Result<(), DataError> {
        self.verified.now(&mut executor).await
    }

    /// Loads the row of `key`, which has a field for each column of the key and no other; `None` if
    /// there is no row.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn load<K, R>(
        &self,
        mut executor: impl Executor,
        key: &K,
    ) -> Result<Option<VersionedRow<R>>, DataError>
    where
        K: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let key = self.item(&self.key(key)?)?;
        let rows = executor.query(&self.load, &[&key]).await;
        loaded(&rows.map_err(crate::error::StatementError::into_error)?)
    }

    /// Updates the fields of the row with the item's key, if its version is `expected`.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn update<T, R>(
        &self,
        mut executor: impl Executor,
        expected: u64,
        item: &T,
    ) -> Result<UpdateResult<R>, DataError>
    where
        T: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let item = self.item(&self.shape.fields(item).map_err(|problem| problem.at(0))?)?;
        let version = sent(expected)?;
        self.verified.once(&mut executor).await?;
        let mut races = LostRaces::default();
        for _ in 0..self.shape.limits.rounds {
            match executor.query(&self.update, &[&item, &version]).await {
                Ok(rows) => {
                    if let Some(version) = made(&rows)? {
                        return Ok(UpdateResult::Updated { version });
                    }
                }
                Err(failure) => races.lost(failure)?,
            }
            match executor.query(&self.load, &[&item]).await {
                Ok(rows) => match loaded(&rows)? {
                    None => return Ok(UpdateResult::NotFound),
                    Some(current) if current.version != expected => {
                        return Ok(UpdateResult::Conflict { current });
                    }
                    Some(_) => races.violation()?,
                },
                Err(failure) => races.lost(failure)?,
            }
        }
        Err(races.into_error(self.shape.limits.rounds))
    }

    /// The fields of a key.
    pub(crate) fn key<K: Serialize>(&self, key: &K) -> Result<Fields, DataError> {
        let columns = self.layout.key.clone();
        let shape = Shape { key: columns.len(), columns, limits: self.shape.limits };
        shape.fields(key).map_err(|problem| problem.at(0))
    }

    /// An item as a parameter.
    pub(crate) fn item(&self, fields: &Fields) -> Result<String, DataError> {
        let item = written(fields).map_err(|problem| problem.at(0))?;
        let most = self.shape.limits.bytes;
        if item.len() > most {
            return Err(DataError::TooLarge { bytes: item.len(), most });
        }
        Ok(item)
    }
}

/// An expected version as a parameter. The next one has to fit, too.
pub(crate) fn sent(expected: u64) -> Result<String, DataError> {
    let fits = expected < i64::MAX.unsigned_abs();
    if fits { Ok(expected.to_string()) } else { Err(ItemError::Position.at(0)) }
}

/// The version that an answer has at `column`.
pub(crate) fn version(row: &[Option<String>], column: usize) -> Result<u64, DataError> {
    number(row, column).ok_or_else(|| DataError::NoVersion(text(row, column).map(String::from)))
}

/// The version that an update has made, if it did.
pub(crate) fn made(rows: &Rows) -> Result<Option<u64>, DataError> {
    rows.first().map(|row| version(row, 0)).transpose()
}

fn loaded<R: DeserializeOwned>(rows: &Rows) -> Result<Option<VersionedRow<R>>, DataError> {
    let Some(there) = rows.first() else { return Ok(None) };
    Ok(Some(VersionedRow { version: version(there, 0)?, row: row(text(there, 1))? }))
}

impl VersionedRowsBuilder {
    /// Adds a column of the key. A unique constraint must be on exactly these columns, or on some
    /// of them.
    #[must_use]
    pub fn key(mut self, column: impl Into<Column>) -> Self {
        self.key.push(column.into());
        self
    }

    /// Sets the column of the version: `bigint`, or `integer` if that is enough; not null.
    #[must_use]
    pub fn version(mut self, column: impl Into<Column>) -> Self {
        self.version = column.into();
        self
    }

    /// Adds a column that is read, and written by every update.
    #[must_use]
    pub fn field(mut self, column: impl Into<Column>) -> Self {
        self.fields.push(column.into());
        self
    }

    /// Sets the limits of a call; [`BatchLimits::items`] has no effect.
    #[must_use]
    pub const fn limits(mut self, limits: BatchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Builds the layout.
    ///
    /// # Errors
    /// [`LayoutError`], if names cannot be names, one is there twice, or there is no key.
    pub fn build(self) -> Result<VersionedRows, LayoutError> {
        let Self { table, key, version, fields, limits } = &self;
        table.check()?;
        check_columns(key.iter().chain([version]).chain(fields))?;
        limits.check()?;
        if key.is_empty() {
            return Err(LayoutError::Missing("key"));
        }
        let columns = key.iter().chain(fields).cloned().collect();
        let (load, update) = (load(&self), update_returning(&self));
        let mut checks = vec![
            Check::plan(&load, ["{}"], table, key),
            Check::plan(&update, ["{}", "0"], table, key),
            Check::unique(table, key),
        ];
        checks.extend(Check::no_json_as_text(table, self.columns()));
        Ok(VersionedRows {
            shape: Shape { columns, key: key.len(), limits: *limits },
            load,
            update,
            verified: Verified::new(checks),
            layout: self,
        })
    }

    /// Every column that an item has.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &Column> {
        self.key.iter().chain(&self.fields)
    }

    /// `UPDATE … WHERE …` of `fields` of what `given` holds, at version `$2`, with `more` tables in
    /// FROM.
    pub(crate) fn update<'a>(
        &self,
        fields: impl IntoIterator<Item = &'a Column>,
        more: &str,
    ) -> String {
        let Self { table, key, version, .. } = self;
        let set =
            |column: &Column| format!("{} = {}, ", sql::names([column]), column.of("(g.item)"));
        let set: String = fields.into_iter().map(set).collect();
        let (name, current) = (sql::names([version]), version.of("t"));
        let same = sql::equal("t", "(g.item)", key);
        format!(
            "UPDATE {table} AS t SET {set}{name} = {current} + 1
FROM given AS g{more}
WHERE {same} AND {current} = $2::bigint"
        )
    }
}

/// Answers with the version and the row, if there is one.
fn load(layout: &VersionedRowsBuilder) -> String {
    let VersionedRowsBuilder { table, key, version, .. } = layout;
    let (given, version) = (sql::record("given", table, 1), version.of("t"));
    let (row, same) = (sql::json("t", layout.columns()), sql::equal("t", "(g.item)", key));
    format!(
        "WITH {given}
SELECT {version}::text, {row}
FROM given AS g JOIN {table} AS t ON {same}"
    )
}

/// Answers with the new version, if there is one.
fn update_returning(layout: &VersionedRowsBuilder) -> String {
    let given = sql::record("given", &layout.table, 1);
    let update = layout.update(&layout.fields, "");
    format!("WITH {given}\n{update}\nRETURNING {}::text", layout.version.of("t"))
}

//! Rows with a version, which is compared when they are updated.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{DataError, ItemError, Races};
use crate::executor::Executor;
use crate::items::{Shape, number, row, text};
use crate::layout::{Column, LayoutError, Limits, Table, check_columns};
use crate::sql;
use crate::verified::{Check, Verified};

/// A row, and which version of it that is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loaded<R> {
    /// Grows by one with every update.
    pub version: u64,
    /// Its key and fields.
    pub row: R,
}

/// What became of an update.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Update<R> {
    /// It was updated, by this call.
    Updated {
        /// The version that it has now.
        version: u64,
    },
    /// There is no such row.
    NotFound,
    /// It has another version than the expected one. Nothing was written.
    Conflict {
        /// What is there.
        current: Loaded<R>,
    },
}

/// Optimistic locking: a table whose rows have a version, a number that every update
/// increments, and that every update compares with the version that it was made from.
///
/// An item is any serde value with a field for each column of the key and each field, without the
/// version. A row that is inserted has any version from 0 on; who deletes one and inserts it
/// anew gives it a larger version than it ever had, or an update from before may hit it.
///
/// # What happens
/// 1. `UPDATE … WHERE` key and version are the expected ones. It waits while another transaction
///    holds the row, and then compares with what that has made of it.
/// 2. Where nothing was updated, a second statement reads what is there. (The first one would see what
///    was there when it began.)
/// 3. Where that is the expected version after all: again, in at most [`Limits::rounds`] rounds.
///
/// # Guarantees
/// - Of any number of updates that expect one version, exactly one is told [`Update::Updated`].
/// - The lost reply to an update, or to the COMMIT after it, leaves open whether it was this one
///   that made the next version: [`Operations`](crate::Operations) can tell.
///
/// # Isolation
/// Under READ COMMITTED all of the above holds. Under REPEATABLE READ and SERIALIZABLE, a transaction
/// that began before the row's last update was committed is told [`DataError::Again`]. Two
/// transactions that update two rows in opposite order deadlock: update in the order of keys, or
/// begin again where the server says `Again`.
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
    pub(crate) table: Table,
    pub(crate) key: Vec<Column>,
    pub(crate) version: Column,
    pub(crate) fields: Vec<Column>,
    limits: Limits,
}

impl VersionedRows {
    /// Begins with the table; the version is in the column `version` unless another is named.
    #[must_use]
    pub fn in_table(table: Table) -> VersionedRowsBuilder {
        VersionedRowsBuilder {
            table,
            key: Vec::new(),
            version: "version".into(),
            fields: Vec::new(),
            limits: Limits::default(),
        }
    }

    /// The statements, each under a name. Their parameter is a JSON object: the item, and in
    /// `update` the expected version.
    #[must_use]
    pub fn sql(&self) -> [(&'static str, &str); 2] {
        [("load", &self.load), ("update", &self.update)]
    }

    /// Has the server plan the statements, without running them: a table or a column that is
    /// missing, a key that is not unique, or a right, shows here. The first update does it anyway; at
    /// the start of a service it shows earlier.
    ///
    /// # Errors
    /// [`DataError::NoUniqueConstraint`], [`DataError::Refused`], [`DataError::Lost`].
    pub async fn verify(&self, mut executor: impl Executor) -> Result<(), DataError> {
        self.verified.now(&mut executor).await
    }

    /// The row of this key, which has a field for each column of it and no other; `None` if there is
    /// none.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn load<K, R>(
        &self,
        mut executor: impl Executor,
        key: &K,
    ) -> Result<Option<Loaded<R>>, DataError>
    where
        K: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let key = self.key(key)?;
        let rows = executor.query(&self.load, &[&key]).await;
        loaded(&rows.map_err(crate::error::Failure::into_error)?)
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
    ) -> Result<Update<R>, DataError>
    where
        T: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let item =
            self.item(self.shape.fields(item).map_err(|problem| problem.at(0))?, expected)?;
        self.verified.once(&mut executor).await?;
        let mut races = Races::default();
        for _ in 0..self.shape.limits.rounds {
            match executor.query(&self.update, &[&item]).await {
                Ok(rows) => {
                    if let Some(version) = version(&rows)? {
                        return Ok(Update::Updated { version });
                    }
                }
                Err(failure) => races.lost(failure)?,
            }
            match executor.query(&self.load, &[&item]).await {
                Ok(rows) => match loaded(&rows)? {
                    None => return Ok(Update::NotFound),
                    Some(current) if current.version != expected => {
                        return Ok(Update::Conflict { current });
                    }
                    Some(_) => races.violation()?,
                },
                Err(failure) => races.lost(failure)?,
            }
        }
        Err(races.into_error(self.shape.limits.rounds))
    }

    /// A key as a parameter.
    pub(crate) fn key<K: Serialize>(&self, key: &K) -> Result<String, DataError> {
        let columns = self.layout.key.clone();
        let shape = Shape { key: columns.len(), columns, limits: self.shape.limits };
        let mut items = shape.items(&[key])?;
        items.pop().ok_or(DataError::OtherRows)
    }

    /// An item as a parameter.
    pub(crate) fn item(
        &self,
        mut fields: Map<String, Value>,
        expected: u64,
    ) -> Result<String, DataError> {
        // The next version has to fit, too.
        if expected >= i64::MAX.unsigned_abs() {
            return Err(ItemError::Position.at(0));
        }
        fields.insert(self.layout.version.name.clone(), expected.into());
        let item = Value::Object(fields).to_string();
        let most = self.shape.limits.bytes;
        if item.len() > most {
            return Err(DataError::TooLarge { bytes: item.len(), most });
        }
        Ok(item)
    }
}

/// The version that an update has made, if it did.
pub(crate) fn version(rows: &[Vec<Option<String>>]) -> Result<Option<u64>, DataError> {
    let Some(row) = rows.first() else { return Ok(None) };
    number(row, 0).map(Some).ok_or(DataError::OtherRows)
}

fn loaded<R: DeserializeOwned>(
    rows: &[Vec<Option<String>>],
) -> Result<Option<Loaded<R>>, DataError> {
    let Some(there) = rows.first() else { return Ok(None) };
    let version = number(there, 0).ok_or(DataError::OtherRows)?;
    Ok(Some(Loaded { version, row: row(text(there, 1))? }))
}

impl VersionedRowsBuilder {
    /// A column of the key, on exactly which, or on some of which, there is a unique constraint.
    #[must_use]
    pub fn key(mut self, column: impl Into<Column>) -> Self {
        self.key.push(column.into());
        self
    }

    /// The column of the version: `bigint`, or `integer` if that is enough; not null.
    #[must_use]
    pub fn version(mut self, column: impl Into<Column>) -> Self {
        self.version = column.into();
        self
    }

    /// A column that is read, and written by every update.
    #[must_use]
    pub fn field(mut self, column: impl Into<Column>) -> Self {
        self.fields.push(column.into());
        self
    }

    /// How much a call may ask for; [`Limits::items`] is without meaning.
    #[must_use]
    pub const fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Puts the statements together.
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
        let checks = [&load, &update].map(|text| Check::plan(text, ["{}"], table, key));
        let checks = checks.into_iter().chain([Check::unique(table, key)]).collect();
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

    /// `UPDATE … WHERE …` of what `given` holds, with `more` tables in FROM.
    pub(crate) fn update(&self, more: &str) -> String {
        let Self { table, key, version, fields, .. } = self;
        let set =
            |column: &Column| format!("{} = {}, ", sql::names([column]), column.of("(g.item)"));
        let set: String = fields.iter().map(set).collect();
        let (name, current) = (sql::names([version]), version.of("t"));
        let same = sql::equal("t", "(g.item)", key.iter().chain([version]));
        format!(
            "UPDATE {table} AS t SET {set}{name} = {current} + 1
FROM given AS g{more}
WHERE {same}"
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
    let (given, update) = (sql::record("given", &layout.table, 1), layout.update(""));
    format!("WITH {given}\n{update}\nRETURNING {}::text", layout.version.of("t"))
}

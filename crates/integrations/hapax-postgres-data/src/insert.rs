//! Rows that are inserted once, identified by a business key.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{DataError, LostRaces};
use crate::executor::{Executor, Rows, TextQueries as _};
use crate::items::{Shape, array, number, row, text};
use crate::layout::{BatchLimits, Column, LayoutError, TableName, check_columns};
use crate::sql;
use crate::verified::{Check, Verified};

/// Result for an item.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Inserted<R> {
    /// The item was inserted, by this call, as this row.
    Created(R),
    /// A row with the same key and fields exists.
    Exists(R),
    /// A row with the key exists, with another value in a field.
    ExistsWithDifferent {
        /// The first field that differs, in the order of the layout.
        field: String,
        /// The row that is there.
        row: R,
    },
}

impl<R> Inserted<R> {
    /// Returns the stored row.
    pub fn into_row(self) -> R {
        match self {
            Self::Created(row) | Self::Exists(row) | Self::ExistsWithDifferent { row, .. } => row,
        }
    }
}

/// A table into which rows are inserted once, by a unique constraint on columns that identify the
/// object, such as customer and cart of an order. If a row with the key exists, it is fetched
/// instead.
///
/// An item is any serde value with a field for each column of the key and each field, and a row
/// is one with those and what is [also read](InsertOrFetchBuilder::also_read). How values are written, read and
/// compared: see [the crate](crate#values).
///
/// # Statements
/// 1. `INSERT … ON CONFLICT DO NOTHING`, for all items whose keys are not there, in one statement,
///    in the order of their keys, so that two batches cannot deadlock, whatever the order of the
///    key in their layouts; by another unique constraint they may, and one gets
///    [`DataError::Again`]. An item whose key is being inserted elsewhere waits for that
///    transaction.
/// 2. If nothing was inserted, a second statement fetches the existing row. (The first one could
///    not see it: it began before the other was committed.)
/// 3. If there is no row either: 1 and 2 for the first of these items alone, so that another unique
///    constraint is named, with its item.
/// 4. For the others, whose rows were deleted in between: again from 1, in at most
///    [`BatchLimits::rounds`] rounds.
///
/// # Guarantees
/// - Of any number of calls with one key, exactly one gets [`Inserted::Created`], while its row
///   exists. Results describe the end of the call: in a transaction that is rolled back afterwards,
///   nothing was inserted.
/// - An item that comes twice in a batch is created at most once, by its first occurrence; the
///   others are compared with that.
/// - A race never shows as an error of the database. Another unique constraint than that of the key
///   is [`DataError::UniqueViolation`], unless there is a row with its key, which then
///   [exists](Inserted::Exists).
/// - On a plain connection each statement commits separately: a call that fails may have inserted
///   some of its items, and the same call again finds them. For all or nothing, call it in a
///   transaction.
///
/// # Isolation
/// Under READ COMMITTED all of the above holds. Under REPEATABLE READ and SERIALIZABLE, a
/// transaction that began before the row in its way was committed does not see it, and gets
/// [`DataError::Again`]; a row that it sees exists, even if it was deleted since. Several calls in
/// one transaction may deadlock with another's in the other order; the one that the server chooses
/// gets `Again`.
///
/// # Limits
/// Columns of the key may not be null. The constraint must not be deferrable, nor may any other
/// unique constraint of the table. `BEFORE INSERT` triggers must not change a column of the layout
/// except those [also read](InsertOrFetchBuilder::also_read): with another key the call fails
/// ([`DataError::OtherRows`]), and with another field the next call of the same gets
/// [`Inserted::ExistsWithDifferent`]. They run for inserted rows, and for duplicates that come at
/// the same moment. A row of [`Inserted::Exists`] may be deleted the next moment: nothing is
/// locked. A delayed duplicate that arrives after the row was deleted inserts it again; if that
/// matters, mark rows as deleted instead of deleting them.
///
/// There is no upsert: a delayed duplicate of it would overwrite later changes. For rows that
/// change, use versions ([`VersionedRows`](crate::VersionedRows)).
#[derive(Debug)]
pub struct InsertOrFetch {
    shape: Shape,
    fetched: String,
    insert: String,
    insist: String,
    verified: Verified,
    table: String,
}

/// Collects the columns of an [`InsertOrFetch`].
#[derive(Clone, Debug)]
pub struct InsertOrFetchBuilder {
    table: TableName,
    key: Vec<Column>,
    fields: Vec<Column>,
    read: Vec<Column>,
    limits: BatchLimits,
}

impl InsertOrFetch {
    /// Begins with the table.
    #[must_use]
    pub fn into_table(table: TableName) -> InsertOrFetchBuilder {
        let (key, fields, read) = Default::default();
        InsertOrFetchBuilder { table, key, fields, read, limits: BatchLimits::default() }
    }

    /// Returns the statements by name: `insert`, for items without a result; `fetch`, for items
    /// that were not inserted; `insist`, for one item that was neither inserted nor fetched, so
    /// that a violated other constraint is named. Their parameter is the items as a JSON array.
    #[must_use]
    pub fn sql(&self) -> [(&'static str, &str); 3] {
        [("insert", &self.insert), ("fetch", &self.fetched), ("insist", &self.insist)]
    }

    /// Makes the server plan the statements without executing them. It fails if a table, a column,
    /// the unique constraint or a permission is missing. The first call makes the same check; call
    /// this at the start of a service to find the error earlier.
    ///
    /// # Errors
    /// [`DataError::NoUniqueConstraint`], [`DataError::JsonAsText`], [`DataError::Rejected`],
    /// [`DataError::Lost`].
    pub async fn verify(&self, mut executor: impl Executor) -> Result<(), DataError> {
        self.verified.now(&mut executor).await
    }

    /// Inserts `item`, or fetches the row that has its key.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn insert<T, R>(
        &self,
        executor: impl Executor,
        item: &T,
    ) -> Result<Inserted<R>, DataError>
    where
        T: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let mut outcomes = self.insert_all(executor, &[item]).await?;
        outcomes.pop().ok_or(DataError::OtherRows)
    }

    /// Inserts each of `items`, or fetches the row that has its key, in two statements for all
    /// items. The results are in the order of the items.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn insert_all<T, R>(
        &self,
        mut executor: impl Executor,
        items: &[T],
    ) -> Result<Vec<Inserted<R>>, DataError>
    where
        T: Serialize + Sync,
        R: DeserializeOwned + Send,
    {
        let mut pending = Pending::new(self.shape.items(items)?);
        self.verified.once(&mut executor).await?;
        let mut races = LostRaces::default();
        for _ in 0..self.shape.limits.rounds {
            // All of them; then the first that is left, alone, since an error names no item.
            for (insert, most) in [(&self.insert, usize::MAX), (&self.insist, 1)] {
                let Some(first) = pending.open.first().copied() else {
                    return pending.into_outcomes();
                };
                let about = (most == 1).then_some(first);
                match executor.query(insert, &[&pending.json(most)]).await {
                    Ok(rows) => pending.created(&rows)?,
                    Err(failure) => races.lost_by(failure, about)?,
                }
                if pending.open.first().is_none_or(|open| most == 1 && *open != first) {
                    continue;
                }
                match executor.query(&self.fetched, &[&pending.json(most)]).await {
                    Ok(rows) => self.found(&mut pending, &rows)?,
                    Err(failure) => races.lost(failure)?,
                }
                if pending.open.first() == Some(&first) || most > 1 && !pending.open.is_empty() {
                    races.violation()?;
                } else {
                    races.explained();
                }
            }
        }
        if pending.open.is_empty() {
            return pending.into_outcomes();
        }
        Err(races.into_error(self.shape.limits.rounds))
    }

    /// Result of `fetch`.
    fn found<R: DeserializeOwned>(
        &self,
        pending: &mut Pending<R>,
        rows: &Rows,
    ) -> Result<(), DataError> {
        for there in rows {
            let (at, outcome) = (pending.place(there)?, self.compared(there)?);
            pending.settle(at, outcome).map_err(|_| self.not_unique())?;
        }
        pending.close();
        Ok(())
    }

    fn compared<R: DeserializeOwned>(
        &self,
        there: &[Option<String>],
    ) -> Result<Inserted<R>, DataError> {
        let row = row(text(there, 2))?;
        let Some(field) = text(there, 1) else { return Ok(Inserted::Exists(row)) };
        let fields = &self.shape.columns[self.shape.key..];
        let field = field.parse().ok().and_then(|at: usize| fields.get(at));
        let field = field.ok_or(DataError::OtherRows)?.name.clone();
        Ok(Inserted::ExistsWithDifferent { field, row })
    }

    fn not_unique(&self) -> DataError {
        let columns = sql::names(&self.shape.columns[..self.shape.key]);
        DataError::NoUniqueConstraint { table: self.table.clone(), columns }
    }
}

/// Items, and what is known of them.
struct Pending<R> {
    items: Vec<String>,
    outcomes: Vec<Option<Inserted<R>>>,
    /// Indices of the items without a result, in order.
    open: Vec<usize>,
}

impl<R> Pending<R> {
    fn new(items: Vec<String>) -> Self {
        let outcomes = items.iter().map(|_| None).collect();
        Self { open: (0..items.len()).collect(), items, outcomes }
    }

    /// The first of those, as many as `most`.
    fn json(&self, most: usize) -> String {
        array(self.open.iter().take(most).map(|at| self.items[*at].as_str()))
    }

    /// Result of `insert`.
    fn created(&mut self, rows: &Rows) -> Result<(), DataError>
    where
        R: DeserializeOwned,
    {
        for created in rows {
            // Without a number: a row that no item asked for.
            let at = self.place(created)?;
            self.settle(at, Inserted::Created(row(text(created, 1))?))?;
        }
        self.close();
        Ok(())
    }

    /// Which item an answer's first column is about: those that were sent are numbered from 1.
    fn place(&self, answer: &[Option<String>]) -> Result<usize, DataError> {
        let number = number(answer, 0).and_then(|number| usize::try_from(number).ok());
        let at = number.and_then(|number| number.checked_sub(1));
        at.and_then(|at| self.open.get(at)).copied().ok_or(DataError::OtherRows)
    }

    /// # Errors
    /// Returns an error if the item has a result already.
    fn settle(&mut self, at: usize, outcome: Inserted<R>) -> Result<(), DataError> {
        match &mut self.outcomes[at] {
            Some(_) => Err(DataError::OtherRows),
            open => {
                *open = Some(outcome);
                Ok(())
            }
        }
    }

    fn close(&mut self) {
        self.open.retain(|at| self.outcomes[*at].is_none());
    }

    fn into_outcomes(self) -> Result<Vec<Inserted<R>>, DataError> {
        self.outcomes.into_iter().collect::<Option<_>>().ok_or(DataError::OtherRows)
    }
}

impl InsertOrFetchBuilder {
    /// Adds a column of the key: the unique constraint must be on exactly these columns.
    #[must_use]
    pub fn key(mut self, column: impl Into<Column>) -> Self {
        self.key.push(column.into());
        self
    }

    /// Adds a column that is written, and compared in this order if the key exists.
    #[must_use]
    pub fn field(mut self, column: impl Into<Column>) -> Self {
        self.fields.push(column.into());
        self
    }

    /// Adds a column that the server fills and that is only read, such as `id` or `created_at`.
    #[must_use]
    pub fn also_read(mut self, column: impl Into<Column>) -> Self {
        self.read.push(column.into());
        self
    }

    /// Sets the limits of a call.
    #[must_use]
    pub const fn limits(mut self, limits: BatchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Builds the layout.
    ///
    /// # Errors
    /// [`LayoutError`], if names cannot be names, one is there twice, or there is no key.
    pub fn build(self) -> Result<InsertOrFetch, LayoutError> {
        let Self { table, key, fields, read, limits } = self;
        table.check()?;
        check_columns(key.iter().chain(&fields).chain(&read))?;
        limits.check()?;
        if key.is_empty() {
            return Err(LayoutError::Missing("key"));
        }
        let names = sql::names(&key);
        let columns: Vec<Column> = key.iter().chain(&fields).cloned().collect();
        let all: Vec<Column> = columns.iter().chain(&read).cloned().collect();
        let hasty = insert(&table, &key, &columns, &all, "");
        let insist = insert(&table, &key, &columns, &all, &format!(" ({names})"));
        let fetched = fetch(&table, &key, &fields, &all);
        let plan = |text: &String| Check::plan(text, ["[]"], &table, &key);
        let checks = [plan(&insist), plan(&fetched), Check::as_columns_do(&table, &key)];
        let checks = checks.into_iter().chain(Check::no_json_as_text(&table, &columns)).collect();
        Ok(InsertOrFetch {
            verified: Verified::new(checks),
            shape: Shape { columns, key: key.len(), limits },
            insert: hasty,
            insist,
            fetched,
            table: table.to_string(),
        })
    }
}

/// Answers with the number and the row of each item that was inserted.
///
/// Rows that are visible are not inserted again, so duplicates fire no trigger and consume no
/// number of a sequence.
fn insert(
    table: &TableName,
    key: &[Column],
    all: &[Column],
    read: &[Column],
    target: &str,
) -> String {
    // One order for all layouts of a table, however they list its key.
    let mut key = key.to_vec();
    key.sort_by(|one, other| one.name.cmp(&other.name));
    let (key, given) = (&key[..], sql::given(table));
    let (names, key_given) = (sql::names(all), sql::list("(g.item)", key));
    let (values, key_first) = (sql::list("(f.item)", all), sql::list("(f.item)", key));
    let same = sql::equal("(f.item)", "t", key);
    let (returned, row) = (sql::list("t", read), sql::json("t", read));
    format!(
        "WITH {given}, firsts AS MATERIALIZED (
    SELECT DISTINCT ON ({key_given}) g.n, g.item
    FROM given AS g
    ORDER BY {key_given}, g.n
), created AS (
    INSERT INTO {table} AS t ({names})
    SELECT {values}
    FROM firsts AS f
    WHERE NOT EXISTS (SELECT FROM {table} AS t WHERE {same})
    ORDER BY {key_first}
    ON CONFLICT{target} DO NOTHING
    RETURNING {returned}
)
SELECT f.n::text, {row}
FROM created AS t LEFT JOIN firsts AS f ON {same}"
    )
}

/// Answers with the number of each item whose key is there, in which field it differs first, and
/// the row.
fn fetch(table: &TableName, key: &[Column], fields: &[Column], read: &[Column]) -> String {
    let given = sql::given(table);
    let differs = sql::first_difference("t", "(g.item)", fields);
    let row = sql::json("t", read);
    let same = sql::equal("t", "(g.item)", key);
    let (wal_write, write_wal) = (sql::WAL_WRITE, sql::WRITE_WAL);
    format!(
        "WITH {given}, {wal_write}
SELECT g.n::text,
    {differs},
    {row},
    {write_wal}
FROM given AS g JOIN {table} AS t ON {same}"
    )
}

//! Requirements of a layout.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::error::DataError;
use crate::executor::{Executor, TextQueries as _};
use crate::layout::{Column, TableName};
use crate::sql;

/// Checks by the server, once, before the first call.
///
/// `ON CONFLICT DO NOTHING` without a target would insert a second row if the unique constraint is
/// missing; planned with a target, it is rejected.
#[derive(Debug)]
pub(crate) struct Verified {
    checks: Vec<Check>,
    done: AtomicBool,
}

/// A statement that can be planned, or that answers with a row, or with none.
#[derive(Debug)]
pub(crate) struct Check {
    text: String,
    parameters: Vec<String>,
    table: String,
    lacking: Lacking,
}

/// Errors of a check.
#[derive(Debug)]
enum Lacking {
    /// No row, or rejected: there is no unique constraint on these columns.
    Constraint(String),
    /// A row: this column is JSON.
    Text,
}

impl Check {
    /// Checks that `statement` can be planned. Its parameters are texts that it can read.
    pub(crate) fn plan<'a>(
        statement: &str,
        parameters: impl IntoIterator<Item = &'a str>,
        table: &TableName,
        key: impl IntoIterator<Item = &'a Column>,
    ) -> Self {
        Self {
            text: format!("EXPLAIN {statement}"),
            parameters: parameters.into_iter().map(String::from).collect(),
            table: table.to_string(),
            lacking: Lacking::Constraint(sql::names(key)),
        }
    }

    /// Checks that no two rows have the same `key`. A role that may only update cannot plan an
    /// insert.
    pub(crate) fn unique<'a>(
        table: &TableName,
        key: impl IntoIterator<Item = &'a Column> + Clone,
    ) -> Self {
        let having = "bool_or(k.equal)";
        Self::by_indexes(table, key, &UNIQUE.replace("$HAVING", having).replace("$EXACTLY", "TRUE"))
    }

    /// Checks that rows that are unique by an index on exactly `key` are so by the columns as well.
    /// Planning an insert finds the index, whatever its collation.
    pub(crate) fn as_columns_do<'a>(
        table: &TableName,
        key: impl IntoIterator<Item = &'a Column> + Clone,
    ) -> Self {
        let exactly = "i.indnkeyatts = json_array_length($2::json)";
        let having = "coalesce(bool_and(k.equal), TRUE)";
        Self::by_indexes(
            table,
            key,
            &UNIQUE.replace("$HAVING", having).replace("$EXACTLY", exactly),
        )
    }

    fn by_indexes<'a>(
        table: &TableName,
        key: impl IntoIterator<Item = &'a Column> + Clone,
        text: &str,
    ) -> Self {
        Self {
            text: text.into(),
            parameters: vec![table.to_string(), names(key.clone())],
            table: table.to_string(),
            lacking: Lacking::Constraint(sql::names(key)),
        }
    }

    /// Checks that none of the `written` columns that are read as text is JSON; nothing if there
    /// are none.
    pub(crate) fn no_json_as_text<'a>(
        table: &TableName,
        written: impl IntoIterator<Item = &'a Column>,
    ) -> Option<Self> {
        let mut texts = written.into_iter().filter(|column| column.read).peekable();
        texts.peek()?;
        Some(Self {
            text: JSON.into(),
            parameters: vec![table.to_string(), names(texts)],
            table: table.to_string(),
            lacking: Lacking::Text,
        })
    }
}

fn names<'a>(columns: impl IntoIterator<Item = &'a Column>) -> String {
    Value::from_iter(columns.into_iter().map(|column| Value::from(column.name.clone()))).to_string()
}

/// Collations that are deterministic hold the same values equal, byte by byte.
const UNIQUE: &str = "SELECT 'unique'
FROM pg_index AS i CROSS JOIN LATERAL (
    SELECT bool_and(a.attname IN (SELECT json_array_elements_text($2::json))) AS within,
        bool_and(
            c.rule = a.attcollation
            OR (one.collisdeterministic AND other.collisdeterministic)
        ) AS equal
    FROM unnest(i.indkey::int2[], i.indcollation::oid[])
        WITH ORDINALITY AS c (number, rule, n)
    JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = c.number
    LEFT JOIN pg_collation AS one ON one.oid = c.rule
    LEFT JOIN pg_collation AS other ON other.oid = a.attcollation
    WHERE c.n <= i.indnkeyatts
) AS k
WHERE i.indrelid = $1::regclass AND i.indisunique AND i.indisvalid
    AND i.indpred IS NULL AND i.indexprs IS NULL
    AND k.within AND $EXACTLY
HAVING $HAVING";

/// Domains are what they are of.
const JSON: &str = "WITH RECURSIVE types (name, type) AS (
    SELECT a.attname::text, a.atttypid
    FROM pg_attribute AS a
    WHERE a.attrelid = $1::regclass
        AND a.attname IN (SELECT json_array_elements_text($2::json))
    UNION
    SELECT d.name, t.typbasetype
    FROM types AS d JOIN pg_type AS t ON t.oid = d.type
    WHERE t.typtype = 'd'
)
SELECT d.name
FROM types AS d
WHERE d.type IN ('json'::regtype, 'jsonb'::regtype)";

impl Verified {
    pub(crate) const fn new(checks: Vec<Check>) -> Self {
        Self { checks, done: AtomicBool::new(false) }
    }

    /// Sends the checks, unless they have passed before.
    pub(crate) async fn once(&self, executor: &mut impl Executor) -> Result<(), DataError> {
        if self.done.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.now(executor).await
    }

    /// Sends the checks. Nothing is executed, but in a transaction a rejection ends it.
    pub(crate) async fn now(&self, executor: &mut impl Executor) -> Result<(), DataError> {
        for Check { text, parameters, table, lacking } in &self.checks {
            let parameters: Vec<&str> = parameters.iter().map(String::as_str).collect();
            let rows = match executor.query(text, &parameters).await {
                Ok(rows) => rows,
                Err(failure) if failure.lacks_constraint() => Vec::new(),
                Err(failure) => return Err(failure.into_error()),
            };
            let table = table.clone();
            match (lacking, rows.first()) {
                (Lacking::Constraint(columns), None) => {
                    return Err(DataError::NoUniqueConstraint { table, columns: columns.clone() });
                }
                (Lacking::Text, Some(row)) => {
                    let column = row.first().cloned().flatten().unwrap_or_default();
                    return Err(DataError::JsonAsText { table, column });
                }
                _ => {}
            }
        }
        self.done.store(true, Ordering::Relaxed);
        Ok(())
    }
}

//! Whether a layout is the table's.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::error::DataError;
use crate::executor::Executor;
use crate::layout::{Column, Table};
use crate::sql;

/// What the server is asked once, before the first call.
///
/// `ON CONFLICT DO NOTHING` without a target would insert a second row where the unique constraint
/// is missing; planned with a target, it is refused.
#[derive(Debug)]
pub(crate) struct Verified {
    checks: Vec<Check>,
    done: AtomicBool,
}

/// A statement that answers with a row, and the constraint whose absence would have it answer with
/// none, or refused.
#[derive(Debug)]
pub(crate) struct Check {
    text: String,
    parameters: Vec<String>,
    table: String,
    columns: String,
}

impl Check {
    /// That `statement` can be planned. Its parameters are JSON: arrays, then objects.
    pub(crate) fn plan<'a>(
        statement: &str,
        parameters: impl IntoIterator<Item = &'a str>,
        table: &Table,
        key: impl IntoIterator<Item = &'a Column>,
    ) -> Self {
        Self {
            text: format!("EXPLAIN {statement}"),
            parameters: parameters.into_iter().map(String::from).collect(),
            table: table.to_string(),
            columns: sql::names(key),
        }
    }

    /// That no two rows have the same `key`. Who may only update cannot plan an insert.
    pub(crate) fn unique(table: &Table, key: &[Column]) -> Self {
        let columns = key.iter().map(|column| Value::from(column.name.clone()));
        Self {
            text: UNIQUE.into(),
            parameters: vec![table.to_string(), Value::from_iter(columns).to_string()],
            table: table.to_string(),
            columns: sql::names(key),
        }
    }
}

const UNIQUE: &str = "SELECT i.indexrelid::text
FROM pg_index AS i
WHERE i.indrelid = $1::regclass AND i.indisunique AND i.indisvalid
    AND i.indpred IS NULL AND i.indexprs IS NULL
    AND (
        SELECT bool_and(a.attname IN (SELECT json_array_elements_text($2::json)))
        FROM pg_attribute AS a
        WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
    )";

impl Verified {
    pub(crate) const fn new(checks: Vec<Check>) -> Self {
        Self { checks, done: AtomicBool::new(false) }
    }

    /// Asks, unless it was answered before.
    pub(crate) async fn once(&self, executor: &mut impl Executor) -> Result<(), DataError> {
        if self.done.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.now(executor).await
    }

    /// Asks. Nothing is executed, but in a transaction a refusal is the end of it.
    pub(crate) async fn now(&self, executor: &mut impl Executor) -> Result<(), DataError> {
        for Check { text, parameters, table, columns } in &self.checks {
            let parameters: Vec<&str> = parameters.iter().map(String::as_str).collect();
            let lacking = match executor.query(text, &parameters).await {
                Ok(rows) => rows.is_empty(),
                Err(failure) if failure.lacks_constraint() => true,
                Err(failure) => return Err(failure.into_error()),
            };
            if lacking {
                let (table, columns) = (table.clone(), columns.clone());
                return Err(DataError::NoUniqueConstraint { table, columns });
            }
        }
        self.done.store(true, Ordering::Relaxed);
        Ok(())
    }
}

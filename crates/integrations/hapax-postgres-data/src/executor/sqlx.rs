//! The same by sqlx.

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgDatabaseError, PgRow, PgSeverity};
use sqlx::{Column, Error, Postgres, Row, TypeInfo};

use super::{Answering, Executor, SqlParameter, SqlRow, SqlValue};
use crate::error::{ServerError, StatementError};

impl Executor for &mut PgConnection {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(query(self, text, parameters))
    }
}

impl Executor for PgConnection {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(query(self, text, parameters))
    }
}

impl Executor for PoolConnection<Postgres> {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(query(self, text, parameters))
    }
}

async fn query(
    connection: &mut PgConnection,
    text: &str,
    parameters: &[SqlParameter<'_>],
) -> Result<Vec<SqlRow>, StatementError> {
    // Unnamed: a pooler in between may not know the name.
    let query = sqlx::query(text).persistent(false);
    let query = parameters.iter().fold(query, |query, parameter| match *parameter {
        SqlParameter::Text(text) => query.bind(text),
        SqlParameter::Bytes(bytes) => query.bind(bytes),
        SqlParameter::Integer(number) => query.bind(number),
        SqlParameter::Texts(texts) => query.bind(texts),
        SqlParameter::ByteStrings(list) => query.bind(list),
        SqlParameter::Integers(numbers) => query.bind(numbers),
    });
    let rows = query.fetch_all(connection).await.map_err(failure)?;
    let row = |row: &PgRow| (0..row.len()).map(|at| value(row, at)).collect();
    rows.iter().map(row).collect::<Result<_, _>>().map_err(failure)
}

fn value(row: &PgRow, at: usize) -> Result<SqlValue, Error> {
    let value = match row.column(at).type_info().name() {
        "BYTEA" => row.try_get::<Option<Vec<u8>>, _>(at)?.map(SqlValue::Bytes),
        "INT8" => row.try_get::<Option<i64>, _>(at)?.map(SqlValue::Integer),
        "INT4" => row.try_get::<Option<i32>, _>(at)?.map(|it| SqlValue::Integer(it.into())),
        _ => row.try_get::<Option<String>, _>(at)?.map(SqlValue::Text),
    };
    Ok(value.unwrap_or(SqlValue::Null))
}

fn failure(error: Error) -> StatementError {
    let database = error.as_database_error().and_then(|db| db.try_downcast_ref());
    let Some(db) = database.map(told) else { return StatementError::Lost(error.into()) };
    let (code, message, constraint, is_error) = db;
    StatementError::of(ServerError { code, message, constraint, source: error.into() }, is_error)
}

fn told(db: &PgDatabaseError) -> (String, String, Option<String>, bool) {
    let constraint = db.constraint().map(str::to_owned);
    let is_error = matches!(db.severity(), PgSeverity::Error);
    (db.code().to_owned(), db.message().to_owned(), constraint, is_error)
}

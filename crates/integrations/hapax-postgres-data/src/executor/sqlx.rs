//! The same by sqlx.

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgDatabaseError, PgRow, PgSeverity};
use sqlx::{Error, Postgres, Row};

use super::private::Query;
use super::{Answering, Rows};
use crate::error::{ServerError, StatementError};

impl Query for &mut PgConnection {
    fn query<'a>(&'a mut self, text: &'a str, parameters: &'a [&'a str]) -> Answering<'a> {
        Box::pin(query(self, text, parameters))
    }
}

impl Query for PgConnection {
    fn query<'a>(&'a mut self, text: &'a str, parameters: &'a [&'a str]) -> Answering<'a> {
        Box::pin(query(self, text, parameters))
    }
}

impl Query for PoolConnection<Postgres> {
    fn query<'a>(&'a mut self, text: &'a str, parameters: &'a [&'a str]) -> Answering<'a> {
        Box::pin(query(self, text, parameters))
    }
}

async fn query(
    connection: &mut PgConnection,
    text: &str,
    parameters: &[&str],
) -> Result<Rows, StatementError> {
    // Unnamed: a pooler in between may not know the name.
    let query = sqlx::query(text).persistent(false);
    let query = parameters.iter().fold(query, |query, text| query.bind(*text));
    let rows = query.fetch_all(connection).await.map_err(failure)?;
    let texts = |row: &PgRow| (0..row.len()).map(|at| row.try_get(at)).collect();
    rows.iter().map(texts).collect::<Result<_, _>>().map_err(failure)
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

//! Connections that statements run on.
//!
//! Parameters and columns have few types, so that the drivers' types stay outside.

#[cfg(feature = "sqlx")]
mod sqlx;

use std::ops::Deref;
use std::pin::Pin;

use tokio_postgres::error::Severity;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, Transaction};

use crate::error::{ServerError, StatementError};

/// A connection or a transaction.
///
/// - tokio-postgres: `&Client`, `&Transaction`, and owned ones: `Client`, or what a pool hands out,
///   as [`Pooled`].
/// - sqlx (feature `sqlx`): `&mut PgConnection`, `&mut *transaction`, and owned ones:
///   `PoolConnection<Postgres>`, `PgConnection`.
///
/// Nothing here leaves state in a session, and statements have no names, so with tokio-postgres a
/// pooler in transaction mode works. sqlx needs a transaction behind such a pooler, because it
/// sends a statement in two round trips. A call that is dropped leaves one statement, which the
/// server executes; nothing here cancels statements.
///
/// Another driver implements it for its own connections.
pub trait Executor: Send {
    /// Runs one statement, and returns its rows. A future that is dropped leaves one statement,
    /// which the server executes completely or not at all.
    ///
    /// # Errors
    /// [`StatementError`].
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a>;
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        (**self).run(text, parameters)
    }
}

/// Future of the rows of a statement.
pub type Answering<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<SqlRow>, StatementError>> + Send + 'a>>;

/// A row: the values of its columns.
pub type SqlRow = Vec<SqlValue>;

/// A parameter of a statement. `None` is null.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum SqlParameter<'a> {
    /// `text`.
    Text(Option<&'a str>),
    /// `bytea`.
    Bytes(Option<&'a [u8]>),
    /// `bigint`.
    Integer(Option<i64>),
    /// `text[]`.
    Texts(&'a [Option<&'a str>]),
    /// `bytea[]`.
    ByteStrings(&'a [Option<&'a [u8]>]),
    /// `bigint[]`.
    Integers(&'a [i64]),
}

/// A value of a column: `text`, `bytea`, `bigint`, `integer` or null. Statements cast other types to
/// text.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SqlValue {
    /// Null.
    Null,
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// An integer.
    Integer(i64),
}

impl SqlValue {
    /// Returns the text; `None` for null and other types.
    #[must_use]
    pub fn text(self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the bytes; `None` for null and other types.
    #[must_use]
    pub fn bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Returns the integer; `None` for null and other types.
    #[must_use]
    pub const fn integer(&self) -> Option<i64> {
        match self {
            Self::Integer(number) => Some(*number),
            _ => None,
        }
    }
}

/// A connection that a pool for tokio-postgres returns, and the way to its client.
///
/// ```
/// # use hapax_postgres_data::Pooled;
/// # async fn example(pool: deadpool_postgres::Pool) -> Result<(), deadpool_postgres::PoolError> {
/// let here = Pooled::new(pool.get().await?, |object| object);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Pooled<P> {
    of: P,
    client: fn(&P) -> &Client,
}

impl<P> Pooled<P> {
    /// Creates a connection from the guard of a pool and a function that returns its client.
    pub const fn new(of: P, client: fn(&P) -> &Client) -> Self {
        Self { of, client }
    }

    /// Returns the guard of the pool.
    pub fn into_inner(self) -> P {
        self.of
    }
}

pub(crate) type Rows = Vec<Vec<Option<String>>>;

/// Statements whose parameters and columns are all text: the server's types are the only ones.
pub(crate) trait TextQueries: Executor {
    fn query(
        &mut self,
        text: &str,
        parameters: &[&str],
    ) -> impl Future<Output = Result<Rows, StatementError>> + Send {
        let parameters: Vec<_> =
            parameters.iter().map(|text| SqlParameter::Text(Some(text))).collect();
        async move {
            let rows = self.run(text, &parameters).await?;
            Ok(rows.into_iter().map(|row| row.into_iter().map(SqlValue::text).collect()).collect())
        }
    }
}

impl<E: Executor + ?Sized> TextQueries for E {}

/// `query_typed` sends parse, bind and execute together: one round trip, and no statement name.
macro_rules! by_tokio_postgres {
    ($(($($generics:tt)*) $of:ty, $self:ident => $client:expr;)*) => {$(
        impl<$($generics)*> Executor for $of {
            fn run<'a>(
                &'a mut self,
                text: &'a str,
                parameters: &'a [SqlParameter<'a>],
            ) -> Answering<'a> {
                let $self = self;
                let client = $client;
                Box::pin(async move {
                    let typed: Vec<_> = parameters.iter().map(typed).collect();
                    let rows = client.query_typed(text, &typed).await.map_err(failure)?;
                    let row = |row: &Row| (0..row.len()).map(|at| value(row, at)).collect();
                    rows.iter().map(row).collect::<Result<_, _>>().map_err(failure)
                })
            }
        }
    )*};
}

by_tokio_postgres! {
    () Client, this => &*this;
    () &Client, this => &**this;
    () &Transaction<'_>, this => &**this;
    (P: Send) Pooled<P>, this => &**this;
}

fn typed<'a>(parameter: &'a SqlParameter<'a>) -> (&'a (dyn ToSql + Sync), Type) {
    match parameter {
        SqlParameter::Text(text) => (text, Type::TEXT),
        SqlParameter::Bytes(bytes) => (bytes, Type::BYTEA),
        SqlParameter::Integer(number) => (number, Type::INT8),
        SqlParameter::Texts(texts) => (texts, Type::TEXT_ARRAY),
        SqlParameter::ByteStrings(list) => (list, Type::BYTEA_ARRAY),
        SqlParameter::Integers(numbers) => (numbers, Type::INT8_ARRAY),
    }
}

fn value(row: &Row, at: usize) -> Result<SqlValue, Error> {
    let value = match *row.columns()[at].type_() {
        Type::BYTEA => row.try_get::<_, Option<Vec<u8>>>(at)?.map(SqlValue::Bytes),
        Type::INT8 => row.try_get::<_, Option<i64>>(at)?.map(SqlValue::Integer),
        Type::INT4 => row.try_get::<_, Option<i32>>(at)?.map(|it| SqlValue::Integer(it.into())),
        _ => row.try_get::<_, Option<String>>(at)?.map(SqlValue::Text),
    };
    Ok(value.unwrap_or(SqlValue::Null))
}

impl<P> Deref for Pooled<P> {
    type Target = Client;

    fn deref(&self) -> &Client {
        (self.client)(&self.of)
    }
}

fn failure(error: Error) -> StatementError {
    let Some(db) = error.as_db_error() else { return StatementError::Lost(error.into()) };
    let is_error = matches!(db.parsed_severity(), Some(Severity::Error));
    let server = ServerError {
        code: db.code().code().to_owned(),
        message: db.message().to_owned(),
        constraint: db.constraint().map(str::to_owned),
        source: error.into(),
    };
    StatementError::of(server, is_error)
}

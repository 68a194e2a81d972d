//! Connections that statements run on.
//!
//! Every parameter and every column of an answer is text, so that the drivers' types stay outside
//! and the server's types are the only ones.

#[cfg(feature = "sqlx")]
mod sqlx;

use std::ops::Deref;
use std::pin::Pin;

use tokio_postgres::error::Severity;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Transaction};

use self::private::Query;
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
pub trait Executor: Query + Send {}

impl<T: Query + Send> Executor for T {}

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
}

pub(crate) type Rows = Vec<Vec<Option<String>>>;
pub(crate) type Answering<'a> =
    Pin<Box<dyn Future<Output = Result<Rows, StatementError>> + Send + 'a>>;

pub(crate) mod private {
    use super::Answering;

    /// Sealed: drivers are added here.
    pub trait Query {
        /// Runs one statement, whose parameters and columns are all text.
        fn query<'a>(&'a mut self, text: &'a str, parameters: &'a [&'a str]) -> Answering<'a>;
    }
}

/// `query_typed` sends parse, bind and execute together: one round trip, and no statement name.
macro_rules! by_tokio_postgres {
    ($(($($generics:tt)*) $of:ty, $self:ident => $client:expr;)*) => {$(
        impl<$($generics)*> Query for $of {
            fn query<'a>(
                &'a mut self,
                text: &'a str,
                parameters: &'a [&'a str],
            ) -> Answering<'a> {
                let $self = self;
                let client = $client;
                Box::pin(async move {
                    let typed: Vec<(&(dyn ToSql + Sync), Type)> =
                        parameters.iter().map(|text| (text as _, Type::TEXT)).collect();
                    let rows = client.query_typed(text, &typed).await.map_err(failure)?;
                    let texts = |row: &tokio_postgres::Row| {
                        (0..row.len()).map(|at| row.try_get(at)).collect::<Result<Vec<_>, _>>()
                    };
                    rows.iter().map(texts).collect::<Result<_, _>>().map_err(failure)
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

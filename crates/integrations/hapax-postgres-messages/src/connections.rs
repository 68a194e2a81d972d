//! Connections: of the caller's pool, or one that is shared.

mod shared;

use std::fmt;
use std::sync::Arc;

pub use self::shared::SharedConnection;
use hapax_core::store::BoxFuture;
use hapax_postgres_data::{Executor, SqlParameter, SqlRow, StatementError};

/// Cause of a failed connection.
pub type ConnectCause = Box<dyn std::error::Error + Send + Sync>;

type Connect<C> = dyn Fn() -> BoxFuture<'static, Result<C, ConnectCause>> + Send + Sync;

/// A source of connections to one database: a pool of tokio-postgres or sqlx. Cheap to clone.
///
/// ```
/// # fn example(pool: deadpool_postgres::Pool) {
/// use hapax_postgres_data::Pooled;
/// use hapax_postgres_messages::Connections;
/// let connections = Connections::new(move || {
///     let pool = pool.clone();
///     async move { pool.get().await.map(|object| Pooled::new(object, |object| object)) }
/// });
/// # }
/// ```
pub struct Connections<C> {
    connect: Arc<Connect<C>>,
}

impl<C: Executor + 'static> Connections<C> {
    /// Creates a source from a function that takes a connection from a pool. It limits the time that
    /// this takes.
    pub fn new<F, E>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<C, E>> + Send + 'static,
        E: Into<ConnectCause>,
    {
        let connect = move || {
            let connecting = connect();
            Box::pin(async move { connecting.await.map_err(Into::into) })
                as BoxFuture<'static, Result<C, ConnectCause>>
        };
        Self { connect: Arc::new(connect) }
    }

    pub(crate) async fn connect(&self) -> Result<C, ConnectCause> {
        (self.connect)().await
    }
}

impl<C> Clone for Connections<C> {
    fn clone(&self) -> Self {
        Self { connect: Arc::clone(&self.connect) }
    }
}

impl<C> fmt::Debug for Connections<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connections")
    }
}

/// Connections for single statements: those of a pool ([`Connections`]), or one that is shared
/// ([`SharedConnection`]).
#[derive(Clone, Debug)]
pub struct StatementConnections(Connections<Box<dyn Executor>>);

impl StatementConnections {
    pub(crate) async fn connect(&self) -> Result<Box<dyn Executor>, ConnectCause> {
        self.0.connect().await
    }

    /// Runs one statement.
    pub(crate) async fn run(
        &self,
        text: &str,
        parameters: &[SqlParameter<'_>],
    ) -> Result<Vec<SqlRow>, ConnectCause> {
        let mut connection = self.connect().await?;
        let rows: Result<_, StatementError> = connection.run(text, parameters).await;
        Ok(rows?)
    }
}

impl<C: Executor + 'static> From<&Connections<C>> for StatementConnections {
    fn from(connections: &Connections<C>) -> Self {
        let connect = Arc::clone(&connections.connect);
        Self(Connections::new(move || {
            let connecting = connect();
            async move { connecting.await.map(|connection| Box::new(connection) as Box<dyn Executor>) }
        }))
    }
}

//! Connections, of the caller's pool.

use std::fmt;
use std::sync::Arc;

use hapax_core::store::BoxFuture;
use hapax_postgres_data::{Executor, Pooled, SqlParameter, SqlRow, StatementError};
use tokio::sync::Mutex;
use tokio_postgres::Client;

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

    /// Returns the same source without the type of its connections.
    pub(crate) fn any(&self) -> Connections<Box<dyn Executor>> {
        let connect = Arc::clone(&self.connect);
        Connections::new(move || {
            let connecting = connect();
            async move { connecting.await.map(|connection| Box::new(connection) as Box<dyn Executor>) }
        })
    }

    pub(crate) async fn connect(&self) -> Result<C, ConnectCause> {
        (self.connect)().await
    }

    /// Runs one statement on a connection of its own.
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

impl Connections<Pooled<Arc<Client>>> {
    /// Creates a source of one connection, which all callers share, and which is made again after it
    /// was lost: for single statements, not for transactions.
    pub fn shared<F, E>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Client, E>> + Send + 'static,
        E: Into<ConnectCause> + 'static,
    {
        let connect = Arc::new(connect);
        let shared: Arc<Mutex<Option<Arc<Client>>>> = Arc::default();
        Self::new(move || {
            let (connect, shared) = (Arc::clone(&connect), Arc::clone(&shared));
            async move {
                // Held while it connects, so that callers do not connect beside each other.
                let mut shared = shared.lock().await;
                let open = shared.as_ref().filter(|client| !client.is_closed());
                let client = match open {
                    Some(client) => Arc::clone(client),
                    None => {
                        Arc::clone(shared.insert(Arc::new(connect().await.map_err(Into::into)?)))
                    }
                };
                Ok::<_, ConnectCause>(Pooled::new(client, |client| client))
            }
        })
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

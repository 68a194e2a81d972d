//! Connections: of the caller's pool, or one that is shared.

mod shared;
mod timed;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::shared::SharedConnection;
pub(crate) use self::timed::TimedConnection;
use hapax_core::store::BoxFuture;
use hapax_postgres::SchemaName;
use hapax_postgres_data::{Answering, Executor, SqlParameter, SqlRow};
use tokio::runtime::Handle;

use crate::schema::{check_one_set, in_schema};

/// Cause of a failed connection.
pub type ConnectCause = Box<dyn std::error::Error + Send + Sync>;

/// Range of timeouts.
pub(crate) const TIMEOUTS: (Duration, Duration) =
    (Duration::from_millis(20), Duration::from_secs(24 * 60 * 60));

type Connect<C> = dyn Fn() -> BoxFuture<'static, Result<C, ConnectCause>> + Send + Sync;
type Discard<C> = dyn Fn(C) + Send + Sync;

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
    discard: Arc<Discard<C>>,
    schema: Option<SchemaName>,
}

impl<C: Executor + 'static> Connections<C> {
    /// Creates a source from a function that takes a connection from a pool. The future that the function
    /// returns is dropped after the `statement_timeout` of an inbox or a store of dead letters, and after
    /// the `outbox_timeout` of a relay. A [`PgOutbox`](crate::PgOutbox) without a relay waits without a
    /// limit.
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
        Self { connect: Arc::new(connect), discard: Arc::new(wait_for_answer), schema: None }
    }

    /// Sets the schema of the tables and functions of messages, which the statements of this crate then name.
    /// Default: the only schema of the search path that has them.
    ///
    /// A handler of a [`PgInbox`](crate::PgInbox) names it itself ([`put_messages`](crate::put_messages)). If the
    /// search path finds the tables of another schema first, the inbox applies no batch: calls of a handler that
    /// names no schema would write to an outbox that no relay publishes.
    #[must_use]
    pub fn schema(mut self, schema: SchemaName) -> Self {
        self.schema = Some(schema);
        self
    }

    /// Returns the schema that statements name.
    pub(crate) const fn named_schema(&self) -> Option<&SchemaName> {
        self.schema.as_ref()
    }

    /// Returns a statement as it is sent.
    pub(crate) fn statement<'a>(&self, text: &'a str) -> Cow<'a, str> {
        in_schema(self.schema.as_ref(), text)
    }

    /// Sets the function that discards a connection on which the database did not answer in time. It
    /// may be in a transaction: the function must close it, and not return it to its pool. With
    /// sqlx `drop(connection.detach())`, with deadpool:
    ///
    /// ```
    /// # fn example(connections: hapax_postgres_messages::Connections<
    /// #     hapax_postgres_data::Pooled<deadpool_postgres::Object>,
    /// # >) {
    /// use deadpool_postgres::Object;
    /// let connections = connections.discard_with(|pooled| drop(Object::take(pooled.into_inner())));
    /// # }
    /// ```
    ///
    /// Default: the connection is kept, outside of the pool, until the database answers or the
    /// connection breaks, and then dropped. Until then the pool has one connection less, so set
    /// `keepalives_idle` and `tcp_user_timeout`.
    #[must_use]
    pub fn discard_with(mut self, discard: impl Fn(C) + Send + Sync + 'static) -> Self {
        self.discard = Arc::new(discard);
        self
    }

    /// Gives up a connection that may be in a transaction.
    pub(crate) fn give_up(&self, connection: C) {
        (self.discard)(connection);
    }

    pub(crate) async fn connect(&self) -> Result<C, ConnectCause> {
        (self.connect)().await
    }
}

/// Drops a connection once the database has answered all that was sent on it: then it is in no
/// transaction.
fn wait_for_answer<C: Executor + 'static>(mut connection: C) {
    // Without a runtime nothing can be sent, and the connection is driven by nothing.
    let Ok(runtime) = Handle::try_current() else { return };
    runtime.spawn(async move {
        // An error is an end too: a connection that is closed is not used again by a pool.
        let _ = connection.run("ROLLBACK", &[]).await;
    });
}

impl<C> Clone for Connections<C> {
    fn clone(&self) -> Self {
        Self {
            connect: Arc::clone(&self.connect),
            discard: Arc::clone(&self.discard),
            schema: self.schema.clone(),
        }
    }
}

impl<C> fmt::Debug for Connections<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connections")
    }
}

/// A connection, whose statements have the time to be answered, if there is one.
type ConnectFor = dyn Fn(Option<Duration>) -> BoxFuture<'static, Result<Box<dyn Executor>, ConnectCause>>
    + Send
    + Sync;

/// Connections for single statements: those of a pool ([`Connections`]), or one that is shared
/// ([`SharedConnection`]).
#[derive(Clone)]
pub struct StatementConnections {
    connect: Arc<ConnectFor>,
    has_schema: bool,
}

/// A connection whose statements name their schema, if there is one.
struct InSchema<C> {
    connections: Connections<C>,
    connection: C,
}

impl<C: Executor + 'static> Executor for InSchema<C> {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(async move {
            let text = self.connections.statement(text);
            self.connection.run(&text, parameters).await
        })
    }
}

impl StatementConnections {
    /// Rejects tables that exist twice in the search path, unless the statements name their schema.
    pub(crate) async fn check_one_set(&self, limit: Option<Duration>) -> Result<(), ConnectCause> {
        if !self.has_schema {
            check_one_set(&mut *self.connect(limit).await?, None).await?;
        }
        Ok(())
    }

    /// Takes a connection. With a limit it and each of its statements fail after that time.
    pub(crate) async fn connect(
        &self,
        limit: Option<Duration>,
    ) -> Result<Box<dyn Executor>, ConnectCause> {
        (self.connect)(limit).await
    }

    /// Runs one statement.
    pub(crate) async fn run(
        &self,
        limit: Option<Duration>,
        text: &str,
        parameters: &[SqlParameter<'_>],
    ) -> Result<Vec<SqlRow>, ConnectCause> {
        Ok(self.connect(limit).await?.run(text, parameters).await?)
    }
}

impl fmt::Debug for StatementConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StatementConnections")
    }
}

impl<C: Executor + 'static> From<&Connections<C>> for StatementConnections {
    fn from(connections: &Connections<C>) -> Self {
        let has_schema = connections.named_schema().is_some();
        let connections = connections.clone();
        let connect = Arc::new(move |limit| {
            let connections = connections.clone();
            Box::pin(async move {
                Ok(match limit {
                    Some(limit) => Box::new(TimedConnection::connect(&connections, limit).await?)
                        as Box<dyn Executor>,
                    None => {
                        let connection = connections.connect().await?;
                        Box::new(InSchema { connections, connection })
                    }
                })
            }) as BoxFuture<'static, _>
        });
        Self { connect, has_schema }
    }
}

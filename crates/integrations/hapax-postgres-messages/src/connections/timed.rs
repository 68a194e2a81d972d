//! A connection whose statements have a timeout.

use std::time::Duration;

use hapax_postgres_data::{Answering, Executor, SqlParameter, StatementError};
use tokio::time::timeout;

use super::{ConnectCause, Connections};

/// A connection for one transaction or statement. A statement that is not answered in time may leave
/// it in a transaction, so that it must not return to its pool: it is given up, and further statements
/// fail. Nothing is cancelled: what was sent, a COMMIT too, may still be executed.
pub(crate) struct TimedConnection<C> {
    connections: Connections<C>,
    connection: Option<C>,
    limit: Duration,
}

impl<C: Executor + 'static> TimedConnection<C> {
    /// Takes a connection, whose statements have `limit` to be answered.
    pub(crate) async fn connect(
        connections: &Connections<C>,
        limit: Duration,
    ) -> Result<Self, ConnectCause> {
        let connections = connections.clone();
        match timeout(limit, connections.connect()).await {
            Ok(connection) => Ok(Self { connection: Some(connection?), connections, limit }),
            Err(_) => Err(format!(
                "expected a connection within {limit:?}, found none: check the database, and the size \
                 of the pool"
            )
            .into()),
        }
    }

    /// Returns the connection, for the handler; `None` if it was given up.
    pub(crate) const fn get_mut(&mut self) -> Option<&mut C> {
        self.connection.as_mut()
    }

    /// Extends the time for an answer, for the next statement after those of a handler.
    pub(crate) const fn extend(&mut self, by: Duration) {
        self.limit = self.limit.saturating_add(by);
    }

    fn no_answer(&self) -> StatementError {
        let text =
            format!("expected an answer of the database within {:?}, found none", self.limit);
        StatementError::Lost(text.into())
    }
}

impl<C: Executor + 'static> Executor for TimedConnection<C> {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(async move {
            let Some(connection) = &mut self.connection else { return Err(self.no_answer()) };
            let text = self.connections.statement(text);
            let answered = timeout(self.limit, connection.run(&text, parameters)).await;
            answered.unwrap_or_else(|_| {
                if let Some(connection) = self.connection.take() {
                    self.connections.give_up(connection);
                }
                Err(self.no_answer())
            })
        })
    }
}

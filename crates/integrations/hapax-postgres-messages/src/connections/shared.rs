//! One connection that all callers share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_postgres_data::{Answering, Executor, SqlParameter};
use tokio::sync::Mutex;
use tokio_postgres::Client;

use super::{ConnectCause, Connections, StatementConnections};

/// One connection that all callers share, for single statements. It is made again after it was lost,
/// and after the future of a statement was dropped, which a timeout does: the server may be gone.
///
/// Transactions of several callers cannot share a connection, so a [`PgInbox`](crate::PgInbox) takes
/// [`Connections`]:
///
/// ```compile_fail
/// # use hapax_postgres_messages::{BatchHandler, PgInbox, SharedConnection};
/// # use tokio_postgres::Client;
/// fn inbox(shared: SharedConnection, handler: impl BatchHandler<Client>) -> PgInbox<Client> {
///     PgInbox::new("orders", shared, std::time::Duration::from_secs(3600), handler)
/// }
/// ```
#[derive(Clone)]
pub struct SharedConnection {
    connections: Connections<SharedClient>,
}

impl SharedConnection {
    /// Creates a source of one connection from a function that connects. It limits the time that this
    /// takes.
    pub fn new<F, E>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Client, E>> + Send + 'static,
        E: Into<ConnectCause> + 'static,
    {
        let connect = Arc::new(connect);
        let open: Arc<Mutex<Option<SharedClient>>> = Arc::default();
        let connections = Connections::new(move || {
            let (connect, open) = (Arc::clone(&connect), Arc::clone(&open));
            async move {
                // Held while it connects, so that callers do not connect beside each other.
                let mut open = open.lock().await;
                if let Some(client) = open.as_ref().filter(|client| client.0.is_usable()) {
                    return Ok(client.clone());
                }
                let client = connect().await.map_err(Into::into)?;
                let client = OpenClient { client, is_abandoned: AtomicBool::new(false) };
                Ok::<_, ConnectCause>(open.insert(SharedClient(Arc::new(client))).clone())
            }
        });
        Self { connections }
    }
}

impl From<&SharedConnection> for StatementConnections {
    fn from(shared: &SharedConnection) -> Self {
        Self::from(&shared.connections)
    }
}

impl fmt::Debug for SharedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedConnection")
    }
}

#[derive(Clone)]
struct SharedClient(Arc<OpenClient>);

struct OpenClient {
    client: Client,
    /// Whether the future of a statement was dropped before its end.
    is_abandoned: AtomicBool,
}

impl OpenClient {
    fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.is_abandoned.load(Ordering::Relaxed)
    }
}

impl Executor for SharedClient {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(async move {
            let mut running = Running { client: &self.0, is_ended: false };
            let mut client = &self.0.client;
            let rows = client.run(text, parameters).await;
            running.is_ended = true;
            rows
        })
    }
}

/// A statement under way: it abandons the connection if it is dropped before its end.
struct Running<'a> {
    client: &'a OpenClient,
    is_ended: bool,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.is_ended {
            self.client.is_abandoned.store(true, Ordering::Relaxed);
        }
    }
}

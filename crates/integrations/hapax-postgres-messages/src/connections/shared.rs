//! One connection that all callers share.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use hapax_postgres::SchemaName;
use hapax_postgres_data::{Answering, Executor, SqlParameter};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_postgres::Client;

use super::{ConnectCause, Connections, StatementConnections};

/// Pauses before a connection is made while others were given up and are not answered: they double
/// with each of these.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(600);

/// One connection that all callers share, for single statements. Another one replaces it after it was
/// lost, and after the future of a statement was dropped, by a timeout or a caller: the server may be
/// gone.
///
/// A server whose synchronous standby is away keeps each session that waits for it. So while
/// connections that were given up are not answered, further ones are made ever less often, at last
/// every 10 minutes.
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
    /// Creates a source of one connection from a function that connects. The function must fail after
    /// a time: callers wait for it one after the other.
    pub fn new<F, E>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Client, E>> + Send + 'static,
        E: Into<ConnectCause> + 'static,
    {
        let connect = Arc::new(connect);
        let open: Arc<Mutex<Option<SharedClient>>> = Arc::default();
        let unanswered = Arc::<Unanswered>::default();
        let connections = Connections::new(move || {
            let (connect, open) = (Arc::clone(&connect), Arc::clone(&open));
            let unanswered = Arc::clone(&unanswered);
            async move {
                // Held while it connects, so that callers do not connect beside each other.
                let mut open = open.lock().await;
                if let Some(client) = open.as_ref().filter(|client| client.0.is_usable()) {
                    return Ok(client.clone());
                }
                unanswered.check()?;
                let client = connect().await.map_err(Into::into)?;
                let is_abandoned = AtomicBool::new(false);
                let client = OpenClient { client, is_abandoned, unanswered };
                Ok::<_, ConnectCause>(open.insert(SharedClient(Arc::new(client))).clone())
            }
        });
        Self { connections }
    }

    /// Sets the schema of the tables and functions: see [`Connections::schema`].
    #[must_use]
    pub fn schema(self, schema: SchemaName) -> Self {
        Self { connections: self.connections.schema(schema) }
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
    unanswered: Arc<Unanswered>,
}

impl OpenClient {
    fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.is_abandoned.load(Ordering::Relaxed)
    }
}

impl Executor for SharedClient {
    fn run<'a>(&'a mut self, text: &'a str, parameters: &'a [SqlParameter<'a>]) -> Answering<'a> {
        Box::pin(async move {
            let mut running = Running { shared: &*self, is_ended: false };
            let mut client = &self.0.client;
            let rows = client.run(text, parameters).await;
            running.is_ended = true;
            rows
        })
    }
}

/// A statement in progress: it abandons the connection if it is dropped before its end.
struct Running<'a> {
    shared: &'a SharedClient,
    is_ended: bool,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let client = &self.shared.0;
        if !self.is_ended && !client.is_abandoned.swap(true, Ordering::Relaxed) {
            client.unanswered.add(self.shared.clone());
        }
    }
}

/// Connections that were given up, and are neither answered nor closed.
#[derive(Default)]
struct Unanswered {
    state: std::sync::Mutex<(u32, Option<Instant>)>,
}

impl Unanswered {
    /// Adds a connection until the server has answered what was sent on it.
    fn add(self: &Arc<Self>, shared: SharedClient) {
        let Ok(runtime) = Handle::try_current() else { return };
        self.change(|(count, last)| {
            *count += 1;
            *last = Some(Instant::now());
        });
        let this = Arc::clone(self);
        runtime.spawn(async move {
            // It is answered after the statements before it. An error is an end too.
            let _ = shared.0.client.simple_query("").await;
            this.change(|(count, _)| *count -= 1);
        });
    }

    /// Returns an error if no further connection is to be made now.
    fn check(&self) -> Result<(), ConnectCause> {
        let (count, last) = self.change(|state| *state);
        let Some(last) = last.filter(|_| count > 0) else { return Ok(()) };
        let pause = FIRST_PAUSE.saturating_mul(1 << (count - 1).min(16)).min(LAST_PAUSE);
        if last.elapsed() >= pause {
            return Ok(());
        }
        Err(format!(
            "expected answers on {count} connections, found none: is the server away, or its \
             synchronous standby? The next connection is made within {pause:?}"
        )
        .into())
    }

    fn change<T>(&self, change: impl FnOnce(&mut (u32, Option<Instant>)) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

//! The client and its builder.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::store::Inspect;
use hapax_core::{Clock, Idempotency, Key, OperationId, Scope, SystemClock};
use hapax_proxy::tls::{AllCertificates, UpstreamTls};
use hapax_proxy::{ConnectOptions, Origin, Upstream, UpstreamProtocol};
use hapax_saga::{SagaOperator, Sagas};
use http::{HeaderName, Method, Uri};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use crate::admission::Admission;
use crate::credentials::{Credentials, CredentialsError, CredentialsRequest, Supplier};
use crate::error::ClientError;
use crate::flow::{ClientNode, ClientState, Host, RequestSaga, TRY, define};
use crate::journal::{Journal, JournalError};
use crate::request::{OutgoingRequest, server_name};
use crate::server::Server;
use crate::stats::HostCounters;

/// Operations of callers that are tried, or in a short pause, at once. Tries have permits of their server.
const SENDING: usize = 100_000;

/// Limit of resumed operations that run at the same time.
const RESUMING: usize = 16;

/// The longest pause for which an operation of a caller is kept in memory.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// Longest lease of a resumed operation, so that another process sees within this time that it was parked.
const LOOK: Duration = Duration::from_secs(5);

/// Default of the time without a byte after which a try ends; that of a whole try is [`TRY`].
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Default of the memory for bodies of responses that the journal does not keep.
const RESPONSE_MEMORY: usize = 256 << 20;

/// A client of HTTP servers over a journal, whose operations survive crashes. Clones share connections, limits
/// and journal.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<ClientInner>,
}

pub(crate) struct ClientInner {
    pub(crate) state: Arc<ClientState>,
    pub(crate) saga: RequestSaga,
    pub(crate) engine: Idempotency,
    pub(crate) store: Arc<dyn Inspect>,
    pub(crate) operator: SagaOperator,
    /// Runs the operations of callers.
    pub(crate) sending: Sagas,
    /// Runs the operations that were resumed.
    pub(crate) resuming: Sagas,
    /// Task of `resuming`.
    pub(crate) runner: Mutex<Option<JoinHandle<()>>>,
    /// True once the client is closed.
    pub(crate) closed: watch::Sender<bool>,
    secret_headers: Vec<HeaderName>,
    strict: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("servers", &self.inner.state.hosts.keys())
            .finish_non_exhaustive()
    }
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        let runner = self.runner.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(runner) = runner.take() {
            runner.abort();
        }
    }
}

impl Client {
    /// Returns a builder of a client that uses this journal. A [`server`](ClientBuilder::server) is declared next.
    pub fn open(journal: Journal) -> ClientBuilder {
        ClientBuilder {
            journal,
            servers: Vec::new(),
            supplier: None,
            secret_headers: Vec::new(),
            strict: false,
            root_certificates: None,
            within: Duration::from_secs(60 * 60),
            remember: Duration::from_secs(30 * 24 * 60 * 60),
            lease: Duration::from_secs(30),
            idle_timeout: IDLE_TIMEOUT,
            response_memory: RESPONSE_MEMORY,
            clock: Arc::new(SystemClock),
            #[cfg(test)]
            doubles: HashMap::new(),
        }
    }

    /// Builds a request with an empty body. Nothing is sent before [`OutgoingRequest::send`].
    pub fn request(&self, method: Method, url: impl Into<String>) -> OutgoingRequest {
        OutgoingRequest::new(self.clone(), method, url.into())
    }

    /// Builds a POST like [`request`](Self::request).
    pub fn post(&self, url: impl Into<String>) -> OutgoingRequest {
        self.request(Method::POST, url)
    }

    /// Returns the idempotency key of a name: 64 hexadecimal digits, derived from the name and the secret of
    /// the journal alone. `None` if the name is not 1 to 255 printable ASCII characters.
    #[must_use]
    pub fn key(&self, name: &str) -> Option<Key> {
        Some(self.id(&Key::new(name).ok()?).downstream())
    }

    /// Closes the client. Calls that wait end with [`SendError::Closed`](crate::SendError::Closed). Requests
    /// in progress may end within `drain`, and their writes within another `drain`; the rest is left to
    /// [`resume`](Self::resume). Returns true if nothing was left.
    pub async fn close(self, drain: Duration) -> bool {
        self.inner.closed.send_replace(true);
        // First: it would claim what parks.
        let runner = self.inner.runner.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(runner) = runner {
            runner.abort();
            let _ = runner.await;
        }
        let ended = tokio::join!(
            self.inner.sending.run(std::future::ready(()), drain),
            self.inner.resuming.run(std::future::ready(()), drain),
        );
        let drained = tokio::time::timeout(drain, self.inner.engine.drain()).await.is_ok();
        ended == (true, true) && drained
    }

    pub(crate) fn scope() -> Scope {
        Scope::shared()
    }

    pub(crate) fn id(&self, name: &Key) -> OperationId {
        self.inner.sending.operation_id(&self.inner.saga, &Self::scope(), name)
    }

    pub(crate) fn within(&self) -> Duration {
        self.inner.state.within
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.inner.strict
    }

    pub(crate) fn is_secret(&self, name: &HeaderName) -> bool {
        self.inner.secret_headers.contains(name)
    }

    /// Returns whether the server of a URL is declared.
    #[must_use]
    pub fn is_declared(&self, url: &str) -> bool {
        let server = url.parse().ok().as_ref().and_then(server_name);
        server.is_some_and(|server| self.host(&server).is_some())
    }

    pub(crate) fn host(&self, server: &str) -> Option<&Host> {
        self.inner.state.hosts.get(server)
    }
}

/// A builder of a [`Client`].
#[must_use = "`build` makes the client"]
pub struct ClientBuilder {
    journal: Journal,
    servers: Vec<(String, Server)>,
    supplier: Option<Supplier>,
    secret_headers: Vec<HeaderName>,
    strict: bool,
    root_certificates: Option<PathBuf>,
    within: Duration,
    remember: Duration,
    lease: Duration,
    idle_timeout: Duration,
    response_memory: usize,
    clock: Arc<dyn Clock>,
    /// By the name of the server.
    #[cfg(test)]
    pub(crate) doubles: HashMap<String, crate::tests::Double>,
}

impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder").field("servers", &self.servers).finish_non_exhaustive()
    }
}

impl ClientBuilder {
    /// Declares the server of an origin, `http://HOST[:PORT]` or `https://HOST[:PORT]`, once. A request to an
    /// origin that was not declared is rejected, and nothing is stored.
    pub fn server(mut self, origin: impl Into<String>, server: Server) -> Self {
        self.servers.push((origin.into(), server));
        self
    }

    /// Sets the callback that returns the credentials of each try; they are never stored. Without a callback no
    /// credentials are sent. If it fails, nothing is sent, and the try is repeated after a pause until the time
    /// of the operation is over. The text of its error may be secret, so that it is neither stored nor logged:
    /// log it in the callback.
    pub fn credentials<F, Fut>(mut self, supply: F) -> Self
    where
        F: Fn(CredentialsRequest) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, CredentialsError>> + Send + 'static,
    {
        self.supplier = Some(Supplier::new(supply));
        self
    }

    /// Adds a header that is never stored: a request with it is rejected
    /// ([`RequestError::SecretHeader`](crate::RequestError::SecretHeader)), as one with `Authorization`
    /// or `Cookie` is. May be called repeatedly. `Proxy-Authorization` is for a proxy and may not be sent at all.
    pub fn secret_header(mut self, name: HeaderName) -> Self {
        self.secret_headers.push(name);
        self
    }

    /// Rejects requests without the name of an operation
    /// ([`RequestError::NoName`](crate::RequestError::NoName)). Default: such an operation gets a random name.
    pub const fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Sets a file of root certificates in PEM, which replace those of the system for all servers. It is read
    /// by [`build`](Self::build).
    pub fn root_certificates(mut self, file: impl Into<PathBuf>) -> Self {
        self.root_certificates = Some(file.into());
        self
    }

    /// Sets the time for which an operation is tried, if its request sets none: see
    /// [`OutgoingRequest::within`]. Default 1 h.
    pub const fn within(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }

    /// Sets the time for which an operation with a response stays in the journal, above zero: meanwhile the
    /// same call returns the response. Later the same call sends again, and a server without a record of the
    /// key executes again: set more than the time in which any job repeats a name. Default 30 days.
    pub const fn remember(mut self, remember: Duration) -> Self {
        self.remember = remember;
        self
    }

    /// Sets the lease of an operation: the time after which another process continues it if this one has died.
    /// At least 100 ms. Default 30 s.
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the timeout of a try without progress: no byte of the request was accepted, and no byte of the
    /// response arrived. Above zero; a whole try has 60 s in any case. Default 30 s.
    pub const fn idle_timeout(mut self, idle_timeout: Duration) -> Self {
        self.idle_timeout = idle_timeout;
        self
    }

    /// Sets the memory, in bytes, for bodies of responses of more than 1 MiB: what each has above that, of all
    /// calls together, in whole MiB. A body past it is read to its end and dropped, and its call gets
    /// [`SendError::ResponseNotRetained`](crate::SendError::ResponseNotRetained). Bytes count until the call
    /// has returned. Default 256 MiB.
    pub const fn response_memory(mut self, bytes: usize) -> Self {
        self.response_memory = bytes;
        self
    }

    /// Sets the wall clock: it reads dates in `Retry-After`, and shows how long the machine was suspended.
    /// Default: the system's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Builds the client. It sends nothing.
    ///
    /// # Errors
    /// [`ClientError::Origin`], [`ClientError::DuplicateServer`], [`ClientError::Retention`],
    /// [`ClientError::ZeroDuration`]: a declaration is invalid; [`ClientError::Certificates`],
    /// [`ClientError::NoRootCertificates`]: no certificates can be used; [`ClientError::Journal`]: there is no
    /// runtime of tokio, or `lease` is below 100 ms.
    pub async fn build(self) -> Result<Client, ClientError> {
        let Self { journal, servers, supplier, secret_headers, strict, within, .. } = self;
        let times =
            [("within", within), ("remember", self.remember), ("idle_timeout", self.idle_timeout)];
        if let Some((setting, _)) = times.into_iter().find(|(_, time)| time.is_zero()) {
            return Err(ClientError::ZeroDuration { setting });
        }
        let mut hosts = HashMap::new();
        let failing = Arc::new(Semaphore::new(RESUMING / 2));
        for (found, server) in servers {
            let Some((name, origin)) = parse(&found) else {
                // What is before `@` may be a password.
                let found = found.rsplit('@').next().unwrap_or_default().to_owned();
                return Err(ClientError::Origin { found });
            };
            if !server.outlasts_a_try() {
                return Err(ClientError::Retention { limit: TRY, found: server.retention });
            }
            let host = host(origin, server, self.root_certificates.clone(), self.idle_timeout);
            let (server, upstream) = host.await?;
            let admission = Arc::new(Admission::new(Arc::clone(&failing)));
            #[cfg(test)]
            let double = self.doubles.get(&name).cloned();
            let host = Host {
                server,
                upstream,
                admission,
                counters: HostCounters::default(),
                #[cfg(test)]
                double,
            };
            if hosts.insert(name, host).is_some() {
                return Err(ClientError::DuplicateServer { found });
            }
        }
        let engine = journal.engine(Arc::clone(&self.clock))?;
        let memory = self.response_memory;
        let state = ClientState::new(
            hosts,
            supplier,
            [within, self.lease],
            engine.clone(),
            self.clock,
            memory,
        );
        let state = Arc::new(state);
        let define = |park_after, node| {
            define(Arc::clone(&state), self.remember, park_after, node).map_err(JournalError::from)
        };
        let saga = define(PAUSE, ClientNode::Sending)?;
        let sending = Sagas::builder(engine.clone()).register(&saga);
        let sending = sending.lease(self.lease).max_running(SENDING).build();
        // A resumed operation is parked in every pause, so that its permit serves others.
        let resumed = define(Duration::ZERO, ClientNode::Resuming)?;
        let resuming = Sagas::builder(engine.clone()).register(&resumed);
        let resuming = resuming.lease(self.lease.min(LOOK)).max_running(RESUMING).admission({
            let state = Arc::clone(&state);
            move |id, input| state.resume(id, input)
        });
        let sending = sending.map_err(JournalError::from)?;
        let resuming = resuming.build().map_err(JournalError::from)?;
        let operator = SagaOperator::new(engine.clone());
        let (runner, closed) = (Mutex::default(), watch::Sender::new(false));
        let store = journal.store;
        let inner = ClientInner {
            state,
            saga,
            engine,
            store,
            operator,
            sending,
            resuming,
            runner,
            closed,
            secret_headers,
            strict,
        };
        Ok(Client { inner: Arc::new(inner) })
    }
}

/// Returns the name of a server in `hosts`, and its address; `None` if `origin` is no origin.
fn parse(origin: &str) -> Option<(String, Origin)> {
    let url: Uri = origin.parse().ok()?;
    let is_bare = url.path_and_query().is_none_or(|it| it.as_str() == "/");
    (is_bare && !origin.contains('#')).then_some(())?;
    Some((server_name(&url)?, Origin::of(&url)?))
}

async fn host(
    origin: Origin,
    server: Server,
    ca: Option<PathBuf>,
    idle_timeout: Duration,
) -> Result<(Server, Upstream), ClientError> {
    let tls = match origin.secure {
        true => {
            let files = UpstreamTls { ca, client: None };
            AllCertificates::read(None, Some(files)).await?.upstream
        }
        false => None,
    };
    let protocol = match server.http2 {
        true => UpstreamProtocol::Http2,
        false => UpstreamProtocol::Auto,
    };
    let proxy = server.proxy.clone();
    let connect = ConnectOptions { tls, protocol, proxy, ..ConnectOptions::default() };
    let upstream = Upstream::new(origin, idle_timeout, Semaphore::MAX_PERMITS, connect);
    Ok((server, upstream))
}

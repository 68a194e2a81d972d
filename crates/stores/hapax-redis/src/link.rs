//! The connection that all callers share.
//!
//! 1. Callers wait for a connection and send on it. What was never sent did not happen; what was
//!    sent and not answered may have.
//! 2. The [keeper](crate::reconnect) makes it, looks after it and makes it anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::connection::Connection;
use crate::error::{RedisConnectError, RedisStoreError, RequestFailure, breaks};
use crate::reconnect::Reconnector;

/// A caller's end.
#[derive(Debug)]
pub(crate) struct ConnectionHandle {
    state: watch::Receiver<LinkState>,
    timeout: Duration,
    keeper: AbortHandle,
    connections: Arc<AtomicU64>,
    one: bool,
}

#[derive(Clone)]
pub(crate) enum LinkState {
    Connecting,
    Up(Arc<LiveConnection>),
    /// The last attempt failed; another one follows.
    Down(Arc<RedisConnectError>),
}

/// A connection, and whether it is alive.
pub(crate) struct LiveConnection {
    connection: Connection,
    /// Callers that wait for an answer now.
    waiting: AtomicUsize,
    answered: AtomicU64,
    pub(crate) broken: Arc<ConnectionStatus>,
}

/// Whether a connection has ended.
#[derive(Debug, Default)]
pub(crate) struct ConnectionStatus {
    ended: AtomicBool,
    /// Something behind it is another than it was, or was not looked at.
    changed: AtomicBool,
    /// Nothing is heard of writes any more.
    #[cfg(feature = "cluster")]
    deaf: AtomicBool,
    heard: Notify,
}

impl ConnectionStatus {
    /// It looks as if it had; the keeper sees to it.
    fn suspect(&self) {
        self.heard.notify_one();
    }

    /// It has: nobody needs to try it any more.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.heard.notify_one();
    }

    /// Its servers are to be looked at again.
    pub(crate) fn change(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Whether they are, since this was asked the last time.
    pub(crate) fn has_changed(&self) -> bool {
        self.changed.swap(false, Ordering::Relaxed)
    }

    /// Whoever waits for news is to subscribe again.
    #[cfg(feature = "cluster")]
    pub(crate) fn deafen(&self) {
        self.deaf.store(true, Ordering::Relaxed);
    }

    /// Whether that is so, since this was asked the last time.
    #[cfg(feature = "cluster")]
    pub(crate) fn was_deafened(&self) -> bool {
        self.deaf.swap(false, Ordering::Relaxed)
    }

    /// Waits until somebody hears so.
    pub(crate) async fn heard(&self) {
        self.heard.notified().await;
    }
}

/// A caller that waits, until this is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ConnectionHandle {
    /// Connects, and keeps the connection from then on, on the runtime of the caller.
    pub(crate) async fn open(keeper: Reconnector) -> Result<Self, RedisConnectError> {
        let timeout = keeper.options.timeout;
        let connections = Arc::clone(&keeper.made);
        let wire = Arc::new(keeper.connect(false).await?);
        let one = wire.connection.is_one();
        let (state, receiver) = watch::channel(LinkState::Up(Arc::clone(&wire)));
        let keeper = tokio::spawn(keeper.keep(wire, state)).abort_handle();
        Ok(Self { state: receiver, timeout, keeper, connections, one })
    }

    /// Sends a command and waits for its answer. Dropped before the answer, the command may still
    /// be carried out.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, RequestFailure> {
        let deadline = Instant::now() + self.timeout;
        let wire = self.wire().await?;
        wire.send(command, deadline, self.timeout).await
    }

    /// The connection: at once while there is one, else when the attempt that is under way, or the
    /// next one, comes to an end.
    pub(crate) async fn wire(&self) -> Result<Arc<LiveConnection>, RequestFailure> {
        if let LinkState::Up(wire) = &*self.state.borrow()
            && !wire.has_ended()
        {
            return Ok(Arc::clone(wire));
        }
        self.next_wire().await
    }

    async fn next_wire(&self) -> Result<Arc<LiveConnection>, RequestFailure> {
        // Shorter than what callers wait for the whole: an error that says that nothing was sent
        // is worth more to them than their own time-out, after which anything may have happened.
        let limit = self.timeout * 3 / 4;
        let mut state = self.state.clone();
        let waiting = async {
            // An attempt that failed before this call says nothing: wait for the next one.
            let mut stale = true;
            loop {
                match &*state.borrow_and_update() {
                    LinkState::Up(wire) if !wire.has_ended() => return Ok(Arc::clone(wire)),
                    LinkState::Down(error) if !stale => {
                        return Err(RedisStoreError::NotConnected(Arc::clone(error)));
                    }
                    LinkState::Up(_) | LinkState::Connecting | LinkState::Down(_) => stale = false,
                }
                // The keeper ends with the link, or with its runtime.
                if state.changed().await.is_err() {
                    return Err(RedisStoreError::Connecting(self.timeout));
                }
            }
        };
        let waited = timeout(limit, waiting).await;
        waited.unwrap_or(Err(RedisStoreError::Connecting(limit))).map_err(RequestFailure::Nothing)
    }

    /// Whether it leads to one server, and not to a cluster.
    pub(crate) const fn is_one(&self) -> bool {
        self.one
    }

    /// Connections made so far.
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) const fn timeout(&self) -> Duration {
        self.timeout
    }
}

impl Drop for ConnectionHandle {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl LiveConnection {
    pub(crate) fn new(connection: Connection, broken: Arc<ConnectionStatus>) -> Self {
        let (waiting, answered) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { connection, waiting, answered, broken }
    }

    /// A connection of its own handle, for several commands that belong together.
    pub(crate) fn connection(&self) -> Connection {
        self.connection.clone()
    }

    pub(crate) async fn send(
        &self,
        command: &Cmd,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Value, RequestFailure> {
        let mut connection = self.connection.clone();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        // Dropped here, by the time-out or by the caller, the command is withdrawn if it was not
        // written yet, else its answer is thrown away. Nobody is told which: it may be done.
        let answer = timeout_at(deadline, connection.query(command)).await;
        let Ok(answer) = answer else {
            return Err(RequestFailure::Unknown(RedisStoreError::TimedOut(limit)));
        };
        answer.inspect(|_| self.has_answered()).map_err(|error| {
            if !breaks(&error) {
                self.has_answered();
            } else if self.is_one() {
                self.broken.end();
            } else {
                // A cluster's client has other connections, and looks after them by itself.
                self.broken.suspect();
            }
            self.connection.classify(error)
        })
    }

    fn has_ended(&self) -> bool {
        self.broken.ended.load(Ordering::Relaxed)
    }

    /// Whether it leads to one server, and no further.
    pub(crate) const fn is_one(&self) -> bool {
        self.connection.is_one()
    }

    fn has_answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    /// How much was answered so far.
    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// The same, if somebody waits for an answer.
    pub(crate) fn waited_at(&self) -> Option<u64> {
        (self.waiting.load(Ordering::Relaxed) > 0).then(|| self.answered())
    }
}

impl std::fmt::Debug for LinkState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Connecting => "connecting",
            Self::Up(_) => "up",
            Self::Down(_) => "down",
        })
    }
}

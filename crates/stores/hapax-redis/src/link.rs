//! The connection that all callers share.
//!
//! 1. Callers wait for a connection and send on it. A request that was never sent did not happen;
//!    one that was sent and not answered may have.
//! 2. The [`Reconnector`](crate::reconnect) makes the connection, checks it and replaces it.

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

/// A caller's handle to the connection.
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

/// A connection and its status.
pub(crate) struct LiveConnection {
    connection: Connection,
    /// Callers that wait for an answer now.
    waiting: AtomicUsize,
    answered: AtomicU64,
    pub(crate) broken: Arc<ConnectionStatus>,
}

/// Events on a connection that its task must react to.
#[derive(Debug, Default)]
pub(crate) struct ConnectionStatus {
    ended: AtomicBool,
    /// The servers may have changed, or could not all be checked.
    changed: AtomicBool,
    /// The subscription to notifications was lost.
    #[cfg(feature = "cluster")]
    subscriptions_lost: AtomicBool,
    heard: Notify,
}

impl ConnectionStatus {
    /// Reports that the connection may have ended; its task checks it.
    fn suspect(&self) {
        self.heard.notify_one();
    }

    /// Reports that the connection has ended, without a check.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.heard.notify_one();
    }

    /// Reports that the servers must be checked again.
    pub(crate) fn change(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Returns and clears whether the servers must be checked again.
    pub(crate) fn has_changed(&self) -> bool {
        self.changed.swap(false, Ordering::Relaxed)
    }

    /// Reports that the subscriptions must be made again.
    #[cfg(feature = "cluster")]
    pub(crate) fn lose_subscriptions(&self) {
        self.subscriptions_lost.store(true, Ordering::Relaxed);
    }

    /// Returns and clears whether the subscriptions must be made again.
    #[cfg(feature = "cluster")]
    pub(crate) fn has_lost_subscriptions(&self) -> bool {
        self.subscriptions_lost.swap(false, Ordering::Relaxed)
    }

    /// Waits until the connection is reported as ended, or as possibly ended.
    pub(crate) async fn heard(&self) {
        self.heard.notified().await;
    }
}

/// Counts a caller that waits for an answer, until dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ConnectionHandle {
    /// Connects, and starts the task that maintains the connection, on the caller's runtime.
    pub(crate) async fn open(keeper: Reconnector) -> Result<Self, RedisConnectError> {
        let timeout = keeper.options.timeout;
        let connections = Arc::clone(&keeper.made);
        let wire = Arc::new(keeper.connect(false).await?);
        let one = wire.connection.is_one();
        let (state, receiver) = watch::channel(LinkState::Up(Arc::clone(&wire)));
        let keeper = tokio::spawn(keeper.keep(wire, state)).abort_handle();
        Ok(Self { state: receiver, timeout, keeper, connections, one })
    }

    /// Sends a command and waits for its answer. If the future is dropped before the answer, the
    /// command may still be executed.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, RequestFailure> {
        let deadline = Instant::now() + self.timeout;
        let wire = self.wire().await?;
        wire.send(command, deadline, self.timeout).await
    }

    /// Returns the connection: at once while there is one, else when the current or the next
    /// attempt to connect ends.
    pub(crate) async fn wire(&self) -> Result<Arc<LiveConnection>, RequestFailure> {
        if let LinkState::Up(wire) = &*self.state.borrow()
            && !wire.has_ended()
        {
            return Ok(Arc::clone(wire));
        }
        self.next_wire().await
    }

    async fn next_wire(&self) -> Result<Arc<LiveConnection>, RequestFailure> {
        // Shorter than the callers' whole timeout: an error that means "nothing was sent" is more
        // useful than their own timeout, after which the request may have been executed.
        let limit = self.timeout * 3 / 4;
        let mut state = self.state.clone();
        let waiting = async {
            // An attempt that failed before this call does not count: wait for the next one.
            let mut stale = true;
            loop {
                match &*state.borrow_and_update() {
                    LinkState::Up(wire) if !wire.has_ended() => return Ok(Arc::clone(wire)),
                    LinkState::Down(error) if !stale => {
                        return Err(RedisStoreError::NotConnected(Arc::clone(error)));
                    }
                    LinkState::Up(_) | LinkState::Connecting | LinkState::Down(_) => stale = false,
                }
                // The task ends with the link, or with its runtime.
                if state.changed().await.is_err() {
                    return Err(RedisStoreError::Connecting(self.timeout));
                }
            }
        };
        let waited = timeout(limit, waiting).await;
        waited.unwrap_or(Err(RedisStoreError::Connecting(limit))).map_err(RequestFailure::Nothing)
    }

    /// Returns whether this is a connection to a single server, not to a cluster.
    pub(crate) const fn is_one(&self) -> bool {
        self.one
    }

    /// Returns the number of connections made so far.
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

    /// Returns a separate handle to the connection, for several commands in a row.
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
        // Dropped here, by the timeout or by the caller, the command is withdrawn if it was not
        // written yet; else its answer is discarded. The caller cannot distinguish the two: the
        // command may have been executed.
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
                // A cluster's client has other connections, and checks them itself.
                self.broken.suspect();
            }
            self.connection.classify(error)
        })
    }

    fn has_ended(&self) -> bool {
        self.broken.ended.load(Ordering::Relaxed)
    }

    /// Returns whether this is a connection to a single server.
    pub(crate) const fn is_one(&self) -> bool {
        self.connection.is_one()
    }

    fn has_answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of answers so far.
    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Returns the number of answers so far if a caller waits for one.
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

//! The connection that all callers share, and the task that keeps it.
//!
//! 1. Callers wait for a connection and send on it. What was never sent did not happen; what was
//!    sent and not answered may have.
//! 2. The keeper connects, looks after the connection, and makes a new one when it breaks or falls
//!    silent: a server that does not answer while requests wait is asked whether it is there, and
//!    the connection is given up if it does not say so. A time-out alone is no reason, because
//!    that would cost everybody else on it their answers.
//! 3. The keeper subscribes to what somebody waits for.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hapax::StoreKey;
use redis::{Cmd, PushInfo, PushKind, Value};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::connection::{self, Connection, Pushed};
use crate::error::{ConnectError, Failure, RedisStoreError, breaks, classify};
use crate::names::Names;
use crate::options::Options;
use crate::target::Target;
use crate::watches::Watches;

/// Pauses between attempts to connect: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// Channels subscribed to by one command.
const CHANNELS_AT_ONCE: usize = 256;

/// A caller's end.
#[derive(Debug)]
pub(crate) struct Link {
    state: watch::Receiver<State>,
    timeout: Duration,
    keeper: AbortHandle,
}

#[derive(Clone)]
enum State {
    Connecting,
    Up(Arc<Wire>),
    /// The last attempt failed; another one follows.
    Down(Arc<ConnectError>),
}

/// A connection, and whether it is alive.
pub(crate) struct Wire {
    connection: Connection,
    /// Callers that wait for an answer now.
    waiting: AtomicUsize,
    answered: AtomicU64,
    broken: Arc<Broken>,
}

/// Whether a connection has ended.
#[derive(Debug, Default)]
struct Broken {
    ended: AtomicBool,
    heard: Notify,
}

impl Broken {
    /// It looks as if it had; the keeper sees to it.
    fn suspect(&self) {
        self.heard.notify_one();
    }

    /// It has: nobody needs to try it any more.
    fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.heard.notify_one();
    }
}

/// A caller that waits, until this is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Link {
    /// Connects, and keeps the connection from then on, on the runtime of the caller.
    pub(crate) async fn open(
        target: Target,
        options: Options,
        names: Names,
        watches: Arc<Watches>,
    ) -> Result<Self, ConnectError> {
        let timeout = options.timeout;
        let keeper = Keeper { target, options, names, watches };
        let wire = Arc::new(keeper.connect().await?);
        let (state, receiver) = watch::channel(State::Up(Arc::clone(&wire)));
        let keeper = tokio::spawn(keeper.keep(wire, state)).abort_handle();
        Ok(Self { state: receiver, timeout, keeper })
    }

    /// Sends a command and waits for its answer. Dropped before the answer, the command may still
    /// be carried out.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, Failure> {
        let deadline = Instant::now() + self.timeout;
        let wire = self.wire().await?;
        wire.send(command, deadline, self.timeout).await
    }

    /// The connection: at once while there is one, else when the attempt that is under way, or the
    /// next one, comes to an end.
    pub(crate) async fn wire(&self) -> Result<Arc<Wire>, Failure> {
        if let State::Up(wire) = &*self.state.borrow()
            && !wire.has_ended()
        {
            return Ok(Arc::clone(wire));
        }
        self.next_wire().await
    }

    async fn next_wire(&self) -> Result<Arc<Wire>, Failure> {
        // Shorter than what callers wait for the whole: an error that says that nothing was sent
        // is worth more to them than their own time-out, after which anything may have happened.
        let patience = self.timeout * 3 / 4;
        let mut state = self.state.clone();
        let waiting = async {
            // An attempt that failed before this call says nothing: wait for the next one.
            let mut stale = true;
            loop {
                match &*state.borrow_and_update() {
                    State::Up(wire) if !wire.has_ended() => return Ok(Arc::clone(wire)),
                    State::Down(error) if !stale => {
                        return Err(RedisStoreError::NotConnected(Arc::clone(error)));
                    }
                    State::Up(_) | State::Connecting | State::Down(_) => stale = false,
                }
                // The keeper ends with the link, or with its runtime.
                if state.changed().await.is_err() {
                    return Err(RedisStoreError::Connecting(self.timeout));
                }
            }
        };
        let waited = timeout(patience, waiting).await;
        waited.unwrap_or(Err(RedisStoreError::Connecting(patience))).map_err(Failure::Nothing)
    }

    pub(crate) const fn timeout(&self) -> Duration {
        self.timeout
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Wire {
    /// A connection of its own handle, for several commands that belong together.
    pub(crate) fn connection(&self) -> Connection {
        self.connection.clone()
    }

    pub(crate) async fn send(
        &self,
        command: &Cmd,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Value, Failure> {
        let mut connection = self.connection.clone();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        // Dropped here, by the time-out or by the caller, the command is withdrawn if it was not
        // written yet, else its answer is thrown away. Nobody is told which: it may be done.
        let answer = timeout_at(deadline, connection.query(command)).await;
        let Ok(answer) = answer else {
            return Err(Failure::Unknown(RedisStoreError::TimedOut(limit)));
        };
        self.answered.fetch_add(1, Ordering::Relaxed);
        answer.map_err(|error| {
            if breaks(&error) {
                // A cluster's client has other connections, and looks after them by itself.
                if self.connection.is_one() { self.broken.end() } else { self.broken.suspect() }
            }
            classify(error)
        })
    }

    fn has_ended(&self) -> bool {
        self.broken.ended.load(Ordering::Relaxed)
    }

    /// What was answered so far, if somebody waits for an answer.
    fn waited_at(&self) -> Option<u64> {
        let answered = self.answered.load(Ordering::Relaxed);
        (self.waiting.load(Ordering::Relaxed) > 0).then_some(answered)
    }
}

/// The task that keeps the connection.
struct Keeper {
    target: Target,
    options: Options,
    names: Names,
    watches: Arc<Watches>,
}

impl Keeper {
    async fn connect(&self) -> Result<Wire, ConnectError> {
        let broken = Arc::<Broken>::default();
        let pushed = self.pushed(Arc::clone(&broken));
        let connection = connection::open(&self.target, &self.options, &pushed).await?;
        let (waiting, answered) = (AtomicUsize::new(0), AtomicU64::new(0));
        Ok(Wire { connection, waiting, answered, broken })
    }

    /// What is heard on the connection without being asked for.
    fn pushed(&self, broken: Arc<Broken>) -> Pushed {
        let (names, watches) = (self.names.clone(), Arc::clone(&self.watches));
        Arc::new(move |push: PushInfo| match push.kind {
            PushKind::Disconnection => broken.end(),
            PushKind::Message => {
                if let Some(Value::BulkString(channel)) = push.data.first()
                    && let Some(key) = names.key(channel)
                {
                    watches.wake(&key);
                }
            }
            _ => {}
        })
    }

    /// Until the task is aborted. Dropped at any await it leaves a connection that closes itself.
    async fn keep(self, mut wire: Arc<Wire>, state: watch::Sender<State>) {
        loop {
            self.look_after(&wire).await;
            // Callers that have it finish on it; it closes with the last of them.
            state.send_replace(State::Connecting);
            drop(wire);
            let mut pause = FIRST_PAUSE;
            wire = loop {
                match self.connect().await {
                    Ok(wire) => break Arc::new(wire),
                    Err(error) => {
                        if pause == FIRST_PAUSE {
                            tracing::warn!(%error, "the store's server is out of reach");
                        }
                        state.send_replace(State::Down(Arc::new(error)));
                        sleep(pause).await;
                        pause = (pause * 2).min(LAST_PAUSE);
                    }
                }
            };
            tracing::info!("connected to the store's server again");
            state.send_replace(State::Up(Arc::clone(&wire)));
        }
    }

    /// Returns when the connection is broken or silent.
    async fn look_after(&self, wire: &Wire) {
        let every = self.options.timeout / 4;
        let mut subscribed = HashSet::new();
        let mut idle = HashSet::new();
        let mut answered_before = None;
        self.subscribe(wire, &mut subscribed).await;
        loop {
            tokio::select! {
                () = wire.broken.heard.notified() => return,
                () = self.watches.more.notified() => self.subscribe(wire, &mut subscribed).await,
                () = sleep(every) => {
                    self.unsubscribe(wire, &mut subscribed, &mut idle).await;
                    let answered = wire.waited_at();
                    if answered.is_some()
                        && answered == answered_before
                        && !wire.connection().answers(every * 2).await
                        && Some(wire.answered.load(Ordering::Relaxed)) == answered
                    {
                        tracing::warn!("the store's server is silent");
                        return;
                    }
                    answered_before = answered;
                }
            }
        }
    }

    /// Subscribes to what is wanted and not subscribed to. Those who wait look once more then: what
    /// was written before the server knew of them, nobody else tells them.
    async fn subscribe(&self, wire: &Wire, subscribed: &mut HashSet<StoreKey>) {
        let mut new = self.watches.wanted();
        new.retain(|key| !subscribed.contains(key));
        for keys in new.chunks(CHANNELS_AT_ONCE) {
            let channels: Vec<_> = keys.iter().map(|key| self.names.name(key)).collect();
            let mut connection = wire.connection();
            match timeout(self.options.timeout, connection.subscribe(&channels)).await {
                Ok(Ok(())) => {
                    subscribed.extend(keys);
                    keys.iter().for_each(|key| self.watches.wake(key));
                }
                // Whoever waits still looks from time to time.
                Ok(Err(error)) => tracing::debug!(%error, "nothing will be heard of writes"),
                Err(_) => return,
            }
        }
    }

    /// Unsubscribes from what was not wanted the last time either.
    async fn unsubscribe(
        &self,
        wire: &Wire,
        subscribed: &mut HashSet<StoreKey>,
        idle: &mut HashSet<StoreKey>,
    ) {
        let unwanted: HashSet<_> =
            subscribed.iter().filter(|key| !self.watches.is_wanted(key)).copied().collect();
        let over: Vec<_> = unwanted.intersection(idle).copied().collect();
        for keys in over.chunks(CHANNELS_AT_ONCE) {
            let channels: Vec<_> = keys.iter().map(|key| self.names.name(key)).collect();
            let mut connection = wire.connection();
            if timeout(self.options.timeout, connection.unsubscribe(&channels)).await.is_err() {
                return;
            }
            for key in keys {
                subscribed.remove(key);
                // Wanted again in the meantime: subscribe anew.
                if self.watches.is_wanted(key) {
                    self.watches.more.notify_one();
                }
            }
        }
        *idle = unwanted;
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Connecting => "connecting",
            Self::Up(_) => "up",
            Self::Down(_) => "down",
        })
    }
}

//! The task that keeps the connection.
//!
//! 1. It connects, looks after the connection, and makes a new one when it breaks or falls silent:
//!    a server that does not answer while requests wait is asked whether it is there, and the
//!    connection is given up if it does not say so. A time-out alone is no reason, because that
//!    would cost everybody else on it their answers.
//! 2. It subscribes to what somebody waits for.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax::StoreKey;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};

use crate::connection::{self, Pushed};
use crate::error::ConnectError;
use crate::link::{Broken, State, Wire};
use crate::names::Names;
use crate::options::Options;
use crate::target::Target;
use crate::watches::Watches;

/// Pauses between attempts to connect: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// Channels subscribed to by one command.
const CHANNELS_AT_ONCE: usize = 256;

/// The task that keeps the connection.
pub(crate) struct Keeper {
    pub(crate) target: Target,
    pub(crate) options: Options,
    pub(crate) names: Names,
    pub(crate) watches: Arc<Watches>,
    /// Connections.
    pub(crate) made: Arc<AtomicU64>,
}

impl Keeper {
    pub(crate) async fn connect(&self) -> Result<Wire, ConnectError> {
        let broken = Arc::<Broken>::default();
        let pushed = self.pushed(Arc::clone(&broken));
        let connection = connection::open(&self.target, &self.options, &pushed).await?;
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Wire::new(connection, broken))
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
    pub(crate) async fn keep(self, mut wire: Arc<Wire>, state: watch::Sender<State>) {
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
        // One for the whole time: who comes to wait in between must not put it off.
        let mut upkeep = interval_at(Instant::now() + every, every);
        upkeep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut subscribed = HashSet::new();
        let mut idle = HashSet::new();
        let mut answered_before = None;
        self.subscribe(wire, &mut subscribed).await;
        loop {
            tokio::select! {
                () = wire.broken.heard() => return,
                () = self.watches.more.notified() => self.subscribe(wire, &mut subscribed).await,
                _ = upkeep.tick() => {
                    self.unsubscribe(wire, &mut subscribed, &mut idle).await;
                    let answered = wire.waited_at();
                    if answered.is_some()
                        && answered == answered_before
                        && !wire.connection().answers(every * 2).await
                        && Some(wire.answered()) == answered
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

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

use hapax_core::OperationId;
use redis::{PushKind, Value};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};

use crate::connection::{self, Connection, PushEvent, PushHandler};
use crate::error::RedisConnectError;
use crate::key_names::KeyNames;
use crate::link::{ConnectionStatus, LinkState, LiveConnection};
use crate::notify::Watchers;
use crate::options::RedisOptions;
use crate::secret::SecretCheck;
use crate::url::RedisUrl;

/// Pauses between attempts to connect: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// Time-outs after which the servers are looked at again, though nothing is known to have changed:
/// by default a minute. Slots move to other nodes, and a server is emptied, without a word.
const LOOK_AGAIN: u32 = 30;

/// Channels subscribed to by one command.
const CHANNELS_AT_ONCE: usize = 256;

/// The task that keeps the connection.
pub(crate) struct Reconnector {
    pub(crate) url: RedisUrl,
    pub(crate) options: RedisOptions,
    pub(crate) names: KeyNames,
    pub(crate) watchers: Arc<Watchers>,
    /// What everybody has to agree on, where names depend on it.
    secret_check: Option<SecretCheck>,
    /// Connections.
    pub(crate) made: Arc<AtomicU64>,
}

impl Reconnector {
    pub(crate) fn new(
        url: RedisUrl,
        options: RedisOptions,
        names: KeyNames,
        watchers: &Arc<Watchers>,
        secret_check: Option<SecretCheck>,
    ) -> Self {
        let watchers = Arc::clone(watchers);
        Self { url, options, names, watchers, secret_check, made: Arc::default() }
    }

    /// A cache agrees with nobody about a secret.
    const fn whose(&self) -> &'static str {
        if self.secret_check.is_some() { "store's" } else { "cache's" }
    }

    /// Connects, for the first time or again.
    pub(crate) async fn connect(&self, again: bool) -> Result<LiveConnection, RedisConnectError> {
        let broken = Arc::<ConnectionStatus>::default();
        let on_push = self.on_push(Arc::clone(&broken));
        let mut connection = connection::open(&self.url, &self.options, &on_push).await?;
        match self.vet(&mut connection).await {
            Ok(true) => {}
            Ok(false) => broken.change(),
            // Of a cluster the node that would say so may be away: no reason to do without the
            // others, on which this process was right before. It is asked again.
            Err(error) if again && !connection.is_one() && !error.is_refusal() => {
                tracing::warn!(%error, "it is unknown whether the cluster's secret is still ours");
                broken.change();
            }
            Err(error) => return Err(error),
        }
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(LiveConnection::new(connection, broken))
    }

    /// Whether this is still the place that it was. `false`: some did not say so.
    async fn vet(&self, connection: &mut Connection) -> Result<bool, RedisConnectError> {
        let limit = self.options.timeout / 2;
        let vetting = connection::vet(connection, &self.url, &self.options);
        let vetted = timeout(limit, vetting).await.unwrap_or_else(|_| {
            tracing::warn!("not all of the store's servers were looked at in time");
            Ok(false)
        })?;
        if let Some(secret_check) = &self.secret_check {
            let agreed = timeout(limit, secret_check.check(connection)).await;
            let was_empty = agreed.unwrap_or(Err(RedisConnectError::TimedOut(limit)))?;
            if was_empty && self.made.load(Ordering::Relaxed) > 0 {
                tracing::error!(
                    "the store's server has lost what it held: what was executed runs again"
                );
            }
        }
        Ok(vetted)
    }

    /// What is heard on the connection without being asked for.
    fn on_push(&self, broken: Arc<ConnectionStatus>) -> PushHandler {
        let (names, watchers) = (self.names.clone(), Arc::clone(&self.watchers));
        Arc::new(move |heard| match heard {
            PushEvent::Ended => broken.end(),
            #[cfg(feature = "cluster")]
            PushEvent::NodeLost => broken.change(),
            #[cfg(feature = "cluster")]
            PushEvent::Deaf => broken.deafen(),
            PushEvent::Message(push) => {
                if push.kind == PushKind::Message
                    && let Some(Value::BulkString(channel)) = push.data.first()
                    && let Some(key) = names.key(channel)
                {
                    watchers.wake(&key);
                }
            }
        })
    }

    /// Until the task is aborted. Dropped at any await it leaves a connection that closes itself.
    pub(crate) async fn keep(self, mut wire: Arc<LiveConnection>, state: watch::Sender<LinkState>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let since = Instant::now();
            self.look_after(&wire).await;
            // Callers that have it finish on it; it closes with the last of them.
            state.send_replace(LinkState::Connecting);
            drop(wire);
            if since.elapsed() >= LAST_PAUSE {
                pause = FIRST_PAUSE;
            } else {
                // A server that lets everybody in and throws them out again.
                sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
            }
            let mut said = String::new();
            wire = loop {
                match self.connect(true).await {
                    Ok(wire) => break Arc::new(wire),
                    Err(error) => {
                        let says = error.to_string();
                        if error.is_refusal() && says != said {
                            tracing::error!(%error, "it cannot be on its server any more");
                        } else if says != said {
                            tracing::warn!(%error, "the {} server is out of reach", self.whose());
                        }
                        said = says;
                        state.send_replace(LinkState::Down(Arc::new(error)));
                        sleep(pause).await;
                        pause = (pause * 2).min(LAST_PAUSE);
                    }
                }
            };
            tracing::info!("connected to the {} server again", self.whose());
            state.send_replace(LinkState::Up(Arc::clone(&wire)));
        }
    }

    /// Returns when the connection is broken or silent.
    async fn look_after(&self, wire: &LiveConnection) {
        let every = self.options.timeout / 4;
        // One for the whole time: who comes to wait in between must not put it off.
        let mut upkeep = interval_at(Instant::now() + every, every);
        upkeep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut subscribed = HashSet::new();
        let mut idle = HashSet::new();
        let mut answered_before = None;
        let mut suspected: Option<(u64, Instant)> = None;
        let mut vetted = Instant::now();
        self.subscribe(wire, &mut subscribed).await;
        loop {
            tokio::select! {
                () = wire.broken.heard() => {
                    if wire.is_one() {
                        return;
                    }
                    // A node is away, or all of them are: that shows when nothing else is answered.
                    suspected.get_or_insert_with(|| (wire.answered(), Instant::now()));
                }
                () = self.watchers.more.notified() => self.subscribe(wire, &mut subscribed).await,
                _ = upkeep.tick() => {
                    #[cfg(feature = "cluster")]
                    if wire.broken.was_deafened() {
                        subscribed.clear();
                        idle.clear();
                        self.subscribe(wire, &mut subscribed).await;
                    }
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
                    if let Some((answered, since)) = suspected
                        && since.elapsed() >= self.options.timeout
                    {
                        if wire.answered() == answered {
                            tracing::warn!("nothing of the cluster answers");
                            return;
                        }
                        suspected = None;
                    }
                    let unseen_for = vetted.elapsed();
                    if unseen_for >= self.options.timeout * LOOK_AGAIN
                        || unseen_for >= self.options.timeout && wire.broken.has_changed()
                    {
                        match self.vet(&mut wire.connection()).await {
                            Ok(true) => {}
                            Err(error) if error.is_refusal() => {
                                tracing::error!(%error, "a server of the store's has changed");
                                return;
                            }
                            Ok(false) | Err(_) => wire.broken.change(),
                        }
                        vetted = Instant::now();
                    }
                }
            }
        }
    }

    /// Subscribes to what is wanted and not subscribed to. Those who wait look once more then: what
    /// was written before the server knew of them, nobody else tells them.
    async fn subscribe(&self, wire: &LiveConnection, subscribed: &mut HashSet<OperationId>) {
        let mut new = self.watchers.wanted();
        new.retain(|key| !subscribed.contains(key));
        for keys in new.chunks(CHANNELS_AT_ONCE) {
            let channels: Vec<_> = keys.iter().map(|key| self.names.name(key)).collect();
            let mut connection = wire.connection();
            match timeout(self.options.timeout, connection.subscribe(&channels)).await {
                Ok(Ok(())) => {
                    subscribed.extend(keys);
                    keys.iter().for_each(|key| self.watchers.wake(key));
                }
                // Whoever waits still looks from time to time.
                Ok(Err(error)) => {
                    tracing::debug!(%error, "nothing is heard of writes");
                    #[cfg(feature = "cluster")]
                    if crate::cluster::is_lost(&error) {
                        wire.broken.deafen();
                    }
                }
                Err(_) => {
                    #[cfg(feature = "cluster")]
                    wire.broken.deafen();
                    return;
                }
            }
        }
    }

    /// Unsubscribes from what was not wanted the last time either.
    async fn unsubscribe(
        &self,
        wire: &LiveConnection,
        subscribed: &mut HashSet<OperationId>,
        idle: &mut HashSet<OperationId>,
    ) {
        let unwanted: HashSet<_> =
            subscribed.iter().filter(|key| !self.watchers.is_wanted(key)).copied().collect();
        let over: Vec<_> = unwanted.intersection(idle).copied().collect();
        for keys in over.chunks(CHANNELS_AT_ONCE) {
            let channels: Vec<_> = keys.iter().map(|key| self.names.name(key)).collect();
            let mut connection = wire.connection();
            let unsubscribing = timeout(self.options.timeout, connection.unsubscribe(&channels));
            match unsubscribing.await {
                Ok(Ok(())) => {}
                // Who still waits for other keys is to be heard again.
                #[cfg(feature = "cluster")]
                Ok(Err(error)) if crate::cluster::is_lost(&error) => wire.broken.deafen(),
                Ok(Err(error)) => tracing::debug!(%error, "it stays subscribed to for nothing"),
                Err(_) => {
                    #[cfg(feature = "cluster")]
                    wire.broken.deafen();
                    return;
                }
            }
            for key in keys {
                subscribed.remove(key);
                // Wanted again in the meantime: subscribe anew.
                if self.watchers.is_wanted(key) {
                    self.watchers.more.notify_one();
                }
            }
        }
        *idle = unwanted;
    }
}

//! The task that maintains the connection.
//!
//! 1. It connects, checks the connection, and replaces it when it breaks or does not answer: if a
//!    server answers nothing while requests wait, it gets a `PING`, and the connection is replaced
//!    if there is no answer to that. A timeout alone is no reason to do so, because all other
//!    requests on the connection would lose their answers.
//! 2. It subscribes to the records that have waiters.

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

/// Pauses between attempts to connect: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// Number of timeouts after which the servers are checked again without a known change: a minute by
/// default. Slots move to other nodes, and servers are emptied, without a notification.
const CHECK_EVERY: u32 = 30;

/// Channels subscribed to by one command.
const CHANNELS_AT_ONCE: usize = 256;

/// The task that maintains the connection.
pub(crate) struct Reconnector {
    pub(crate) url: RedisUrl,
    pub(crate) options: RedisOptions,
    pub(crate) names: KeyNames,
    pub(crate) watchers: Arc<Watchers>,
    /// The check of the secret; `None` for a cache, whose names do not depend on one.
    secret_check: Option<SecretCheck>,
    /// Number of connections made.
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

    /// Returns the owner of the connection for log messages. Only a store checks the secret.
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
            // The cluster's node with the mark may be unreachable. The other nodes are used
            // nevertheless, because the secret was right on them before. The check is repeated.
            Err(error) if again && !connection.is_one() && !error.is_refusal() => {
                tracing::warn!(%error, "it is unknown whether the cluster's secret is still ours");
                broken.change();
            }
            Err(error) => return Err(error),
        }
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(LiveConnection::new(connection, broken))
    }

    /// Checks that the servers are fit and have the same secret as before. Returns `false` if not
    /// all of them could be checked.
    async fn vet(&self, connection: &mut Connection) -> Result<bool, RedisConnectError> {
        let limit = self.options.timeout / 2;
        let vetting = connection::vet(connection, &self.url, &self.options);
        let vetted = timeout(limit, vetting).await.unwrap_or_else(|_| {
            tracing::warn!("not all servers of the store could be checked in time");
            Ok(false)
        })?;
        if let Some(secret_check) = &self.secret_check {
            let is_first = self.made.load(Ordering::Relaxed) == 0;
            let agreed = timeout(limit, secret_check.check(connection, is_first)).await;
            let was_empty = agreed.unwrap_or(Err(RedisConnectError::TimedOut(limit)))?;
            if was_empty && !is_first {
                tracing::error!(
                    "the server of the store was emptied: operations of the lost records execute again"
                );
            }
        }
        Ok(vetted)
    }

    /// Returns the handler of events that are no answer to a request.
    fn on_push(&self, broken: Arc<ConnectionStatus>) -> PushHandler {
        let (names, watchers) = (self.names.clone(), Arc::clone(&self.watchers));
        Arc::new(move |heard| match heard {
            PushEvent::Ended => broken.end(),
            #[cfg(feature = "cluster")]
            PushEvent::NodeLost => broken.change(),
            #[cfg(feature = "cluster")]
            PushEvent::SubscriptionsLost => broken.lose_subscriptions(),
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

    /// Runs until the task is aborted. If the future is dropped, at any await, the connection
    /// closes.
    pub(crate) async fn keep(self, mut wire: Arc<LiveConnection>, state: watch::Sender<LinkState>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let since = Instant::now();
            self.look_after(&wire).await;
            // Callers that use the connection finish on it; it closes with the last of them.
            state.send_replace(LinkState::Connecting);
            drop(wire);
            if since.elapsed() >= LAST_PAUSE {
                pause = FIRST_PAUSE;
            } else {
                // The server may accept connections and close them at once.
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
                            tracing::error!(%error, "the server is unfit for this store now");
                        } else if says != said {
                            tracing::warn!(%error, "the {} server is unreachable", self.whose());
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

    /// Returns when the connection is broken or unresponsive.
    async fn look_after(&self, wire: &LiveConnection) {
        let every = self.options.timeout / 4;
        // One interval for the whole time: new waiters in between must not postpone it.
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
                    // One node or all of them are unreachable. In the latter case nothing else is
                    // answered.
                    suspected.get_or_insert_with(|| (wire.answered(), Instant::now()));
                }
                () = self.watchers.more.notified() => self.subscribe(wire, &mut subscribed).await,
                _ = upkeep.tick() => {
                    #[cfg(feature = "cluster")]
                    if wire.broken.has_lost_subscriptions() {
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
                        tracing::warn!("the store's server does not answer");
                        return;
                    }
                    answered_before = answered;
                    if let Some((answered, since)) = suspected
                        && since.elapsed() >= self.options.timeout
                    {
                        if wire.answered() == answered {
                            tracing::warn!("no node of the cluster answers");
                            return;
                        }
                        suspected = None;
                    }
                    let unseen_for = vetted.elapsed();
                    if unseen_for >= self.options.timeout * CHECK_EVERY
                        || unseen_for >= self.options.timeout && wire.broken.has_changed()
                    {
                        match self.vet(&mut wire.connection()).await {
                            Ok(true) => {}
                            Err(error) if error.is_refusal() => {
                                tracing::error!(%error, "a server of the store is unfit now");
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

    /// Subscribes to the records that have waiters and no subscription. Then it wakes these
    /// waiters, which load once more: there is no notification for a write before the subscription.
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
                // Waiters also poll from time to time.
                Ok(Err(error)) => {
                    tracing::debug!(%error, "cannot subscribe to notifications: waiters poll");
                    #[cfg(feature = "cluster")]
                    if crate::cluster::is_lost(&error) {
                        wire.broken.lose_subscriptions();
                    }
                }
                Err(_) => {
                    #[cfg(feature = "cluster")]
                    wire.broken.lose_subscriptions();
                    return;
                }
            }
        }
    }

    /// Unsubscribes from records that have had no waiters for two rounds.
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
                // The other waiters need a new subscription.
                #[cfg(feature = "cluster")]
                Ok(Err(error)) if crate::cluster::is_lost(&error) => {
                    wire.broken.lose_subscriptions()
                }
                Ok(Err(error)) => tracing::debug!(%error, "unused channels stay subscribed"),
                Err(_) => {
                    #[cfg(feature = "cluster")]
                    wire.broken.lose_subscriptions();
                    return;
                }
            }
            for key in keys {
                subscribed.remove(key);
                // A waiter has come meanwhile: subscribe again.
                if self.watchers.is_wanted(key) {
                    self.watchers.more.notify_one();
                }
            }
        }
        *idle = unwanted;
    }
}

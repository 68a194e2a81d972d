//! Reads and writes of the register, and the entry of a running process.
//!
//! A store that one process opens at a time has a register with quarantines only, which its process reads at start,
//! about every three seconds, and after a change of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::{Snapshot, Swap, Swapped};
use hapax_core::{BoxFuture, Entropy, Idempotency, Store, StoreError, SystemEntropy, Timestamp};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::fault::{RegisterError, RegisterFault, difference_in, is_outage, unanswered_since};
use super::quarantine::{MAX_CONFIRMED, StoreQuarantine};
use super::record::{content, swap};
use super::{
    LAPSE, REFRESH, RegisterContent, RouteNaming, StoreUser, UserDifference, WATCH, register_id,
};
use crate::keys::rfc3339;

/// Time between two attempts while the store is unavailable, doubled after each up to the second one: until the next
/// success no key without a record executes.
const RETRY: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(2)];

/// The most swaps of one change: each one after a conflict with another process. Their pauses take 6 s on average.
pub(super) const MAX_CONFLICTS: u32 = 60;

/// The conflicts after which the pause before the next swap grows no more.
const MAX_PAUSES: u32 = 20;

/// The conflicts of which all but the last are followed by a swap at once, and that one by a pause.
const CONFLICTS_PER_PAUSE: u32 = 4;

/// The most times that one swap is sent while its replies are lost.
const MAX_COPIES: u32 = 3;

/// The register of one store.
#[derive(Clone, Debug)]
pub struct StoreRegister {
    store: Arc<dyn Store>,
    timeout: Duration,
}

/// The entry of this process in the register of a store.
#[derive(Clone, Debug)]
pub struct RegisteredUser {
    register: StoreRegister,
    engine: Idempotency,
    state: Arc<Mutex<UserState>>,
    /// One application of the quarantines at a time: an older one must not follow a newer one.
    applying: Arc<tokio::sync::Mutex<()>>,
    /// Notified when the entry has to be written at once.
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct UserState {
    /// Has the time of the last write, 0 before the first one.
    user: StoreUser,
    /// True once a wait for another process is in the log.
    has_waited: bool,
    /// True once a loss of quarantines is in the log.
    has_lost: bool,
    /// The other running processes, as of the last read.
    others: Vec<StoreUser>,
    /// True if no process used the namespace before.
    is_first: bool,
    /// The quarantines of the store that apply to this process, as of the last read.
    applied: Vec<StoreQuarantine>,
    /// Ids of the quarantines of a store for one process that do not apply to it, as of the last read.
    not_applied: Vec<String>,
}

impl StoreRegister {
    /// Creates the handle. A call of the store may take `timeout`.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, timeout: Duration) -> Self {
        Self { store, timeout }
    }

    /// Returns the running processes.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn users(&self) -> Result<Vec<StoreUser>, StoreError> {
        let seen = self.load().await?;
        let mut users = content(&seen)?.users;
        users.retain(|user| user.is_running(seen.now));
        Ok(users)
    }

    /// Enters a process. If the register has an entry that differs, it waits for at most 15 seconds to see whether
    /// that is written again: its process may have ended, or the store may have been unavailable.
    ///
    /// The quarantines of the store apply to `engine` from then on, for as long as [`refresh`](RegisteredUser::refresh)
    /// runs. If the future is dropped, the entry may stay until it lapses.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub async fn enter(
        &self,
        user: StoreUser,
        engine: &Idempotency,
    ) -> Result<RegisteredUser, RegisterError> {
        let entered = self.pending(user, engine);
        match entered.apply().await {
            Ok(()) => Ok(entered),
            Err(error) => {
                Err(difference_in(&error).map_or(RegisterError::Store(error), Into::into))
            }
        }
    }

    /// Enters a process as [`enter`](Self::enter) does, later if the store is not available.
    ///
    /// # Errors
    /// [`UserDifference`]: a running process cannot share the namespace.
    pub async fn enter_when_available(
        &self,
        user: StoreUser,
        engine: &Idempotency,
    ) -> Result<RegisteredUser, Box<UserDifference>> {
        match self.enter(user.clone(), engine).await {
            Ok(entered) => Ok(entered),
            Err(RegisterError::Difference(difference)) => Err(difference),
            Err(RegisterError::Store(error)) => {
                tracing::warn!(
                    %error,
                    "this process is not in the register of the store yet: until it is, keys without a record do not execute \
                     (in an outage: routes with store_outage = \"open\" execute unprotected)"
                );
                let entered = self.pending(user, engine);
                if is_outage(&error) {
                    engine.quarantines().note_failure();
                }
                Ok(entered)
            }
        }
    }

    /// Returns the entry of a process that has not entered. It is written once the store accepts it and no process that
    /// differs runs. Until then `engine` executes no key without a record.
    #[must_use]
    pub fn pending(&self, user: StoreUser, engine: &Idempotency) -> RegisteredUser {
        engine.quarantines().expire();
        let state = Arc::new(Mutex::new(UserState {
            user,
            has_waited: false,
            has_lost: false,
            others: Vec::new(),
            is_first: false,
            applied: Vec::new(),
            not_applied: Vec::new(),
        }));
        RegisteredUser {
            register: self.clone(),
            engine: engine.clone(),
            state,
            applying: Arc::default(),
            changed: Arc::default(),
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        self.store.capabilities().shared
    }

    async fn within<T>(&self, call: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
        let called = timeout(self.timeout, call).await;
        called.unwrap_or_else(|_| Err(StoreError::ambiguous("no answer within the timeout")))
    }

    pub(super) async fn load(&self) -> Result<Snapshot, StoreError> {
        self.within(self.store.load(&register_id())).await
    }

    /// Applies a change, and returns what was written with the time of the write.
    pub(super) async fn change(
        &self,
        change: impl Fn(&mut RegisterContent, Timestamp),
    ) -> Result<(RegisterContent, Timestamp), StoreError> {
        let change = |content: &mut RegisterContent, now, _| {
            change(content, now);
            Ok(())
        };
        self.change_timed(|| Duration::ZERO, change).await
    }

    /// Applies a change. `change` is called for each content that is found, with its time by the clock of the store, and
    /// with the result of `time` before it was loaded. Nothing is written if it returns an error.
    async fn change_timed(
        &self,
        time: impl Fn() -> Duration,
        mut change: impl FnMut(&mut RegisterContent, Timestamp, Duration) -> Result<(), RegisterFault>,
    ) -> Result<(RegisterContent, Timestamp), StoreError> {
        let (mut at, mut seen) = (time(), self.load().await?);
        for conflicts in 1..=MAX_CONFLICTS {
            let (mut changed, now) = (content(&seen)?, seen.now);
            change(&mut changed, now, at)?;
            let swap = swap(&seen, &changed)?;
            let sent_at = time();
            match self.swap(swap).await? {
                Swapped::Stored(_) => return Ok((changed, now)),
                // The sooner the next swap, the fewer others come before it.
                Swapped::Conflict(found) if conflicts % CONFLICTS_PER_PAUSE != 0 => {
                    (at, seen) = (sent_at, found);
                }
                Swapped::Conflict(_) => {
                    let mut byte = [0];
                    SystemEntropy.fill(&mut byte).map_err(StoreError::unavailable)?;
                    // Up to 50 ms times the conflicts so far: the more processes, the rarer the attempts of each.
                    let pause = u64::from(byte[0]) * u64::from(conflicts.min(MAX_PAUSES)) / 5;
                    sleep(Duration::from_millis(pause)).await;
                    // The content that the conflict returned may be outdated after the pause.
                    (at, seen) = (time(), self.load().await?);
                }
            }
        }
        Err(RegisterFault::Conflicts.into())
    }

    /// Sends a swap. Without a reply the same swap is sent again, which finds out whether it was applied.
    async fn swap(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let mut copies = 0;
        loop {
            copies += 1;
            match self.within(self.store.swap(swap.clone())).await {
                Err(StoreError::Ambiguous(_)) if copies < MAX_COPIES => {}
                answer => return answer,
            }
        }
    }
}

impl RegisteredUser {
    /// Writes the entry and applies the quarantines of the store until the future is dropped, and logs processes that
    /// this one should not share a namespace with.
    pub async fn refresh(&self) {
        let mut logged = Vec::new();
        // Whether the last attempt failed since another process differs; `None` if it succeeded.
        let mut failing = None;
        let mut outage_since = None;
        let [first, longest] = RETRY;
        let mut retry = first;
        loop {
            let pause = match self.apply().await {
                Ok(()) => {
                    (failing, outage_since, retry) = (None, None, first);
                    REFRESH
                }
                Err(error) => {
                    let differs = difference_in(&error).is_some();
                    if failing.replace(differs) != Some(differs) {
                        self.warn_of(&error);
                    }
                    self.note_outage(&error, &mut outage_since);
                    let pause = retry;
                    retry = longest.min(retry * 2);
                    pause
                }
            };
            self.log(&mut logged);
            let _ = timeout(pause, self.changed.notified()).await;
        }
    }

    /// Records a failure if the store has not answered for ten seconds: one, as of a connection after the process was
    /// frozen, is no outage. `since` is the time of the first one in a row.
    fn note_outage(&self, error: &StoreError, since: &mut Option<Duration>) {
        let (quarantines, now) = (self.engine.quarantines(), self.engine.quarantines().time());
        *since = unanswered_since(error, *since, now);
        match *since {
            None => quarantines.note_answer(),
            Some(since) if now.saturating_sub(since) >= LAPSE => quarantines.note_failure(),
            Some(_) => {}
        }
    }

    /// Applies the quarantines of the store to the engine now.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn apply(&self) -> Result<(), StoreError> {
        let _turn = self.applying.lock().await;
        match self.register.is_shared() {
            true => self.write().await,
            false => self.read().await,
        }
    }

    /// Returns the register.
    #[must_use]
    pub const fn register(&self) -> &StoreRegister {
        &self.register
    }

    pub(super) fn user(&self) -> StoreUser {
        self.state().user.clone()
    }

    pub(super) const fn engine(&self) -> &Idempotency {
        &self.engine
    }

    async fn read(&self) -> Result<(), StoreError> {
        let seen = self.register.load().await?;
        self.confirm(&mut content(&seen)?, seen.now);
        self.engine.quarantines().set_valid_until(None);
        Ok(())
    }

    /// Applies the quarantines in `content`, which was loaded just now. Those that are missing there, although no operator
    /// ended them, are added: the register was lost with the store. Returns their ids.
    fn confirm(&self, content: &mut RegisterContent, now: Timestamp) -> Vec<String> {
        let mut state = self.state();
        let lost = content.restore(&state.applied, now);
        // Once until they are written.
        if lost > 0 && !std::mem::replace(&mut state.has_lost, true) {
            tracing::error!(
                lost,
                "quarantines of the store were lost with its register and are continued: the store may have lost records \
                 again; begin them anew"
            );
        }
        state.has_lost = lost > 0;
        let user = &state.user;
        let applies = |it: &&StoreQuarantine| user.follows(&it.namespace) && it.is_in_force(now);
        let applied: Vec<_> = content.quarantines.iter().filter(applies).cloned().collect();
        let quarantines = applied.iter().map(|it| it.of_engine(user)).collect();
        let ids = applied.iter().map(|it| it.id.clone()).collect();
        log_changes(&state.applied, &applied);
        if !self.register.is_shared() {
            let in_force = content.quarantines.iter().filter(|it| it.is_in_force(now));
            let others: Vec<_> = in_force.filter(|it| !user.follows(&it.namespace)).collect();
            for other in &others {
                if !state.not_applied.contains(&other.id) {
                    tracing::error!(
                        namespace = other.namespace,
                        own = user.namespace,
                        "the store has a quarantine of another namespace, which has no effect: end it, and begin one of \
                         the own namespace"
                    );
                }
            }
            let ids = others.into_iter().map(|it| it.id.clone()).collect();
            state.not_applied = ids;
        }
        state.applied = applied;
        // With the lock, so that a change of the routes comes before or after both.
        self.engine.quarantines().replace(quarantines, now);
        ids
    }

    fn warn_of(&self, error: &StoreError) {
        if let Some(difference) = difference_in(error) {
            tracing::error!(
                "this process executes no key without a record while another one with other settings runs: {difference}"
            );
            return;
        }
        match self.register.is_shared() {
            true => tracing::warn!(
                %error,
                "the register of the store was not written: from 10 s after the last success on, keys without a record do \
                 not execute (in an outage: routes with store_outage = \"open\" execute unprotected)"
            ),
            false => tracing::warn!(
                %error,
                "the quarantines of the store were not read: those of the last read apply"
            ),
        }
    }

    /// Logs each process once, for as long as it runs.
    fn log(&self, logged: &mut Vec<String>) {
        let state = self.state();
        logged.retain(|id| state.others.iter().any(|other| other.id == *id));
        for other in &state.others {
            if logged.contains(&other.id) {
                continue;
            }
            if let Some(difference) = state.user.difference(other) {
                tracing::error!("{difference}");
            } else if state.user.differs_in_upstream(other) {
                tracing::warn!(
                    namespace = state.user.namespace,
                    user = other.name,
                    upstream = other.upstream,
                    "another gateway uses this namespace in front of another upstream: if that is another \
                     service, it gets responses of this one; give each service a namespace of its own"
                );
            } else {
                continue;
            }
            logged.push(other.id.clone());
        }
    }

    /// Returns whether no process that entered used the namespace before.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.state().is_first
    }

    /// Returns a difference from a running process, as of the last read.
    #[must_use]
    pub fn difference(&self) -> Option<UserDifference> {
        let state = self.state();
        state.others.iter().find_map(|other| state.user.difference(other))
    }

    /// Replaces routes and upstream of the entry, unless a running process differs. It is written within three seconds, at
    /// once if operations get other names: a process that differs may have entered since the last read, so until then no key
    /// without a record executes.
    ///
    /// # Errors
    /// [`UserDifference`]; the entry stays as it is.
    pub fn replace(
        &self,
        upstream: String,
        routes: BTreeMap<String, RouteNaming>,
    ) -> Result<(), Box<UserDifference>> {
        let mut state = self.state();
        let changed = StoreUser { upstream: Some(upstream), routes, ..state.user.clone() };
        if let Some(difference) = state.others.iter().find_map(|other| changed.difference(other)) {
            return Err(Box::new(difference));
        }
        let before = StoreUser { id: String::new(), ..state.user.clone() };
        if self.register.is_shared() && changed.difference(&before).is_some() {
            // With the lock, so that a write of the former routes does not make it valid again.
            self.engine.quarantines().expire();
            self.changed.notify_one();
        }
        state.user = changed;
        // A quarantine of a route that gets another name here applies to all routes.
        let applied = state.applied.iter().map(|it| it.of_engine(&state.user));
        self.engine.quarantines().widen(&applied.collect::<Vec<_>>());
        Ok(())
    }

    /// Removes the entry. Without success it lapses.
    pub async fn remove(&self) {
        if !self.register.is_shared() {
            return;
        }
        let id = self.state().user.id.clone();
        let removing = self.register.change(|content, _| content.remove(&id));
        // The end of a process does not wait for others that write the register.
        match timeout(self.register.timeout, removing).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, "the entry in the register of the store lapses")
            }
            Err(_) => tracing::debug!("the entry in the register of the store lapses"),
        }
    }

    /// Writes the entry. If another one differs, it waits for at most 15 seconds to see whether that is written again.
    async fn write(&self) -> Result<(), StoreError> {
        match self.write_without(&BTreeMap::new()).await {
            Err(error) if difference_in(&error).is_some() => {
                if !std::mem::replace(&mut self.state().has_waited, true) {
                    tracing::info!(
                        %error,
                        "waiting for at most 15 seconds to see whether a process with other settings still runs"
                    );
                }
                let ended = self.watch().await?;
                self.write_without(&ended).await
            }
            done => done,
        }
    }

    /// Waits until no process that differs is known to run. Returns the entries of ended ones that differ, by id and
    /// time. It is the time of this process that counts: the clock of the store may be set.
    ///
    /// # Errors
    /// [`StoreError`]; of [`RegisterFault::Difference`] if such a process runs.
    async fn watch(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        let (begun, user) = (Instant::now(), self.user());
        let mut first: Option<BTreeMap<String, u64>> = None;
        loop {
            let seen = self.register.load().await?;
            // The store answers: this is no outage, in which routes with `store_outage = "open"` execute.
            self.engine.quarantines().note_answer();
            let mut content = content(&seen)?;
            self.confirm(&mut content, seen.now);
            let users = content.users;
            self.note_others(&users, seen.now);
            let differing = users.iter().filter_map(|it| Some((it, user.difference(it)?)));
            let differing: Vec<_> = differing.collect();
            let Some(entries) = &first else {
                let entries = differing.iter().map(|(it, _)| (it.id.clone(), it.seen)).collect();
                first = Some(entries);
                continue;
            };
            // It was written since this call began.
            let running = |it: &StoreUser| entries.get(&it.id) != Some(&it.seen);
            let is_over = differing.is_empty() || begun.elapsed() >= WATCH;
            if let Some((_, difference)) = differing.into_iter().find(|(it, _)| running(it)) {
                return Err(RegisterFault::Difference(Box::new(difference)).into());
            }
            if is_over {
                return Ok(first.unwrap_or_default());
            }
            sleep(LAPSE / 20).await;
        }
    }

    /// Writes the entry, and removes those that have not been written since they were seen as these: by id and time.
    async fn write_without(&self, ended: &BTreeMap<String, u64>) -> Result<(), StoreError> {
        let user = self.user();
        let quarantines = self.engine.quarantines();
        let mut at = Duration::ZERO;
        let change = |content: &mut RegisterContent, now: Timestamp, loaded_at| {
            at = loaded_at;
            self.note_first(content, now);
            self.note_others(&content.users, now);
            content.users.retain(|it| ended.get(&it.id) != Some(&it.seen));
            // Applied before the write that confirms them.
            let mut confirmed = self.confirm(content, now);
            confirmed.truncate(MAX_CONFIRMED);
            content.admit(&user, now)?;
            let since = self.user().since;
            content.enter(&StoreUser { confirmed, since, ..user.clone() }, now);
            Ok(())
        };
        let changed = self.register.change_timed(|| quarantines.time(), change).await;
        let (content, now) = changed.inspect_err(|error| {
            if difference_in(error).is_some() {
                quarantines.expire();
            }
        })?;
        if !content.users.iter().any(|it| it.id == user.id) {
            return Err(RegisterFault::Full.into());
        }
        self.note_others(&content.users, now);
        let mut state = self.state();
        state.user.seen = now.as_micros();
        state.has_waited = false;
        // Routes and consumers that were replaced meanwhile were not compared.
        if state.user.routes == user.routes && state.user.consumers == user.consumers {
            // The entry counts as written from a later time on: others take this process for a running one for longer.
            quarantines.set_valid_until(Some(at + LAPSE));
        }
        Ok(())
    }

    /// Notes what a process that has not entered finds in the register.
    fn note_first(&self, content: &RegisterContent, now: Timestamp) {
        let mut state = self.state();
        if state.user.seen == 0 {
            state.is_first = !content.namespaces.contains(&state.user.namespace);
        }
        if state.user.since == 0 {
            state.user.since = now.as_micros();
        }
    }

    /// Notes the other processes that run. An entry that differs counts for longer: see [`watch`](Self::watch).
    fn note_others(&self, users: &[StoreUser], now: Timestamp) {
        let mut state = self.state();
        let id = &state.user.id;
        let others = users.iter().filter(|it| it.id != *id && it.is_running(now));
        state.others = others.cloned().collect();
    }

    fn state(&self) -> MutexGuard<'_, UserState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs the quarantines that begin and end to apply.
fn log_changes(before: &[StoreQuarantine], after: &[StoreQuarantine]) {
    let is_in =
        |it: &StoreQuarantine, all: &[StoreQuarantine]| all.iter().any(|other| other.id == it.id);
    for it in after.iter().filter(|it| !is_in(it, before)) {
        tracing::warn!(
            namespace = it.namespace,
            route = it.route,
            until = rfc3339(Timestamp::from_micros(it.until)),
            reason = it.reason,
            who = it.who,
            "a quarantine of the store applies: keys without a record do not execute"
        );
    }
    for it in before.iter().filter(|it| !is_in(it, after)) {
        tracing::warn!(
            namespace = it.namespace,
            route = it.route,
            "a quarantine of the store has ended: keys without a record execute again"
        );
    }
}

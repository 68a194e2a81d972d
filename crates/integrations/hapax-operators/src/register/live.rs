//! Reads and writes of the register, and the entry of a running process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::{Draft, Snapshot, Stamp, Swap, Swapped};
use hapax_core::{
    BoxFuture, Entropy, Extensions, Fingerprint, FingerprintScheme, LeaseId, Notes, OnUnknown,
    Record, RecordState, Store, StoreError, SystemEntropy, Terms, Timestamp, WriteId,
};
use tokio::time::{sleep, timeout};

use super::{
    FORMAT, LAPSE, REFRESH, RegisterContent, RouteNames, StoreUser, UserConflict, register_id,
};

/// Swaps of one change that may meet a change of another process, one after the other.
const MAX_CONFLICTS: u32 = 100;

/// Copies of a swap whose reply is lost, before the error is returned.
const MAX_COPIES: u32 = 3;

/// Lease of the record, which is not renewed: a store removes no record earlier than a lease after it expires.
const LEASE: Duration = Duration::from_secs(1);

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
    state: Arc<Mutex<UserState>>,
}

#[derive(Debug)]
struct UserState {
    user: StoreUser,
    /// The other live processes, as of the last write.
    others: Vec<StoreUser>,
}

/// Errors of joining the register.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// A process that runs cannot share the namespace.
    #[error(transparent)]
    Conflict(#[from] Box<UserConflict>),
    /// The register could not be read or written.
    #[error("the register of the store: {0}")]
    Store(#[from] StoreError),
}

impl StoreRegister {
    /// Creates the handle. A call of the store may take `timeout`.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, timeout: Duration) -> Self {
        Self { store, timeout }
    }

    /// Returns the processes that run.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn users(&self) -> Result<Vec<StoreUser>, StoreError> {
        let seen = self.load().await?;
        let mut users = content(&seen).users;
        users.retain(|user| user.is_live(seen.now));
        Ok(users)
    }

    /// Enters a process. While another one that differs has not written for a while, it waits for at most
    /// ten seconds to see whether that one has ended.
    ///
    /// If the future is dropped, the entry may stay until it lapses.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub async fn join(&self, mut user: StoreUser) -> Result<RegisteredUser, RegisterError> {
        let seen = self.load().await?;
        user.since = seen.now.as_micros();
        let mut waited: Option<StoreUser> = None;
        loop {
            let seen = self.load().await?;
            let users = content(&seen).users;
            let running = users.iter().filter(|it| it.is_live(seen.now));
            let found = running.filter_map(|it| Some((it, user.conflict(it)?))).next();
            match found {
                None => break,
                // It wrote since this call began to wait, so that it runs.
                Some((other, conflict))
                    if waited
                        .as_ref()
                        .is_some_and(|it| it.id == other.id && it.seen != other.seen) =>
                {
                    return Err(Box::new(conflict).into());
                }
                Some((other, _)) => {
                    if waited.is_none() {
                        tracing::info!(user = other.name, "waiting to see whether it still runs");
                    }
                    if waited.as_ref().is_none_or(|it| it.id != other.id) {
                        waited = Some(other.clone());
                    }
                }
            }
            sleep(LAPSE / 20).await;
        }
        let joined = RegisteredUser {
            register: self.clone(),
            state: Arc::new(Mutex::new(UserState { user, others: Vec::new() })),
        };
        joined.write().await?;
        // Another one may have joined at the same time: the one that finds both entries leaves.
        if let Some(conflict) = joined.conflict() {
            joined.leave().await;
            return Err(Box::new(conflict).into());
        }
        Ok(joined)
    }

    async fn within<T>(&self, call: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
        let called = timeout(self.timeout, call).await;
        called.unwrap_or_else(|_| Err(StoreError::ambiguous("no answer within the timeout")))
    }

    async fn load(&self) -> Result<Snapshot, StoreError> {
        self.within(self.store.load(&register_id())).await
    }

    /// Applies a change, and returns what was written with the time of the write.
    async fn change(
        &self,
        change: impl Fn(&mut RegisterContent, Timestamp),
    ) -> Result<(RegisterContent, Timestamp), StoreError> {
        let mut seen = self.load().await?;
        for _ in 0..MAX_CONFLICTS {
            let (mut changed, now) = (content(&seen), seen.now);
            change(&mut changed, now);
            let swap = swap(&seen, &changed)?;
            match self.swap(swap).await? {
                Swapped::Stored(_) => return Ok((changed, now)),
                Swapped::Conflict(other) => seen = other,
            }
        }
        Err(StoreError::unavailable("other processes changed the register each time: try again"))
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
    /// Writes the entry until the future is dropped, and logs processes that this one should not share a
    /// namespace with.
    pub async fn keep(&self) {
        let mut logged = Vec::new();
        let mut is_unwritten = false;
        loop {
            match self.write().await {
                Ok(()) => is_unwritten = false,
                Err(error) if !is_unwritten => {
                    is_unwritten = true;
                    tracing::warn!(%error, "the register of the store was not written");
                }
                Err(_) => {}
            }
            self.log(&mut logged);
            sleep(REFRESH).await;
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
            if let Some(conflict) = state.user.conflict(other) {
                tracing::error!("{conflict}");
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

    /// Returns a difference from a process that runs, as of the last write.
    #[must_use]
    pub fn conflict(&self) -> Option<UserConflict> {
        let state = self.state();
        state.others.iter().find_map(|other| state.user.conflict(other))
    }

    /// Replaces routes and upstream of the entry, unless a process that runs differs; it is written within
    /// three seconds.
    ///
    /// # Errors
    /// [`UserConflict`]; the entry stays as it is.
    pub fn replace(
        &self,
        upstream: String,
        routes: BTreeMap<String, RouteNames>,
    ) -> Result<(), Box<UserConflict>> {
        let mut state = self.state();
        let changed = StoreUser { upstream: Some(upstream), routes, ..state.user.clone() };
        match state.others.iter().find_map(|other| changed.conflict(other)) {
            Some(conflict) => Err(Box::new(conflict)),
            None => {
                state.user = changed;
                Ok(())
            }
        }
    }

    /// Removes the entry. Without success it lapses.
    pub async fn leave(&self) {
        let id = self.state().user.id.clone();
        if let Err(error) = self.register.change(|content, _| content.leave(&id)).await {
            tracing::debug!(%error, "the entry in the register of the store lapses");
        }
    }

    async fn write(&self) -> Result<(), StoreError> {
        let user = self.state().user.clone();
        let (content, now) = self.register.change(|content, now| content.enter(&user, now)).await?;
        let others = content.users.into_iter().filter(|it| it.id != user.id && it.is_live(now));
        self.state().others = others.collect();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, UserState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the content of a register that was loaded; an absent one is empty.
fn content(seen: &Snapshot) -> RegisterContent {
    match seen.stored.as_ref().map(|stored| &stored.record.state) {
        Some(RecordState::Done(outcome)) => RegisterContent::decode(outcome),
        _ => RegisterContent::default(),
    }
}

fn swap(seen: &Snapshot, content: &RegisterContent) -> Result<Swap, StoreError> {
    let fresh = |error| StoreError::unavailable(error);
    let entropy: &dyn Entropy = &SystemEntropy;
    let lease_id = LeaseId::fresh(entropy).map_err(fresh)?;
    let record = Record {
        scheme: FingerprintScheme::new(FORMAT).map_err(StoreError::unavailable)?,
        fingerprint: Fingerprint::builder(FORMAT).finish(),
        lease_id,
        generation: lease_id,
        attempt: 1,
        // It is no operation: a store that was emptied accepts it before an operator confirms the store.
        terms: Terms { lease: LEASE, retention: LAPSE, on_unknown: OnUnknown::Reexecute },
        checkpoint: None,
        notes: Notes::default(),
        extensions: Extensions::default(),
        state: RecordState::Done(content.encode().map_err(StoreError::unavailable)?),
    };
    Ok(Swap {
        id: register_id(),
        expected: seen.stored.as_ref().map(|stored| stored.write_id),
        write_id: WriteId::fresh(entropy).map_err(fresh)?,
        draft: Draft { record, stamp: Stamp::NextFence, lease: Duration::ZERO, keep: None },
    })
}

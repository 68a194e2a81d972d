//! Quarantines in the register: begin, end, and the processes that have not confirmed one.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_core::{Entropy, Namespace, Quarantine, StoreError, SystemEntropy, Timestamp};
use serde::{Deserialize, Serialize};

use super::live::content;
use super::{RegisterContent, RegisteredUser, StoreRegister, StoreUser};
use crate::keys::rfc3339;

/// The longest quarantine.
pub const MAX_QUARANTINE: Duration = Duration::from_secs(24 * 3600);

/// The most quarantines of a store that last.
const MAX_QUARANTINES: usize = 100;

/// The most confirmations in the entry of a process.
pub(super) const MAX_CONFIRMED: usize = MAX_QUARANTINES;

/// A quarantine in the register of a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct StoreQuarantine {
    /// Random id, which processes confirm.
    pub(super) id: String,
    pub(super) namespace: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) route: Option<String>,
    /// Microseconds since 1970, by the clock of the store.
    pub(super) since: u64,
    pub(super) until: u64,
    pub(super) reason: String,
    pub(super) who: String,
    /// Fields of later versions, which stay as they are.
    #[serde(flatten)]
    pub(super) later: BTreeMap<String, serde_json::Value>,
}

/// A request to begin a quarantine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QuarantineStart {
    /// The namespace.
    pub namespace: Namespace,
    /// The route that it is limited to, by its name in metrics.
    pub route: Option<String>,
    /// The duration, at most [`MAX_QUARANTINE`]. A quarantine of this namespace and route that lasts keeps its start, and
    /// ends after this time instead.
    pub duration: Duration,
    /// The reason.
    pub reason: String,
    /// The operator.
    pub who: String,
}

/// A quarantine as operators see it. Times are RFC 3339, by the clock of the store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QuarantineView {
    /// The namespace.
    pub namespace: String,
    /// The route that it is limited to.
    pub route: Option<String>,
    /// The start: keys that contain a later time execute.
    pub since: String,
    /// The end.
    pub until: String,
    /// The reason.
    pub reason: String,
    /// The operator.
    pub who: String,
    /// Number of the processes that run and have confirmed it.
    pub confirmed: usize,
    /// Names of the processes that run and have not.
    pub unconfirmed: Vec<String>,
}

/// Errors of beginning and ending a quarantine. Nothing was changed, unless the store gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuarantineError {
    /// The duration is out of range.
    #[error("expected a duration of 1 s to 24 h, found {found:?}")]
    Duration {
        /// The duration.
        found: Duration,
    },
    /// No process that runs in the namespace has this route.
    #[error(
        "expected a route of a process that runs in this namespace ({known}), found {found:?}: name one of these, or leave \
         the route out"
    )]
    Route {
        /// The route.
        found: String,
        /// The routes that processes have.
        known: String,
    },
    /// There are too many quarantines.
    #[error("expected fewer than 100 quarantines of this store, found 100: end some")]
    TooMany,
    /// There is no such quarantine.
    #[error("expected a quarantine of namespace {namespace:?}{}, found none: list them", of_route(.route.as_deref()))]
    NotFound {
        /// The namespace.
        namespace: String,
        /// The route.
        route: Option<String>,
    },
    /// The register could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn of_route(route: Option<&str>) -> String {
    route.map(|route| format!(" and route {route:?}")).unwrap_or_default()
}

impl StoreQuarantine {
    pub(super) fn lasts(&self, now: Timestamp) -> bool {
        now.as_micros() < self.until
    }

    pub(super) fn of_engine(&self) -> Quarantine {
        Quarantine {
            route: self.route.clone(),
            since: Timestamp::from_micros(self.since),
            until: Timestamp::from_micros(self.until),
        }
    }

    fn view(&self, users: &[StoreUser], now: Timestamp) -> QuarantineView {
        let live = users.iter().filter(|user| user.is_live(now) && user.follows(&self.namespace));
        let (confirmed, unconfirmed): (Vec<_>, Vec<_>) =
            live.partition(|user| user.confirmed.contains(&self.id));
        QuarantineView {
            namespace: self.namespace.clone(),
            route: self.route.clone(),
            since: rfc3339(Timestamp::from_micros(self.since)),
            until: rfc3339(Timestamp::from_micros(self.until)),
            reason: self.reason.clone(),
            who: self.who.clone(),
            confirmed: confirmed.len(),
            unconfirmed: unconfirmed.iter().map(|user| user.name.clone()).collect(),
        }
    }
}

impl RegisterContent {
    fn views(&self, now: Timestamp) -> Vec<QuarantineView> {
        let lasting = self.quarantines.iter().filter(|it| it.lasts(now));
        lasting.map(|it| it.view(&self.users, now)).collect()
    }

    fn is_of(it: &StoreQuarantine, namespace: &Namespace, route: Option<&str>) -> bool {
        it.namespace == namespace.as_str() && it.route.as_deref() == route
    }

    fn begin(&mut self, start: &QuarantineStart, id: &str, now: Timestamp) {
        self.quarantines.retain(|it| it.lasts(now));
        let is_same =
            |it: &&StoreQuarantine| Self::is_of(it, &start.namespace, start.route.as_deref());
        let since = self.quarantines.iter().find(is_same).map_or(now.as_micros(), |it| it.since);
        self.quarantines.retain(|it| !is_same(&it));
        self.quarantines.push(StoreQuarantine {
            id: id.to_owned(),
            namespace: start.namespace.as_str().to_owned(),
            route: start.route.clone(),
            since,
            until: now.after(start.duration).as_micros(),
            reason: start.reason.clone(),
            who: start.who.clone(),
            later: BTreeMap::new(),
        });
    }

    /// Returns the error of a route that no process has: its quarantine would have no effect.
    fn check(&self, start: &QuarantineStart, now: Timestamp) -> Result<(), QuarantineError> {
        if self.quarantines.iter().filter(|it| it.lasts(now)).count() >= MAX_QUARANTINES {
            return Err(QuarantineError::TooMany);
        }
        let Some(route) = &start.route else { return Ok(()) };
        let live =
            self.users.iter().filter(|it| it.is_live(now) && it.follows(start.namespace.as_str()));
        let mut known: Vec<_> =
            live.flat_map(|it| it.routes.values().map(|it| &*it.name)).collect();
        if known.contains(&&**route) {
            return Ok(());
        }
        known.retain(|name| !name.is_empty());
        known.sort_unstable();
        known.dedup();
        let known = if known.is_empty() { "none has one".to_owned() } else { known.join(", ") };
        Err(QuarantineError::Route { found: route.clone(), known })
    }
}

impl StoreRegister {
    /// Returns the quarantines that last.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn quarantines(&self) -> Result<Vec<QuarantineView>, StoreError> {
        let seen = self.load().await?;
        Ok(content(&seen)?.views(seen.now))
    }

    /// Begins a quarantine, or changes the end of one. It is in force once [`quarantines`](Self::quarantines) has no
    /// unconfirmed process: each reads the register at least every three seconds, and one that cannot read it for ten
    /// executes no key without a record.
    ///
    /// # Errors
    /// [`QuarantineError`].
    pub async fn begin_quarantine(&self, start: &QuarantineStart) -> Result<(), QuarantineError> {
        if !(Duration::from_secs(1)..=MAX_QUARANTINE).contains(&start.duration) {
            return Err(QuarantineError::Duration { found: start.duration });
        }
        let seen = self.load().await?;
        content(&seen)?.check(start, seen.now)?;
        let mut id = [0; 16];
        SystemEntropy.fill(&mut id).map_err(StoreError::unavailable)?;
        let id = crate::hex(&id);
        self.change(|content, now| content.begin(start, &id, now)).await?;
        Ok(())
    }

    /// Ends a quarantine. Processes notice within three seconds.
    ///
    /// # Errors
    /// [`QuarantineError`].
    pub async fn end_quarantine(
        &self,
        namespace: &Namespace,
        route: Option<&str>,
    ) -> Result<(), QuarantineError> {
        let seen = self.load().await?;
        let is_it = |it: &StoreQuarantine| RegisterContent::is_of(it, namespace, route);
        if !content(&seen)?.quarantines.iter().any(|it| is_it(it) && it.lasts(seen.now)) {
            let (namespace, route) = (namespace.as_str().to_owned(), route.map(str::to_owned));
            return Err(QuarantineError::NotFound { namespace, route });
        }
        self.change(|content, now| content.quarantines.retain(|it| it.lasts(now) && !is_it(it)))
            .await?;
        Ok(())
    }
}

impl RegisteredUser {
    /// Returns the quarantines of the store that last, as [`StoreRegister::quarantines`] does.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn quarantines(&self) -> Result<Vec<QuarantineView>, StoreError> {
        let mut views = self.register().quarantines().await?;
        if !self.register().is_shared() {
            // Such a register has no processes: this one has the store, and applies what it changes.
            let is_own =
                |it: &&mut QuarantineView| it.namespace == self.engine().namespace().as_str();
            views.iter_mut().filter(is_own).for_each(|it| it.confirmed = 1);
        }
        Ok(views)
    }
}

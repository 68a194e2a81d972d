//! Quarantines in the register: begin, end, and the processes that have not confirmed one.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_core::{Entropy, Namespace, Quarantine, StoreError, SystemEntropy, Timestamp};
use serde::{Deserialize, Serialize};

use super::record::content;
use super::{LAPSE, RegisterContent, RegisteredUser, StoreRegister, StoreUser};
use crate::keys::rfc3339;

/// The longest quarantine.
pub const MAX_QUARANTINE_DURATION: Duration = Duration::from_secs(24 * 3600);

/// The most quarantines in force in one store.
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
    /// The duration, at most [`MAX_QUARANTINE_DURATION`]. One in force of this namespace and route is replaced.
    pub duration: Duration,
    /// True if the namespace may be one that no process has used.
    pub any_namespace: bool,
    /// The reason.
    pub reason: String,
    /// The operator.
    pub who: String,
}

/// A quarantine as operators see it. Times are RFC 3339, by the clock of the store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QuarantineView {
    /// Its id: another quarantine of the same namespace and route has another one.
    pub id: String,
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
    /// Number of the running processes that have confirmed it.
    pub confirmed: usize,
    /// Names of the running processes that have not.
    pub unconfirmed: Vec<String>,
    /// Seconds, at most 10, until each process without an entry has read the register or executes no key without a record;
    /// 0 for a store of one process.
    pub in_force_in_seconds: u64,
}

/// Errors of beginning and ending a quarantine. Nothing was changed, unless the store gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuarantineError {
    /// The duration is out of range.
    #[error(
        "expected a duration of 1 s to 24 h, found {found:?}: pass --for (\"seconds\") within it, and begin it again before \
         it ends"
    )]
    Duration {
        /// The duration.
        found: Duration,
    },
    /// No process has used the namespace.
    #[error(
        "expected a namespace that a process has used ({known}), found {found:?}: name one of these. If the store has lost \
         that name too, or is a file, which has none: compare it with the setting `namespace` of the service (\"\" by \
         default), since a quarantine of another one has no effect, and pass --any-namespace (\"any_namespace\": true)"
    )]
    Namespace {
        /// The namespace.
        found: String,
        /// The namespaces that processes have used.
        known: String,
    },
    /// The process that has the file open has another namespace.
    #[error(
        "expected the namespace of the process that has the file open ({own:?}), found {found:?}: name that one"
    )]
    OtherNamespace {
        /// The namespace.
        found: String,
        /// The namespace of the process.
        own: String,
    },
    /// No process of the namespace has this route.
    #[error(
        "expected a route of a process of this namespace ({known}), found {found:?}: name one of these, or leave the route \
         out"
    )]
    Route {
        /// The route.
        found: String,
        /// The routes that processes have.
        known: String,
    },
    /// There are too many quarantines.
    #[error(
        "expected fewer than 100 quarantines of this store, found 100: end some with `hapax store quarantine end`"
    )]
    TooMany,
    /// There is no such quarantine.
    #[error("expected a quarantine of namespace {namespace:?}{}, found none: `hapax store quarantine list` (GET \
         /api/quarantines) lists them", of_route(.route.as_deref()))]
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
    pub(super) fn is_in_force(&self, now: Timestamp) -> bool {
        now.as_micros() < self.until
    }

    fn is_of(&self, namespace: &Namespace, route: Option<&str>) -> bool {
        self.namespace == namespace.as_str() && self.route.as_deref() == route
    }

    /// Returns the quarantine of the engine of a process. It applies to all routes of a process that has routes, none of
    /// them with this name: the requests may reach another one.
    pub(super) fn of_engine(&self, user: &StoreUser) -> Quarantine {
        let is_of = |route: &&String| {
            user.routes.is_empty() || user.routes.values().any(|it| it.name == **route)
        };
        Quarantine {
            route: self.route.as_ref().filter(is_of).cloned(),
            since: Timestamp::from_micros(self.since),
            until: Timestamp::from_micros(self.until),
        }
    }

    fn view(&self, users: &[StoreUser], now: Timestamp) -> QuarantineView {
        let running =
            users.iter().filter(|user| user.is_running(now) && user.follows(&self.namespace));
        let (confirmed, unconfirmed): (Vec<_>, Vec<_>) =
            running.partition(|user| user.confirmed.contains(&self.id));
        QuarantineView {
            id: self.id.clone(),
            namespace: self.namespace.clone(),
            route: self.route.clone(),
            since: rfc3339(Timestamp::from_micros(self.since)),
            until: rfc3339(Timestamp::from_micros(self.until)),
            reason: self.reason.clone(),
            who: self.who.clone(),
            confirmed: confirmed.len(),
            unconfirmed: unconfirmed.iter().map(|user| user.name.clone()).collect(),
            in_force_in_seconds: Timestamp::from_micros(self.since)
                .after(LAPSE)
                .since(now)
                .as_secs_f64()
                .ceil() as u64,
        }
    }
}

impl RegisterContent {
    fn views(&self, now: Timestamp) -> Vec<QuarantineView> {
        let in_force = self.quarantines.iter().filter(|it| it.is_in_force(now));
        in_force.map(|it| it.view(&self.users, now)).collect()
    }

    fn begin(&mut self, start: &QuarantineStart, id: &str, now: Timestamp) {
        self.end(|it| it.is_of(&start.namespace, start.route.as_deref()), now);
        self.quarantines.push(StoreQuarantine {
            id: id.to_owned(),
            namespace: start.namespace.as_str().to_owned(),
            route: start.route.clone(),
            // Also of one that replaces another: the store may have lost records in the meantime.
            since: now.as_micros(),
            until: now.after(start.duration).as_micros(),
            reason: start.reason.clone(),
            who: start.who.clone(),
            later: BTreeMap::new(),
        });
    }

    fn end(&mut self, is_ended: impl Fn(&StoreQuarantine) -> bool, now: Timestamp) {
        self.ended.retain(|_, until| now.as_micros() < *until);
        self.quarantines.retain(|it| it.is_in_force(now));
        let (ended, in_force) =
            std::mem::take(&mut self.quarantines).into_iter().partition(is_ended);
        self.quarantines = in_force;
        let ended: Vec<StoreQuarantine> = ended;
        self.ended.extend(ended.into_iter().map(|it| (it.id, it.until)));
        while self.ended.len() > MAX_QUARANTINES {
            let first = self.ended.iter().min_by_key(|(_, until)| **until);
            let Some(id) = first.map(|(id, _)| id.clone()) else { break };
            self.ended.remove(&id);
        }
    }

    /// Adds those of `applied` that are in force and were lost with the register. Returns their number.
    pub(super) fn restore(&mut self, applied: &[StoreQuarantine], now: Timestamp) -> usize {
        let is_known = |it: &StoreQuarantine| {
            self.ended.contains_key(&it.id)
                || self.quarantines.iter().any(|other| other.id == it.id)
        };
        let lost: Vec<_> =
            applied.iter().filter(|it| it.is_in_force(now) && !is_known(it)).cloned().collect();
        let count = lost.len();
        self.quarantines.extend(lost);
        count
    }

    /// Returns the error of a namespace or route that no process has: its quarantine would have no effect.
    fn check(&self, start: &QuarantineStart, now: Timestamp) -> Result<(), QuarantineError> {
        if self.quarantines.iter().filter(|it| it.is_in_force(now)).count() >= MAX_QUARANTINES {
            return Err(QuarantineError::TooMany);
        }
        let namespace = start.namespace.as_str();
        if !self.namespaces.contains(namespace) && !start.any_namespace {
            let known: Vec<_> = self.namespaces.iter().map(|it| format!("{it:?}")).collect();
            let known =
                if known.is_empty() { "none is known".to_owned() } else { known.join(", ") };
            return Err(QuarantineError::Namespace { found: namespace.to_owned(), known });
        }
        check_route(start, self.users.iter().filter(|it| it.follows(namespace)))
    }
}

/// Returns the error of a route that none of `users` has: its quarantine would have no effect.
fn check_route<'a>(
    start: &QuarantineStart,
    users: impl Iterator<Item = &'a StoreUser>,
) -> Result<(), QuarantineError> {
    let Some(route) = &start.route else { return Ok(()) };
    let mut known: Vec<_> = users.flat_map(|it| it.routes.values().map(|it| &*it.name)).collect();
    if known.contains(&&**route) {
        return Ok(());
    }
    known.retain(|name| !name.is_empty());
    known.sort_unstable();
    known.dedup();
    let known = if known.is_empty() { "none has one".to_owned() } else { known.join(", ") };
    Err(QuarantineError::Route { found: route.clone(), known })
}

impl StoreRegister {
    /// Returns the quarantines in force.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn quarantines(&self) -> Result<Vec<QuarantineView>, StoreError> {
        let seen = self.load().await?;
        let mut views = content(&seen)?.views(seen.now);
        if !self.is_shared() {
            views.iter_mut().for_each(|it| it.in_force_in_seconds = 0);
        }
        Ok(views)
    }

    /// Begins a quarantine, and returns its id. It is in force everywhere once
    /// [`quarantines`](Self::quarantines) shows no unconfirmed process and `in_force_in_seconds` is 0: each process
    /// writes its entry about every three seconds, and one that cannot for ten executes no key without a record.
    ///
    /// # Errors
    /// [`QuarantineError`].
    pub async fn begin_quarantine(
        &self,
        start: &QuarantineStart,
    ) -> Result<String, QuarantineError> {
        let seen = self.load().await?;
        content(&seen)?.check(start, seen.now)?;
        self.begin(start).await
    }

    async fn begin(&self, start: &QuarantineStart) -> Result<String, QuarantineError> {
        if !(Duration::from_secs(1)..=MAX_QUARANTINE_DURATION).contains(&start.duration) {
            return Err(QuarantineError::Duration { found: start.duration });
        }
        let mut id = [0; 16];
        SystemEntropy.fill(&mut id).map_err(StoreError::unavailable)?;
        let id = crate::hex(&id);
        self.change(|content, now| content.begin(start, &id, now)).await?;
        Ok(id)
    }

    /// Ends a quarantine. Processes read that after about three seconds.
    ///
    /// # Errors
    /// [`QuarantineError`].
    pub async fn end_quarantine(
        &self,
        namespace: &Namespace,
        route: Option<&str>,
    ) -> Result<(), QuarantineError> {
        let seen = self.load().await?;
        let quarantines = content(&seen)?.quarantines.into_iter();
        let found = quarantines.filter(|it| it.is_of(namespace, route) && it.is_in_force(seen.now));
        let ids: Vec<String> = found.map(|it| it.id).collect();
        if ids.is_empty() {
            let (namespace, route) = (namespace.as_str().to_owned(), route.map(str::to_owned));
            return Err(QuarantineError::NotFound { namespace, route });
        }
        // One that begins meanwhile is of another loss of records.
        self.change(|content, now| content.end(|it| ids.contains(&it.id), now)).await?;
        Ok(())
    }
}

impl RegisteredUser {
    /// Begins a quarantine as [`StoreRegister::begin_quarantine`] does, and applies it in this process.
    ///
    /// # Errors
    /// [`QuarantineError`].
    pub async fn begin_quarantine(
        &self,
        start: &QuarantineStart,
    ) -> Result<String, QuarantineError> {
        if !self.register().is_shared() {
            // Only this process has the store.
            let own = self.engine().namespace();
            if start.namespace != *own {
                let [found, own] = [&start.namespace, own].map(|it| it.as_str().to_owned());
                return Err(QuarantineError::OtherNamespace { found, own });
            }
            check_route(start, std::iter::once(&self.user()))?;
        }
        let begun = match self.register().is_shared() {
            true => self.register().begin_quarantine(start).await,
            // Its register has no processes.
            false => self.register().begin(start).await,
        };
        // Without a reply it may have begun.
        let applied = self.apply().await;
        let id = begun?;
        self.check_applied(applied)?;
        Ok(id)
    }

    /// Ends a quarantine as [`StoreRegister::end_quarantine`] does, and applies that in this process.
    ///
    /// # Errors
    /// [`QuarantineError`].
    pub async fn end_quarantine(
        &self,
        namespace: &Namespace,
        route: Option<&str>,
    ) -> Result<(), QuarantineError> {
        let ended = self.register().end_quarantine(namespace, route).await;
        let applied = self.apply().await;
        ended?;
        Ok(self.check_applied(applied)?)
    }

    /// Returns the error of a change of the quarantines that this process has not applied. On a shared store it is no error:
    /// the process is among those that have not confirmed the change until it has written its entry, or pauses.
    fn check_applied(&self, applied: Result<(), StoreError>) -> Result<(), StoreError> {
        match applied {
            Err(error) if self.register().is_shared() => {
                tracing::warn!(%error, "this process has not confirmed a change of the quarantines yet");
                Ok(())
            }
            applied => applied,
        }
    }

    /// Returns the quarantines of the store that are in force, as [`StoreRegister::quarantines`] does.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn quarantines(&self) -> Result<Vec<QuarantineView>, StoreError> {
        let mut views = self.register().quarantines().await?;
        if !self.register().is_shared() {
            // Such a register has no processes: this one has the store.
            let applied = self.engine().quarantines().in_force();
            for view in &mut views {
                let is_applied = applied.iter().any(|it| rfc3339(it.until) == view.until);
                view.confirmed = usize::from(is_applied);
                view.in_force_in_seconds = 0;
            }
        }
        Ok(views)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::register::RouteNaming;

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(secs * 1_000_000)
    }

    fn start(namespace: &str) -> QuarantineStart {
        QuarantineStart {
            namespace: Namespace::new(namespace).unwrap(),
            route: None,
            duration: Duration::from_secs(100),
            any_namespace: false,
            reason: "restored".to_owned(),
            who: "anna".to_owned(),
        }
    }

    #[test]
    fn a_quarantine_that_is_replaced_begins_anew() {
        let mut content = RegisterContent::default();
        content.begin(&start("shop"), "a", at(10));
        content.begin(&start("bank"), "b", at(10));
        content.begin(&start("shop"), "c", at(50));
        let found: Vec<_> =
            content.quarantines.iter().map(|it| (&*it.id, it.since, it.until)).collect();
        assert_eq!(found, [("b", 10_000_000, 110_000_000), ("c", 50_000_000, 150_000_000)]);
        assert_eq!(content.views(at(55))[1].in_force_in_seconds, 5);
        assert_eq!(content.views(at(110)).len(), 1);
    }

    #[test]
    fn a_quarantine_that_is_lost_with_the_register_is_continued_and_one_that_was_ended_is_not() {
        let mut content = RegisterContent::default();
        content.begin(&start("shop"), "a", at(10));
        let applied = content.quarantines.clone();
        assert_eq!(content.restore(&applied, at(20)), 0);
        let mut older = RegisterContent::default();
        assert_eq!(older.restore(&applied, at(20)), 1);
        assert_eq!(older.quarantines, applied);
        assert_eq!(RegisterContent::default().restore(&applied, at(110)), 0, "it is over");
        content.end(|it| it.id == "a", at(30));
        assert_eq!(content.restore(&applied, at(31)), 0);
        // Its id is needed for as long as a process may apply it.
        content.end(|it| it.id == "b", at(109));
        assert_eq!(content.ended.len(), 1);
        content.end(|it| it.id == "b", at(110));
        assert_eq!(content.ended.len(), 0);
    }

    #[test]
    fn a_namespace_that_no_process_has_used_is_rejected() {
        let mut content = RegisterContent::default();
        let error = content.check(&start("shop"), at(1)).unwrap_err();
        assert!(error.to_string().contains("(none is known), found \"shop\""), "{error}");
        content.namespaces.insert("shops".to_owned());
        let error = content.check(&start("shop"), at(1)).unwrap_err();
        assert!(error.to_string().contains("(\"shops\"), found \"shop\""), "{error}");
        content.check(&QuarantineStart { any_namespace: true, ..start("shop") }, at(1)).unwrap();
    }

    #[test]
    fn a_route_that_no_process_names_is_rejected() {
        let mut content = RegisterContent::default();
        let user = |routes| StoreUser {
            routes,
            ..StoreUser::new(&Namespace::new("shop").unwrap(), "service".to_owned()).unwrap()
        };
        content.enter(&user(BTreeMap::new()), at(1));
        let of = |route: &str| QuarantineStart { route: Some(route.to_owned()), ..start("shop") };
        let error = content.check(&of("pay"), at(1)).unwrap_err();
        assert!(error.to_string().contains("(none has one), found \"pay\""), "{error}");
        let naming = RouteNaming {
            name: "pay".to_owned(),
            scope: String::new(),
            key_header: String::new(),
            fingerprint: String::new(),
            later: BTreeMap::new(),
        };
        content.enter(&user(BTreeMap::from([("/pay".to_owned(), naming)])), at(1));
        content.check(&of("pay"), at(1)).unwrap();
        content.check(&of("paymnts"), at(1)).unwrap_err();
    }

    #[test]
    fn a_relay_makes_no_namespace_known() {
        let mut content = RegisterContent::default();
        let user = |namespace: &str, every_namespace| StoreUser {
            every_namespace,
            ..StoreUser::new(&Namespace::new(namespace).unwrap(), "process".to_owned()).unwrap()
        };
        content.enter(&user("", true), at(1));
        content.enter(&user("shop", false), at(1));
        content.check(&start("shop"), at(1)).unwrap();
        content.check(&start(""), at(1)).unwrap_err();
    }
}

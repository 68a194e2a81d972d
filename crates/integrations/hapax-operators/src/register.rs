//! The register of a store: the processes that use it, and how each names and compares operations.
//!
//! 1. It is one record of the store, under an operation id that no key has, and is changed by compare and
//!    swap. So every store has it, and it needs no table.
//! 2. A process writes its entry about every three seconds. One that has written nothing for ten seconds counts
//!    as ended; so does one that left.
//! 3. Processes of one namespace name and compare operations alike; otherwise duplicates that reach two of them
//!    execute twice. A process that differs from a running one is rejected. So is a process of a consumer that finds the
//!    ids or order keys of its messages otherwise, or has another namespace.
//! 4. The register decides nothing about records. A process whose entry is new, has other routes or consumers, or has not
//!    been written for that long writes it only if no process differs that runs or was written later. Until then it executes no
//!    key without a record. So a process that was paused does not execute beside one with other settings that came after
//!    it, also after an outage in which all entries lapse.
//! 5. It has the quarantines of the store. A process applies those of its namespace when it writes its entry, which
//!    confirms them. One that has not written for ten seconds executes no key without a record, so that a quarantine
//!    that every running process has confirmed holds for the others too. An exception is an outage of the store of more than
//!    ten seconds, in which routes with `store_outage = "open"` execute unprotected.

mod difference;
mod fault;
mod live;
mod paths;
mod quarantine;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hapax_core::{
    Entropy, EntropyError, Fingerprint, Namespace, OperationId, Outcome, SystemEntropy, Timestamp,
};
use serde::{Deserialize, Serialize};

pub use difference::{ConsumerNaming, DifferenceSubject, UserDifference};
pub use fault::RegisterError;
use fault::RegisterFault;
pub use live::{RegisteredUser, StoreRegister};
use quarantine::StoreQuarantine;
pub use quarantine::{MAX_QUARANTINE_DURATION, QuarantineError, QuarantineStart, QuarantineView};

/// Time between two writes of an entry.
pub(crate) const REFRESH: Duration = Duration::from_secs(3);

/// Time for which a process that enters waits for a write of one that differs. It is longer than a write takes after
/// the store was unavailable.
pub(crate) const WATCH: Duration = Duration::from_secs(15);

/// Time without a write after which a process counts as ended.
pub(crate) const LAPSE: Duration = Duration::from_secs(10);

/// Time after which an ended process is removed from the register. A store outage makes all entries old: until then a
/// process that differs waits to see whether they are written again.
const FORGET: Duration = Duration::from_secs(3600);

/// The most processes of a register. Ended ones are replaced.
const MAX_USERS: usize = 1000;

/// Name of the scheme and of the format of the record.
const FORMAT: &str = "hapax-register/1";

/// Returns the operation id of the register.
pub(crate) fn register_id() -> OperationId {
    OperationId::from_bytes(*Fingerprint::builder(FORMAT).finish().as_bytes())
}

/// A process that uses a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoreUser {
    /// Random id of the process.
    pub id: String,
    /// The namespace of its operations; empty for the default.
    pub namespace: String,
    /// Kind, address and process id, for logs and errors.
    pub name: String,
    /// The service behind it, if it is a gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// How operations are named and compared, by the path of the route; `*` is any other path.
    pub routes: BTreeMap<String, RouteNaming>,
    /// How the messages of its consumers are named and ordered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consumers: Vec<ConsumerNaming>,
    /// Time of its start, in microseconds since 1970, by the clock of the store.
    #[serde(default)]
    pub since: u64,
    /// Time of its last write, in microseconds since 1970, by the clock of the store.
    #[serde(default)]
    pub seen: u64,
    /// True if quarantines of every namespace apply to it, as to a relay, which sends the messages of all services.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub every_namespace: bool,
    /// Ids of the quarantines that it applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub confirmed: Vec<String>,
    /// Fields of later versions, which stay as they are.
    #[serde(flatten)]
    pub later: BTreeMap<String, serde_json::Value>,
}

/// The settings by which the operations of a route are named and compared.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteNaming {
    /// The name of the route in metrics; empty for requests without a route.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The headers that name the caller.
    pub scope: String,
    /// The header that has the key.
    pub key_header: String,
    /// The fingerprint scheme.
    pub fingerprint: String,
    /// Fields of later versions, which stay as they are.
    #[serde(flatten)]
    pub later: BTreeMap<String, serde_json::Value>,
}

impl StoreUser {
    /// Creates the entry of a process that has no routes yet.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    pub fn new(namespace: &Namespace, name: String) -> Result<Self, EntropyError> {
        let mut id = [0; 32];
        SystemEntropy.fill(&mut id)?;
        Ok(Self {
            id: OperationId::from_bytes(id).to_string(),
            namespace: namespace.as_str().to_owned(),
            name,
            upstream: None,
            routes: BTreeMap::new(),
            consumers: Vec::new(),
            since: 0,
            seen: 0,
            every_namespace: false,
            confirmed: Vec::new(),
            later: BTreeMap::new(),
        })
    }

    /// Returns whether it wrote its entry within the last ten seconds.
    #[must_use]
    pub fn is_running(&self, now: Timestamp) -> bool {
        now.since(Timestamp::from_micros(self.seen)) < LAPSE
    }

    /// Returns whether quarantines of a namespace apply to it.
    fn follows(&self, namespace: &str) -> bool {
        self.every_namespace || self.namespace == namespace
    }

    /// Returns the difference from `other` that keeps them from sharing records, if both have one namespace or one consumer
    /// at one broker. A path that only one of them has a route for is the most specific pattern of the other that matches
    /// it, or `*`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<UserDifference> {
        if self.id == other.id {
            return None;
        }
        let of_consumers = difference::of_consumers(self, other);
        of_consumers.or_else(|| self.difference_of_routes(other))
    }

    fn difference_of_routes(&self, other: &Self) -> Option<UserDifference> {
        if self.namespace != other.namespace {
            return None;
        }
        let [of_ours, of_theirs] = [self, other].map(|user| paths::by_meaning(&user.routes));
        let paths = self.routes.keys().chain(other.routes.keys());
        paths.into_iter().find_map(|path| {
            let meaning = paths::meaning(path);
            let [ours, theirs] = [&of_ours, &of_theirs].map(|of| paths::find(of, &meaning));
            let (ours, theirs) = ours.zip(theirs)?;
            let settings = [
                ("scope", &ours.scope, &theirs.scope),
                ("key_header", &ours.key_header, &theirs.key_header),
                ("fingerprint", &ours.fingerprint, &theirs.fingerprint),
            ];
            let (setting, ours, theirs) = settings.into_iter().find(|(_, a, b)| a != b)?;
            Some(UserDifference {
                name: other.name.clone(),
                namespace: other.namespace.clone(),
                subject: DifferenceSubject::Path(path.clone()),
                setting,
                ours: ours.clone(),
                theirs: theirs.clone(),
            })
        })
    }

    /// Returns whether `other` is in front of another service under the same namespace, which is a mistake
    /// unless both addresses lead to one service.
    #[must_use]
    pub fn differs_in_upstream(&self, other: &Self) -> bool {
        let upstreams = self.upstream.as_ref().zip(other.upstream.as_ref());
        self.namespace == other.namespace && upstreams.is_some_and(|(ours, theirs)| ours != theirs)
    }
}

/// The content of the register.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub(crate) struct RegisterContent {
    #[serde(default)]
    users: Vec<StoreUser>,
    /// Every namespace that was ever used.
    #[serde(default)]
    namespaces: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    quarantines: Vec<StoreQuarantine>,
    /// Ids of quarantines that operators ended, each with the time at which it would have ended. One that is in neither
    /// list was lost with the register.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    ended: BTreeMap<String, u64>,
    /// Fields of later versions, which stay as they are.
    #[serde(flatten)]
    later: BTreeMap<String, serde_json::Value>,
}

impl RegisterContent {
    fn decode(outcome: &Outcome) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(outcome.bytes())
    }

    fn encode(&self) -> Result<Outcome, serde_json::Error> {
        Ok(Outcome::new(FORMAT, serde_json::to_vec(self)?))
    }

    /// Checks that the entry of a process may be written at `now`. `user` has the time of its last write.
    ///
    /// # Errors
    /// [`RegisterFault::Difference`]: another process differs, and may execute.
    fn admit(&self, user: &StoreUser, now: Timestamp) -> Result<(), RegisterFault> {
        let own = self.users.iter().find(|it| it.id == user.id);
        // While an entry with these routes and consumers counts as running, no process that differs enters.
        let is_same = |it: &StoreUser| it.routes == user.routes && it.consumers == user.consumers;
        if own.is_some_and(|it| it.is_running(now) && is_same(it)) {
            return Ok(());
        }
        // One that has lapsed may run again, as after an outage: of two, the later one stays. A process that enters
        // removes the entries that differ.
        let counts = |it: &&StoreUser| own.is_none() || it.is_running(now) || it.seen >= user.seen;
        match self.users.iter().filter(counts).find_map(|it| user.difference(it)) {
            Some(difference) => Err(RegisterFault::Difference(Box::new(difference))),
            None => Ok(()),
        }
    }

    /// Adds or replaces the entry of a process, and removes those that ended long ago. The entry is left out where
    /// there are too many.
    fn enter(&mut self, user: &StoreUser, now: Timestamp) {
        let age = |it: &StoreUser| now.since(Timestamp::from_micros(it.seen));
        // An ended process that named operations as this one does is of no further use.
        let is_alike = |it: &StoreUser| {
            let is_same = it.namespace == user.namespace && it.routes == user.routes;
            is_same && it.consumers == user.consumers
        };
        self.users.retain(|it| {
            it.id != user.id && age(it) < FORGET && (it.is_running(now) || !is_alike(it))
        });
        if self.users.len() >= MAX_USERS {
            self.users.retain(|it| it.is_running(now));
        }
        // A process of every namespace, such as a relay, has operations of no service.
        if self.namespaces.len() < MAX_USERS && !user.every_namespace {
            self.namespaces.insert(user.namespace.clone());
        }
        if self.users.len() < MAX_USERS {
            self.users.push(StoreUser { seen: now.as_micros(), ..user.clone() });
        }
    }

    fn remove(&mut self, id: &str) {
        self.users.retain(|it| it.id != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(id: &str, namespace: &str, scope: &str, upstream: &str) -> StoreUser {
        let names = RouteNaming {
            name: String::new(),
            scope: scope.to_owned(),
            key_header: "idempotency-key".to_owned(),
            fingerprint: "http/1".to_owned(),
            later: BTreeMap::new(),
        };
        StoreUser {
            id: id.to_owned(),
            namespace: namespace.to_owned(),
            name: format!("gateway {id}"),
            upstream: Some(upstream.to_owned()),
            routes: BTreeMap::from([("*".to_owned(), names)]),
            consumers: Vec::new(),
            since: 0,
            seen: 0,
            every_namespace: false,
            confirmed: Vec::new(),
            later: BTreeMap::new(),
        }
    }

    #[test]
    fn users_of_one_namespace_that_name_operations_otherwise_differ() {
        let ours = user("a", "shop", "authorization", "http://a");
        assert_eq!(ours.difference(&user("b", "shop", "authorization", "http://b")), None);
        assert_eq!(ours.difference(&user("b", "bank", "x-user", "http://b")), None);
        let found = ours.difference(&user("b", "shop", "x-user", "http://b")).unwrap();
        assert_eq!((found.setting, &*found.theirs), ("scope", "x-user"));
        assert!(
            found.to_string().contains("gateway b has it in the namespace \"shop\""),
            "{found}"
        );
        // A rolling deployment may add a route that names operations as all paths were named before.
        let mut more = ours.clone();
        more.id = "c".to_owned();
        let mut names = more.routes["*"].clone();
        more.routes.insert("/other".to_owned(), names.clone());
        assert_eq!(ours.difference(&more), None);
        names.key_header = "x-key".to_owned();
        more.routes.insert("/other".to_owned(), names);
        for (one, other) in [(&ours, &more), (&more, &ours)] {
            let found = one.difference(other).unwrap();
            let path = DifferenceSubject::Path("/other".to_owned());
            assert_eq!((found.setting, found.subject), ("key_header", path));
        }
    }

    #[test]
    fn routes_are_compared_by_the_requests_that_they_match() {
        let with = |id: &str, path: &str, key_header: &str| {
            let mut user = user(id, "shop", "authorization", "http://a");
            let names = RouteNaming { key_header: key_header.into(), ..user.routes["*"].clone() };
            user.routes.insert(path.to_owned(), names);
            user
        };
        for (ours, theirs) in [("/Pay", "/pay"), ("/p/{x}", "/p/{id}"), ("/p/{*a}", "/P/{*b}")] {
            let [one, other] = [with("a", ours, "x-key"), with("b", theirs, "x-key")];
            assert_eq!(one.difference(&other), None, "{ours} {theirs}");
            let other = with("b", theirs, "y-key");
            let found = one.difference(&other).unwrap();
            assert_eq!(found.subject, DifferenceSubject::Path(ours.to_owned()));
            assert_eq!((&*found.ours, &*found.theirs), ("x-key", "y-key"));
        }
        for (ours, theirs) in [("/p/{x}", "/p/{*x}"), ("/p/{x}", "/p/x"), ("/p", "/p/{x}")] {
            let [one, other] = [with("a", ours, "x-key"), with("b", theirs, "x-key")];
            assert!(one.difference(&other).is_some(), "{ours} {theirs}");
        }
    }

    #[test]
    fn an_entry_lapses_and_fields_of_later_versions_stay() {
        let at = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let later = br#"{"users": [], "pauses": [1, 2]}"#.as_slice();
        let mut content = RegisterContent::decode(&Outcome::new(FORMAT, later)).unwrap();
        content.enter(&user("a", "bank", "x", "http://a"), at(100));
        content.enter(&user("b", "", "x", "http://a"), at(105));
        content.enter(&user("a", "bank", "y", "http://a"), at(106));
        let ids = |content: &RegisterContent| {
            content.users.iter().map(|it| it.id.clone()).collect::<Vec<_>>()
        };
        assert_eq!(ids(&content), ["b", "a"]);
        assert!(content.users[0].is_running(at(114)) && !content.users[0].is_running(at(115)));
        content.enter(&user("c", "", "z", "http://a"), at(115));
        assert_eq!(ids(&content), ["b", "a", "c"], "after an outage b may come back");
        content.enter(&user("c", "", "z", "http://a"), at(105 + 3600));
        assert_eq!(ids(&content), ["a", "c"]);
        content.enter(&user("d", "bank", "y", "http://a"), at(105 + 3600));
        assert_eq!(ids(&content), ["c", "d"], "d names operations as a did");
        content.remove("a");
        let read = RegisterContent::decode(&content.encode().unwrap()).unwrap();
        assert_eq!(read, content);
        assert!(read.later.contains_key("pauses"), "{read:?}");
        assert!(RegisterContent::decode(&Outcome::new(FORMAT, "?")).is_err());
    }

    #[test]
    fn an_entry_that_another_process_may_have_followed_is_compared() {
        let at = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let mut content = RegisterContent::default();
        let [a, b, c] = [("a", "x"), ("b", "y"), ("c", "x")]
            .map(|(id, scope)| user(id, "shop", scope, "http://a"));
        let written =
            |user: &StoreUser, now: Timestamp| StoreUser { seen: now.as_micros(), ..user.clone() };
        content.admit(&a, at(100)).unwrap();
        content.enter(&a, at(100));
        content.admit(&b, at(109)).unwrap_err();
        content.admit(&c, at(109)).unwrap();
        content.enter(&c, at(109));
        let changed = StoreUser { routes: b.routes.clone(), ..written(&a, at(100)) };
        assert!(content.admit(&changed, at(109)).is_err(), "c runs with other routes");
        content.remove("c");
        assert!(content.admit(&b, at(110)).is_err(), "a has lapsed, and may run again");
        content.enter(&b, at(110));
        let (a, b) = (written(&a, at(100)), written(&b, at(110)));
        for (now, why) in [(111, "b runs"), (200, "b was written later")] {
            assert!(content.admit(&a, at(now)).is_err(), "{why}");
            content.admit(&b, at(now)).unwrap();
        }
        // As two processes of earlier versions, which only log it.
        content.users.push(written(&a, at(110)));
        content.admit(&b, at(119)).unwrap();
    }

    #[test]
    fn an_entry_whose_consumers_changed_is_compared() {
        let at = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let naming = |ids: &str| ConsumerNaming {
            consumer: "invoices".to_owned(),
            sources: vec!["nats://ORDERS".to_owned()],
            broker: "1f".to_owned(),
            mode: "claim".to_owned(),
            ids: ids.to_owned(),
            order_by: "none".to_owned(),
            later: BTreeMap::new(),
        };
        let of = |id: &str, ids: &str| {
            let consumers = vec![naming(ids)];
            StoreUser { consumers, routes: BTreeMap::new(), ..user(id, "shop", "x", "http://a") }
        };
        let mut content = RegisterContent::default();
        for id in ["a", "b"] {
            content.admit(&of(id, "position"), at(100)).unwrap();
            content.enter(&of(id, "position"), at(100));
        }
        content.admit(&of("a", "position"), at(105)).unwrap();
        assert!(content.admit(&of("a", "cloudevents"), at(105)).is_err(), "b runs with others");
        assert!(content.admit(&of("c", "cloudevents"), at(105)).is_err(), "a and b run");
        content.admit(&of("c", "position"), at(105)).unwrap();
    }

    #[test]
    fn fields_of_later_versions_stay_in_each_part_when_another_entry_is_written() {
        let later = br#"{"users": [{"id": "l", "namespace": "", "name": "later", "seen": 99000000, "zone": "b",
            "routes": {"*": {"scope": "x", "key_header": "k", "fingerprint": "http/9", "sources": ["k", "q"]}}}]}"#;
        let mut content = RegisterContent::decode(&Outcome::new(FORMAT, &later[..])).unwrap();
        content.enter(&user("a", "bank", "x", "http://a"), Timestamp::from_micros(100_000_000));
        let written = content.encode().unwrap();
        let written: serde_json::Value = serde_json::from_slice(written.bytes()).unwrap();
        let expected: serde_json::Value = serde_json::from_slice(later).unwrap();
        for field in ["zone", "routes"] {
            assert_eq!(written["users"][0][field], expected["users"][0][field], "{written}");
        }
    }
}

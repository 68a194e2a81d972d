//! Lookup of the route of a request.
//!
//! 1. A route's pattern is matched against the path's [readings](path), ignoring ASCII case, since
//!    some servers do. The request is forwarded with its original path.
//! 2. If the readings match several routes, or only some match a route, the
//!    [strictest](ProtectionLevel::holds) policy applies; that of the plain reading if no other is
//!    stricter. It is unknown which handler the upstream runs, but it runs under no laxer policy
//!    than its own.
//! 3. If none is the strictest (one needs a key, the other never executes twice; or they have
//!    different scopes), the request is rejected: any choice would be wrong for one of them.
//!    Clients do not send such paths by mistake.
//! 4. A path without readings could be any path. The strictest policy of all applies, or the
//!    request is rejected.
//!
//! Unprotected methods do not count in this comparison. Without routes, the default policy applies
//! to every path.

mod path;
mod tree;

use hapax_core::OnUnknown;
use hapax_http::classify::Profile;
use hapax_http::fingerprint::HttpFingerprintScheme;
use hapax_http::header::Grammar;
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, StoreOutage};
use hapax_http::statuses::StatusLists;
use http::{HeaderName, Method, Uri};

use crate::config::{ConfigError, PolicyConfig, RouteConfig, RouteMode, ScopeConfig};
use tree::{PatternError, Tree};

/// Routes of a configuration, by path.
#[derive(Clone, Debug)]
pub(crate) struct RouteTable {
    tree: Tree<usize>,
    routes: Vec<ProtectionLevel>,
    rest: ProtectionLevel,
    /// One route for each distinct protection level, for paths without readings: thousands of
    /// routes have few levels.
    kinds: Vec<Option<usize>>,
    /// Whether the last segment of each route's pattern contains a dot: `/calls.json`.
    dotted: Vec<bool>,
}

/// Error of a path for which no policy is the strictest one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AmbiguousRoute;

impl RouteTable {
    /// Builds the table; `policy` is for requests without a matching route.
    pub(crate) fn new(policy: &PolicyConfig, routes: &[RouteConfig]) -> Result<Self, ConfigError> {
        let mut tree = Tree::default();
        for (index, route) in routes.iter().enumerate() {
            let added = pattern(&route.path).and_then(|pattern| {
                tree.insert(&pattern, index).map_err(|error| match error {
                    PatternError::Unreadable(reason) => reason.to_owned(),
                    PatternError::Taken(other) => {
                        format!("is for the same as that of another route, {}", routes[other].path)
                    }
                })
            });
            added.map_err(|reason| route.error(index, ConfigError::RoutePath { reason }))?;
        }
        let levels =
            routes.iter().map(|route| ProtectionLevel::of(route.handling, &route.policy)).collect();
        let rest = ProtectionLevel::of(RouteMode::Protect, policy);
        let last = |route: &RouteConfig| route.path.rsplit('/').next().map(str::to_owned);
        let dotted = routes.iter().map(|route| last(route).is_some_and(|it| it.contains('.')));
        let dotted = dotted.collect();
        let mut table = Self { tree, routes: levels, rest, kinds: vec![None], dotted };
        for index in 0..table.routes.len() {
            let is_new =
                |grip: &ProtectionLevel| table.kinds.iter().all(|kind| table.grip(*kind) != grip);
            if table.routes.get(index).is_some_and(is_new) {
                table.kinds.push(Some(index));
            }
        }
        Ok(table)
    }

    /// Returns whether a method equals a protected one except for the case of its letters. Methods
    /// are case-sensitive (RFC 9110 9.1), but many frameworks convert them to upper case first:
    /// there an unprotected request would be executed with a protected method.
    fn resembles_protected(&self, method: &Method) -> bool {
        let plain = |other: &Method| {
            other != method && other.as_str().eq_ignore_ascii_case(method.as_str())
        };
        self.kinds.iter().any(|kind| self.grip(*kind).methods.iter().any(plain))
    }

    /// Returns the index of the route for paths of this pattern, by taking the pattern itself for a
    /// path.
    pub(crate) fn find_pattern(&self, pattern: &str) -> Option<usize> {
        self.tree.find(&pattern.to_ascii_lowercase())
    }

    /// Returns the index of the route of a request, `None` for none; the error is the reason of the
    /// rejection, as a sentence.
    pub(crate) fn route(&self, path: &str, method: &Method) -> Result<Option<usize>, &'static str> {
        if self.resembles_protected(method) {
            return Err("Expected the method in upper case.");
        }
        self.find(path, method).map_err(|AmbiguousRoute| {
            "The path can be read in several ways, for which policies hold that contradict each other."
        })
    }

    /// Returns the index of the route of a request; `None` for none.
    pub(crate) fn find(
        &self,
        path: &str,
        method: &Method,
    ) -> Result<Option<usize>, AmbiguousRoute> {
        if self.routes.is_empty() {
            return Ok(None);
        }
        let is_named = |plain: &str| {
            self.tree.find(plain).and_then(|index| self.dotted.get(index)).is_some_and(|it| *it)
        };
        let found = match path::readings(path, is_named) {
            Some(readings) => {
                let mut found: Vec<Option<usize>> = Vec::new();
                for reading in &readings {
                    let route = self.tree.find(reading);
                    if !found.contains(&route) {
                        found.push(route);
                    }
                }
                found
            }
            None => self.kinds.clone(),
        };
        let holds_all = |one: &&Option<usize>| {
            let grip = self.grip(**one);
            found.iter().all(|other| grip.holds(self.grip(*other), method))
        };
        found.iter().find(holds_all).copied().ok_or(AmbiguousRoute)
    }

    fn grip(&self, route: Option<usize>) -> &ProtectionLevel {
        route.and_then(|index| self.routes.get(index)).unwrap_or(&self.rest)
    }
}

/// Parts of a policy by which it can be stricter than another one.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ProtectionLevel {
    /// Protected methods.
    methods: Vec<Method>,
    needs_key: bool,
    on_unknown: OnUnknown,
    closed: bool,
    withholds: bool,
    most_in_flight: u32,
    of_record: RecordIdentity,
}

/// Parts of a policy without an order of strictness: they decide which record a request has, which
/// requests are equal, and how outcomes are classified. Under another caller's scope a request
/// would get that caller's response.
#[derive(Clone, PartialEq, Eq, Debug)]
struct RecordIdentity {
    scope: Option<ScopeConfig>,
    missing: MissingScope,
    key_header: HeaderName,
    grammar: Grammar,
    fingerprint: HttpFingerprintScheme,
    profile: Profile,
    statuses: StatusLists,
    reconcile_url: Option<Uri>,
}

impl ProtectionLevel {
    fn of(handling: RouteMode, policy: &PolicyConfig) -> Self {
        let methods = if handling == RouteMode::Protect { &policy.methods[..] } else { &[] };
        Self {
            methods: methods.to_vec(),
            needs_key: policy.key == KeyRule::Required,
            on_unknown: policy.on_unknown,
            closed: policy.store_outage == StoreOutage::Closed,
            withholds: policy.completion_outage == CompletionOutage::Withhold,
            most_in_flight: policy.max_in_flight_per_scope.map_or(u32::MAX, Into::into),
            of_record: RecordIdentity {
                scope: policy.scope.clone(),
                missing: policy.scope_missing.unwrap_or_default(),
                key_header: policy.key_header.clone(),
                grammar: policy.grammar,
                fingerprint: policy.fingerprint.clone(),
                profile: policy.profile,
                statuses: policy.statuses.clone(),
                reconcile_url: policy.reconcile_url.clone(),
            },
        }
    }

    /// Returns whether this level is in no respect laxer than `other` for requests of this method.
    fn holds(&self, other: &Self, method: &Method) -> bool {
        let strict = |on_unknown| match on_unknown {
            OnUnknown::Reexecute => 0,
            OnUnknown::Reconcile => 1,
            OnUnknown::Block => 2,
        };
        !other.methods.contains(method)
            || (self.methods.contains(method)
                && self.needs_key >= other.needs_key
                && strict(self.on_unknown) >= strict(other.on_unknown)
                && self.closed >= other.closed
                && self.withholds >= other.withholds
                && self.most_in_flight <= other.most_in_flight
                && self.of_record == other.of_record)
    }
}

/// Returns the form of a pattern that readings are matched against.
fn pattern(path: &str) -> Result<String, String> {
    if !path.starts_with('/') {
        return Err("must begin with a slash".into());
    }
    if path.contains(['%', '?', '#', ';', '\\']) || path.chars().any(char::is_control) {
        return Err("is written decoded, without `%`, `?`, `#`, `;` and `\\`".into());
    }
    if path.len() > 1 {
        if path.ends_with('/') {
            return Err("must not end with a slash: requests match with one and without".into());
        }
        if path.split('/').skip(1).any(|segment| matches!(segment, "" | "." | "..")) {
            let reason = "must have no empty segment, `.` or `..`: requests are matched without";
            return Err(reason.into());
        }
    }
    path.split('/').try_for_each(foreign)?;
    Ok(path.to_ascii_lowercase())
}

/// Rejects a segment in the notation of another router. It would match only its literal text, and
/// leave the intended paths unprotected.
fn foreign(segment: &str) -> Result<(), String> {
    if let Some(name) = segment.strip_prefix(':') {
        let name = if name.is_empty() { "id" } else { name };
        return Err(format!("has `{segment}`, and expects `{{{name}}}` for any one segment"));
    }
    let is_rest = segment.starts_with("{*") && segment.matches('*').count() == 1;
    if segment.contains('*') && !is_rest {
        return Err(format!(
            "has `{segment}`, and expects `{{*rest}}` as its last segment for everything below, or \
             `{{id}}` for any one segment"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(policy: &PolicyConfig, routes: &[(&str, PolicyConfig)]) -> RouteTable {
        let route = |(path, policy): &(&str, PolicyConfig)| RouteConfig::new(*path, policy.clone());
        RouteTable::new(policy, &routes.iter().map(route).collect::<Vec<_>>()).unwrap()
    }

    fn alike(paths: &[&str]) -> RouteTable {
        let routes: Vec<_> = paths.iter().map(|path| (*path, lax())).collect();
        table(&lax(), &routes)
    }

    fn needs_key() -> PolicyConfig {
        PolicyConfig { key: KeyRule::Required, ..lax() }
    }

    fn lax() -> PolicyConfig {
        PolicyConfig { on_unknown: OnUnknown::Reexecute, ..PolicyConfig::default() }
    }

    fn blocks() -> PolicyConfig {
        PolicyConfig { on_unknown: OnUnknown::Block, ..lax() }
    }

    #[test]
    fn the_most_specific_route_applies_in_any_order() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
            let paths =
                ["/v1/{*rest}", "/v1/payments", "/v1/payments/{id}", "/v1/payments/{id}/refund"];
            let table = alike(&order.map(|index| paths[index]));
            for (path, route) in [
                ("/v1", 0),
                ("/v1/", 0),
                ("/v1/orders/7", 0),
                ("/V1/Payments", 1),
                ("/v1/payments/7", 2),
                ("/v1/payments/7/refund", 3),
                ("/v1/payments/7/x", 0),
                ("/v1/x/../payments/./7", 2),
            ] {
                let found = table.find(path, &Method::POST).unwrap().map(|index| order[index]);
                assert_eq!(found, Some(route), "{path} in {order:?}");
            }
            assert_eq!(table.find("/v2", &Method::POST), Ok(None));
            assert_eq!(table.find("/", &Method::POST), Ok(None));
        }
    }

    const SPELLINGS: [&str; 20] = [
        "/payments",
        "/%70ayments",
        "/a/../payments",
        "//payments",
        "/payments/",
        "/PAYMENTS",
        "/payments;x=1",
        "/payments%3bx",
        "/payments%3Fx",
        "/payments%23",
        "/%2570ayments",
        "/%25/../%2570ayments",
        "/x%2f..%2Fpayments",
        "/\\payments",
        "/x/..;/payments",
        "/x//..//payments/.",
        "/open/%2e%2e/payments",
        "/payments.json",
        "/payments.",
        "/payments%20",
    ];

    #[test]
    fn patterns_of_other_routers_are_rejected_with_the_right_form() {
        for (path, form) in [
            ("/charges/*", "`{*rest}`"),
            ("/charges/*rest", "`{*rest}`"),
            ("/charges/**", "`{*rest}`"),
            ("/*", "`{*rest}`"),
            ("/a*/b", "`{id}`"),
            ("/charges/{id}*", "`{*rest}`"),
            ("/charges/{**rest}", "`{*rest}`"),
            ("/:id", "`{id}`"),
            ("/charges/:charge/refunds", "`{charge}`"),
            ("/:", "`{id}`"),
        ] {
            let route = RouteConfig::new(path, PolicyConfig::default());
            let error =
                RouteTable::new(&PolicyConfig::default(), &[route]).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains(form), "{error}");
        }
        for path in ["/charges/{*rest}", "/{id}", "/accounts/me:close", "/a/{id}/b"] {
            alike(&[path]);
        }
    }

    #[test]
    fn a_stricter_policy_cannot_be_evaded_by_spelling() {
        let routes = [("/payments", needs_key()), ("/open/{*rest}", lax()), ("/{*rest}", lax())];
        // With routes that other readings match, and without.
        for routes in [&routes[..], &routes[..2], &routes[..1]] {
            let table = table(&lax(), routes);
            for path in SPELLINGS {
                assert_eq!(table.find(path, &Method::POST), Ok(Some(0)), "{path}");
            }
            // It could be any path.
            for path in ["/%", "/payments%00", "/payments%ff", "/payments%zz"] {
                assert_eq!(table.find(path, &Method::POST), Ok(Some(0)), "{path}");
            }
        }
    }

    #[test]
    fn a_laxer_route_applies_only_to_paths_with_one_reading() {
        let mut open = RouteConfig::new("/health", lax());
        open.handling = RouteMode::Pass;
        let mut observed = RouteConfig::new("/observed", needs_key());
        observed.handling = RouteMode::Observe;
        let optional = RouteConfig::new("/optional", lax());
        let table = RouteTable::new(&needs_key(), &[open, observed, optional]).unwrap();
        for (index, name) in ["health", "observed", "optional"].iter().enumerate() {
            for path in [format!("/{name}"), format!("/{name}/"), format!("//{name}")] {
                assert_eq!(table.find(&path, &Method::POST), Ok(Some(index)), "{path}");
            }
            for path in [format!("/charge/../{name}"), format!("/{name};x"), "/%zz".into()] {
                assert_eq!(table.find(&path, &Method::POST), Ok(None), "{path}");
                // Both policies leave GET unprotected, so that of the plain reading applies.
                let plain = table.find(&path, &Method::GET).unwrap();
                assert!(plain.is_none() || plain == Some(index), "{path}");
            }
        }
    }

    #[test]
    fn a_path_without_a_strictest_policy_is_rejected() {
        let routes = [("/keyed/{*rest}", needs_key()), ("/blocked/{*rest}", blocks())];
        let table = table(&lax(), &routes);
        for path in ["/keyed/..%2fblocked", "/keyed/../blocked/x", "/blocked%2f..%5Ckeyed/", "/%"] {
            assert_eq!(table.find(path, &Method::POST), Err(AmbiguousRoute), "{path}");
            assert!(table.find(path, &Method::GET).is_ok(), "{path}");
        }
        for path in ["/keyed/a%2Fb", "/keyed/a;b", "/keyed/100%25", "/keyed/a/../b"] {
            assert_eq!(table.find(path, &Method::POST), Ok(Some(0)), "{path}");
        }
    }

    #[test]
    fn policies_with_different_scopes_have_no_strictest() {
        let of = |name: &'static str| PolicyConfig {
            scope: Some(ScopeConfig::headers([http::HeaderName::from_static(name)])),
            ..lax()
        };
        let shared = PolicyConfig { scope: Some(ScopeConfig::Everyone), ..lax() };
        for policy in [of("x-a"), shared] {
            let table = table(&policy, &[("/payments", of("x-merchant"))]);
            for path in ["/payments", "/payments/", "/x/../payments/7"] {
                assert!(table.find(path, &Method::GET).is_ok(), "{path}");
            }
            for path in ["/payments;v=1", "/payments.json", "/x%2f..%2fpayments", "/%zz"] {
                assert_eq!(table.find(path, &Method::POST), Err(AmbiguousRoute), "{path}");
            }
            assert_eq!(table.find("/payments", &Method::POST), Ok(Some(0)));
        }
    }

    #[test]
    fn a_dot_in_a_routes_last_segment_is_not_a_format() {
        let of = PolicyConfig { profile: Profile::StripeV1, ..lax() };
        let mut open = RouteConfig::new("/hooks/bank.json", lax());
        open.handling = RouteMode::Pass;
        let calls = RouteConfig::new("/accounts/{sid}/calls.json", of.clone());
        let table = RouteTable::new(&needs_key(), &[open, calls]).unwrap();
        for (path, route) in [
            ("/hooks/bank.json", Ok(Some(0))),
            ("/Accounts/x/Calls.json", Ok(Some(1))),
            ("/hooks/bank.xml", Ok(None)),
            // All other readings still apply.
            ("/hooks/bank.json;v=1", Ok(None)),
            ("/x%2f../accounts/x/calls.json", Err(AmbiguousRoute)),
        ] {
            assert_eq!(table.find(path, &Method::POST), route, "{path}");
        }
    }

    #[test]
    fn a_protected_method_is_recognised_in_any_case() {
        let table = alike(&["/payments"]);
        for (method, is_like_one) in
            [("POST", false), ("post", true), ("Patch", true), ("get", false), ("POSTS", false)]
        {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            assert_eq!(table.resembles_protected(&method), is_like_one, "{method}");
        }
    }

    #[test]
    fn a_path_without_readings_is_compared_with_each_distinct_policy_once() {
        let routes: Vec<_> = (0..RouteConfig::MOST)
            .map(|index| RouteConfig::new(format!("/{index}"), lax()))
            .chain([RouteConfig::new("/keyed", needs_key())])
            .collect();
        let table = RouteTable::new(&lax(), &routes).unwrap();
        assert_eq!(table.kinds, [None, Some(RouteConfig::MOST)]);
        assert_eq!(table.find("/%zz", &Method::POST), Ok(Some(RouteConfig::MOST)));
    }

    #[test]
    fn each_stricter_setting_makes_a_policy_stricter() {
        let lax = lax();
        let grip = |policy: &PolicyConfig| ProtectionLevel::of(RouteMode::Protect, policy);
        let closed = PolicyConfig { store_outage: StoreOutage::Open, ..lax.clone() };
        let few =
            PolicyConfig { max_in_flight_per_scope: std::num::NonZeroU32::new(1), ..lax.clone() };
        let withholds =
            PolicyConfig { completion_outage: CompletionOutage::Withhold, ..lax.clone() };
        for (strict, lax) in [
            (&needs_key(), &lax),
            (&blocks(), &lax),
            (&lax, &closed),
            (&few, &lax),
            (&withholds, &lax),
        ] {
            let (strict, lax) = (grip(strict), grip(lax));
            assert!(strict.holds(&lax, &Method::POST) && !lax.holds(&strict, &Method::POST));
            assert!(lax.holds(&strict, &Method::GET));
        }
        assert!(grip(&lax).holds(&grip(&lax), &Method::POST));
    }

    #[test]
    fn without_routes_no_path_is_rejected() {
        for path in ["/%", "/a%2f..", "/%ff"] {
            assert_eq!(alike(&[]).find(path, &Method::POST), Ok(None));
        }
    }

    #[test]
    fn invalid_patterns_are_rejected() {
        for (paths, says) in [
            (&["payments"][..], "begin with a slash"),
            (&["/%70ayments"], "decoded"),
            (&["/payments/"], "end with a slash"),
            (&["/a//b"], "empty segment"),
            (&["/a/../b"], "empty segment"),
            (&["/a", "/A"], "another route, /a"),
            (&["/a/{x}", "/a/{y}"], "another route, /a/{x}"),
            (&["/{*rest}/b"], "last segment"),
            (&["/{"], "a whole segment"),
        ] {
            let routes: Vec<RouteConfig> =
                paths.iter().map(|path| RouteConfig::new(*path, lax())).collect();
            let error = RouteTable::new(&lax(), &routes).unwrap_err().to_string();
            assert!(error.contains(says), "{paths:?}: {error}");
        }
    }

    #[test]
    fn a_rest_pattern_matches_its_prefix_unless_that_has_a_route() {
        let table = alike(&["/a/{*rest}", "/a", "/b/{*rest}", "/{*rest}"]);
        let find = |path: &str| table.find(path, &Method::POST);
        let found = ["/a", "/a/x", "/b", "/b/", "/b/x", "/", "/c"].map(find);
        assert_eq!(found, [1, 0, 2, 2, 2, 3, 3].map(|index| Ok(Some(index))));
    }

    proptest! {
        /// For every reading of a path, the policy that was found is at least as strict as the
        /// reading's own, unless the request was rejected.
        #[test]
        fn no_reading_of_a_path_has_a_stricter_policy_than_applied(
            path in "/[ab]{0,2}[ab./%;\\\\25ef]{0,16}",
            strict in proptest::collection::vec(any::<(bool, bool)>(), 4),
        ) {
            let policy = |(key, block): (bool, bool)| PolicyConfig {
                key: if key { KeyRule::Required } else { KeyRule::Optional },
                on_unknown: if block { OnUnknown::Block } else { OnUnknown::Reexecute },
                ..lax()
            };
            let paths = ["/a/{*rest}", "/b", "/b/{x}/a"];
            let routes: Vec<_> =
                paths.into_iter().zip(strict.iter().copied().map(policy)).collect();
            let table = table(&policy(strict[3]), &routes);
            if let Ok(found) = table.find(&path, &Method::POST) {
                let found = table.grip(found);
                for reading in path::readings(&path, |_| false).into_iter().flatten() {
                    let read = table.tree.find(&reading);
                    prop_assert!(found.holds(table.grip(read), &Method::POST), "{}", reading);
                }
            }
        }
    }
}

//! Replacement of the configuration at run time.
//!
//! A configuration is applied completely or not at all. It is checked as a whole, for example
//! whether bodies fit into the memory. A mixture of two configurations would not satisfy these
//! checks, and no file would describe it. So one field that cannot change at run time makes the
//! whole reload fail.
//!
//! A reload is safe for existing records: each contains its terms (lease, retention, handling of
//! unknown outcomes) and its fingerprint scheme, and of two policies the stricter one counts. A
//! change of scope is not safe: under another scope a key names another operation, so the retry of
//! an executed request executes again. It is allowed, because there is no other way to change the
//! scope, and logged as a warning.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax_core::{InFlight, OnUnknown};
use hapax_http::server::{ScopePart, StoreOutage};
use hapax_operators::{RegisteredUser, UserDifference};
use http::Method;
use http::header::COOKIE;
use tokio::runtime::Handle;

use crate::budget::MaxBodies;
use crate::config::{
    Config, ConfigError, JwtKeys, NamesSettings, PolicyConfig, RouteMode, ScopeConfig, changed,
};
use crate::reconcile;
use crate::routes::RouteTable;
use crate::snapshot::{CurrentConfig, SharedResources};
use crate::tokens::JwtKeysError;

/// Settings that may change, but not to more than was the largest at the start.
const BODY_REQUEST: &str = "max_request_body";
const BODY_RESPONSE: &str = "max_response_body";

/// Errors of a reload. The configuration in force stays.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReloadError {
    /// The configuration is invalid.
    Config(ConfigError),
    /// The configuration needs a restart: these settings have changed.
    Restart(Vec<&'static str>),
    /// The configuration needs a restart: a URL begins with https, and none did before.
    Https,
    /// Another process of the namespace names or compares operations otherwise.
    Shared(Box<UserDifference>),
    /// The keys of bearer tokens cannot be used.
    JwtKeys(JwtKeysError),
}

impl NamesSettings for ReloadError {
    fn describe(&self, name: &dyn Fn(&str) -> String) -> String {
        let changed = |field: &&str| match *field {
            BODY_REQUEST | BODY_RESPONSE => {
                format!("{} (above the largest at the start)", name(field))
            }
            field => name(field),
        };
        match self {
            Self::Config(error) => error.describe(name),
            Self::Restart(fields) => {
                let fields: Vec<_> = fields.iter().map(changed).collect();
                format!("{} cannot change without a restart", fields.join(", "))
            }
            Self::Https => {
                "https for a URL, where there was none before, needs a restart".to_owned()
            }
            Self::Shared(difference) => difference.to_string(),
            Self::JwtKeys(error) => format!("{}: {error}", name("jwt_keys")),
        }
    }

    fn route(&self) -> Option<usize> {
        if let Self::Config(error) = self { error.route() } else { None }
    }
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(&|field| format!("`{field}`")))
    }
}

impl Error for ReloadError {}

impl From<ConfigError> for ReloadError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

/// State that a reload compares a configuration with.
#[derive(Debug)]
pub(super) struct ReloadState {
    in_force: Mutex<Config>,
    /// Sizes that the memory was divided for.
    largest: MaxBodies,
    /// Runtime for probes of reconcile URLs: a reload may be called outside of it.
    runtime: Handle,
}

impl ReloadState {
    /// Creates the state. It must be called on a tokio runtime.
    pub(super) fn new(config: Config, largest: MaxBodies) -> Self {
        Self { in_force: Mutex::new(config), largest, runtime: Handle::current() }
    }

    /// Begins to fetch the keys of bearer tokens, if they have a URL.
    pub(super) fn fetch_keys(&self, current: &CurrentConfig, resources: &SharedResources) {
        current.load().fetch_keys(&self.runtime, &resources.metrics);
    }

    /// Probes each reconcile URL in the background, and warns of those whose responses are not as
    /// required. Each probe takes a few seconds at most.
    pub(super) fn probe(&self, current: &CurrentConfig) {
        for reconciler in current.load().reconcile_clients() {
            self.runtime.spawn(reconcile::warn_of(reconciler.clone()));
        }
    }

    pub(super) fn drain_timeout(&self) -> Duration {
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner).drain_timeout
    }

    pub(super) fn drain_delay(&self) -> Duration {
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner).drain_delay
    }

    pub(super) fn reload(
        &self,
        config: Config,
        resources: &SharedResources,
        current: &CurrentConfig,
        user: &RegisteredUser,
    ) -> Result<(), ReloadError> {
        let resolved = config.resolve()?;
        // Locked until the end, so that reloads are applied one after the other.
        let mut in_force = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fixed = changed(&in_force, &config);
        let MaxBodies { request, response } = resolved.largest;
        if request > self.largest.request {
            fixed.push(BODY_REQUEST);
        }
        if response > self.largest.response {
            fixed.push(BODY_RESPONSE);
        }
        if !fixed.is_empty() {
            return Err(ReloadError::Restart(fixed));
        }
        if resolved.is_secure() && resources.connect.tls.is_none() {
            return Err(ReloadError::Https);
        }
        let routes = super::user::routes(&config, &resolved);
        let open_files = resolved.open_files();
        let before = current.load();
        let tokens = resources.tokens(&config, &resolved, Some(&before));
        let tokens = tokens.map_err(ReloadError::JwtKeys)?;
        let snapshot = resources.snapshot(&config, resolved, tokens, Some(&before))?;
        // The last check: it changes the entry.
        user.replace(config.upstream.to_string(), routes).map_err(ReloadError::Shared)?;
        current.store(Arc::new(snapshot));
        self.fetch_keys(current, resources);
        self.probe(current);
        compare(&in_force, &config);
        super::warn::warn_without_secret(&config, resources.layer.engine());
        super::warn::warn_of_secrets(open_files);
        warn(&config);
        *in_force = config;
        Ok(())
    }
}

/// Warns of changes under which the retry of what was executed may execute again, or nothing decides about an operation
/// without a retry any more.
fn compare(before: &Config, after: &Config) {
    // While any route reconciles, each pass states the reason for the records about which no request is sent.
    if before.reconciles() && !after.reconciles() && !after.reconcile_every.is_zero() {
        tracing::warn!(
            "no route has on_unknown = reconcile any more: operations whose outcome is unknown, which the reconcile URL was \
             requested about without a retry, now wait for a retry or an operator; `hapax keys list --state unknown` \
             lists them"
        );
    }
    let ChangedRoutes { open, anew } = ChangedRoutes::of(before, after);
    if before.jwt.issuer.is_some() && before.jwt.issuer != after.jwt.issuer {
        tracing::warn!(
            "jwt_issuer has changed: where a claim names the caller, keys used before are new keys now"
        );
    }
    for (paths, what) in [
        (open, "requests are no longer protected"),
        (anew, "the scope has changed: keys used before are new keys now"),
    ] {
        if let Some(first) = paths.first() {
            tracing::warn!(path = first, and_others = paths.len() - 1, "{what}");
        }
    }
}

/// Paths whose protection or scope changes.
#[derive(PartialEq, Eq, Default, Debug)]
struct ChangedRoutes<'a> {
    /// Paths on which a method is no longer protected.
    open: BTreeSet<&'a str>,
    /// Paths on which the scope is computed from other headers.
    anew: BTreeSet<&'a str>,
}

impl<'a> ChangedRoutes<'a> {
    /// Compares each path that either configuration has a route for, and all other paths.
    fn of(before: &'a Config, after: &'a Config) -> Self {
        let table = |config: &Config| RouteTable::new(&config.policy, &config.routes);
        // Both configurations are or were in force, so their routes are valid.
        let (Ok(was), Ok(is)) = (table(before), table(after)) else { return Self::default() };
        let named =
            before.routes.iter().chain(&after.routes).map(|route| Some(route.path.as_str()));
        let (mut open, mut anew) = (BTreeSet::new(), BTreeSet::new());
        for path in std::iter::once(None).chain(named) {
            let (was, is) = (held(before, &was, path), held(after, &is, path));
            let protects = |held: &(RouteMode, &PolicyConfig), method: &Method| {
                held.0 == RouteMode::Protect && held.1.methods.contains(method)
            };
            if was.1.methods.iter().any(|it| protects(&was, it) && !protects(&is, it)) {
                open.insert(path.unwrap_or("(any other)"));
            } else if was.0 == RouteMode::Protect && callers(before, was.1) != callers(after, is.1)
            {
                anew.insert(path.unwrap_or("(any other)"));
            }
        }
        Self { open, anew }
    }
}

/// Returns the handling and the policy of the path; `None` is a path without a route.
fn held<'a>(
    config: &'a Config,
    table: &RouteTable,
    path: Option<&str>,
) -> (RouteMode, &'a PolicyConfig) {
    let route = path.and_then(|path| config.routes.get(table.find_pattern(path)?));
    route.map_or((RouteMode::Protect, &config.policy), |route| (route.handling, &route.policy))
}

/// Returns the scope headers, configured or default.
fn callers(config: &Config, policy: &PolicyConfig) -> Option<ScopeConfig> {
    policy.callers(config).ok().map(|(callers, _)| callers)
}

/// Logs the policy of every protected route, and warns of settings with risks.
pub(super) fn warn(config: &Config) {
    let routes = config.routes.iter().filter(|route| route.handling == RouteMode::Protect);
    let routes = routes.map(|route| (route.path.as_str(), &route.policy));
    for (route, policy) in routes.chain([("(any other)", &config.policy)]) {
        let in_flight = match policy.in_flight {
            InFlight::Reject => "reject".to_owned(),
            InFlight::Wait(limit) => format!("wait for {limit:?}"),
        };
        let on_unknown = policy.on_unknown.as_str();
        tracing::info!(route, on_unknown, in_flight, lease = ?policy.lease, "policy");
        if policy.on_unknown == OnUnknown::Reexecute {
            tracing::warn!(
                route,
                "on_unknown = reexecute: after a crash, a time-out or a 5xx a retry may execute twice"
            );
        }
        let parts = callers(config, policy);
        let parts = parts.as_ref().map_or(&[][..], ScopeConfig::parts);
        if policy.on_unknown == OnUnknown::Reconcile
            && policy.reconcile_authorization.is_none()
            && parts.iter().any(ScopePart::is_of_credentials)
        {
            tracing::warn!(
                route,
                "on_unknown = reconcile: records do not have the credentials of callers, so after a crash an operation \
                 waits for a retry of its client or for an operator; set reconcile_authorization to a file, or to \
                 \"none\" if the reconcile URL needs no credentials"
            );
        }
        if policy.scope.as_ref().is_some_and(|scope| scope.parts().contains(&COOKIE.into())) {
            tracing::warn!(
                route,
                "scope = cookie is all cookies together: one that changes between two attempts makes the retry that of \
                 another caller, and it executes again; name the cookie of the session, as cookie:NAME"
            );
        }
    }
    if config.policies().any(PolicyConfig::has_claim) && config.jwt.keys.is_none() {
        tracing::warn!(
            "auth_url has to verify the bearer token of each request that it allows, since claims of the token name the \
             caller: a server that decides by anything else allows a caller to name another one. With jwt_keys, \
             jwt_issuer and jwt_audience the gateway verifies it"
        );
    }
    if config.jwt.keys.as_ref().is_some_and(JwtKeys::is_unprotected) {
        tracing::warn!(
            "jwt_keys is fetched without TLS: who replaces the keys on the network can name any caller; use https"
        );
    }
    if let Some(setting) = config.idle_passes() {
        tracing::warn!(
            "{setting} has no effect: no protected route has on_unknown = reconcile, so that nothing is reconciled without \
             a retry"
        );
    }
    let open = |policy: &PolicyConfig| policy.store_outage == StoreOutage::Open;
    if config.policies().any(open) {
        tracing::warn!("while the store is unavailable, requests are executed unprotected");
    }
    for route in &config.routes {
        let path = &route.path;
        match route.handling {
            RouteMode::Protect => {}
            RouteMode::Pass => tracing::warn!(path, "requests of this route are not protected"),
            RouteMode::Observe => {
                tracing::warn!(path, "requests of this route are observed, not protected");
                if route.policy.on_unknown == OnUnknown::Reconcile {
                    tracing::warn!(
                        path,
                        "reconcile_url and reconcile_authorization have no effect on this route until it is protected: \
                         an observed route sends no reconcile request"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;
    use crate::config::RouteConfig;

    fn config(policy: PolicyConfig, routes: &[(&str, PolicyConfig)]) -> Config {
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.routes =
            routes.iter().map(|(path, policy)| RouteConfig::new(*path, policy.clone())).collect();
        Config { policy, ..config }
    }

    fn of(name: &'static str) -> PolicyConfig {
        let names = vec![HeaderName::from_static(name)];
        PolicyConfig { scope: Some(ScopeConfig::headers(names)), ..PolicyConfig::default() }
    }

    #[test]
    fn a_changed_scope_is_reported_for_every_cause() {
        let (all, user) = (of("authorization"), of("x-user"));
        let plain = config(all.clone(), &[]);
        let own = config(all.clone(), &[("/p", user.clone())]);
        let wide = config(all.clone(), &[("/p", all.clone()), ("/{*rest}", user.clone())]);
        let widest = config(all.clone(), &[("/{*rest}", user.clone())]);
        for (before, after, anew) in [
            (&plain, &own, &["/p"][..]),
            (&own, &plain, &["/p"]),
            (&wide, &widest, &["/p"]),
            (&own, &widest, &["/{*rest}"]),
            (&plain, &config(user, &[]), &["(any other)"]),
            // The default, now configured explicitly.
            (&config(PolicyConfig::default(), &[]), &plain, &[]),
            (&own, &own, &[]),
        ] {
            let changed = ChangedRoutes::of(before, after);
            assert!(changed.open.is_empty());
            assert_eq!(changed.anew.into_iter().collect::<Vec<_>>(), anew);
        }
    }

    #[test]
    fn a_route_that_is_no_longer_protected_is_reported() {
        let policy = PolicyConfig::default();
        let patch = PolicyConfig { methods: vec![Method::PATCH], ..policy.clone() };
        let all = config(policy.clone(), &[("/p", policy.clone())]);
        let mut passes = all.clone();
        passes.routes[0].handling = RouteMode::Pass;
        for (before, after, open) in [
            (&all, &config(policy.clone(), &[("/p", patch.clone())]), &["/p"][..]),
            (&all, &passes, &["/p"]),
            (&passes, &all, &[]),
            (&all, &config(patch.clone(), &[("/p", policy.clone())]), &["(any other)"]),
            (&config(patch, &[]), &all, &[]),
        ] {
            let changed = ChangedRoutes::of(before, after);
            assert!(changed.anew.is_empty());
            assert_eq!(changed.open.into_iter().collect::<Vec<_>>(), open);
        }
    }
}

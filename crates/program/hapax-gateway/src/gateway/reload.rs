//! Another configuration for new requests.
//!
//! All of it or nothing. A configuration is checked as a whole, for example whether bodies fit into
//! the memory. With some of it from before that
//! would be untrue, and what runs would be written down nowhere. So what cannot change at run time
//! has the rest refused.
//!
//! What changes is safe for records that are there: their terms (lease, retention, what is unknown)
//! and the scheme of their fingerprint are written in each of them, and of two policies the stricter
//! counts. A change of scope is not: under another scope a key is another key, and the retry of what
//! was executed executes. It is allowed, because there is no other way to change it, and warned of.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax_core::{InFlight, OnUnknown};
use hapax_http::server::StoreOutage;
use http::Method;
use tokio::runtime::Handle;

use crate::budget::MaxBodies;
use crate::config::{
    Config, ConfigError, ListenTls, PolicyConfig, RouteMode, ScopeConfig, Transport, UpstreamTls,
};
use crate::reconcile;
use crate::routes::RouteTable;
use crate::snapshot::{CurrentConfig, SharedResources};

/// Why a configuration does not hold now. What held before holds on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// It cannot be, here or anywhere.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It can be, after a restart.
    #[error("{} cannot change without a restart", .0.join(", "))]
    Restart(Vec<&'static str>),
}

/// What a reload is compared with.
#[derive(Debug)]
pub(super) struct ReloadState {
    in_force: Mutex<Config>,
    /// What the memory was divided for.
    largest: MaxBodies,
    /// Where reconcile URLs are probed: a reload may come from outside of the runtime.
    runtime: Handle,
}

impl ReloadState {
    /// It must be called on a tokio runtime.
    pub(super) fn new(config: Config, largest: MaxBodies) -> Self {
        Self { in_force: Mutex::new(config), largest, runtime: Handle::current() }
    }

    /// Probes each reconcile URL, and warns of those that do not answer as they must. Each takes a
    /// few seconds at most, and holds up nothing.
    pub(super) fn probe(&self, current: &CurrentConfig) {
        for reconciler in current.now().reconcile_clients() {
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
    ) -> Result<(), ReloadError> {
        let resolved = config.resolve()?;
        // Held to the end: of two reloads one is the later.
        let mut in_force = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fixed = changed(&in_force, &config);
        let MaxBodies { request, response } = resolved.largest;
        if request > self.largest.request {
            fixed.push("--max-request-body (above the largest at the start)");
        }
        if response > self.largest.response {
            fixed.push("--max-response-body (above the largest at the start)");
        }
        if resolved.is_secure() && resources.connect.tls.is_none() {
            fixed.push("https for a URL, where there was none before,");
        }
        if !fixed.is_empty() {
            return Err(ReloadError::Restart(fixed));
        }
        let snapshot = resources.snapshot(&config, resolved, Some(&current.now()))?;
        current.replace(snapshot);
        self.probe(current);
        compare(&in_force, &config);
        warn(&config);
        *in_force = config;
        Ok(())
    }
}

/// What differs and cannot change at run time. Each field is here, or it may change.
fn changed(before: &Config, after: &Config) -> Vec<&'static str> {
    let Config {
        listen,
        upstream: _,
        admin,
        admin_token_file,
        audit_file,
        access_log,
        store,
        cache,
        secret_file,
        auth: _,
        store_timeout,
        // It counts at the next start.
        store_wait: _,
        max_waiters,
        drain_timeout: _,
        drain_delay: _,
        limits,
        transport,
        policy: _,
        routes: _,
    } = before;
    let fixed = [
        ("--listen", *listen != after.listen),
        ("--admin", *admin != after.admin),
        ("--admin-token-file", *admin_token_file != after.admin_token_file),
        ("--audit-file", *audit_file != after.audit_file),
        ("--access-log", *access_log != after.access_log),
        ("--store", *store != after.store),
        ("--cache", *cache != after.cache),
        ("--secret-file", *secret_file != after.secret_file),
        ("--store-timeout", *store_timeout != after.store_timeout),
        ("--max-waiters", *max_waiters != after.max_waiters),
        ("--max-memory", limits.memory != after.limits.memory),
        ("--max-connections", limits.connections != after.limits.connections),
        (
            "--max-connections-per-peer",
            limits.connections_per_peer != after.limits.connections_per_peer,
        ),
        ("--head-timeout", limits.head_timeout != after.limits.head_timeout),
        ("--body-timeout", limits.stall != after.limits.stall),
    ];
    fixed
        .into_iter()
        .chain(of_transport(transport, &after.transport))
        .filter(|(_, differs)| *differs)
        .map(|(flag, _)| flag)
        .collect()
}

/// What of connections and TLS differs; each field is here.
fn of_transport(before: &Transport, after: &Transport) -> [(&'static str, bool); 12] {
    let Transport {
        tls,
        streams,
        trusted,
        upstream_protocol,
        upstream_tls: UpstreamTls { ca, client },
        connect_timeout,
        upstream_idle,
        fresh_connections,
    } = before;
    type OfTls = fn(&ListenTls) -> Option<&PathBuf>;
    let of_tls = |file: OfTls| tls.as_ref().and_then(file) != after.tls.as_ref().and_then(file);
    type OfClient = fn(&(PathBuf, PathBuf)) -> &PathBuf;
    let of_client =
        |file: OfClient| client.as_ref().map(file) != after.upstream_tls.client.as_ref().map(file);
    [
        ("--tls-cert", of_tls(|tls| Some(&tls.certificate))),
        ("--tls-key", of_tls(|tls| Some(&tls.key))),
        ("--tls-client-ca", of_tls(|tls| tls.client_ca.as_ref())),
        ("--max-streams", *streams != after.streams),
        ("--trust-forwarded", *trusted != after.trusted),
        ("--upstream-protocol", *upstream_protocol != after.upstream_protocol),
        ("--upstream-ca", *ca != after.upstream_tls.ca),
        ("--upstream-cert", of_client(|(certificate, _)| certificate)),
        ("--upstream-key", of_client(|(_, key)| key)),
        ("--connect-timeout", *connect_timeout != after.connect_timeout),
        ("--upstream-idle", *upstream_idle != after.upstream_idle),
        ("--fresh-connections", *fresh_connections != after.fresh_connections),
    ]
}

/// Warns of changes under which the retry of what was executed may execute again.
fn compare(before: &Config, after: &Config) {
    let ChangedRoutes { open, anew } = ChangedRoutes::of(before, after);
    for (paths, what) in [
        (open, "requests are no longer protected"),
        (anew, "the scope has changed: keys used before are new keys now"),
    ] {
        if let Some(first) = paths.first() {
            tracing::warn!(path = first, and_others = paths.len() - 1, "{what}");
        }
    }
}

/// Paths for which something else holds than before.
#[derive(PartialEq, Eq, Default, Debug)]
struct ChangedRoutes<'a> {
    /// Where some method was protected, and is not any more.
    open: BTreeSet<&'a str>,
    /// Where callers were told apart by something else.
    anew: BTreeSet<&'a str>,
}

impl<'a> ChangedRoutes<'a> {
    /// Of each path that either configuration names, and of all others.
    fn of(before: &'a Config, after: &'a Config) -> Self {
        let table = |config: &Config| RouteTable::new(&config.policy, &config.routes);
        // Both hold, or held: their routes are in order.
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

/// What holds for paths like this; `None` for those without a route.
fn held<'a>(
    config: &'a Config,
    table: &RouteTable,
    path: Option<&str>,
) -> (RouteMode, &'a PolicyConfig) {
    let route = path.and_then(|path| config.routes.get(table.find_pattern(path)?));
    route.map_or((RouteMode::Protect, &config.policy), |route| (route.handling, &route.policy))
}

/// Who counts as the caller, whether that was said or is the default.
fn callers(config: &Config, policy: &PolicyConfig) -> Option<ScopeConfig> {
    policy.callers(config).ok().map(|(callers, _)| callers)
}

/// Logs the policy of every protected route, and warns of what holds and may surprise.
pub(super) fn warn(config: &Config) {
    let routes = config.routes.iter().filter(|route| route.handling == RouteMode::Protect);
    let routes = routes.map(|route| (route.path.as_str(), &route.policy));
    for (route, policy) in routes.chain([("(any other)", &config.policy)]) {
        let in_flight = match policy.in_flight {
            InFlight::Reject => "reject".to_owned(),
            InFlight::Wait(patience) => format!("wait for {patience:?}"),
        };
        let on_unknown = policy.on_unknown.as_str();
        tracing::info!(route, on_unknown, in_flight, lease = ?policy.lease, "policy");
        if policy.on_unknown == OnUnknown::Reexecute {
            tracing::warn!(
                route,
                "on_unknown = reexecute: after a crash, a time-out or a 5xx a retry may execute twice"
            );
        }
    }
    let open = |policy: &PolicyConfig| policy.store_outage == StoreOutage::Open;
    if config.policies().any(open) {
        tracing::warn!("while the store is away, requests are executed unprotected");
    }
    for route in &config.routes {
        let path = &route.path;
        match route.handling {
            RouteMode::Protect => {}
            RouteMode::Pass => tracing::warn!(path, "requests of this route are not protected"),
            RouteMode::Observe => {
                tracing::warn!(path, "requests of this route are observed, not protected");
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
        PolicyConfig { scope: Some(ScopeConfig::Headers(names)), ..PolicyConfig::default() }
    }

    #[test]
    fn a_new_scope_is_noticed_wherever_it_comes_from() {
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
            // What is said now and was the default.
            (&config(PolicyConfig::default(), &[]), &plain, &[]),
            (&own, &own, &[]),
        ] {
            let changed = ChangedRoutes::of(before, after);
            assert!(changed.open.is_empty());
            assert_eq!(changed.anew.into_iter().collect::<Vec<_>>(), anew);
        }
    }

    #[test]
    fn what_is_no_longer_protected_is_noticed() {
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

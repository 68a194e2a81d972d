//! The entry of a gateway in the register of its store.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use hapax_core::{Idempotency, StoreError};
use hapax_http::server::ScopePart;
use hapax_operators::{RegisterError, RegisteredUser, RouteNaming, StoreRegister, StoreUser};

use crate::config::{Config, PolicyConfig, ResolvedConfig, ResolvedPolicy, RouteMode, ScopeConfig};

/// Enters a gateway.
pub(super) async fn enter(
    config: &Config,
    resolved: &ResolvedConfig,
    engine: &Idempotency,
    listen: SocketAddr,
) -> Result<RegisteredUser, RegisterError> {
    // In containers address and process are often the same.
    let host = crate::reconcile::hostname().unwrap_or_default();
    let place = [host, listen.to_string()].join(" ");
    let name = format!("the gateway on {}, process {}", place.trim(), std::process::id());
    let mut user = StoreUser::new(engine.namespace(), name).map_err(StoreError::unavailable)?;
    user.upstream = Some(config.upstream.to_string());
    user.routes = routes(config, resolved);
    let register = StoreRegister::new(Arc::clone(engine.store()), engine.store_timeout());
    // Without the store no claim succeeds either. Replays do, and requests without a key.
    let entered = Box::pin(register.enter_when_available(user, engine)).await?;
    if entered.is_first() && !engine.namespace().is_default() {
        tracing::warn!(
            namespace = engine.namespace().as_str(),
            "no process used this namespace before: every key is new. If the store has records of this service that were \
             written without a namespace, stop this process and set an empty name instead, or their retries execute again"
        );
    }
    Ok(entered)
}

/// Returns how a gateway with this configuration names and compares the operations of each route.
pub(super) fn routes(config: &Config, resolved: &ResolvedConfig) -> BTreeMap<String, RouteNaming> {
    let protected = config.routes.iter().zip(&resolved.routes);
    let protected = protected.filter(|(route, _)| route.handling == RouteMode::Protect);
    let routes = protected.map(|(route, resolved)| {
        (route.path.clone(), names(route.name(), &route.policy, resolved))
    });
    routes.chain([("*".to_owned(), names("", &config.policy, &resolved.policy))]).collect()
}

fn names(route: &str, policy: &PolicyConfig, resolved: &ResolvedPolicy) -> RouteNaming {
    let scope = match &resolved.callers {
        ScopeConfig::Everyone => "none".to_owned(),
        ScopeConfig::Parts(parts) => {
            parts.iter().map(ScopePart::as_str).collect::<Vec<_>>().join(",")
        }
    };
    RouteNaming {
        name: route.to_owned(),
        scope,
        key_header: policy.key_header.to_string(),
        fingerprint: policy.fingerprint.name().as_str().to_owned(),
        later: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::Namespace;

    use super::*;
    use crate::config::RouteConfig;
    use crate::routes::RouteTable;

    /// Two patterns differ in the register exactly if all requests of one are requests of the other.
    #[test]
    fn the_register_compares_routes_as_the_gateway_matches_them() {
        let spellings = [
            "/",
            "/Pay",
            "/pay",
            "/p/{x}",
            "/P/{id}",
            "/p/{*a}",
            "/p/{*rest}",
            "/p/x",
            "/{a}/x",
            "/{a}",
            "/{*a}",
            "/p.json",
            "/P.JSON",
            "/p/É",
            "/p/é",
        ];
        let policy = PolicyConfig::default();
        let user = |path: &str, key_header: &str| {
            let mut user = StoreUser::new(&Namespace::default(), "gateway".to_owned()).unwrap();
            let names = RouteNaming {
                name: String::new(),
                scope: "none".to_owned(),
                key_header: key_header.to_owned(),
                fingerprint: "http/1".to_owned(),
                later: BTreeMap::new(),
            };
            // No route for other paths: each difference is of the two.
            user.routes.insert(path.to_owned(), names);
            user
        };
        let matches = |pattern: &str, of: &str| {
            let routes = [RouteConfig::new(pattern, policy.clone())];
            let table = RouteTable::new(&policy, &routes).unwrap();
            // A request of the other pattern, and of no more specific one.
            let segments = of.split('/').map(|segment| match segment {
                rest if rest.starts_with("{*") => "z/z".to_owned(),
                any if any.starts_with('{') => "z".to_owned(),
                text => text.replace('É', "%C3%89").replace('é', "%C3%A9"),
            });
            let path = segments.collect::<Vec<_>>().join("/");
            table.route(&path, &http::Method::POST).unwrap().is_some()
        };
        for ours in spellings {
            for theirs in spellings {
                let is_same = matches(ours, theirs) || matches(theirs, ours);
                let differ = user(ours, "x-key").difference(&user(theirs, "y-key")).is_some();
                assert_eq!(differ, is_same, "{ours} {theirs}");
            }
        }
    }
}

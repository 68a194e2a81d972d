//! The entry of a gateway in the register of its store.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use hapax_core::{Idempotency, StoreError};
use hapax_operators::{RegisterError, RegisteredUser, RouteNames, StoreRegister, StoreUser};
use http::HeaderName;

use crate::config::{Config, PolicyConfig, ResolvedConfig, ResolvedPolicy, RouteMode, ScopeConfig};

/// Enters a gateway; `None` if only one process can open the store.
pub(super) async fn join(
    config: &Config,
    resolved: &ResolvedConfig,
    engine: &Idempotency,
    listen: SocketAddr,
) -> Result<Option<RegisteredUser>, RegisterError> {
    if !engine.store().capabilities().shared {
        return Ok(None);
    }
    let name = format!("the gateway on {listen}, process {},", std::process::id());
    let mut user = StoreUser::new(engine.namespace(), name).map_err(StoreError::unavailable)?;
    user.upstream = Some(config.upstream.to_string());
    user.routes = routes(config, resolved);
    let register = StoreRegister::new(Arc::clone(engine.store()), engine.store_timeout());
    register.join(user).await.map(Some)
}

/// Returns how a gateway with this configuration names and compares the operations of each route.
pub(super) fn routes(config: &Config, resolved: &ResolvedConfig) -> BTreeMap<String, RouteNames> {
    let protected = config.routes.iter().zip(&resolved.routes);
    let protected = protected.filter(|(route, _)| route.handling == RouteMode::Protect);
    let routes =
        protected.map(|(route, resolved)| (route.path.clone(), names(&route.policy, resolved)));
    routes.chain([("*".to_owned(), names(&config.policy, &resolved.policy))]).collect()
}

fn names(policy: &PolicyConfig, resolved: &ResolvedPolicy) -> RouteNames {
    let scope = match &resolved.callers {
        ScopeConfig::Everyone => "none".to_owned(),
        ScopeConfig::Headers(names) => {
            names.iter().map(HeaderName::as_str).collect::<Vec<_>>().join(",")
        }
    };
    RouteNames {
        scope,
        key_header: policy.key_header.to_string(),
        fingerprint: policy.fingerprint.name().as_str().to_owned(),
    }
}

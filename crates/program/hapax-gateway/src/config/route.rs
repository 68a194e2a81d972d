//! Routes: paths with their own policies.

use super::{Config, ConfigError, PolicyConfig, ResolvedPolicy};

/// A route: paths with their own handling and policy.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RouteConfig {
    /// Pattern of the paths: `/payments`, `/orders/{id}`, `/v2/{*rest}`, which also matches `/v2`.
    /// Of several patterns that match a path, the most specific one applies.
    pub path: String,
    /// Name of the route in metrics. Default: its path.
    pub name: Option<String>,
    /// Handling of its requests. Default: they are protected.
    pub handling: RouteMode,
    /// Complete policy of the route, not only the differences from the default policy.
    pub policy: PolicyConfig,
}

/// Handling of the requests of a route.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RouteMode {
    /// Requests are protected.
    #[default]
    Protect,
    /// Requests pass through, with any key.
    Pass,
    /// Requests pass through, and the results that protection would have had are counted. Nothing
    /// is rejected, replayed, reconciled, authorised or recorded in the store. See [the
    /// manual](hapax_core::manual::gateway#observing-first).
    Observe,
}

impl RouteConfig {
    /// Largest number of routes.
    pub const MOST: usize = 10_000;

    /// Creates a protected route with `policy`.
    #[must_use]
    pub fn new(path: impl Into<String>, policy: PolicyConfig) -> Self {
        Self { path: path.into(), name: None, handling: RouteMode::default(), policy }
    }

    /// Returns the name of the route in metrics.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.path)
    }

    pub(super) fn resolve(&self, config: &Config) -> Result<ResolvedPolicy, ConfigError> {
        if self.name.as_deref().is_some_and(|name| !is_name(name)) {
            return Err(ConfigError::RouteName);
        }
        let caller_is_asked_for = config.auth.as_ref().is_some_and(|auth| !auth.scope.is_empty());
        if self.handling == RouteMode::Observe && caller_is_asked_for {
            return Err(ConfigError::ObserveAuth);
        }
        let is_verified = config.jwt.is_complete() || !self.policy.has_claim();
        if self.handling == RouteMode::Observe && config.auth.is_some() && !is_verified {
            return Err(ConfigError::ObserveClaim);
        }
        self.policy.resolve(config)
    }

    /// Adds this route, the `index`-th, to an error.
    pub(crate) fn error(&self, index: usize, error: ConfigError) -> ConfigError {
        ConfigError::Route { index, path: self.path.clone(), error: Box::new(error) }
    }
}

/// Returns whether `name` can be a label's value in quotes.
fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\'))
}

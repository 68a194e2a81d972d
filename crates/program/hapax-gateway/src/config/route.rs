//! Paths for which something else holds.

use super::{Config, ConfigError, PolicyConfig, ResolvedPolicy};

/// Paths for which something else holds.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RouteConfig {
    /// Which: `/payments`, `/orders/{id}`, `/v2/{*rest}`; the last of these with `/v2` itself. The
    /// most specific of those that match counts.
    pub path: String,
    /// What metrics call it. Default: its path.
    pub name: Option<String>,
    /// What is done with its requests. Default: they are protected.
    pub handling: RouteMode,
    /// What holds there; all of it, not only what differs.
    pub policy: PolicyConfig,
}

/// What is done with the requests of a route.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RouteMode {
    /// They are protected.
    #[default]
    Protect,
    /// They pass through, whatever keys they have.
    Pass,
    /// They pass through, and it is counted what would have become of them: nothing is refused,
    /// replayed, asked or recorded in the store. See [the manual](hapax_core::manual::gateway#observing-first).
    Observe,
}

impl RouteConfig {
    /// How many routes there may be.
    pub const MOST: usize = 10_000;

    /// A protected route on which `policy` holds.
    #[must_use]
    pub fn new(path: impl Into<String>, policy: PolicyConfig) -> Self {
        Self { path: path.into(), name: None, handling: RouteMode::default(), policy }
    }

    /// What metrics call it.
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
        self.policy.resolve(config)
    }

    /// Says that it is about this route, the `index`-th.
    pub(crate) fn error(&self, index: usize, error: ConfigError) -> ConfigError {
        ConfigError::Route { index, path: self.path.clone(), error: Box::new(error) }
    }
}

/// It is a label's value, in quotes.
fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\'))
}

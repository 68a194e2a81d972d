//! Settings of reconciliation that have no effect, alone or together.

use std::time::Duration;

use hapax_core::OnUnknown;

use super::{Config, ConfigError, RouteMode};
use crate::store::StoreUrl;

impl Config {
    /// Default of [`reconcile_every`](Self::reconcile_every).
    pub(super) const RECONCILE_EVERY: Duration = Duration::from_secs(60);

    /// Default of [`reconcile_limit`](Self::reconcile_limit).
    pub(super) const RECONCILE_LIMIT: usize = 256;

    /// Rejects settings of reconciliation without a retry that cannot have an effect.
    pub(super) fn check_reconciling(&self) -> Result<(), ConfigError> {
        let is_off = self.reconcile_every.is_zero();
        if !self.policies().any(|policy| policy.reconcile_authorization.is_some()) {
            return Ok(());
        }
        if is_off && self.admin.is_none() {
            return Err(ConfigError::ReconcileNever);
        }
        if self.has_no_secret() {
            let why = ": without a secret no record describes its operation, so that a retry or an operator decides";
            return Err(ConfigError::needs("reconcile_authorization", "secret_file", why));
        }
        Ok(())
    }

    /// Returns whether the store is one that has no secret unless a file has it. The driver of another store may have
    /// one.
    fn has_no_secret(&self) -> bool {
        let is_known = match &self.store {
            StoreUrl::File(_) => return false,
            StoreUrl::Memory => true,
            StoreUrl::Server(url) => {
                url.is_redis() || ["postgres", "postgresql"].contains(&url.scheme())
            }
        };
        is_known && self.secret_file.is_none()
    }

    /// Returns whether the reconcile URL of a protected route is requested.
    pub(crate) fn reconciles(&self) -> bool {
        let routes = self.routes.iter().filter(|route| route.handling == RouteMode::Protect);
        let mut policies = routes.map(|route| &route.policy).chain([&self.policy]);
        policies.any(|policy| policy.on_unknown == OnUnknown::Reconcile)
    }

    /// Returns a setting of the passes that was given although no protected route reconciles.
    pub(crate) fn idle_passes(&self) -> Option<&'static str> {
        if self.reconciles() {
            return None;
        }
        // `0s` states that there are none.
        if ![Self::RECONCILE_EVERY, Duration::ZERO].contains(&self.reconcile_every) {
            return Some("reconcile_every");
        }
        (self.reconcile_limit != Self::RECONCILE_LIMIT).then_some("reconcile_limit")
    }
}

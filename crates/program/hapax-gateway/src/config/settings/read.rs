//! Reading of a configuration from the settings that a user gives.

use std::collections::BTreeMap;
use std::fmt;

use super::super::{Config, ConfigError, PolicyConfig, RouteConfig, RouteMode};
use super::{GATEWAY_SETTINGS, POLICY_SETTINGS, ROUTE_SETTINGS, Setting};

/// Settings that a user gives, by name, with the words of each.
pub type SettingWords = BTreeMap<&'static str, Vec<String>>;

/// All settings that a user gives.
#[derive(Clone, Default)]
pub struct GivenSettings {
    /// Settings of which there is one.
    pub gateway: SettingWords,
    /// Settings of the policy.
    pub policy: SettingWords,
    /// Settings of each route: its own ones, and those of the policy that differ there.
    pub routes: Vec<SettingWords>,
}

impl fmt::Debug for GivenSettings {
    /// Shows the names of the settings only, because values may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [&self.gateway, &self.policy].into_iter().chain(&self.routes);
        f.debug_set().entries(all.flat_map(BTreeMap::keys)).finish()
    }
}

impl Config {
    /// Reads a configuration; what is not given has its default. [`Config::check`] says whether it can
    /// be started.
    ///
    /// # Errors
    /// [`ConfigError`] for a value that cannot be read, and for a setting without any effect.
    pub fn read(given: &GivenSettings) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let (policy, mut idle) = read_policy(&given.policy)?;
        config.policy = policy;
        read(GATEWAY_SETTINGS, &mut config, &given.gateway)?;
        if !given.gateway.contains_key("upstream") {
            return Err(ConfigError::NoUpstream);
        }
        for (index, own) in given.routes.iter().enumerate() {
            let mut route = RouteConfig::default();
            let read = read_route(&mut route, own, &given.policy, &mut idle);
            read.map_err(|error| route.error(index, error))?;
            config.routes.push(route);
        }
        idle.into_values().next().map_or(Ok(config), Err)
    }
}

/// Settings without effect, with the reasons.
type IdleSettings = BTreeMap<&'static str, ConfigError>;

/// Reads a route. Settings of `policy` that have an effect on the route are removed from `idle`.
fn read_route(
    route: &mut RouteConfig,
    own: &SettingWords,
    policy: &SettingWords,
    idle: &mut IdleSettings,
) -> Result<(), ConfigError> {
    read(ROUTE_SETTINGS, route, own)?;
    let mut all = policy.clone();
    let url = own.get("reconcile_url");
    if url.is_some() && url != policy.get("reconcile_url") {
        // The credentials are for the service of the inherited URL.
        all.remove("reconcile_authorization");
    }
    all.extend(own.clone());
    let (policy, mut unused) = read_policy(&all)?;
    route.policy = policy;
    for Setting { info, .. } in POLICY_SETTINGS {
        let passes = route.handling == RouteMode::Pass && !info.has_effect_unprotected();
        match (own.contains_key(info.name), unused.remove(info.name)) {
            (true, _) if passes => return Err(ConfigError::PassingRoute { field: info.name }),
            (true, Some(error)) => return Err(error),
            (false, None) if !passes => drop(idle.remove(info.name)),
            _ => {}
        }
    }
    Ok(())
}

fn read<T>(table: &[Setting<T>], config: &mut T, given: &SettingWords) -> Result<(), ConfigError> {
    let given = table.iter().filter_map(|setting| Some((setting, given.get(setting.info.name)?)));
    given.into_iter().try_for_each(|(setting, words)| (setting.set)(config, words))
}

/// Reads a policy. A setting that has no effect there may have one on a route.
fn read_policy(given: &SettingWords) -> Result<(PolicyConfig, IdleSettings), ConfigError> {
    let (mut policy, mut idle) = (PolicyConfig::default(), IdleSettings::new());
    for setting in POLICY_SETTINGS {
        let Some(words) = given.get(setting.info.name) else { continue };
        match (setting.set)(&mut policy, words) {
            Err(error @ ConfigError::NoEffect { .. }) => {
                drop(idle.insert(setting.info.name, error))
            }
            set => set?,
        }
    }
    Ok((policy, idle))
}

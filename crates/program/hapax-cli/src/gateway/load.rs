//! Flags over the environment over the file over the defaults.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use hapax_gateway::{
    CacheUrl, Config, ConfigError, PolicyConfig, ReloadError, StartError, StoreOpenError, StoreUrl,
    StoreUrlError, TlsError, Transport, UpstreamTls, UrlText,
};
use serde::Serialize;
use toml::Table;

use super::args::GatewayArgs;
use super::fields::{GatewayFields, PolicyFields};
use super::file::{File, RouteFields, Section};
use crate::exit::CliError;
use crate::logging::LogFormat;

/// What was said, all in all.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) config: Config,
    pub(super) log_format: LogFormat,
    pub(super) log_level: String,
    said: SettingSources,
}

/// Where it was said.
#[derive(Debug)]
struct SettingSources {
    /// The file's name, and what is in it.
    file: Option<(String, File)>,
    /// Flags and environment.
    gateway: Table,
    policy: Table,
}

impl GatewayArgs {
    /// Reads the file, if there is one, and puts everything together.
    ///
    /// Every way in which it cannot be is one line that says where.
    pub(super) fn load(&self) -> Result<Loaded, CliError> {
        let file = self.config.as_deref().map(read).transpose()?;
        let (of_file, policy, routes) = match &file {
            Some((_, file)) => (file.gateway.clone(), file.policy.clone(), file.routes.clone()),
            None => Default::default(),
        };
        let said =
            SettingSources { file, gateway: said(&self.gateway), policy: said(&self.policy) };
        let gateway = self.gateway.clone().or(of_file);
        let policy = self.policy.clone().or(policy);
        let log_format = gateway.log_format.unwrap_or(LogFormat::Text);
        let log_level = gateway.log_level.clone().unwrap_or_else(|| "info".into());
        crate::logging::filter(&log_level)
            .map_err(|what| said.failure(&SettingError::Setting(what)))?;
        let config = config(gateway, &policy, routes).map_err(|error| said.failure(&error))?;
        config.check().map_err(|error| said.failure(&error.into()))?;
        Ok(Loaded { config, log_format, log_level, said })
    }
}

impl Loaded {
    /// Why a gateway does not take it, and where that was said.
    pub(super) fn refused(&self, error: &ReloadError) -> CliError {
        let reason = match error {
            ReloadError::Config(error) => error.clone().into(),
            other => SettingError::Setting(other.to_string()),
        };
        let failure = self.said.failure(&reason);
        match (&self.said.file, error) {
            // What a restart is needed for may be that it is said no more.
            (Some((name, _)), ReloadError::Restart(_)) if self.said.line_of(&reason).is_none() => {
                CliError::usage(format!("{name}: {failure}"))
            }
            _ => failure,
        }
    }

    /// Why no gateway can be started with it. Configuration, and an address that cannot be listened on,
    /// is 64; a store that cannot be had is 69.
    pub(super) fn failed(&self, error: &StartError) -> CliError {
        let (flag, what) = match error {
            StartError::Config(error) => return self.said.failure(&error.clone().into()),
            StartError::Tls(error) => (self.flag_of(error), error.to_string()),
            StartError::Store(error @ StoreOpenError::Url { url, .. }) => {
                let of_store = *url == self.config.store.to_string();
                (Some(if of_store { "--store" } else { "--cache" }), error.to_string())
            }
            StartError::Listen { .. } => (None, error.to_string()),
            // They begin with their flag.
            StartError::AdminToken { .. } | StartError::AccessLog { .. } => {
                (None, error.to_string())
            }
            StartError::Store(error @ StoreOpenError::Secret { .. }) => (None, error.to_string()),
            other => return CliError::unavailable(other),
        };
        let what = flag.map_or(what.clone(), |flag| format!("{flag}: {what}"));
        self.said.failure(&SettingError::Setting(what))
    }

    /// Which setting names the file that certificates cannot be had from.
    fn flag_of(&self, error: &TlsError) -> Option<&'static str> {
        let (TlsError::Read { path, .. } | TlsError::Useless { path, .. }) = error else {
            return None;
        };
        let Transport { tls, upstream_tls: UpstreamTls { ca, client }, .. } =
            &self.config.transport;
        let tls = tls.as_ref();
        [
            ("--tls-cert", tls.map(|tls| &tls.certificate)),
            ("--tls-key", tls.map(|tls| &tls.key)),
            ("--tls-client-ca", tls.and_then(|tls| tls.client_ca.as_ref())),
            ("--upstream-ca", ca.as_ref()),
            ("--upstream-cert", client.as_ref().map(|(certificate, _)| certificate)),
            ("--upstream-key", client.as_ref().map(|(_, key)| key)),
        ]
        .into_iter()
        .find_map(|(flag, named)| (named == Some(path)).then_some(flag))
    }

    /// What may surprise, a line each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let of_file = self.said.file.as_ref().and_then(|(name, file)| file.warning(name));
        of_file.into_iter().collect()
    }

    /// What holds of who the caller is where it was not said: the one depends on the other.
    pub(super) fn callers_by_default(&self, policy: &PolicyConfig) -> &'static str {
        let by_auth = self.config.auth.as_ref().is_some_and(|auth| !auth.scope.is_empty());
        match (&policy.scope, policy.scope_missing) {
            _ if by_auth => "",
            (None, None) => {
                "# By default scope = [\"authorization\"] and scope_missing = \"reject\".\n"
            }
            (None, Some(_)) => "# By default scope = [\"authorization\"].\n",
            (Some(hapax_gateway::ScopeConfig::Headers(_)), None) => {
                "# By default scope_missing = \"reject\".\n"
            }
            (Some(_), _) => "",
        }
    }

    /// All that holds, as a file, without what is secret.
    pub(super) fn shown(&self) -> Result<String, CliError> {
        let mut gateway = GatewayFields::of(&self.config);
        gateway.log_format = Some(self.log_format);
        gateway.log_level = Some(self.log_level.clone());
        let policy = said(&PolicyFields::of(&self.config.policy));
        let mut text = section("[gateway]", &said(&gateway))?;
        text.push('\n');
        text.push_str(&section("[policy]", &policy)?);
        text.push_str(self.callers_by_default(&self.config.policy));
        for route in &self.config.routes {
            let mut own = said(&PolicyFields::of(&route.policy));
            // What does not differ is above; what is only there is said to be as by default.
            own.retain(|field, value| policy.get(field) != Some(value));
            let mut all = Table::new();
            all.insert("path".into(), route.path.clone().into());
            if let Some(name) = &route.name {
                all.insert("name".into(), name.clone().into());
            }
            match route.handling {
                hapax_gateway::RouteMode::Protect => {}
                hapax_gateway::RouteMode::Pass => drop(all.insert("protect".into(), false.into())),
                hapax_gateway::RouteMode::Observe => {
                    drop(all.insert("observe".into(), true.into()))
                }
            }
            all.extend(own);
            text.push('\n');
            text.push_str(&section("[[route]]", &all)?);
        }
        Ok(text)
    }
}

/// The file at `path`, and how it is called.
fn read(path: &Path) -> Result<(String, File), CliError> {
    let name = path.display().to_string();
    let file = File::read(path).map_err(|wrong| {
        let line = wrong.line.map_or(String::new(), |line| format!(":{line}"));
        CliError::usage(format!("{name}{line}: {}", wrong.what))
    })?;
    Ok((name, file))
}

/// What a gateway's file says to whoever looks into its store.
#[derive(Debug, Default)]
pub(crate) struct StoreSettings {
    pub(crate) store: Option<StoreUrl>,
    pub(crate) cache: Option<CacheUrl>,
    pub(crate) secret_file: Option<PathBuf>,
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) admin_token_file: Option<PathBuf>,
    pub(crate) audit_file: Option<PathBuf>,
}

impl StoreSettings {
    /// Of the file at `path`, for what was not said. Where it was `said` which store it is, a file that
    /// cannot be read is warned of: who looks into a store in an emergency may have no other.
    pub(crate) fn for_the_rest(path: Option<&Path>, said: bool) -> Result<Self, CliError> {
        match Self::read(path) {
            Err(failure) if said => {
                eprintln!("hapax: warning: {failure}; going on without");
                Ok(Self::default())
            }
            read => read,
        }
    }

    /// Of the file at `path`; nothing where there is none.
    fn read(path: Option<&Path>) -> Result<Self, CliError> {
        let Some((name, file)) = path.map(read).transpose()? else { return Ok(Self::default()) };
        let failed = |field: &str, error: StoreUrlError| {
            let line = file.line(Section::Gateway, field).unwrap_or_default();
            CliError::usage(format!("{name}:{line}: --{field}: {error}"))
        };
        let GatewayFields {
            store, cache, secret_file, admin, admin_token_file, audit_file, ..
        } = file.gateway.clone();
        let store = store.map(UrlText::read).transpose();
        let cache = cache.map(UrlText::read).transpose();
        Ok(Self {
            store: store.map_err(|error| failed("store", error))?,
            cache: cache.map_err(|error| failed("cache", error))?,
            secret_file,
            admin: admin.and_then(|admin| admin.0),
            admin_token_file,
            audit_file,
        })
    }
}

/// Returns the configuration in the file at `path`, for its reconcile URLs. The upstream, which may be
/// said elsewhere, does not matter to them.
pub(crate) fn to_probe(path: &Path) -> Result<Config, CliError> {
    let (name, file) = read(path)?;
    let mut gateway = file.gateway.clone();
    gateway.upstream = "http://127.0.0.1:1".parse().ok();
    let failed = |reason: SettingError| {
        let (SettingError::Setting(what) | SettingError::Route(_, what)) = reason;
        CliError::usage(format!("{name}: {what}"))
    };
    config(gateway, &file.policy, file.routes).map_err(failed)
}

/// Why it cannot be: something that was said, or on which route.
pub(super) enum SettingError {
    Setting(String),
    Route(usize, String),
}

impl From<ConfigError> for SettingError {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Route { index, .. } => Self::Route(index, error.to_string()),
            error => Self::Setting(error.to_string()),
        }
    }
}

fn config(
    gateway: GatewayFields,
    policy: &PolicyFields,
    routes: Vec<RouteFields>,
) -> Result<Config, SettingError> {
    super::unused::check(policy, &routes)?;
    let everywhere = policy.clone().policy().map_err(SettingError::Setting)?;
    let mut config = gateway.config(everywhere).map_err(SettingError::Setting)?;
    for (index, route) in routes.into_iter().enumerate() {
        let path = route.path.clone();
        let route = route.route(policy);
        config.routes.push(
            route.map_err(|what| SettingError::Route(index, format!("route {path}: {what}")))?,
        );
    }
    Ok(config)
}

impl SettingSources {
    /// One line: the file and its line, where it was said there.
    fn failure(&self, reason: &SettingError) -> CliError {
        let (SettingError::Setting(what) | SettingError::Route(_, what)) = reason;
        CliError::usage(match (&self.file, self.line_of(reason)) {
            (Some((name, _)), Some(line)) => format!("{name}:{line}: {what}"),
            _ => what.clone(),
        })
    }

    fn line_of(&self, reason: &SettingError) -> Option<usize> {
        let (route, what) = match reason {
            SettingError::Setting(what) => (None, what),
            SettingError::Route(index, what) => (Some(*index), what),
        };
        let (_, file) = self.file.as_ref()?;
        // Errors name what is wrong as a flag; the first that the file says is the place.
        let flags = what.split(|char: char| !(char.is_ascii_lowercase() || char == '-'));
        let fields =
            flags.filter_map(|word| word.strip_prefix("--")).map(|it| it.replace('-', "_"));
        let line = fields.into_iter().find_map(|field| self.line(file, route, &field));
        line.or_else(|| file.line(Section::Route(route?), "path"))
    }

    fn line(&self, file: &File, route: Option<usize>, field: &str) -> Option<usize> {
        if let Some(line) = route.and_then(|index| file.line(Section::Route(index), field)) {
            return Some(line);
        }
        if self.gateway.contains_key(field) || self.policy.contains_key(field) {
            return None;
        }
        file.line(Section::Gateway, field).or_else(|| file.line(Section::Policy, field))
    }
}

/// By name; these structures have nothing that TOML has not.
pub(super) fn said(fields: &impl Serialize) -> Table {
    Table::try_from(fields).unwrap_or_default()
}

pub(super) fn section(title: &str, fields: &Table) -> Result<String, CliError> {
    let mut text = format!("{title}\n");
    for (field, value) in fields {
        writeln!(text, "{field} = {value}").map_err(CliError::unavailable)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests;

//! The configuration from all sources: flags win over the environment, the environment over the
//! file, and the file over the defaults.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use hapax_core::Namespace;
use hapax_gateway::{
    CacheUrl, Config, ConfigError, GATEWAY_SETTINGS, GivenSettings, JwtKeysError, NamesSettings,
    POLICY_SETTINGS, PolicyConfig, ROUTE_SETTINGS, ReloadError, Setting, StartError,
    StoreOpenError, StoreUrl, TlsError,
};
use hapax_operators::{RegisterError, TokenError};
use toml::Value;

use super::args::GatewayArgs;
use super::file::{File, Section};
use super::settings::{FlagSettings, name, value};
use crate::exit::CliError;
use crate::secrets;

/// The settings of all sources.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) config: Config,
    sources: SettingSources,
}

/// The sources of settings, for the location in errors.
#[derive(Debug)]
struct SettingSources {
    /// The file's name and content.
    file: Option<(String, File)>,
    flags: GivenSettings,
}

impl GatewayArgs {
    /// Reads the file, if there is one, and merges it with flags and environment.
    ///
    /// Errors are one line, with the file and the line of the setting if it is in the file.
    pub(super) fn load(&self) -> Result<Loaded, CliError> {
        let file = self.config.as_deref().map(read).transpose()?;
        let mut given = file.as_ref().map(|(_, file)| file.given.clone()).unwrap_or_default();
        let FlagSettings(flags) = self.settings.clone();
        given.gateway.extend(flags.gateway.clone());
        given.policy.extend(flags.policy.clone());
        let sources = SettingSources { file, flags };
        let config = Config::read(&given).map_err(|error| sources.failure(&error))?;
        crate::logging::filter(&config.log.level)
            .map_err(|what| sources.failure_of("log_level", what))?;
        config.check().map_err(|error| {
            let failure = sources.failure(&error);
            if error.may_end() { failure.may_end() } else { failure }
        })?;
        Ok(Loaded { config, sources })
    }
}

impl Loaded {
    /// Returns the error of a reload that a gateway rejected, with the location of the setting.
    pub(super) fn reload_failed(&self, error: &ReloadError) -> CliError {
        let failure = self.sources.failure(error);
        match (&self.sources.file, error) {
            // The setting that needs a restart may have been removed: then it has no line.
            (Some((name, _)), ReloadError::Restart(fields))
                if self.sources.line_of(None, fields).is_none() =>
            {
                CliError::usage(format!("{name}: {failure}"))
            }
            _ => failure,
        }
    }

    /// Returns the error of a gateway that cannot start. The exit code is 64 if no other start with this configuration
    /// can succeed, and 69 if one may: the store cannot be opened, a file is not there yet, certificates or keys cannot be
    /// used, an address is in use.
    pub(super) fn failed(&self, error: &StartError) -> CliError {
        let failure = self.failure(error);
        let may_end = match error {
            // Another program may be replacing the files: a part of one is there, or a key before its certificate.
            StartError::Tls(TlsError::Read { .. } | TlsError::Invalid { .. })
            | StartError::JwtKeys(JwtKeysError::Read { .. }) => true,
            StartError::Listen { source, .. } => source.kind() != ErrorKind::PermissionDenied,
            StartError::AdminToken { source: TokenError::Read(_), .. } => true,
            StartError::AccessLog { source, .. } => {
                !matches!(source.kind(), ErrorKind::InvalidData | ErrorKind::InvalidInput)
            }
            StartError::Store(error) => {
                secrets::is_not_there(error, self.config.secret_file.as_deref())
            }
            _ => false,
        };
        if may_end { failure.may_end() } else { failure }
    }

    fn failure(&self, error: &StartError) -> CliError {
        let what = error.to_string();
        match error {
            StartError::Config(error) => self.sources.failure(error),
            StartError::Tls(error) => match self.field_of(error) {
                Some(field) => self.sources.failure_of(field, format!("{}: {what}", name(field))),
                None => CliError::usage(what),
            },
            StartError::Store(StoreOpenError::Url { url, .. }) => {
                let of_store = *url == self.config.store.to_string();
                let field = if of_store { "store" } else { "cache" };
                self.sources.failure_of(field, format!("{}: {what}", name(field)))
            }
            StartError::Listen { .. } => CliError::usage(what),
            // The texts of these errors begin with the flag.
            StartError::AdminToken { .. } => self.sources.failure_of("admin_token_file", what),
            StartError::AccessLog { .. } => self.sources.failure_of("access_log", what),
            StartError::JwtKeys(_) => self.sources.failure_of("jwt_keys", what),
            StartError::Register(RegisterError::Difference(_)) => {
                self.sources.failure_of("namespace", format!("--namespace: {what}"))
            }
            StartError::Store(StoreOpenError::Secret { .. }) => {
                self.sources.failure_of("secret_file", what)
            }
            other => CliError::unavailable(other),
        }
    }

    /// Returns the setting that names the file whose certificates or key cannot be used.
    fn field_of(&self, error: &TlsError) -> Option<&'static str> {
        let (TlsError::Read { path, .. } | TlsError::Invalid { path, .. }) = error else {
            return None;
        };
        let path = [path.display().to_string()];
        let of_tls = |field: &str| field.starts_with("tls_") || field.starts_with("upstream_");
        GATEWAY_SETTINGS
            .iter()
            .filter(|setting| of_tls(setting.info.name))
            .find(|setting| setting.get(&self.config).is_some_and(|words| words == path))
            .map(|setting| setting.info.name)
    }

    /// Returns warnings of settings that may surprise, a line each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let of_file = self.sources.file.as_ref().and_then(|(name, file)| file.warning(name));
        of_file.into_iter().collect()
    }

    /// Returns the defaults of the caller's name, which depend on each other.
    pub(super) fn callers_by_default(&self, policy: &PolicyConfig) -> &'static str {
        let by_auth = self.config.auth.as_ref().is_some_and(|auth| !auth.scope.is_empty());
        match (&policy.scope, policy.scope_missing) {
            _ if by_auth => "",
            (None, None) => {
                "# By default scope = [\"authorization\"] and scope_missing = \"reject\".\n"
            }
            (None, Some(_)) => "# By default scope = [\"authorization\"].\n",
            (Some(hapax_gateway::ScopeConfig::Parts(_)), None) => {
                "# By default scope_missing = \"reject\".\n"
            }
            (Some(_), _) => "",
        }
    }

    /// Returns the whole configuration as a file, without secrets.
    pub(super) fn shown(&self) -> Result<String, CliError> {
        let mut gateway = shown(GATEWAY_SETTINGS, &self.config);
        let per_peer =
            i64::try_from(self.config.limits.per_peer()).map_err(CliError::unavailable)?;
        gateway.insert("max_connections_per_peer", per_peer.into());
        let policy = shown(POLICY_SETTINGS, &self.config.policy);
        let mut text = section("[gateway]", &gateway)?;
        text.push('\n');
        text.push_str(&section("[policy]", &policy)?);
        text.push_str(self.callers_by_default(&self.config.policy));
        for route in &self.config.routes {
            let mut own = shown(POLICY_SETTINGS, &route.policy);
            // Fields that equal those of `[policy]` are left out. A field that only `[policy]` sets
            // is shown with its default.
            let has_url = own.get("reconcile_url") != policy.get("reconcile_url");
            own.retain(|field, value| {
                // A route with another URL does not inherit it.
                policy.get(field) != Some(value) || (has_url && *field == "reconcile_authorization")
            });
            own.extend(shown(ROUTE_SETTINGS, route));
            text.push('\n');
            text.push_str(&section("[[route]]", &own)?);
        }
        Ok(text)
    }
}

/// Reads the file at `path` and returns its name and content.
fn read(path: &Path) -> Result<(String, File), CliError> {
    let name = path.display().to_string();
    let file = File::read(path).map_err(|wrong| {
        let line = wrong.line.map_or(String::new(), |line| format!(":{line}"));
        CliError::usage(format!("{name}{line}: {}", wrong.what))
    })?;
    Ok((name, file))
}

/// The settings of a gateway's file for commands about its store.
#[derive(Debug, Default)]
pub(crate) struct StoreSettings {
    pub(crate) store: Option<StoreUrl>,
    pub(crate) namespace: Option<Namespace>,
    pub(crate) cache: Option<CacheUrl>,
    pub(crate) secret_file: Option<PathBuf>,
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) admin_token_file: Option<PathBuf>,
    pub(crate) audit_file: Option<PathBuf>,
    pub(crate) must_exist: bool,
}

impl StoreSettings {
    /// Completes the options from the file at `path`. If a store was given, a file that cannot be
    /// read is only a warning: in an emergency there may be no other way.
    pub(crate) fn complete_from_file(
        path: Option<&Path>,
        is_named: bool,
    ) -> Result<Self, CliError> {
        match Self::read(path) {
            Err(failure) if is_named => {
                eprintln!("hapax: warning: {failure}; continuing without the file");
                Ok(Self::default())
            }
            read => read,
        }
    }

    /// Reads the file at `path`; nothing if there is none.
    fn read(path: Option<&Path>) -> Result<Self, CliError> {
        let Some((name, file)) = path.map(read).transpose()? else { return Ok(Self::default()) };
        let mut given = GivenSettings::default();
        let fields = [
            "store",
            "namespace",
            "cache",
            "secret_file",
            "admin",
            "admin_token_file",
            "audit_file",
            "store_must_exist",
        ];
        let gateway = file.given.gateway.iter().filter(|(field, _)| fields.contains(field));
        given.gateway.extend(gateway.map(|(field, words)| (*field, words.clone())));
        let is_given = |field| given.gateway.contains_key(field);
        let (has_store, has_admin) = (is_given("store"), is_given("admin"));
        let config = with_upstream(given).map_err(|error| {
            SettingSources { file: Some((name, file)), flags: GivenSettings::default() }
                .failure(&error)
        })?;
        Ok(Self {
            store: has_store.then_some(config.store),
            namespace: config.namespace,
            cache: config.cache,
            secret_file: config.secret_file,
            admin: config.admin.filter(|_| has_admin),
            admin_token_file: config.admin_token_file,
            audit_file: config.audit_file,
            must_exist: config.store_must_exist,
        })
    }
}

/// Reads a configuration with a placeholder as upstream: these commands do not use it, and it may
/// not be set in the file.
fn with_upstream(mut given: GivenSettings) -> Result<Config, ConfigError> {
    given.gateway.insert("upstream", vec!["http://127.0.0.1:1".to_owned()]);
    Config::read(&given)
}

/// Returns the configuration in the file at `path`, for its reconcile URLs.
pub(crate) fn to_probe(path: &Path) -> Result<Config, CliError> {
    let (file_name, file) = read(path)?;
    let failed =
        |error: ConfigError| CliError::usage(format!("{file_name}: {}", error.describe(&name)));
    with_upstream(file.given).map_err(failed)
}

impl SettingSources {
    /// Returns an error in one line, with file and line if the setting is in the file.
    fn failure(&self, error: &impl NamesSettings) -> CliError {
        let fields = error.fields();
        let fields: Vec<_> = fields.iter().map(String::as_str).collect();
        self.located(error.route(), &fields, &error.describe(&name))
    }

    /// Adds the place of one setting to an error.
    fn failure_of(&self, field: &str, what: impl std::fmt::Display) -> CliError {
        self.located(None, &[field], &what)
    }

    fn located(
        &self,
        route: Option<usize>,
        fields: &[&str],
        what: &dyn std::fmt::Display,
    ) -> CliError {
        CliError::usage(match (&self.file, self.line_of(route, fields)) {
            (Some((name, _)), Some(line)) => format!("{name}:{line}: {what}"),
            _ => what.to_string(),
        })
    }

    /// Returns the line of the first of `fields` that is in the file; for a route, else that of its
    /// path.
    fn line_of(&self, route: Option<usize>, fields: &[&str]) -> Option<usize> {
        let (_, file) = self.file.as_ref()?;
        let line = fields.iter().find_map(|field| self.line(file, route, field));
        line.or_else(|| file.line(Section::Route(route?), "path"))
    }

    fn line(&self, file: &File, route: Option<usize>, field: &str) -> Option<usize> {
        if let Some(line) = route.and_then(|index| file.line(Section::Route(index), field)) {
            return Some(line);
        }
        if self.flags.gateway.contains_key(field) || self.flags.policy.contains_key(field) {
            return None;
        }
        file.line(Section::Gateway, field).or_else(|| file.line(Section::Policy, field))
    }
}

/// The settings of a section of a file, by name.
pub(super) type ShownSettings = BTreeMap<&'static str, Value>;

/// Returns the settings that a file would have for this configuration, without secrets.
pub(super) fn shown<T>(table: &[Setting<T>], config: &T) -> ShownSettings {
    let shown = table.iter().filter_map(|setting| {
        let words = setting.get(config)?;
        Some((setting.info.name, value(&setting.info, &words)))
    });
    shown.collect()
}

pub(super) fn section(title: &str, fields: &ShownSettings) -> Result<String, CliError> {
    let mut text = format!("{title}\n");
    for (field, value) in fields {
        writeln!(text, "{field} = {value}").map_err(CliError::unavailable)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests;

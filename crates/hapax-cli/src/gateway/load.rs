//! Flags over the environment over the file over the defaults.

use std::fmt::Write as _;

use hapax_gateway::{Config, ConfigError, ReloadError};
use serde::Serialize;
use toml::Table;

use super::args::GatewayArgs;
use super::fields::{GatewayFields, PolicyFields};
use super::file::{File, RouteFields, Section};
use crate::exit::Failure;
use crate::logging::LogFormat;

/// What was said, all in all.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) config: Config,
    pub(super) log_format: LogFormat,
    pub(super) log_level: String,
    said: Said,
}

/// Where it was said.
#[derive(Debug)]
struct Said {
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
    pub(super) fn load(&self) -> Result<Loaded, Failure> {
        let file = match &self.config {
            Some(path) => {
                let name = path.display().to_string();
                let file = File::read(path).map_err(|wrong| {
                    let line = wrong.line.map_or(String::new(), |line| format!(":{line}"));
                    Failure::usage(format!("{name}{line}: {}", wrong.what))
                })?;
                Some((name, file))
            }
            None => None,
        };
        let (of_file, policy, routes) = match &file {
            Some((_, file)) => (file.gateway.clone(), file.policy.clone(), file.routes.clone()),
            None => Default::default(),
        };
        let said = Said { file, gateway: said(&self.gateway), policy: said(&self.policy) };
        let gateway = self.gateway.clone().or(of_file);
        let policy = self.policy.clone().or(policy);
        let log_format = gateway.log_format.unwrap_or(LogFormat::Text);
        let log_level = gateway.log_level.clone().unwrap_or_else(|| "info".into());
        let config = config(gateway, &policy, routes).map_err(|error| said.failure(&error))?;
        config.check().map_err(|error| said.failure(&error.into()))?;
        Ok(Loaded { config, log_format, log_level, said })
    }
}

impl Loaded {
    /// Why a gateway does not take it, and where that was said.
    pub(super) fn refused(&self, error: &ReloadError) -> Failure {
        match error {
            ReloadError::Config(error) => self.said.failure(&error.clone().into()),
            other => Failure::usage(match &self.said.file {
                Some((name, _)) => format!("{name}: {other}"),
                None => other.to_string(),
            }),
        }
    }

    /// All that holds, as a file, without what is secret.
    pub(super) fn shown(&self) -> Result<String, Failure> {
        let mut gateway = GatewayFields::of(&self.config);
        gateway.log_format = Some(self.log_format);
        gateway.log_level = Some(self.log_level.clone());
        let policy = said(&PolicyFields::of(&self.config.policy));
        let mut text = section("[gateway]", &said(&gateway))?;
        text.push('\n');
        text.push_str(&section("[policy]", &policy)?);
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
                hapax_gateway::Handling::Protect => {}
                hapax_gateway::Handling::Pass => drop(all.insert("protect".into(), false.into())),
                hapax_gateway::Handling::Observe => drop(all.insert("observe".into(), true.into())),
            }
            all.extend(own);
            text.push('\n');
            text.push_str(&section("[[route]]", &all)?);
        }
        Ok(text)
    }
}

/// Why it cannot be: something that was said, or on which route.
enum Reason {
    Said(String),
    Route(usize, String),
}

impl From<ConfigError> for Reason {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Route { index, .. } => Self::Route(index, error.to_string()),
            error => Self::Said(error.to_string()),
        }
    }
}

fn config(
    gateway: GatewayFields,
    policy: &PolicyFields,
    routes: Vec<RouteFields>,
) -> Result<Config, Reason> {
    let everywhere = policy.clone().policy().map_err(Reason::Said)?;
    let mut config = gateway.config(everywhere).map_err(Reason::Said)?;
    for (index, route) in routes.into_iter().enumerate() {
        let path = route.path.clone();
        let route = route.route(policy);
        config
            .routes
            .push(route.map_err(|what| Reason::Route(index, format!("route {path}: {what}")))?);
    }
    Ok(config)
}

impl Said {
    /// One line: the file and its line, where it was said there.
    fn failure(&self, reason: &Reason) -> Failure {
        let (route, what) = match reason {
            Reason::Said(what) => (None, what),
            Reason::Route(index, what) => (Some(*index), what),
        };
        let Some((name, file)) = &self.file else { return Failure::usage(what) };
        // Errors name what is wrong as a flag; the first that the file says is the place.
        let flags = what.split(|char: char| !(char.is_ascii_lowercase() || char == '-'));
        let fields =
            flags.filter_map(|word| word.strip_prefix("--")).map(|it| it.replace('-', "_"));
        let line = fields.into_iter().find_map(|field| self.line(file, route, &field));
        let line = line.or_else(|| file.line(Section::Route(route?), "path"));
        Failure::usage(match line {
            Some(line) => format!("{name}:{line}: {what}"),
            None => what.clone(),
        })
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
fn said(fields: &impl Serialize) -> Table {
    Table::try_from(fields).unwrap_or_default()
}

fn section(title: &str, fields: &Table) -> Result<String, Failure> {
    let mut text = format!("{title}\n");
    for (field, value) in fields {
        writeln!(text, "{field} = {value}").map_err(Failure::unavailable)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::*;

    /// What clap knows, by the name of the field.
    fn flags() -> Vec<clap::Arg> {
        let command = GatewayArgs::augment_args(Command::new("gateway"));
        let own = ["config", "check", "help"];
        command
            .get_arguments()
            .filter(|arg| !own.contains(&arg.get_id().as_str()))
            .cloned()
            .collect()
    }

    /// What serde knows: its error lists it.
    fn fields(section: &str) -> Vec<String> {
        let error = match section {
            "gateway" => toml::from_str::<GatewayFields>("no_such_field = 1").unwrap_err(),
            _ => toml::from_str::<PolicyFields>("no_such_field = 1").unwrap_err(),
        };
        let message = error.message().to_owned();
        let known = message.split("expected one of").nth(1).unwrap();
        known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn flags_environment_and_file_do_not_drift_apart() {
        let mut known = fields("gateway");
        known.extend(fields("policy"));
        let flags = flags();
        let ids: Vec<_> = flags.iter().map(|arg| arg.get_id().to_string()).collect();
        assert_eq!(ids, known);
        for (arg, field) in flags.iter().zip(&known) {
            assert_eq!(arg.get_long(), Some(field.replace('_', "-").as_str()));
            let env = match field.as_str() {
                // As it was called before there was a file.
                "log_level" => "HAPAX_LOG".to_owned(),
                field => format!("HAPAX_{}", field.to_ascii_uppercase()),
            };
            assert_eq!(arg.get_env().and_then(|env| env.to_str()), Some(env.as_str()));
            assert!(!arg.is_required_set() && arg.get_default_values().is_empty(), "{field}");
        }
    }

    #[test]
    fn the_help_tells_the_defaults_as_they_are() {
        let config = Config::new("http://127.0.0.1:3000".parse().unwrap());
        let mut gateway = GatewayFields::of(&config);
        gateway.log_format = Some(LogFormat::Text);
        let mut shown = said(&gateway);
        shown.extend(said(&PolicyFields::of(&config.policy)));
        let mut compared = 0;
        for arg in flags() {
            let help = arg.get_long_help().or(arg.get_help()).unwrap().to_string();
            let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
            let Some(value) = shown.get(arg.get_id().as_str()) else { continue };
            let value = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Array(values) => {
                    let texts = values.iter().filter_map(|value| value.as_str());
                    texts.collect::<Vec<_>>().join(",")
                }
                other => other.to_string(),
            };
            let told = help.rsplit("[default: ").next().unwrap_or_default();
            if ["upstream", "stream"].contains(&arg.get_id().as_str()) {
                continue;
            }
            // `60s` and `1m` are the same.
            let told = told.trim_end_matches(']');
            let same = |text: &str| text.parse::<super::super::values::Time>().ok();
            let alike = told == value || (same(told).is_some() && same(told) == same(&value));
            assert!(alike, "{}: {told} is told, {value} is so", arg.get_id());
            compared += 1;
        }
        assert!(compared > 25, "{compared}");
    }

    fn args(text: &[&str]) -> GatewayArgs {
        use clap::FromArgMatches as _;
        let command = GatewayArgs::augment_args(Command::new("gateway").no_binary_name(true));
        let mut matches = command.try_get_matches_from(text).unwrap();
        GatewayArgs::from_arg_matches_mut(&mut matches).unwrap()
    }

    fn load(flags: &[&str], file: &str) -> Result<Loaded, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.toml");
        std::fs::write(&path, file).unwrap();
        let path = path.display().to_string();
        let loaded = args(&[&["--config", &path], flags].concat()).load();
        loaded.map_err(|failure| failure.to_string().replace(&path, "f.toml"))
    }

    #[test]
    fn what_is_shown_is_what_holds() {
        let file = r#"
            [gateway]
            upstream = "http://127.0.0.1:3000"
            admin = "off"
            max_memory = "1GiB"
            auth_url = "http://127.0.0.1:4180/check?token=secret"
            auth_copy = "x-user,x-role"
            [policy]
            methods = ["post", "PUT"]
            scope = "authorization"
            in_flight = "wait"
            cors_origins = ["https://shop.example"]
            docs_url = "https://docs.example"
            max_in_flight_per_scope = 7
            grammar = "strict"
            expires = true
            fingerprint_only = ["/amount", "/a,b", ""]
            fingerprint_headers = "x-tenant"
            [[route]]
            path = "/a"
            fingerprint_only = "none"
            fingerprint_except = "/sent_at,/trace"
            [[route]]
            path = "/raw"
            fingerprint_body = "raw"
            fingerprint_only = "none"
            fingerprint_headers = "none"
            expires = false
            [[route]]
            path = "/named"
            name = "a"
            key = "required"
            docs_url = "none"
            cors_origins = "none"
            max_in_flight_per_scope = 0
            [[route]]
            path = "/b/{*rest}"
            protect = false
            [[route]]
            path = "/c"
            observe = true
        "#;
        let loaded = load(&["--lease", "10s"], file).unwrap();
        let shown = loaded.shown().unwrap();
        assert!(!shown.contains("secret"), "{shown}");
        let again = load(&[], &shown).unwrap_or_else(|error| panic!("{error}\n{shown}"));
        assert_eq!(again.shown().unwrap(), shown);
        let policy = &again.config.policy;
        assert_eq!(policy.lease.as_secs(), 10);
        assert_eq!((policy, &again.config.routes), (&loaded.config.policy, &loaded.config.routes));
        let names = [("/a", ";except=/sent_at,/trace;headers=x-tenant"), ("/raw", "")];
        for (route, (path, rest)) in loaded.config.routes.iter().zip(names) {
            let body = if path == "/raw" { "raw" } else { "canonical" };
            let name = format!("http/1;body={body}{rest}");
            let found = (route.path.as_str(), route.policy.fingerprint.name().as_str());
            assert_eq!(found, (path, name.as_str()));
        }
        let name = "http/1;body=canonical;only=,/a%2Cb,/amount;headers=x-tenant";
        assert_eq!(policy.fingerprint.name().as_str(), name);
        let route = &loaded.config.routes[2].policy;
        assert!(route.docs_url.is_none() && route.cors.is_none());
        assert!(route.max_in_flight_per_scope.is_none());
        assert_eq!(route.methods, policy.methods);
    }

    #[test]
    fn errors_name_the_line_that_said_it() {
        let upstream = "[gateway]\nupstream = \"http://127.0.0.1:3000\"\n";
        for (flags, rest, says) in [
            (&[][..], "store = \"mysql:x\"", "f.toml:3: --store: a store is"),
            (&[], "max_memory = \"1MiB\"", "f.toml:3: --max-memory 1MiB is too little"),
            (&["--max-memory", "1MiB"], "max_memory = \"1GiB\"", "--max-memory 1MiB is too little"),
            (&[], "[policy]\non_unknown = \"reconcile\"", "f.toml:4: --on-unknown reconcile needs"),
            (&[], "[policy]\ncors_max_age = \"1h\"", "f.toml:4: --cors-max-age needs"),
            (
                &[],
                "[policy]\nfingerprint_only = \"amount\"",
                "f.toml:4: --fingerprint-only: a JSON pointer is empty or begins with",
            ),
            (
                &[],
                "[policy]\nfingerprint_only = \"/a\"\n[[route]]\npath = \"/a\"\nfingerprint_except = \"/b\"",
                "f.toml:7: route /a: --fingerprint-except contradicts --fingerprint-only",
            ),
            (
                &[],
                "[policy]\nfingerprint_only = \"/a\"\n[[route]]\npath = \"/a\"\nfingerprint_body = \"raw\"",
                "f.toml:7: route /a: --fingerprint-body must be `canonical`",
            ),
            (&[], "[[route]]\n\npath = \"/a\"\non_unknown = \"reconcile\"", "f.toml:6: route /a: "),
            (&[], "[[route]]\n\npath = \"a\"", "f.toml:5: route a: the path must begin"),
            (
                &[],
                "[[route]]\npath = \"/a\"\n[[route]]\npath = \"/A\"",
                "f.toml:6: route /A: the path is for the same as that of another route, /a",
            ),
            (
                &[],
                "[[route]]\npath = \"/a\"\nobserve = true\nprotect = false",
                "f.toml:4: route /a: `observe = true` contradicts",
            ),
            (&[], "lsten = \"x\"", "f.toml:3: unknown field `lsten` in [gateway]"),
        ] {
            let error = load(flags, &format!("{upstream}{rest}")).unwrap_err();
            assert!(error.starts_with(says), "{rest}: {error}");
        }
        let error = load(&[], "").unwrap_err();
        assert!(error.contains("--upstream is required"), "{error}");
    }
}

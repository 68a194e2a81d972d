use clap::{Args as _, Command};
use hapax_gateway::CorsHeaders;

use super::*;

/// What clap knows, by the name of the field.
fn flags() -> Vec<clap::Arg> {
    let command = GatewayArgs::augment_args(Command::new("gateway"));
    let own = ["config", "check", "help"];
    command.get_arguments().filter(|arg| !own.contains(&arg.get_id().as_str())).cloned().collect()
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
        // A share of another setting.
        if arg.get_id() == "max_connections_per_peer" {
            continue;
        }
        if ["upstream", "stream"].contains(&arg.get_id().as_str()) {
            continue;
        }
        // `60s` and `1m` are the same.
        let told = told.trim_end_matches(']');
        let same = |text: &str| text.parse::<super::super::value_args::DurationArg>().ok();
        let alike = told == value || (same(told).is_some() && same(told) == same(&value));
        assert!(alike, "{}: {told} is told, {value} is so", arg.get_id());
        compared += 1;
    }
    assert!(compared > 25, "{compared}");
}

fn args(text: &[&str]) -> Result<GatewayArgs, clap::Error> {
    use clap::FromArgMatches as _;
    let command = GatewayArgs::augment_args(Command::new("gateway").no_binary_name(true));
    let mut matches = command.try_get_matches_from(text)?;
    GatewayArgs::from_arg_matches_mut(&mut matches)
}

fn load(flags: &[&str], file: &str) -> Result<Loaded, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    std::fs::write(&path, file).unwrap();
    let path = path.display().to_string();
    let loaded = args(&[&["--config", &path], flags].concat()).unwrap().load();
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
        methods = ["POST", "PUT"]
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
    // What is not shown is not taken for what it stands for.
    let error = load(&[], &shown).unwrap_err();
    assert!(error.starts_with("f.toml:") && error.contains("`(hidden)`"), "{error}");
    let told = shown.replace("(hidden)", "token=secret");
    let again = load(&[], &told).unwrap_or_else(|error| panic!("{error}\n{shown}"));
    assert_eq!(again.config.auth, loaded.config.auth);
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
        (
            &[],
            "[policy]\nfinal_statuses = [503]\nunknown_statuses = \"5xx\"",
            "f.toml:4: --final-statuses and --unknown-statuses both have 503",
        ),
        (
            &[],
            "[policy]\nretryable_statuses = [503, 700]",
            "f.toml:4: `700`: expected a status from 200 to 599",
        ),
        (
            &[],
            "[policy]\nretryable_statuses = [503]\n[[route]]\npath = \"/a\"\nunknown_statuses = [503]",
            "f.toml:4: route /a: --retryable-statuses and --unknown-statuses both have 503",
        ),
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
        (
            &[],
            "[[route]]\npath = \"/a\"\nprotect = true\nobserve = true",
            "f.toml:4: route /a: `observe = true` contradicts `protect = true`",
        ),
        (&[], "[policy]\nmethods = [\"ANY\"]", "f.toml:4: `ANY`: expected methods in upper case"),
        (&[], "[policy]\nlease = \"0s\"", "f.toml:4: --lease: the lease is zero"),
        (&[], "[policy]\nlease = \"99ms\"", "f.toml:4: --lease: the lease is under 100ms"),
        (&[], "[policy]\nlease = \"25h\"", "f.toml:4: --retention and --lease: the retention"),
        (
            &[],
            "[policy]\nlease = \"5m\"\nretention = \"4m\"",
            "f.toml:5: --retention and --lease: the retention",
        ),
        (&[], "lsten = \"x\"", "f.toml:3: unknown field `lsten` in [gateway]"),
    ] {
        let error = load(flags, &format!("{upstream}{rest}")).unwrap_err();
        assert!(error.starts_with(says), "{rest}: {error}");
    }
    let error = load(&[], "").unwrap_err();
    assert!(error.contains("--upstream is required"), "{error}");
}

const UPSTREAM: &str = "[gateway]\nupstream = \"http://127.0.0.1:3000\"\n";

#[test]
fn what_can_have_no_effect_is_refused() {
    for (rest, says) in [
        ("auth_timeout = \"1s\"", "f.toml:3: --auth-timeout needs --auth-url"),
        ("upstream_ca = \"ca.pem\"", "f.toml:3: --upstream-ca needs a URL that begins with https"),
        (
            "\nupstream_key = \"a\"\nupstream_cert = \"b\"",
            "f.toml:5: --upstream-cert needs a URL that begins with https",
        ),
        ("[policy]\nwait_for = \"1s\"", "f.toml:4: --wait-for needs --in-flight wait"),
        (
            "[policy]\nwait_for = \"1s\"\n[[route]]\npath = \"/\"\nin_flight = \"wait\"\nwait_for = \"2s\"",
            "f.toml:4: --wait-for needs",
        ),
        (
            "[policy]\nin_flight = \"wait\"\n[[route]]\npath = \"/\"\nin_flight = \"reject\"\nwait_for = \"2s\"",
            "f.toml:8: route /: --wait-for needs",
        ),
        (
            "[policy]\nscope = \"none\"\nscope_missing = \"reject\"",
            "f.toml:5: --scope-missing contradicts --scope none",
        ),
        (
            "[[route]]\npath = \"/\"\nprotect = false\non_unknown = \"block\"",
            "f.toml:6: route /: --on-unknown contradicts `protect = false`",
        ),
        (
            "[[route]]\npath = \"/\"\nkey = \"required\"\nprotect = false",
            "f.toml:5: route /: --key contradicts",
        ),
        (
            "[[route]]\npath = \"/\"\ncors_origins = \"none\"\ncors_methods = \"GET\"",
            "f.toml:6: route /: --cors-methods needs --cors-origins",
        ),
    ] {
        let error = load(&[], &format!("{UPSTREAM}{rest}")).unwrap_err();
        assert!(error.starts_with(says), "{rest}: {error}");
    }
    for rest in [
        "[policy]\nwait_for = \"1s\"\n[[route]]\npath = \"/\"\nin_flight = \"wait\"",
        "[policy]\nscope = \"none\"\nscope_missing = \"reject\"\n[[route]]\npath = \"/\"\nscope = \"x-user\"",
        "[policy]\nin_flight = \"wait\"\nwait_for = \"1s\"\n[[route]]\npath = \"/\"\nprotect = false",
        "[policy]\ncors_methods = \"*\"\n[[route]]\npath = \"/\"\nprotect = false\ncors_origins = \"*\"",
        "[[route]]\npath = \"/\"\nprotect = false\nupstream_timeout = \"5m\"\ndocs_url = \"none\"",
    ] {
        let loaded = load(&[], &format!("{UPSTREAM}{rest}")).unwrap();
        let shown = loaded.shown().unwrap();
        let again = load(&[], &shown).unwrap_or_else(|error| panic!("{error}\n{shown}"));
        assert_eq!(again.config.routes, loaded.config.routes, "{shown}");
        assert_eq!(again.shown().unwrap(), shown);
    }
}

#[test]
fn none_is_no_header() {
    let auth = "auth_url = \"http://127.0.0.1:1/\"\nauth_scope = \"none\"\nauth_copy = \"none\"";
    let cors = "cors_origins = \"*\"\ncors_headers = \"none\"\ncors_expose = \"none\"";
    let loaded = load(&[], &format!("{UPSTREAM}{auth}\n[policy]\n{cors}")).unwrap();
    let auth = loaded.config.auth.as_ref().unwrap();
    assert!(auth.scope.is_empty() && auth.copy.is_empty());
    let cors = loaded.config.policy.cors.as_ref().unwrap();
    assert_eq!((&cors.headers, &cors.expose), (&CorsHeaders::List(vec![]), &vec![]));
    let shown = loaded.shown().unwrap();
    assert!(shown.contains("auth_scope = [\"none\"]\n"), "{shown}");
    assert_eq!(load(&[], &shown).unwrap().shown().unwrap(), shown);
    let mixed = "auth_url = \"http://127.0.0.1:1/\"\nauth_scope = \"x-a,none\"";
    let error = load(&[], &format!("{UPSTREAM}{mixed}")).unwrap_err();
    assert!(error.starts_with("f.toml:4: --auth-scope: `none` stands alone"), "{error}");
}

#[test]
fn lists_may_have_spaces_as_flags_too() {
    let flags = [
        "--upstream=http://127.0.0.1:3000",
        "--methods=POST, PATCH",
        "--scope=authorization , x-tenant",
        "--fingerprint-only=/a, /b",
        "--trust-forwarded=loopback, 10.0.0.0/8",
        "--cors-origins=https://a, https://b",
        "--cors-methods=GET, POST",
    ];
    let file = flags.iter().skip(1).map(|flag| {
        let (name, value) = flag.trim_start_matches("--").split_once('=').unwrap();
        format!("{} = \"{value}\"\n", name.replace('-', "_"))
    });
    let (gateway, policy): (Vec<_>, Vec<_>) = file.partition(|line| line.starts_with("trust"));
    let file = format!("{UPSTREAM}{}[policy]\n{}", gateway.concat(), policy.concat());
    let of_file = load(&[], &file).unwrap().shown().unwrap();
    assert_eq!(args(&flags).unwrap().load().unwrap().shown().unwrap(), of_file);
}

#[test]
fn a_misspelt_boolean_is_refused() {
    for (text, value) in [("true", true), ("1", true), ("off", false), ("no", false)] {
        let args = args(&[&format!("--stream={text}")]).unwrap();
        assert_eq!(args.policy.stream, Some(value), "{text}");
    }
    for text in ["ture", "flase", "2", ""] {
        for flag in ["stream", "expires", "replay-set-cookie", "cors-credentials"] {
            let error = args(&[&format!("--{flag}={text}")]).unwrap_err().to_string();
            assert!(error.contains(flag), "{text}: {error}");
        }
    }
}

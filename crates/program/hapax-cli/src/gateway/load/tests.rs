use std::fmt::Write as _;

use clap::{Args as _, Command};
use hapax_gateway::{CorsHeaders, SettingInfo, ValueKind, parse_duration};

use super::super::settings::{gateway, policy, variable};
use super::*;

#[test]
fn defaults_that_are_written_differently_are_the_same_durations() {
    let config = Config::default();
    let gateway = GATEWAY_SETTINGS.iter().map(|it| (&it.info, it.get(&config)));
    let policy = POLICY_SETTINGS.iter().map(|it| (&it.info, it.get(&config.policy)));
    let mut compared = 0;
    for (info, words) in gateway.chain(policy).filter(|(info, _)| info.placeholder == "DUR") {
        let Some(words) = words else { continue };
        let default = info.default(&name).unwrap();
        assert_eq!(parse_duration(&default), parse_duration(&words[0]), "{}", info.name);
        compared += 1;
    }
    assert!(compared > 8, "{compared}");
}

/// Returns a table of settings, in Markdown.
fn table(settings: impl Iterator<Item = &'static SettingInfo>, has_flags: bool) -> String {
    let mut text = String::new();
    let columns = ["flag", "variable", "field", "default", "meaning", "reload"];
    let columns = if has_flags { &columns[..] } else { &columns[2..5] };
    let row = |columns: &[String]| format!("| {} |\n", columns.join(" | "));
    text += &row(&columns.iter().map(|&column| column.to_owned()).collect::<Vec<_>>());
    text += &row(&columns.iter().map(|_| "---".to_owned()).collect::<Vec<_>>());
    let code = |field: &str| format!("`{}`", name(field).trim_matches('`'));
    for info in settings {
        let values = match info.kind {
            ValueKind::Choice(words) => words().join("\\|"),
            _ => info.placeholder.to_owned(),
        };
        let columns = [
            format!("`{} {values}`", name(info.name)),
            format!("`{}`", variable(info.name)),
            format!("`{}`", info.name),
            info.default(&code).unwrap_or_default(),
            info.help(&code).replace('<', "\\<"),
            if info.is_reloadable() { "yes" } else { "restart" }.to_owned(),
        ];
        text += &row(if has_flags { &columns } else { &columns[2..5] });
    }
    text
}

#[test]
fn the_settings_page_matches_the_tables() {
    let routes = || ROUTE_SETTINGS.iter().map(|setting| &setting.info);
    let mut page = String::from(PAGE);
    for (title, table) in [
        ("`[gateway]`: settings of which there is one", table(gateway(), true)),
        ("`[policy]`: settings that a route may have too", table(policy(), true)),
        ("`[[route]]`: settings that only a route has", table(routes(), false)),
    ] {
        write!(page, "\n## {title}\n\n{table}").unwrap();
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/settings.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(page == golden, "docs/settings.md is not as the tables are: UPDATE_GOLDEN=1 writes it");
}

const PAGE: &str = "\
# Settings of the gateway

This page is generated from the tables that the program reads its settings by. Flags win over variables,
variables over [the file](../examples/gateway/hapax.toml) (`--config FILE`), and the file over the defaults.
Durations are written `250ms`, `30s`, `5m`, `24h` or `7d`, sizes `64KiB`, `1MiB` or `2GiB`. In a flag or a
variable the values of a list are separated by commas; in the file a list may also be an array.

A setting with `yes` in the last column can change while the gateway runs: SIGHUP reads the file again. If
any other setting has changed, the whole file is rejected and the configuration before it stays in force.
`max_request_body` and `max_response_body` cannot grow beyond the largest value at the start.

`hapax gateway --check` prints the configuration, and `hapax gateway --check METHOD PATH` the
policy of one request.
";

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
fn a_shown_configuration_loads_as_the_same() {
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
    // A hidden value is rejected, not taken as the value.
    let error = load(&[], &shown).unwrap_err();
    assert!(error.starts_with("f.toml:") && error.contains("`(hidden)`"), "{error}");
    let unhidden = shown.replace("(hidden)", "token=secret");
    let again = load(&[], &unhidden).unwrap_or_else(|error| panic!("{error}\n{shown}"));
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
fn a_route_with_another_reconcile_url_does_not_inherit_its_credentials() {
    let file = r#"
        [gateway]
        upstream = "http://127.0.0.1:3000"
        [policy]
        on_unknown = "reconcile"
        reconcile_url = "http://127.0.0.1:3000/outcome"
        reconcile_authorization = "none"
        [[route]]
        path = "/inherits"
        lease = "10s"
        [[route]]
        path = "/same"
        reconcile_url = "http://127.0.0.1:3000/outcome"
        [[route]]
        path = "/other"
        reconcile_url = "http://10.0.0.1/outcome"
        [[route]]
        path = "/other/own"
        reconcile_url = "http://10.0.0.1/outcome"
        reconcile_authorization = "none"
    "#;
    let loaded = load(&[], file).unwrap();
    let found = |loaded: &Loaded| {
        let routes = loaded.config.routes.iter();
        routes.map(|it| it.policy.reconcile_authorization.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(found(&loaded), [true, true, false, true]);
    let shown = loaded.shown().unwrap();
    let again = load(&[], &shown).unwrap_or_else(|error| panic!("{error}\n{shown}"));
    assert_eq!(found(&again), [true, true, false, true], "{shown}");
    // Only the routes reconcile, by another URL.
    let unused = r#"
        [gateway]
        upstream = "http://127.0.0.1:3000"
        [policy]
        reconcile_authorization = "none"
        [[route]]
        path = "/other"
        on_unknown = "reconcile"
        reconcile_url = "http://10.0.0.1/outcome"
    "#;
    let error = load(&[], unused).unwrap_err();
    assert!(error.starts_with("f.toml:5: ") && error.contains("does not inherit it"), "{error}");
}

#[test]
fn settings_of_reconciliation_without_effect_are_rejected_with_their_line() {
    let upstream = "[gateway]\nupstream = \"http://127.0.0.1:3000\"\n";
    let policy =
        "[policy]\non_unknown = \"reconcile\"\nreconcile_url = \"http://127.0.0.1:3000/o\"\n";
    let none = "reconcile_authorization = \"none\"";
    let memory = "store = \"memory:\"\n";
    let postgres = "store = \"postgres://h@db/h\"\nnamespace = \"pay\"\n";
    let secret = "secret_file = \"/etc/hapax/secret\"\n";
    let (never, off) = ("reconcile_every = \"0s\"\n", "admin = \"off\"\n");
    let needs = "--reconcile-authorization needs --secret-file: without a secret";
    for (gateway, more, line, expected) in [
        ([memory, ""], none, 7, needs),
        ([postgres, ""], none, 8, needs),
        ([memory, secret], none, 0, ""),
        ([postgres, secret], none, 0, ""),
        ([memory, ""], "", 0, ""),
        (
            [never, off],
            none,
            8,
            "--reconcile-authorization has no effect with --reconcile-every 0s and --admin off",
        ),
        // An operator may reconcile; the passes need no admin address.
        ([never, ""], none, 0, ""),
        ([off, ""], none, 0, ""),
        ([never, off], "", 0, ""),
        // The passes may be stopped for a time.
        ([never, "reconcile_limit = 7\n"], "", 0, ""),
    ] {
        let file = format!("{upstream}{}{policy}{more}", gateway.concat());
        match load(&[], &file) {
            Err(error) => {
                let found = format!("f.toml:{line}: {expected}");
                assert!(line > 0 && error.starts_with(&found), "{error}\n{file}");
            }
            Ok(loaded) => {
                assert_eq!(line, 0, "{expected}\n{file}");
                // What `--check` prints can be read again.
                load(&[], &loaded.shown().unwrap()).unwrap();
            }
        }
    }
}

#[test]
fn errors_name_the_line_of_the_setting() {
    let upstream = "[gateway]\nupstream = \"http://127.0.0.1:3000\"\n";
    for (flags, rest, expected) in [
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
            "f.toml:5: route /a: `observe` contradicts `protect = false`",
        ),
        (
            &[],
            "[[route]]\npath = \"/a\"\nprotect = true\nobserve = true",
            "f.toml:6: route /a: `observe` contradicts `protect = true`",
        ),
        (&[], "[policy]\nmethods = [\"ANY\"]", "f.toml:4: `ANY`: expected methods in upper case"),
        (&[], "[policy]\nlease = \"0s\"", "f.toml:4: --lease: the lease is zero"),
        (&[], "[policy]\nlease = \"99ms\"", "f.toml:4: --lease: the lease is shorter than 100ms"),
        (&[], "[policy]\nlease = \"25h\"", "f.toml:4: --retention and --lease: the retention"),
        (
            &[],
            "[policy]\nlease = \"5m\"\nretention = \"4m\"",
            "f.toml:5: --retention and --lease: the retention",
        ),
        (&[], "lsten = \"x\"", "f.toml:3: unknown field `lsten` in [gateway]"),
    ] {
        let error = load(flags, &format!("{upstream}{rest}")).unwrap_err();
        assert!(error.starts_with(expected), "{rest}: {error}");
    }
    let error = load(&[], "").unwrap_err();
    assert!(error.contains("--upstream is required"), "{error}");
}

const UPSTREAM: &str = "[gateway]\nupstream = \"http://127.0.0.1:3000\"\n";

#[test]
fn a_setting_without_effect_is_rejected() {
    for (rest, expected) in [
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
        assert!(error.starts_with(expected), "{rest}: {error}");
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
fn none_is_an_empty_list_of_headers() {
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
fn a_boolean_flag_takes_its_value_with_or_without_an_equals_sign() {
    let shown = |flags: &[&str]| {
        let flags = [&["--upstream=http://127.0.0.1:3000"], flags].concat();
        args(&flags).map(|args| args.load().unwrap().shown().unwrap())
    };
    let expected = shown(&["--expires=true", "--replay-set-cookie=false"]).unwrap();
    for flags in [
        &["--expires", "true", "--replay-set-cookie", "false"][..],
        &["--replay-set-cookie", "no", "--expires"],
    ] {
        assert_eq!(shown(flags).unwrap(), expected, "{flags:?}");
    }
    assert!(shown(&["--expires", "maybe"]).is_err());
}

#[test]
fn lists_may_have_spaces_as_flags_too() {
    let flags = [
        "--upstream=http://127.0.0.1:3000",
        "--methods=POST, PATCH",
        "--scope=authorization , x-tenant, cookie:sid",
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
fn a_misspelt_boolean_is_rejected() {
    for (text, value) in [("true", true), ("1", true), ("off", false), ("no", false)] {
        let args = args(&[&format!("--stream={text}")]).unwrap();
        assert_eq!(args.settings.0.policy["stream"], [value.to_string()], "{text}");
    }
    for text in ["ture", "flase", "2", ""] {
        for flag in ["stream", "expires", "replay-set-cookie", "cors-credentials"] {
            let error = args(&[&format!("--{flag}={text}")]).unwrap_err().to_string();
            assert!(error.contains(flag), "{text}: {error}");
        }
    }
}

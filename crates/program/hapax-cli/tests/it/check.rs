//! What `--check` says, and what is warned of.

use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use rustix::process::Signal;

use crate::world::{Gateway, Upstream, hapax, log_lines, refused};

const GATEWAY: &str = "[gateway]\nupstream = \"http://127.0.0.1:1\"\n";

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn check_reports_an_invalid_configuration_without_starting() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hapax.toml");
    let name = file.to_str().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("none.pem"), "none").unwrap();
    std::fs::write(path("bad.secret"), "none").unwrap();
    for (more, says) in [
        ("log_level = \"infoo\"".to_owned(), ":4: --log-level: `infoo` is no level"),
        ("log_level = \"info,a=infoo\"".to_owned(), ":4: --log-level"),
        ("log_level = \"hapax_gateway\"".to_owned(), ":4: --log-level: `hapax_gateway`"),
        ("store = \"redis://host:port/x\"".to_owned(), ":4: --store: redis://host:port/x: "),
        ("store = \"postgres://host:port/x\"".to_owned(), ":4: --store: postgres://host:port/x"),
        (
            "store = \"file:x.db\"\ncache = \"redis://h\"\nsecret_file = \"nowhere\"".to_owned(),
            ":6: --secret-file (HAPAX_SECRET_FILE): nowhere: ",
        ),
        (format!("secret_file = \"{}\"", path("bad.secret")), ":4: --secret-file ("),
        (
            format!("tls_cert = \"{}\"\ntls_key = \"nowhere.key\"", path("none.pem")),
            ":5: --tls-key: nowhere.key: ",
        ),
        (format!("tls_cert = \"{0}\"\ntls_key = \"{0}\"", path("none.pem")), ":4: --tls-cert: "),
    ] {
        let text = format!("{GATEWAY}listen = \"127.0.0.1:0\"\n{more}\n");
        let store = if more.contains("store") { "" } else { "store = \"memory:\"\n" };
        std::fs::write(&file, format!("{text}{store}admin = \"off\"\nnamespace = \"\"\n")).unwrap();
        for how in [&["--check"][..], &[]] {
            let (code, line) = refused(&[&["gateway", "--config", name], how].concat());
            let says = format!("hapax: {name}{says}");
            assert!(line.starts_with(&says), "{how:?}: {line}, not {says}");
            // A file may be there, or whole, at the next start.
            let may_end = says.contains("nowhere") || says.contains("--tls");
            assert_eq!(code, if may_end { 69 } else { 64 }, "{line}");
        }
    }
    assert!(!std::path::Path::new("x.db").exists());
    // Directives are none of that.
    let level = "--log-level=warn,hapax_gateway=debug,[a{b=1}]=trace,off,3";
    let checked = hapax(&["gateway", "--check", "--upstream=http://127.0.0.1:1", level]).output();
    assert!(checked.unwrap().status.success());
}

#[test]
fn unknown_variables_are_warned_of() {
    let of = |check: &[&str]| {
        let mut command =
            hapax(&[&["gateway", "--upstream", "http://127.0.0.1:1"], check].concat());
        command.env("HAPAX_ON_UNKOWN", "block").env("HAPAX_SERVICE_HOST", "10.0.0.1");
        command
    };
    let checked = of(&["--check"]).output().unwrap();
    assert!(checked.status.success());
    let warning = "HAPAX_ON_UNKOWN is no setting and is ignored: HAPAX_ON_UNKNOWN is one";
    assert_eq!(said(&checked), format!("hapax: warning: {warning}\n"));
    // The listener cannot be, so that it ends.
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = busy.local_addr().unwrap().to_string();
    let started =
        of(&["--admin=off", "--store=memory:", "--listen", &busy, "--log-format=json"]).output();
    let said = said(&started.unwrap());
    let line: serde_json::Value = serde_json::from_str(said.lines().next().unwrap()).unwrap();
    assert_eq!((&line["level"], &line["message"]), (&"WARN".into(), &warning.into()), "{said}");
}

#[test]
fn secrets_that_every_user_can_read_are_warned_of() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let file = folder.path().join("hapax.toml");
    let name = file.to_str().unwrap();
    let check = |text: &str, mode: u32| {
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let checked = hapax(&["gateway", "--config", name, "--check"]).output().unwrap();
        assert!(checked.status.success(), "{}", said(&checked));
        said(&checked)
    };
    for (field, value) in [
        ("cache", "redis://:s3cr3t@127.0.0.1"),
        ("store", "postgres://u:s3cr3t@127.0.0.1/x"),
        ("auth_url", "http://127.0.0.1:2/?s3cr3t"),
    ] {
        let text = format!("{GATEWAY}{field} = \"{value}\"\nnamespace = \"\"\n");
        let warned = check(&text, 0o644);
        let about =
            format!("hapax: warning: {name} can be read by every user of this machine, and");
        assert!(warned.starts_with(&format!("{about} `{field}`")), "{warned}");
        assert!(!warned.contains("s3cr3t"), "{warned}");
        assert_eq!(check(&text, 0o640), "");
    }
    let open = format!("{GATEWAY}store = \"postgres://u@127.0.0.1/x\"\nnamespace = \"\"\n");
    assert_eq!(check(&open, 0o644), "");
    let auth = "auth_url = \"http://127.0.0.1:2/?s3cr3t\"";
    let text = format!("[gateway]\nupstream = \"http://{}\"\n{auth}", upstream.address);
    check(&text, 0o644);
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", name]);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.contains("can be read by every user"), "{log}");
    assert!(log_lines(folder.path(), "draining").len() == 1);
}

#[test]
fn errors_do_not_repeat_values_that_may_be_secret() {
    let secret = "http://h/?token=s3cr3t x";
    for (variable, flag) in [
        ("HAPAX_AUTH_URL", "--auth-url"),
        ("HAPAX_JWT_KEYS", "--jwt-keys"),
        ("HAPAX_UPSTREAM", "--upstream"),
        ("HAPAX_RECONCILE_URL", "--reconcile-url"),
        ("HAPAX_STORE", "--store"),
        ("HAPAX_LISTEN", "--listen"),
        ("HAPAX_DOCS_URL", "--docs-url"),
    ] {
        let mut command = hapax(&["gateway", "--check", "--cors-origins=none"]);
        if variable != "HAPAX_UPSTREAM" {
            command.env("HAPAX_UPSTREAM", "http://127.0.0.1:1");
        }
        let output = command.env(variable, secret).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(flag) && !said.contains("s3cr3t"), "{said}");
    }
    let (code, line) = refused(&["gateway", "http://u:s3cr3t@h/"]);
    assert!(
        code == 64 && line.contains("unexpected argument") && !line.contains("s3cr3t"),
        "{line}"
    );
    let (code, line) = refused(&["gateway", "--upstrem", "http://127.0.0.1:3000"]);
    assert!(code == 64 && line.contains("did you mean --upstream?"), "{line}");
    // What is none is.
    let (code, line) = refused(&["gateway", "--lease", "soon"]);
    assert!(code == 64 && line.contains("'soon'"), "{line}");
    let hidden = ["gateway", "--upstream=http://h", "--auth-url", "http://h/?(hidden)"];
    let (code, line) = refused(&hidden);
    assert!(
        code == 64
            && line.contains("`(hidden)` is shown in place of a secret: give the secret itself"),
        "{line}"
    );
}

#[test]
fn check_with_method_and_path_prints_the_route_and_its_policy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hapax.toml");
    let name = file.to_str().unwrap();
    let routes = "[policy]\nlease = \"7s\"\n\
        [[route]]\npath = \"/payments/{*rest}\"\nname = \"money\"\nkey = \"required\"\n\
        on_unknown = \"block\"\n\
        [[route]]\npath = \"/payments/{id}/receipt\"\nprotect = false\n\
        [[route]]\npath = \"/orders\"\nobserve = true\n\
        [[route]]\npath = \"/loose/{*rest}\"\nscope = \"x-user\"\n";
    std::fs::write(&file, format!("{GATEWAY}{routes}")).unwrap();
    let check = |method: &str, path: &str| {
        let checked =
            hapax(&["gateway", "--config", name, "--check", method, path]).output().unwrap();
        assert!(checked.status.success(), "{}", said(&checked));
        String::from_utf8(checked.stdout).unwrap()
    };
    for (method, path, says) in [
        (
            "POST",
            "/payments/7?a=b",
            "# route /payments/{*rest} (money)\n# protected: without a key",
        ),
        ("POST", "/x/../%2570ayments", "# route /payments/{*rest} (money)\n# protected"),
        ("PUT", "/payments", "# not protected: PUT is not among the methods"),
        ("POST", "/payments/7/receipt", "# not protected: `protect = false`"),
        ("POST", "/orders", "# not protected: `observe = true` only counts"),
        ("POST", "/orders/7", "# no route\n# protected with a key"),
        ("POST", "/loose/..%2fpayments", "# rejected with 400 malformed-request: The path can be"),
        ("post", "/payments", "# rejected with 400 malformed-request: Expected the method"),
    ] {
        let shown = check(method, path);
        assert!(shown.contains(says), "{method} {path}: {shown}");
    }
    let shown = check("POST", "/payments/7");
    for says in ["\n[policy]\n", "\nkey = \"required\"\n", "\nlease = \"7s\"\n"] {
        assert!(shown.contains(says), "{shown}");
    }
    for (values, says) in [
        (&["POST"][..], "expects no value, or METHOD and PATH"),
        (&["POST", "payments"], "begins with a slash"),
        (&["PO ST", "/payments"], "expects a method"),
    ] {
        let (code, line) = refused(&[&["gateway", "--config", name, "--check"], values].concat());
        assert!(code == 64 && line.contains(says), "{line}");
    }
    // Forms of other routers would protect nothing.
    for (path, form) in [("/charges/*", "`{*rest}`"), ("/charges/:id", "`{id}`")] {
        std::fs::write(&file, format!("{GATEWAY}[[route]]\npath = \"{path}\"\n")).unwrap();
        let (code, line) = refused(&["gateway", "--config", name, "--check"]);
        assert!(code == 64 && line.contains("hapax.toml:4: ") && line.contains(form), "{line}");
    }
}

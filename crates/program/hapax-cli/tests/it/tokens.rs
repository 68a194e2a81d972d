//! Callers named by a claim of their token (wire.md 36), through the program.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use hapax_testkit::http::TestIssuer;
use serde_json::json;

use crate::world::{Answer, Gateway, Upstream, hapax, ok, receive, refused, send_to, store};

/// A payment with this token.
fn pay(gateway: &Gateway, upstream: Option<&Upstream>, key: &str, token: &str) -> Answer {
    let bearer = format!("Bearer {token}");
    let sent = send_to(gateway.address, "/pay", key, &[("authorization", &bearer)], "x");
    if let Some(upstream) = upstream {
        upstream.next().answer("201 Created", "paid");
    }
    receive(&sent).unwrap()
}

#[test]
fn w36_operators_name_the_caller_by_issuer_and_claim() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let issuer = TestIssuer::new("a", 1);
    let file = folder.path().join("keys.json");
    std::fs::write(&file, issuer.key_set()).unwrap();
    let file = file.to_str().unwrap();
    let more = [
        "--scope",
        "jwt:sub",
        "--jwt-keys",
        file,
        "--jwt-issuer",
        TestIssuer::ISSUER,
        "--jwt-audience",
        TestIssuer::AUDIENCE,
    ];
    let gateway = Gateway::logged(upstream.address, folder.path(), &more);
    let token = |jti: u32| issuer.token(&json!({ "sub": "anna", "jti": jti }));
    assert_eq!(pay(&gateway, Some(&upstream), "k", &token(1)).status, 201);
    let replay = pay(&gateway, None, "k", &token(2));
    assert_eq!((replay.status, replay.header("idempotency-replayed").as_str()), (201, "true"));
    let expired = pay(&gateway, None, "k", &issuer.token(&json!({ "sub": "anna", "exp": 1 })));
    assert_eq!((expired.status, expired.code().as_str()), (401, "invalid-token"));
    assert!(upstream.is_idle());

    // With the gateway there, and without.
    let caller = format!("jwt:sub: {} anna", TestIssuer::ISSUER);
    let store = store(folder.path());
    let show = ["keys", "show", "k", "--store", &store, "--scope", &caller];
    let hash = ["keys", "hash", "k", "--store", &store, "--scope", &caller];
    let find = ["keys", "find", "k", "--store", &store];
    let through = [ok(&show), ok(&hash), ok(&find)];
    assert!(through[0].contains("state        done\n"), "{}", through[0]);
    assert!(through[2].contains(&format!("{} anna", TestIssuer::ISSUER)), "{}", through[2]);
    gateway.kill();
    assert!(ok(&show).contains("state        done\n"));
    assert_eq!(ok(&hash), through[1]);
    // A token never reaches the log.
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(!log.contains("eyJ") && !log.contains("anna"), "{log}");
}

/// The name of a call is not used up by a token that has expired.
#[test]
fn a_call_with_an_expired_token_executes_nothing_and_continues_with_a_new_one() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let issuer = TestIssuer::new("a", 1);
    let file = folder.path().join("keys.json");
    std::fs::write(&file, issuer.key_set()).unwrap();
    let keys = ["--scope", "jwt:sub", "--jwt-keys", file.to_str().unwrap(), "--jwt-issuer"];
    let more = [TestIssuer::ISSUER, "--jwt-audience", TestIssuer::AUDIENCE];
    let gateway = Gateway::logged(upstream.address, folder.path(), &[&keys[..], &more].concat());
    let url = format!("http://{}/pay", gateway.address);
    let journal = folder.path().join("calls.db");
    let words = ["call", "--name", "invoice-17", "--server", "hapax", "POST", &url, "--journal"];
    let words =
        [&words[..], &[journal.to_str().unwrap(), "--header-env", "authorization=TOKEN"]].concat();
    let call = |claims: &serde_json::Value| {
        let mut call = hapax(&words);
        call.env("TOKEN", format!("Bearer {}", issuer.token(claims)));
        call.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for _ in 0..2 {
        let expired = call(&json!({ "sub": "anna", "exp": 1 })).wait_with_output().unwrap();
        let said = String::from_utf8(expired.stderr).unwrap();
        assert_eq!(expired.status.code(), Some(77), "{said}");
        let line = said.lines().last().unwrap();
        assert!(
            line.contains("401 `invalid-token`") && line.contains("executed nothing"),
            "{said}"
        );
    }
    assert!(upstream.is_idle());
    let renewed = call(&json!({ "sub": "anna" }));
    upstream.next().answer("201 Created", "paid");
    let renewed = renewed.wait_with_output().unwrap();
    assert_eq!(
        (renewed.status.code(), &renewed.stdout[..]),
        (Some(0), &b"paid"[..]),
        "{renewed:?}"
    );
}

#[test]
fn renewed_tokens_that_are_the_scope_are_logged_once_a_minute() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::logged(upstream.address, folder.path(), &[]);
    let issuer = TestIssuer::new("a", 1);
    let token = |jti: u32| issuer.token(&json!({ "sub": "anna", "jti": jti }));
    for jti in 0..4 {
        assert_eq!(pay(&gateway, Some(&upstream), "k", &token(jti)).status, 201);
    }
    assert_eq!(gateway.metric("hapax_same_request_other_caller_total"), 3);
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let lines: Vec<_> =
        log.lines().filter(|line| line.contains("executed for two callers")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("scope = jwt:CLAIM"), "{lines:?}");
}

#[test]
fn an_invalid_setting_of_tokens_is_one_line_and_exit_code_64() {
    let folder = tempfile::tempdir().unwrap();
    let [file, missing] = ["keys.json", "missing.json"].map(|it| folder.path().join(it));
    std::fs::write(&file, "{\"keys\": []}").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let [file, missing] = [&file, &missing].map(|it| it.to_str().unwrap());
    let store = format!("file:{}", folder.path().join("hapax.db").display());
    let gateway =
        ["gateway", "--upstream", "http://127.0.0.1:1", "--store", &store, "--admin", "off"];
    let claim = ["--scope", "jwt:sub"];
    let rest = ["--jwt-issuer", "https://a", "--jwt-audience", "b"];
    let keys = |keys: &'static str| ["--jwt-keys", keys];
    for (more, code, says) in [
        (
            &claim[..],
            64,
            "--scope jwt:CLAIM needs --jwt-keys, --jwt-issuer and --jwt-audience, or --auth-url",
        ),
        (&[&claim[..], &rest].concat(), 64, "--jwt-issuer needs --jwt-keys"),
        (&[&claim[..], &keys("keys.json")].concat(), 64, "--jwt-keys needs --jwt-issuer"),
        (&keys("keys.json")[..], 64, "--jwt-keys needs --scope jwt:CLAIM"),
        (
            &[&rest[..], &["--auth-url", "http://127.0.0.1:2"]].concat(),
            64,
            "--jwt-issuer needs --scope",
        ),
        (&[&claim[..], &keys("ftp://a/b"), &rest].concat(), 64, "--jwt-keys must be a file"),
        (&[&claim[..], &keys(""), &rest].concat(), 64, "--jwt-keys"),
        (&["--scope", "jwt:"], 64, "--scope"),
        (&["--scope", "jwt:a b"], 64, "--scope"),
        (&[&claim[..], &["--jwt-keys", file], &rest].concat(), 64, "expected a public key"),
        // It may be there at another start.
        (&[&claim[..], &["--jwt-keys", missing], &rest].concat(), 69, "missing.json"),
    ] {
        let (found, line) = refused(&[&gateway[..], more].concat());
        assert!(found == code && line.contains(says), "{found} {line:?} for {more:?}");
    }
    assert!(!folder.path().join("hapax.db").exists());
}

//! Forward authorisation through the program.

use crate::world::{Answer, Gateway, Upstream, log_line, ok, receive, refused, send, store};

/// A payment whose caller the auth URL says is Alice.
fn allowed(gateway: &Gateway, auth: &Upstream, upstream: Option<&Upstream>) -> Answer {
    let asked = send(gateway.address, "k", "x");
    let question = auth.next();
    assert!(question.head.starts_with("GET /check?secret=1 HTTP/1.1\r\n"), "{}", question.head);
    assert_eq!(question.header("authorization"), "Bearer a");
    assert_eq!(question.header("x-forwarded-method"), "POST");
    assert_eq!(question.header("x-forwarded-uri"), "/pay");
    question.answer("200 OK\r\nx-user: alice\r\nx-role: buyer", "");
    if let Some(upstream) = upstream {
        let request = upstream.next();
        assert_eq!(
            (request.header("x-user"), request.header("x-role")),
            ("alice".into(), "buyer".into())
        );
        request.answer("201 Created", "paid");
    }
    receive(&asked).unwrap()
}

#[test]
fn revoked_credentials_get_no_replay() {
    let (upstream, auth) = (Upstream::start(), Upstream::start());
    let folder = tempfile::tempdir().unwrap();
    let url = format!("http://{}/check?secret=1", auth.address);
    let more = ["--auth-url", &url, "--auth-scope", "x-user", "--auth-copy", "X-Role,x-level"];
    let gateway = Gateway::logged(upstream.address, folder.path(), &more);
    let first = allowed(&gateway, &auth, Some(&upstream));
    assert_eq!((first.status, first.header("idempotency-replayed").as_str()), (201, "false"));

    let asked = send(gateway.address, "k", "x");
    auth.next().answer("401 Unauthorized\r\nwww-authenticate: Bearer", "revoked");
    let denied = receive(&asked).unwrap();
    assert_eq!((denied.status, denied.body.as_str()), (401, "revoked"));
    assert_eq!(denied.header("www-authenticate"), "Bearer");

    let asked = send(gateway.address, "k", "x");
    drop(auth.next());
    // A question that broke off is asked once more.
    drop(auth.next());
    let away = receive(&asked).unwrap();
    assert_eq!((away.status, away.code().as_str()), (503, "auth-unavailable"));

    let replay = allowed(&gateway, &auth, None);
    assert_eq!(replay.header("idempotency-replayed"), "true");
    assert_eq!(replay.body, first.body);
    assert!(upstream.is_idle());

    let ready = log_line(folder.path(), "ready");
    assert_eq!(ready["auth"], format!("http://{}/check", auth.address), "{ready}");
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(!log.contains("secret=1") && !log.contains("Bearer a"), "{log}");
    log_line(folder.path(), "the auth URL gave no usable response: requests with a key get 503");

    // Operators name the caller as the auth URL does, with the gateway there or not.
    let at = ["keys", "show", "k", "--store", &store(folder.path()), "--scope", "x-user: alice"];
    let through = ok(&at);
    assert!(through.contains("state        done\n"), "{through}");
    gateway.kill();
    assert!(ok(&at).contains("state        done\n"));
}

#[test]
fn an_invalid_auth_setting_is_one_line_and_exit_code_64() {
    let upstream = ["gateway", "--upstream", "http://127.0.0.1:1"];
    let url = ["--auth-url", "http://127.0.0.1:2/check"];
    for (more, says) in [
        (&["--auth-scope", "x-user"][..], "needs --auth-url"),
        (&["--auth-copy", "x-user"], "needs --auth-url"),
        (&["--auth-url", "/check"], "--auth-url must be"),
        (&[&url[..], &["--auth-timeout", "2"]].concat(), "--auth-timeout"),
        (&[&url[..], &["--auth-timeout", "0s"]].concat(), "--auth-timeout is zero"),
        (&[&url[..], &["--auth-scope", "a b"]].concat(), "--auth-scope"),
        (&[&url[..], &["--auth-copy", "cookie"]].concat(), "--auth-copy cannot be `cookie`"),
        (
            &[&url[..], &["--auth-scope", "x-user", "--scope", "authorization"]].concat(),
            "contradicts --scope",
        ),
    ] {
        let (code, line) = refused(&[&upstream[..], more].concat());
        assert!(code == 64 && line.contains(says), "{code} {line:?} for {more:?}");
    }
}

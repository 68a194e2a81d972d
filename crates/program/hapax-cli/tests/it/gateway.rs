//! `hapax gateway` as a process: how it starts, drains, dies and comes back.

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rustix::process::Signal;

use crate::world::{
    Gateway, Upstream, log_line, log_lines, ok, post, receive, refused, run, send, store,
    wait_for_log,
};

#[test]
fn an_invalid_setting_is_one_line_and_exit_code_64() {
    let upstream = ["gateway", "--upstream", "http://127.0.0.1:1"];
    for (more, says) in [
        (&["--lease", "30"][..], "--lease"),
        (&["--max-request-body", "1MB"], "--max-request-body"),
        (&["--listen", "localhost:8080"], "like 127.0.0.1:8080"),
        (&["--admin", "localhost:9090"], "like 127.0.0.1:9090, or `off`"),
        (&["--store", "postgress://user:pass@host/db"], "--store: a store is `memory:`"),
        (&["--cache", "http://user:pass@host"], "--cache: a cache is `memory:`"),
        (&["--store", "sqlite:x"], "memory:"),
        (&["--profile", "odd"], "stripe-v1"),
        (&["--scope", "a b"], "--scope"),
        (&["--scope", "authorization,none"], "stands alone"),
        (&["--docs-url", "docs"], "--docs-url"),
        (&["--on-unknown", "reconcile"], "--reconcile-url"),
        (&["--log-level", "x=y=z"], "--log-level"),
        (&["--no-such-flag"], "--no-such-flag"),
        (&["--scope", "x-forwarded-for"], "x-forwarded-for"),
        (&["--retention", "4000d"], "--retention"),
        (&["--on-unknown", "block", "--reconcile-url", "http://a/"], "--reconcile-url"),
        (&["--tls-cert", "/nowhere/at/all"], "set both"),
        (&["--tls-client-ca", "/nowhere/at/all"], "needs --tls-cert"),
        (&["--upstream-key", "/nowhere/at/all"], "set both"),
        (&["--upstream-protocol", "spdy"], "--upstream-protocol"),
        (&["--trust-forwarded", "10.0.0.0/99"], "10.0.0.0/8"),
        (&["--trust-forwarded", "loopback,none"], "stands alone"),
        (&["--max-streams", "0"], "--max-streams"),
        (&["--connect-timeout", "0s"], "--connect-timeout"),
    ] {
        let (code, line) = refused(&[&upstream[..], more].concat());
        assert!(code == 64 && line.contains(says), "{code} {line:?} for {more:?}");
        assert!(!line.contains("pass@"), "{line:?} tells a password");
    }
    assert_eq!(refused(&["gateway"]).0, 64);
    for (flags, flag) in [
        (&["--upstream", "http://me:hidden@127.0.0.1:1"][..], "--upstream"),
        (&[&upstream[1..], &["--auth-url", "http://me:hidden@a/"]].concat(), "--auth-url"),
        (
            &[
                &upstream[1..],
                &["--on-unknown", "reconcile", "--reconcile-url", "http://me:hidden@a/"],
            ]
            .concat(),
            "--reconcile-url",
        ),
    ] {
        let (code, line) = refused(&[&["gateway"], flags].concat());
        let says = format!("{flag} must be a URL without a user name and password");
        assert!(code == 64 && line.contains(&says) && !line.contains("hidden"), "{code} {line}");
    }
    let (code, line) = refused(&["gateway", "--upstream", "http://127.0.0.1:65536"]);
    assert!(code == 64 && line.contains("--upstream must be"), "{code} {line}");
    assert_eq!(run(&[]).status.code(), Some(64));
}

#[test]
fn what_another_start_may_find_is_one_line_and_exit_code_69() {
    let secure = ["gateway", "--upstream", "https://127.0.0.1:1", "--store", "memory:"];
    for more in [
        &["--secret-file", "/nowhere/at/all"][..],
        &["--tls-cert", "/nowhere/at/all", "--tls-key", "/nowhere"],
        &["--upstream-ca", "/nowhere/at/all"],
        &["--access-log", "/nowhere/at/all"],
        // An address of no interface.
        &["--listen", "192.0.2.1:1"],
    ] {
        let (code, line) = refused(&[&secure[..], &["--admin", "off"], more].concat());
        assert!(code == 69 && line.contains(more[1]), "{code} {line:?} for {more:?}");
    }
}

#[test]
fn a_second_gateway_on_one_file_is_one_line_and_exit_code_69() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let first = Gateway::start(upstream.address, folder.path(), &[]);
    let store = store(folder.path());
    let upstream = format!("http://{}", upstream.address);
    let arguments = ["gateway", "--upstream", &upstream, "--store", &store];
    let free = ["--listen", "127.0.0.1:0", "--admin", "off"];
    let (code, line) = refused(&[&arguments[..], &free].concat());
    assert_eq!(code, 69);
    assert!(line.contains(&format!("process {}", first.id())), "{line}");
    assert!(line.contains(&first.admin.to_string()), "{line}");

    let taken = first.address.to_string();
    let (code, line) = refused(&[&arguments[..], &["--listen", &taken]].concat());
    assert!(code == 69 && line.contains(&taken), "{code} {line}");
}

#[test]
fn a_missing_secret_is_one_line_and_makes_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let arguments = ["gateway", "--upstream", "http://127.0.0.1:1", "--store", &store];
    let secret = folder.path().join("secret").display().to_string();
    let named = [&arguments[..], &["--secret-file", &secret]].concat();
    let anywhere = ["--listen", "127.0.0.1:0", "--admin", "off"];
    let (code, line) = refused(&[&named[..], &anywhere].concat());
    assert!(code == 69 && line.contains(&secret), "{code} {line}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was made");
    let keys = ["keys", "list", "--secret-file", &secret, "--store", "postgres://127.0.0.1:1/x"];
    let (code, line) = refused(&keys);
    assert!(code == 69 && line.contains(&secret), "{code} {line}");

    // One that a gateway made for itself, and that somebody lost.
    let upstream = Upstream::start();
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
    std::fs::remove_file(folder.path().join("hapax.db.secret")).unwrap();
    let (code, line) = refused(&[&arguments[..], &anywhere].concat());
    assert!(code == 64 && line.contains("hapax.db.secret"), "{code} {line}");
}

#[test]
fn sighup_without_a_file_does_not_affect_requests() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    gateway.signal(Signal::HUP);
    let asked = send(gateway.address, "k", "x");
    upstream.next().answer("201 Created", "here still");
    assert_eq!(receive(&asked).unwrap().body, "here still");
    gateway.signal(Signal::HUP);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
}

#[test]
fn sigterm_drains_and_ends_with_0() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let (address, asked) = (gateway.address, send(gateway.address, "k", "x"));
    let waiting = upstream.next();
    gateway.signal(Signal::TERM);
    while TcpStream::connect(address).is_ok() {
        std::thread::yield_now();
    }
    waiting.answer("201 Created", "done");
    let answer = receive(&asked).unwrap();
    assert_eq!((answer.status, answer.body.as_str()), (201, "done"));
    assert_eq!(gateway.wait(), 0);

    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    assert_eq!(post(gateway.address, "k", "x").header("idempotency-replayed"), "true");
}

#[test]
fn a_request_without_a_response_at_the_drain_timeout_is_unknown() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let block = ["--on-unknown", "block", "--drain-timeout", "100ms"];
    let gateway = Gateway::start(upstream.address, folder.path(), &block);
    let asked = send(gateway.address, "k", "x");
    let _never = upstream.next();
    gateway.signal(Signal::TERM);
    assert_eq!(receive(&asked).unwrap().code(), "upstream-broken");
    assert_eq!(gateway.wait(), 0);
    let listed = ok(&["keys", "list", "--store", &store(folder.path()), "--state", "unknown"]);
    let unknown = listed.lines().filter(|line| line.starts_with("unknown ")).count();
    assert_eq!(unknown, 1, "{listed}");
}

#[test]
fn a_second_sigterm_ends_at_once() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &["--drain-timeout", "1h"]);
    let (address, _asked) = (gateway.address, send(gateway.address, "k", "x"));
    let _never = upstream.next();
    gateway.signal(Signal::TERM);
    while TcpStream::connect(address).is_ok() {
        std::thread::yield_now();
    }
    // One a second later or more; which of these is one does not matter.
    assert_eq!(gateway.wait_telling(Signal::TERM), 128 + 15);
}

#[test]
fn two_sigterms_at_once_are_one() {
    two_at_once_are_one(Signal::TERM);
}

#[test]
fn two_interrupts_at_once_are_one() {
    two_at_once_are_one(Signal::INT);
}

fn two_at_once_are_one(signal: Signal) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--drain-timeout", "1h"]);
    let asked = send(gateway.address, "k", "x");
    let waiting = upstream.next();
    gateway.signal(signal);
    // Until the first has been heard, so that the kernel does not make one of both.
    let log = || std::fs::read_to_string(folder.path().join("log")).unwrap();
    while !log().contains("draining") {
        std::thread::yield_now();
    }
    gateway.signal(signal);
    waiting.answer("201 Created", "done");
    assert_eq!(receive(&asked).map(|answer| answer.body), Some("done".into()));
    assert_eq!(gateway.wait(), 0);
    assert!(log().contains("counts as one with the first"), "{}", log());
}

#[test]
fn the_log_has_the_policies_and_requests_without_a_response() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    // Nothing is said of `on_unknown`.
    let more = ["--in-flight", "wait", "--lease", "10s"];
    let gateway = Gateway::logged(upstream.address, folder.path(), &more);
    let asked = send(gateway.address, "a-key", "x");
    drop(upstream.next());
    assert_eq!(receive(&asked).unwrap().code(), "upstream-broken");

    let ready = log_line(folder.path(), "ready");
    let url = format!("http://{}/", upstream.address);
    for (name, value) in [("upstream", url.as_str()), ("store", &store(folder.path()))] {
        assert_eq!(ready[name], value, "{name} in {ready}");
    }
    let policy = log_line(folder.path(), "policy");
    for (name, value) in [
        ("route", "(any other)"),
        ("on_unknown", "block"),
        ("in_flight", "wait for 5s"),
        ("lease", "10s"),
    ] {
        assert_eq!(policy[name], value, "{name} in {policy}");
    }
    let failed = log_line(folder.path(), "a request got no answer");
    assert_eq!((&failed["method"], &failed["path"]), (&"POST".into(), &"/pay".into()), "{failed}");
    let id = failed["id"].as_str().unwrap();
    let shown = ok(&["keys", "show", "--id", id, "--store", &store(folder.path())]);
    assert!(shown.contains("state        unknown\n"), "{shown}");
    let unknown = log_line(folder.path(), "an execution ended and its outcome is unknown");
    assert!(unknown["operation"] == id && unknown["attempt"] == 1, "{unknown}");
    assert!(unknown["route"].is_string() && unknown["reason"].is_string(), "{unknown}");
}

/// A process that has a file to itself knows what it executes, whatever its clock says.
#[test]
fn a_gateway_that_was_frozen_past_a_lease_executes_nothing_a_second_time() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let more = ["--lease", "1s", "--on-unknown", "reexecute"];
    let gateway = Gateway::start(upstream.address, folder.path(), &more);
    let asked = send(gateway.address, "k", "x");
    let waiting = upstream.next();
    gateway.signal(Signal::STOP);
    // Longer than the lease, however fast the machine is.
    assert!(upstream.next_within(Duration::from_secs(3)).is_none());
    gateway.signal(Signal::CONT);
    for _ in 0..3 {
        let duplicate = post(gateway.address, "k", "x");
        assert_eq!((duplicate.status, &*duplicate.code()), (409, "in-flight"), "{duplicate:?}");
    }
    waiting.answer("201 Created", "once");
    assert_eq!(receive(&asked).unwrap().body, "once");
    let replay = post(gateway.address, "k", "x");
    assert_eq!((&*replay.body, &*replay.header("idempotency-replayed")), ("once", "true"));
    assert!(upstream.is_idle());
}

/// A gateway, killed while the upstream works on a request, and started again.
fn killed_and_back(upstream: &Upstream, folder: &std::path::Path, more: &[&str]) -> (Gateway, u64) {
    let gateway = Gateway::start(upstream.address, folder, more);
    let (listen, asked) = (gateway.address.to_string(), send(gateway.address, "k", "x"));
    let waiting = upstream.next();
    assert_eq!(waiting.header("idempotency-attempt"), "1");
    let fence = waiting.header("idempotency-fence").parse().unwrap();
    gateway.kill();
    assert_eq!(receive(&asked), None);
    waiting.answer("201 Created", "nobody hears this");
    let again = [&["--listen", &listen], more].concat();
    (Gateway::start(upstream.address, folder, &again), fence)
}

#[test]
fn after_sigkill_reexecute_executes_again_with_a_larger_fence() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let (gateway, fence) =
        killed_and_back(&upstream, folder.path(), &["--on-unknown", "reexecute"]);
    let asked = send(gateway.address, "k", "x");
    let waiting = upstream.next();
    assert_eq!(waiting.header("idempotency-attempt"), "2");
    assert!(waiting.header("idempotency-fence").parse::<u64>().unwrap() > fence);
    waiting.answer("201 Created", "second");
    assert_eq!(receive(&asked).unwrap().body, "second");
}

#[test]
fn after_sigkill_block_rejects_retries_until_an_operator_decides() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let (gateway, fence) = killed_and_back(&upstream, folder.path(), &[]);
    for _ in 0..2 {
        let answer = post(gateway.address, "k", "x");
        assert_eq!((answer.status, answer.code().as_str()), (409, "outcome-unknown"));
    }
    let at = ["--store", &store(folder.path()), "--scope", "Bearer a"];
    let shown = ok(&[&["keys", "show", "k"], &at[..]].concat());
    assert!(shown.contains("state        unknown\n"), "{shown}");
    assert!(shown.contains(&format!("fence        {fence}\n")), "{shown}");
    // The service may work on after the gateway has gone.
    assert!(shown.contains("\nmay execute  until 20"), "{shown}");
    let listed = ok(&["keys", "list", "--state", "unknown", at[0], at[1]]);
    assert!(listed.contains("\n          may still execute until 20"), "{listed}");
    let did_not = ["--outcome", "did-not-happen", "--reason", "not in the ledger"];
    let (code, line) = refused(&[&["keys", "resolve", "k"], &at[..], &did_not].concat());
    assert!(code == 1 && line.contains("may still execute until 20"), "{code} {line}");
    assert!(line.ends_with("with `force` (--force)"), "{line}");
    let decision = ["--outcome", "happened", "--status", "201", "--body", "as it was"];
    let decision = [&decision[..], &["--reason", "the service has it"]].concat();
    ok(&[&["keys", "resolve", "k"], &at[..], &decision].concat());
    let answer = post(gateway.address, "k", "x");
    assert_eq!((answer.status, answer.body.as_str()), (201, "as it was"));
    assert_eq!(answer.header("idempotency-replayed"), "true");
    assert!(upstream.is_idle());
}

#[test]
fn after_sigkill_reconcile_sends_a_reconcile_request() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = format!("http://{}/outcome", upstream.address);
    let more = ["--on-unknown", "reconcile", "--reconcile-url", &url, "--upstream-timeout", "2s"];
    let (gateway, fence) = killed_and_back(&upstream, folder.path(), &more);
    // What the dead gateway sent may still be running for as long as the upstream has.
    let (asked, question) = loop {
        let asked = send(gateway.address, "k", "x");
        match upstream.next_within(Duration::from_millis(100)) {
            Some(question) => break (asked, question),
            None => assert_eq!(receive(&asked).unwrap().code(), "outcome-unknown"),
        }
    };
    assert!(question.head.starts_with("GET /outcome HTTP/1.1\r\n"), "{}", question.head);
    assert_eq!(question.header("idempotency-key"), "k");
    assert_eq!(question.header("idempotency-fence"), fence.to_string());
    assert_eq!(question.header("authorization"), "Bearer a");
    question.answer("200 OK\r\nidempotency-status: 201", "it was made");
    let answer = receive(&asked).unwrap();
    assert_eq!((answer.status, answer.body.as_str()), (201, "it was made"));
    assert!(upstream.is_idle());
}

#[test]
fn executions_that_a_hook_allows_and_failed_probes_are_logged() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = format!("http://{}/outcome", upstream.address);
    let more = ["--on-unknown", "reconcile", "--reconcile-url", &url];
    let gateway = Gateway::logged(upstream.address, folder.path(), &more);
    wait_for_log(folder.path(), "the reconcile URL passed its probe", 1);
    let asked = send(gateway.address, "k", "x");
    let first = upstream.next();
    let fence = first.header("idempotency-fence");
    drop(first);
    assert_eq!(receive(&asked).unwrap().code(), "upstream-broken");
    let asked = send(gateway.address, "k", "x");
    upstream.next().answer("404 Not Found\r\nidempotency-outcome: did-not-happen", "");
    upstream.next().answer("201 Created", "second");
    assert_eq!(receive(&asked).unwrap().body, "second");
    let allowed = log_line(folder.path(), "the reconcile hook allows an execution");
    assert_eq!(allowed["did_not_happen"], fence.as_str(), "{allowed}");
    drop(gateway);

    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{gone}/outcome?token=secret");
    let more = ["--on-unknown", "reconcile", "--reconcile-url", &url];
    let _gateway = Gateway::logged(upstream.address, folder.path(), &more);
    wait_for_log(folder.path(), "the reconcile URL failed its probe", 1);
    let failed = log_line(folder.path(), "the reconcile URL failed its probe");
    assert_eq!(failed["level"], "WARN", "{failed}");
    assert_eq!(failed["url"], format!("http://{gone}/outcome"), "{failed}");
}

#[test]
fn a_secret_readable_by_others_is_reported_at_start_and_by_the_doctor() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let doctor = || ok(&["doctor", "--store", &store(folder.path())]);
    let warnings = || log_lines(folder.path(), "other users can read this secret: chmod 600 it");
    Gateway::logged(upstream.address, folder.path(), &[]).kill();
    assert_eq!(warnings(), Vec::<serde_json::Value>::new());
    assert!(!doctor().contains("users other than its owner can read"), "{}", doctor());

    for (name, mode) in [("hapax.db.secret", 0o640), ("hapax.db.admin-token", 0o604)] {
        let path = folder.path().join(name);
        let set = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(mode);
        let gateway = Gateway::logged(upstream.address, folder.path(), &[]);
        let warned = warnings();
        assert_eq!(warned.len(), 1, "{name}: {warned:?}");
        assert_eq!(warned[0]["path"], path.to_str().unwrap());
        gateway.kill();
        let found = doctor();
        let line = found.lines().find(|line| line.contains("users other than its owner can read"));
        let line = line.unwrap_or_else(|| panic!("{name}: {found}"));
        assert!(line.starts_with("risk") && line.contains(path.to_str().unwrap()), "{line}");
        set(0o600);
    }
}

#[test]
fn the_doctor_probes_the_reconcile_url() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let file = folder.path().join("hapax.toml");
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (at, code, says) in [(upstream.address, 0, "fine"), (gone, 1, "broken")] {
        let text = format!(
            "[policy]\non_unknown = \"reconcile\"\nreconcile_url = \"http://{at}/outcome\"\n"
        );
        std::fs::write(&file, text).unwrap();
        let arguments = ["doctor", "--config", file.to_str().unwrap(), "--store", "memory:"];
        let output = crate::world::hapax(&arguments).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let line = said.lines().find(|line| line.contains("reconcile: ")).unwrap_or_else(|| {
            panic!("no line in {said}{}", String::from_utf8_lossy(&output.stderr))
        });
        assert!(line.starts_with(says) && line.contains(&format!("http://{at}/outcome")), "{line}");
        assert_eq!(output.status.code(), Some(code), "{said}");
    }
}

#[test]
fn settings_are_read_from_the_environment() {
    let upstream = Upstream::start();
    let mut command = crate::world::hapax(&["gateway", "--admin", "off", "--lease", "0s"]);
    command.env("HAPAX_UPSTREAM", format!("http://{}", upstream.address));
    command.env("HAPAX_STORE", "memory:").env("HAPAX_LEASE", "1h");
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    // The flag wins.
    assert!(said.contains("the lease is zero"), "{said}");
}

#[test]
fn neither_keys_nor_callers_are_logged() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = format!("http://{}", upstream.address);
    let arguments = [
        "gateway",
        "--upstream",
        &url,
        "--store",
        &store(folder.path()),
        "--admin",
        "127.0.0.1:0",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "trace",
        "--log-format",
        "json",
    ];
    let log = folder.path().join("log");
    let mut child = crate::world::hapax(&arguments)
        .stdout(std::process::Stdio::piped())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    let address = line.split([' ', ',']).find_map(|word| word.strip_prefix("http://")).unwrap();
    let address = address.parse().unwrap();
    let asked = send(address, "a-secret-key", "x");
    upstream.next().answer("201 Created", "x");
    receive(&asked).unwrap();
    assert_eq!(post(address, "a-secret-key", "another").code(), "key-reused");
    // And one whose upstream breaks off, which is worth a warning.
    let asked = send(address, "a-secret-key-too", "x");
    drop(upstream.next());
    assert_eq!(receive(&asked).unwrap().code(), "upstream-broken");
    child.kill().unwrap();
    child.wait().unwrap();
    let logged = std::fs::read_to_string(log).unwrap();
    assert!(logged.contains("a request got no answer"), "{logged}");
    for line in logged.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|_| panic!("{line}"));
    }
    assert!(!logged.contains("a-secret-key"), "{logged}");
    assert!(!logged.contains("Bearer a"), "{logged}");
}

//! What SIGHUP does with files that are not as they should be.

use std::path::Path;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustix::process::Signal;
use serde_json::Value;

use crate::world::{Gateway, Upstream, log_lines, receive, send, send_to, wait_for_log};

const REFUSED: &str = "SIGHUP: the reload was rejected; the configuration in force stays";
const RELOADED: &str = "SIGHUP: reloaded, for requests from now on";
const CERTIFICATES: &str = "SIGHUP: certificates were read again";

/// A file in `folder`, in front of an upstream, with this at its end.
fn write(folder: &Path, upstream: &Upstream, more: &str) -> String {
    let file = folder.join("hapax.toml");
    let new = folder.join("new.toml");
    std::fs::write(&new, format!("[gateway]\nupstream = \"http://{}\"\n{more}", upstream.address))
        .unwrap();
    std::fs::rename(&new, &file).unwrap();
    file.display().to_string()
}

#[test]
fn a_removed_route_is_logged() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let routes = "[[route]]\npath = \"/a\"\n[[route]]\npath = \"/b\"\nkey = \"required\"\n";
    let file = write(folder.path(), &upstream, routes);
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", &file]);
    write(folder.path(), &upstream, &routes[..routes.rfind("[[route]]").unwrap()]);
    gateway.signal(Signal::HUP);
    wait_for_log(folder.path(), RELOADED, 1);
    let gone = log_lines(
        folder.path(),
        "a route was removed from the file: its requests follow the other routes or [policy]",
    );
    assert_eq!(gone.iter().map(|line| &line["path"]).collect::<Vec<_>>(), ["/b"]);
    // Nothing is read that is not there.
    assert_eq!(log_lines(folder.path(), CERTIFICATES).len(), 0);
}

#[test]
fn the_policy_of_every_route_is_logged_at_start_and_after_a_reload() {
    const MAY_TWICE: &str =
        "on_unknown = reexecute: after a crash, a time-out or a 5xx a retry may execute twice";
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let routes = |of_b: &str| {
        format!("[[route]]\npath = \"/a\"\n[[route]]\npath = \"/b\"\non_unknown = \"{of_b}\"\n")
    };
    let file = write(folder.path(), &upstream, &routes("reexecute"));
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", &file]);
    let said = |from: usize, to: usize| -> Vec<(String, String)> {
        wait_for_log(folder.path(), "policy", to);
        let lines = log_lines(folder.path(), "policy");
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let of = |line: &serde_json::Value| (text(&line["route"]), text(&line["on_unknown"]));
        lines[from..to].iter().map(of).collect()
    };
    let held = |of_b: &str| {
        [("/a", "block"), ("/b", of_b), ("(any other)", "block")]
            .map(|(route, policy)| (route.to_owned(), policy.to_owned()))
    };
    let warned = || -> Vec<_> {
        let lines = log_lines(folder.path(), MAY_TWICE);
        assert!(lines.iter().all(|line| line["level"] == "WARN"), "{lines:?}");
        lines.iter().map(|line| line["route"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(said(0, 3), held("reexecute"));
    wait_for_log(folder.path(), MAY_TWICE, 1);
    assert_eq!(warned(), ["/b"]);

    for (round, of_b) in [(1, "block"), (2, "reexecute")] {
        write(folder.path(), &upstream, &routes(of_b));
        gateway.signal(Signal::HUP);
        wait_for_log(folder.path(), RELOADED, round);
        assert_eq!(said(3 * round, 3 * round + 3), held(of_b));
    }
    wait_for_log(folder.path(), MAY_TWICE, 2);
    assert_eq!(warned(), ["/b", "/b"]);
}

/// A reload may be the reason for which nothing decides about an operation whose client does not retry.
#[test]
fn a_reload_that_leaves_abandoned_operations_to_their_retries_warns() {
    const OF_SETTINGS: &str = "on_unknown = reconcile: records do not have the credentials of callers, so after a crash \
        an operation waits for a retry of its client or for an operator; set reconcile_authorization to a file, or to \
        \"none\" if the reconcile URL needs no credentials";
    const OF_RECORDS: &str = "the reconcile URL is not requested about undecided operations without a retry: their \
        retries or an operator decide; `hapax keys reconcile --all` prints the reason for each";
    const STOPPED: &str = "no route has on_unknown = reconcile any more: operations whose outcome is unknown, which the \
        reconcile URL was requested about without a retry, now wait for a retry or an operator; `hapax keys list --state \
        unknown` lists them";
    const IDLE: &str = "reconcile_every has no effect: no protected route has on_unknown = reconcile, so that nothing is \
        reconciled without a retry";
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let routes = |path: &str, authorization: &str| {
        let url = format!("http://{}{path}", upstream.address);
        format!(
            "reconcile_every = \"200ms\"\n[policy]\non_unknown = \"reconcile\"\nreconcile_url = \"{url}\"\n{authorization}\n"
        )
    };
    let none = "reconcile_authorization = \"none\"";
    let file = write(folder.path(), &upstream, &routes("/outcome", none));
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", &file]);
    let reload = |round, more: &str| {
        write(folder.path(), &upstream, more);
        gateway.signal(Signal::HUP);
        wait_for_log(folder.path(), RELOADED, round);
        log_lines(folder.path(), OF_SETTINGS)
    };
    assert_eq!(reload(1, &routes("/outcome", none)), [] as [Value; 0]);
    let warned = reload(2, &routes("/outcome", ""));
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert_eq!((&warned[0]["level"], &warned[0]["route"]), (&"WARN".into(), &"(any other)".into()));

    let sent = send(gateway.address, "k", "x");
    upstream.next().answer("500 Oh", "");
    assert_eq!(receive(&sent).unwrap().status, 500);
    wait_for_log(folder.path(), OF_RECORDS, 1);
    // The URL of another service.
    assert_eq!(reload(3, &routes("/other", none)).len(), 1);
    wait_for_log(folder.path(), OF_RECORDS, 2);
    let warned = log_lines(folder.path(), OF_RECORDS);
    let reasons: Vec<_> = warned.iter().map(|line| (&line["level"], &line["records"])).collect();
    let [level, first, second] = ["WARN", "no-authorization: 1", "other-hook: 1"].map(Value::from);
    assert_eq!(reasons, [(&level, &first), (&level, &second)]);
    assert!(upstream.is_idle());
    // From here on no pass states a reason.
    reload(4, "reconcile_every = \"200ms\"\n");
    let [stopped, idle] = [STOPPED, IDLE].map(|text| log_lines(folder.path(), text));
    assert_eq!((stopped.len(), idle.len()), (1, 1), "{stopped:?} {idle:?}");
    assert_eq!((&stopped[0]["level"], &idle[0]["level"]), (&level, &level));
}

#[test]
fn a_setting_that_needs_a_restart_is_named_with_its_line() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let file = write(folder.path(), &upstream, "max_streams = 50\n");
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", &file]);
    for (more, says) in [
        ("\nmax_streams = 51\n", ":4: --max-streams cannot change without a restart"),
        ("max_streams = 50\nlog_level = \"debug\"\n", ":4: --log-level cannot change"),
        ("", ": --max-streams cannot change without a restart"),
    ] {
        let before = log_lines(folder.path(), REFUSED).len();
        write(folder.path(), &upstream, more);
        gateway.signal(Signal::HUP);
        wait_for_log(folder.path(), REFUSED, before + 1);
        let line = log_lines(folder.path(), REFUSED).pop().unwrap();
        let said = line["refused"].as_str().unwrap();
        assert!(said.starts_with(&format!("{file}{says}")), "{said}");
    }
}

#[test]
fn a_file_that_blocks_while_it_is_read_delays_no_request() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let file = write(folder.path(), &upstream, "");
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", &file]);
    // A pipe that nobody writes to.
    std::fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    gateway.signal(Signal::HUP);
    // The second is heard while the first one reads.
    while log_lines(folder.path(), "SIGHUP: files are being read, then read again").is_empty() {
        gateway.signal(Signal::HUP);
        std::thread::yield_now();
    }
    let asked = send_to(gateway.address, "/", "k", &[("authorization", "Bearer a")], "x");
    upstream.next().answer("201 Created", "x");
    assert_eq!(receive(&asked).unwrap().status, 201);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
}

#[test]
fn a_file_that_is_too_large_is_rejected() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let file = write(folder.path(), &upstream, &"# a comment\n".repeat(100_000));
    let (code, line) = crate::world::refused(&["gateway", "--check", "--config", &file]);
    assert!(code == 64 && line.ends_with("hapax.toml: is larger than 1 MiB"), "{line}");
}

#[test]
fn file_and_certificates_are_applied_together_or_not_at_all() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    let make = || {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(path("own.pem"), cert.pem()).unwrap();
        std::fs::write(path("own.key"), signing_key.serialize_pem()).unwrap();
    };
    make();
    let tls = format!(
        "tls_cert = \"{}\"\ntls_key = \"{}\"\n",
        path("own.pem").display(),
        path("own.key").display()
    );
    let file = write(folder.path(), &upstream, &tls);
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--config", &file]);
    let seen = |message: &str| log_lines(folder.path(), message).len();

    // A file that can be, with a key that is none.
    std::fs::write(path("own.key"), "none").unwrap();
    write(folder.path(), &upstream, &format!("{tls}[[route]]\npath = \"/a\"\n"));
    gateway.signal(Signal::HUP);
    wait_for_log(folder.path(), REFUSED, 1);
    // A file that cannot be, with certificates that can.
    make();
    write(folder.path(), &upstream, &format!("{tls}[[route]]\npath = \"a\"\n"));
    gateway.signal(Signal::HUP);
    wait_for_log(folder.path(), REFUSED, 2);
    assert_eq!((seen(RELOADED), seen(CERTIFICATES)), (0, 0));
    let said = log_lines(folder.path(), REFUSED);
    let said: Vec<_> = said.iter().map(|line| line["refused"].as_str().unwrap()).collect();
    assert!(said[0].contains("own.key") && said[1].contains(":6: route a: "), "{said:?}");

    write(folder.path(), &upstream, &format!("{tls}[[route]]\npath = \"/a\"\n"));
    gateway.signal(Signal::HUP);
    wait_for_log(folder.path(), RELOADED, 1);
    assert_eq!((seen(RELOADED), seen(CERTIFICATES)), (1, 1));
}

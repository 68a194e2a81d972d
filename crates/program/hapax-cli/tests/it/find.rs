//! `hapax keys find` and `hapax keys hash`, on a file and through the gateway that has it open.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use crate::world::{Gateway, Upstream, hapax, ok, receive, refused, send_to, store};

fn pay(gateway: &Gateway, upstream: &Upstream, (key, caller, path): (&str, &str, &str)) {
    let asked = send_to(gateway.address, path, key, &[("authorization", caller)], "x");
    upstream.next().answer("201 Created", "hello");
    receive(&asked).unwrap();
}

/// The records of the key `k`, as JSON.
fn find(at: &[&str], more: &[&str]) -> Value {
    serde_json::from_str(&ok(&[&["keys", "find", "k", "--json"], more, at].concat())).unwrap()
}

/// What a command prints that reads this from standard input.
fn piped(args: &[&str], input: &str) -> String {
    let mut child = hapax(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

#[test]
fn a_key_is_found_for_all_callers_through_the_gateway_and_in_the_file() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    for payment in [
        ("k", "Bearer a", "/pay?token=t"),
        ("k", "Bearer b", "/pay"),
        ("k", "Bearer c", "/refunds/7"),
        ("other", "Bearer a", "/pay"),
    ] {
        pay(&gateway, &upstream, payment);
    }
    let store = store(folder.path());
    let at = ["--store", &*store];
    let look = || {
        let all = find(&at, &[]);
        let keys = all["keys"].as_array().unwrap();
        let counts = (keys.len(), &all["searched"], &all["unreadable"], &all["more"]);
        assert_eq!(counts, (3, &4.into(), &0.into(), &false.into()), "{all}");
        for (more, count) in [
            (&["--path", "/pay"][..], 2),
            (&["--path", "/refunds", "--since", "1h"], 1),
            (&["--since", "1h"], 3),
            (&["--limit", "2"], 2),
        ] {
            assert_eq!(find(&at, more)["keys"].as_array().unwrap().len(), count, "{more:?}");
        }
        let none = [&["keys", "find", "k", "--path", "/re"], &at[..]].concat();
        let (code, line) = refused(&none);
        assert!(code == 1 && line.contains("found none among 4 records"), "{code} {line}");
        let text = ok(&[&["keys", "find", "k"], &at[..]].concat());
        let is_row =
            |line: &&str| line.contains("POST  /") && line.contains("key k  authorization #");
        assert!(text.starts_with("STATE ") && text.lines().filter(is_row).count() == 3, "{text}");
        assert_eq!(piped(&[&["keys", "find", "@-"], &at[..]].concat(), "k\n"), text);
        let csv = ok(&[&["keys", "find", "k", "--csv"], &at[..]].concat());
        assert!(csv.starts_with("id,fence,state,") && csv.lines().count() == 4, "{csv}");
    };
    look();
    gateway.kill();
    look();
}

#[test]
fn a_record_is_shown_and_decided_by_the_first_digits_of_its_id() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    for caller in ["Bearer a", "Bearer b"] {
        pay(&gateway, &upstream, ("k", caller, "/pay"));
    }
    let store = store(folder.path());
    let at = ["--store", &*store];
    let found = find(&at, &[]);
    let mut ids = [0, 1].map(|at: usize| found["keys"][at]["id"].as_str().unwrap().to_owned());
    ids.sort_unstable();
    let [first, second] = ids;
    let is_second = |record: &&Value| record["id"] == *second;
    let fence =
        found["keys"].as_array().unwrap().iter().find(is_second).unwrap()["fence"].to_string();
    let look = || {
        let shown = ok(&[&["keys", "show", "--id", &first[..8]], &at[..]].concat());
        assert!(shown.contains(&first), "{shown}");
        let rest = ok(&[&["keys", "list", "--after", &first[..12]], &at[..]].concat());
        assert!(rest.contains(&second) && !rest.contains(&first), "{rest}");
        for (id, exit, text) in [
            ("ffffffffffffffff", 1, "found no record whose id begins with them"),
            ("abc", 64, "or its first 8 or more"),
        ] {
            let (code, line) = refused(&[&["keys", "show", "--id", id], &at[..]].concat());
            assert!(code == exit && line.contains(text), "{code} {line}");
        }
    };
    look();
    gateway.kill();
    look();
    let release = ["keys", "release", "--id", &second[..8], "--forget", "--reason", "r"];
    let (code, line) = refused(&[&release[..], &["--fence", "1"], &at].concat());
    assert!(code == 1 && line.contains("with the fence of the decision"), "{code} {line}");
    // Digits may be mistyped, and lead to a record that was not looked at.
    let (code, line) = refused(&[&release[..], &at].concat());
    assert!(code == 64 && line.contains("expected --fence, or a whole --id"), "{code} {line}");
    let released = ok(&[&release[..], &["--fence", &fence, "--json"], &at].concat());
    assert!(released.contains(&second), "{released}");
}

#[test]
fn the_hashes_of_the_access_log_are_computed_from_key_and_caller() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let log = folder.path().join("access.jsonl");
    let gateway =
        Gateway::start(upstream.address, folder.path(), &["--access-log", log.to_str().unwrap()]);
    pay(&gateway, &upstream, ("a-key", "Bearer a", "/pay"));
    let text = loop {
        let text = std::fs::read_to_string(&log).unwrap();
        if text.ends_with('\n') {
            break text;
        }
        std::thread::yield_now();
    };
    let line: Value = serde_json::from_str(&text).unwrap();
    let logged = (&line["key_hash"], &line["caller_hash"]);
    assert!(logged.0.is_string() && logged.1.is_string(), "{line}");
    let store = store(folder.path());
    let at = ["--scope", "Bearer a", "--store", &*store];
    let look = || {
        let hashes = ok(&[&["keys", "hash", "a-key", "--json"], &at[..]].concat());
        let hashes: Value = serde_json::from_str(&hashes).unwrap();
        assert_eq!((&hashes["key_hash"], &hashes["caller_hash"]), logged);
    };
    look();
    gateway.kill();
    look();
    let printed = piped(&[&["keys", "hash", "@-"], &at[..]].concat(), "a-key\n");
    let [key, caller] = [logged.0, logged.1].map(|hash| hash.as_str().unwrap());
    let expected = format!("key_hash     {key}\ncaller_hash  {caller}\n");
    assert_eq!(printed, expected);
    // A list by caller takes the same hash.
    let by = ["keys", "list", "--caller-hash", caller, "--store", &store];
    assert!(ok(&by).contains("key a-key"));
}

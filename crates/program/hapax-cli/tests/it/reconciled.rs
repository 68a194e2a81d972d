//! `hapax keys reconcile`, and the reconciliation of operations that a crash left.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::thread::{JoinHandle, spawn};

use serde_json::{Value, json};

use crate::world::{Gateway, Upstream, hapax, ok, post, receive, refused, send, store};

const MARKED: &str = "404 Not Found\r\nidempotency-outcome: did-not-happen";

/// A gateway that reconciles, without credentials.
fn start(upstream: &Upstream, folder: &Path, more: &[&str]) -> Gateway {
    let url = format!("http://{}/outcome", upstream.address);
    let policy = ["--on-unknown", "reconcile", "--reconcile-url", &url];
    let policy = [&policy[..], &["--reconcile-authorization", "none"], more].concat();
    Gateway::start(upstream.address, folder, &policy)
}

/// Leaves an operation with an unknown outcome under each key.
fn leave(upstream: &Upstream, gateway: &Gateway, keys: &[&str]) {
    for key in keys {
        let sent = send(gateway.address, key, "x");
        upstream.next().answer("500 Oh", "");
        receive(&sent).unwrap();
    }
}

/// Begins the command; returns its exit code and what it prints.
fn reconcile(store: &str, more: &[&str]) -> JoinHandle<(i32, String)> {
    let words = [&["keys", "reconcile", "--store", store], more].concat();
    let mut command = hapax(&words);
    spawn(move || {
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    })
}

/// The lines of JSON, and the counts of the last one.
fn parsed(printed: &str) -> (Vec<Value>, Value) {
    let lines = printed.lines().map(|line| serde_json::from_str(line).unwrap());
    let mut lines: Vec<Value> = lines.collect();
    let mut last = lines.pop().unwrap();
    (lines, last["summary"].take())
}

fn answer(upstream: &Upstream, status: &str, body: &str) {
    let request = upstream.next();
    assert!(request.head.starts_with("GET /outcome "), "{}", request.head);
    assert_eq!(request.header("authorization"), "");
    request.answer(status, body);
}

#[test]
fn w46_the_reconcile_url_decides_at_the_request_of_an_operator_without_a_retry() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = start(&upstream, folder.path(), &["--reconcile-every", "0s"]);
    leave(&upstream, &gateway, &["a", "b", "c"]);
    let store = store(folder.path());
    let of_a = ["a", "--scope", "Bearer a", "--json"];
    let running = reconcile(&store, &of_a);
    answer(&upstream, "200 OK", "paid");
    let (code, printed) = running.join().unwrap();
    let (lines, found) = parsed(&printed);
    assert_eq!((code, &found["happened"]), (0, &json!(1)), "{found}");
    assert_eq!((lines.len(), &lines[0]["result"]), (1, &json!("happened")));
    let (code, printed) = reconcile(&store, &of_a).join().unwrap();
    let (_, found) = parsed(&printed);
    assert_eq!((code, &found["decided"]), (0, &json!(1)), "{found}");

    let running = reconcile(&store, &["--all"]);
    for (status, body) in [("503 Later", ""), (MARKED, "")] {
        answer(&upstream, status, body);
    }
    let (code, printed) = running.join().unwrap();
    assert_eq!(code, 1, "{printed}");
    let last = "0 happened, 1 did not happen, 0 decided meanwhile, 1 still unknown (cannot-say: 1), 0 not requested, 0 damaged";
    assert_eq!(printed.lines().last(), Some(last));
    assert_eq!(printed.lines().count(), 3);
    let running = reconcile(&store, &["--all"]);
    answer(&upstream, "200 OK", "paid");
    assert_eq!(running.join().unwrap().0, 0);
    assert_eq!(post(gateway.address, "a", "x").body, "paid");
    let (code, printed) = reconcile(&store, &["--all"]).join().unwrap();
    assert!(code == 0 && printed.starts_with("0 happened, 0 did not happen"), "{printed}");
    gateway.kill();
    let (code, line) = refused(&["keys", "reconcile", "--all", "--store", &store]);
    assert!(code == 64 && line.contains("expected a running gateway"), "{line}");
}

/// It is no success that nothing was requested.
#[test]
fn records_about_which_no_request_is_sent_are_counted_with_their_reasons() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = format!("http://{}/outcome", upstream.address);
    let policy = ["--on-unknown", "reconcile", "--reconcile-url", &url];
    let gateway = Gateway::start(upstream.address, folder.path(), &policy);
    leave(&upstream, &gateway, &["a", "b"]);
    let (code, printed) = reconcile(&store(folder.path()), &["--all", "--json"]).join().unwrap();
    let (lines, found) = parsed(&printed);
    assert_eq!((code, &found["not_requested"]), (1, &json!({ "no-authorization": 2 })), "{found}");
    assert_eq!(lines.len(), 2);
    let because = lines[0]["because"].as_str().unwrap();
    assert!(because.contains("expected `reconcile_authorization`"), "{because}");
    assert!(upstream.is_idle());
}

/// A run through many records takes long, and its reader has each result at once.
#[test]
fn the_results_of_a_run_are_printed_as_they_come() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = start(&upstream, folder.path(), &["--reconcile-every", "0s"]);
    leave(&upstream, &gateway, &["a", "b"]);
    let store = store(folder.path());
    let mut command = hapax(&["keys", "reconcile", "--store", &store, "--all", "--json"]);
    let mut running = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    answer(&upstream, MARKED, "");
    // The second request has no response yet.
    let released = next();
    assert_eq!(released["result"], "did-not-happen");
    answer(&upstream, "200 OK", "paid");
    assert_eq!(next()["result"], "happened");
    assert_eq!(next()["summary"]["did_not_happen"], 1);
    assert!(running.wait().unwrap().success());
    // The record says by which decision its key executes again, and the audit file who made the request.
    let shown = ok(&["keys", "show", "--id", released["id"].as_str().unwrap(), "--store", &store]);
    assert!(shown.contains("the reconcile URL answered that it did not happen"), "{shown}");
    let audit = std::fs::read_to_string(folder.path().join("hapax.db.audit.jsonl")).unwrap();
    let audit: Vec<Value> = audit.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(audit.len(), 4);
    assert!(audit[0]["who"].as_str().unwrap().contains("uid"), "{audit:?}");
}

#[test]
fn w46_an_operation_that_a_killed_gateway_left_is_settled_without_its_client() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let times = ["--lease", "1s", "--upstream-timeout", "1s", "--reconcile-every", "200ms"];
    let gateway = start(&upstream, folder.path(), &times);
    // A request whose client disconnects before it is claimed is not executed.
    let sent = send(gateway.address, "a", "x");
    let execution = upstream.next();
    gateway.kill();
    drop(sent);
    // The first walk of the next gateway is to find the lease lapsed: the second one follows a minute later.
    let list = ["keys", "list", "--state", "unknown", "--store", &store(folder.path())];
    while ok(&list).contains("no records") {}
    let gateway = start(&upstream, folder.path(), &times);
    let request = upstream.next();
    for name in ["idempotency-operation-id", "idempotency-fence"] {
        assert_eq!(request.header(name), execution.header(name), "{name}");
    }
    // No record has the form in which the client sent it.
    assert_eq!(request.header("idempotency-key"), "\"a\"");
    request.answer("200 OK", "paid");
    // The retry may come before the response is stored.
    let replay = loop {
        let answer = post(gateway.address, "a", "x");
        if answer.status != 409 {
            break answer;
        }
    };
    assert_eq!((replay.status, replay.body.as_str()), (200, "paid"));
    assert_eq!(replay.header("idempotency-replayed"), "true");
    assert!(upstream.is_idle());
}

//! Records of a gateway.

use std::net::SocketAddr;

use hapax_testkit::servers::{PostgresServer, RedisServer};
use serde_json::Value;

use super::{Upgraded, fixture, words};
use crate::world::{Answer, Gateway, Upstream, log_lines, ok, receive, refused, run, send_fields};

const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";

/// The result of a retry.
#[derive(Clone, Copy)]
enum Expected {
    /// Status, body and headers of the record.
    Replay(u16, &'static str, &'static [(&'static str, &'static str)]),
    /// The code of a rejection.
    Rejected(&'static str),
    /// A second execution.
    Executes,
    /// The reconcile URL answers that it happened, that it did not, or nothing that decides.
    Reconciles(Option<bool>),
    /// The lease of the fixture runs, unless a file ended it when it was opened.
    Leased,
}

use Expected::{Executes, Leased, Reconciles, Rejected, Replay};

/// Path, key, type and body of a retry of each request of the fixtures, and its result.
const RETRIES: [(&str, &str, &str, &str, Expected); 18] = [
    ("/orders", "done", JSON, r#"{"a":1.0,"b":2}"#, Replay(201, "paid by done é", PAID)),
    ("/orders?a=1&b=2", "form", FORM, "a+b=1&c=%20", Replay(201, "paid by form é", PAID)),
    ("/orders", "empty", JSON, "{}", Replay(204, "", &[])),
    ("/orders", "moved", JSON, "{}", Replay(307, "there", &[("location", "/elsewhere")])),
    ("/orders", "resolved", JSON, "{}", Replay(202, "paid by hand", &[("x-by", "operator")])),
    ("/orders", "large", JSON, "{}", Rejected("response-not-retained")),
    ("/orders", "seen", JSON, "{}", Rejected("outcome-unknown")),
    ("/orders", "broken", JSON, "{}", Rejected("outcome-unknown")),
    ("/orders", "lapsed", JSON, "{}", Rejected("outcome-unknown")),
    ("/live", "live", JSON, "{}", Leased),
    ("/live", "busy", JSON, "{}", Executes),
    ("/live", "denied", JSON, "{}", Executes),
    ("/again", "again", JSON, "{}", Executes),
    ("/again", "again-lapsed", JSON, "{}", Executes),
    ("/asked", "asked-yes", JSON, "{}", Reconciles(Some(true))),
    ("/asked", "asked-no", JSON, "{}", Reconciles(Some(false))),
    ("/asked", "asked-mute", JSON, "{}", Reconciles(None)),
    ("/soon", "soon-asked", JSON, "{}", Reconciles(Some(true))),
];

const PAID: &[(&str, &str)] =
    &[("x-order", "17"), ("link", "</a>"), ("link", "</b>"), ("content-type", "text/plain")];

impl Upgraded {
    fn config(&self, upstream: SocketAddr) -> String {
        let text = fixture("gateway.toml").replace("UPSTREAM", &format!("http://{upstream}"));
        std::fs::write(self.path("gateway.toml"), text).unwrap();
        self.path("gateway.toml")
    }

    /// Starts a gateway as the earlier one was, in the empty namespace.
    fn gateway(&self, upstream: &Upstream) -> Gateway {
        let config = self.config(upstream.address);
        let files = [self.path("hapax.db.admin-token"), self.path("audit.jsonl")];
        let own = ["--admin-token-file", &files[0], "--audit-file", &files[1]];
        let at = self.at();
        let more = words(&["--config", &config, "--namespace", "", "--store-must-exist"], &at);
        Gateway::logged(upstream.address, self.folder.path(), &[&more[..], &own].concat())
    }

    /// Runs `hapax keys` on the store itself.
    fn keys<T>(&self, run: fn(&[&str]) -> T, what: &[&str]) -> T {
        let config = self.config(([127, 0, 0, 1], 1).into());
        let audit = self.path("audit.jsonl");
        let more = ["--config", &config, "--namespace", "", "--audit-file", &audit];
        run(&words(&[&["keys"], what, &more].concat(), &self.at()))
    }
}

fn post(gateway: &Gateway, path: &str, key: &str, kind: &str, body: &str) -> Answer {
    let fields = [("idempotency-key", key), ("content-type", kind)];
    receive(&send_fields(gateway.address, path, &fields, body)).expect("an answer")
}

fn assert_replay(answer: &Answer, status: u16, body: &str, headers: &[(&str, &str)], key: &str) {
    assert_eq!((answer.status, &*answer.body), (status, body), "{key}: {answer:?}");
    assert_eq!(answer.header("idempotency-replayed"), "true", "{key}: {answer:?}");
    for (name, value) in headers {
        let line = format!("\r\n{name}: {value}\r\n");
        assert!(answer.head.to_lowercase().contains(&line), "{key}: {line}{answer:?}");
    }
}

fn records_of_an_earlier_release_are_replayed_and_decided(store: &Upgraded) {
    let upstream = Upstream::start();
    let gateway = store.gateway(&upstream);
    for (path, key, kind, body, expected) in RETRIES {
        // A released key has no fingerprint.
        if !matches!(key, "busy" | "denied") {
            let other = post(&gateway, path, key, kind, r#"{"another": "request"}"#);
            assert_eq!((other.status, &*other.code()), (422, "key-reused"), "{key}: {other:?}");
        }
        let retry = || post(&gateway, path, key, kind, body);
        let rejected = |code: &str| {
            let answer = retry();
            assert_eq!((answer.status, &*answer.code()), (409, code), "{key}: {answer:?}");
        };
        match expected {
            Replay(status, body, headers) => assert_replay(&retry(), status, body, headers, key),
            Rejected(code) => rejected(code),
            Leased if store.is_file => rejected("outcome-unknown"),
            Leased => rejected("in-flight"),
            Executes => executes(&gateway, &upstream, (path, key, kind, body)),
            Reconciles(verdict) => {
                let fields = [("idempotency-key", key), ("content-type", kind)];
                let asked = send_fields(gateway.address, path, &fields, body);
                let request = upstream.next();
                assert!(request.head.starts_with("GET /by-operation "), "{}", request.head);
                assert_eq!(request.header("idempotency-key"), key);
                match verdict {
                    Some(true) => request.answer("200 OK", "found"),
                    Some(false) => {
                        let marked = "404 Not Found\r\nidempotency-outcome: did-not-happen";
                        request.answer(marked, "");
                        answer_second(&upstream);
                    }
                    None => request.answer("503 Later", ""),
                }
                let answer = receive(&asked).unwrap();
                match verdict {
                    Some(true) => assert_replay(&answer, 200, "found", &[], key),
                    Some(false) => assert_eq!((answer.status, &*answer.body), (201, "second")),
                    None => assert_eq!(answer.code(), "outcome-unknown"),
                }
            }
        }
        assert!(upstream.is_idle(), "{key}");
    }
    operators_decide(store, &gateway, &upstream);
    // What this release wrote is read by it, and new keys execute.
    drop(gateway);
    let gateway = store.gateway(&upstream);
    assert_replay(&post(&gateway, "/again", "again", JSON, "{}"), 201, "second", &[], "again");
    assert_replay(
        &post(&gateway, "/orders", "seen", JSON, "{}"),
        203,
        "in the ledger",
        &[],
        "seen",
    );
    let asked = send_fields(gateway.address, "/orders", &[("idempotency-key", "new")], "{}");
    let request = upstream.next();
    assert_eq!(request.header("idempotency-attempt"), "1");
    request.answer("201 Created", "first");
    assert_eq!(receive(&asked).unwrap().status, 201);
    let lost = "the server of the store was emptied: operations of the lost records execute again";
    assert!(log_lines(store.folder.path(), lost).is_empty());
}

/// Sends a request that executes again, and is replayed afterwards.
fn executes(gateway: &Gateway, upstream: &Upstream, request: (&str, &str, &str, &str)) {
    let (path, key, kind, body) = request;
    let fields = [("idempotency-key", key), ("content-type", kind)];
    let asked = send_fields(gateway.address, path, &fields, body);
    answer_second(upstream);
    let answer = receive(&asked).unwrap();
    assert_eq!((answer.status, &*answer.body), (201, "second"), "{key}: {answer:?}");
    assert_eq!(answer.header("idempotency-replayed"), "false");
    assert_replay(&post(gateway, path, key, kind, body), 201, "second", &[], key);
}

fn answer_second(upstream: &Upstream) {
    let request = upstream.next();
    assert_eq!(request.header("idempotency-attempt"), "2", "{}", request.head);
    request.answer("201 Created", "second");
}

/// Decides about records, as the operators' API does.
fn operators_decide(store: &Upgraded, gateway: &Gateway, upstream: &Upstream) {
    let admin = gateway.admin.to_string();
    let at = ["--admin", &admin, "--admin-token-file", &store.path("hapax.db.admin-token")];
    let keys =
        |what: &[&str]| ok(&[&["keys"], what, &["--reason", "in the ledger"], &at[..]].concat());
    let happened = ["--outcome", "happened", "--status", "203", "--body", "in the ledger"];
    keys(&[&["resolve", "seen"], &happened[..]].concat());
    let answer = post(gateway, "/orders", "seen", JSON, "{}");
    assert_replay(&answer, 203, "in the ledger", &[], "seen");
    // It has no settle time, so that nothing says until when it may execute.
    keys(&["release", "broken"]);
    executes(gateway, upstream, ("/orders", "broken", JSON, "{}"));
    keys(&["release", "asked-mute", "--force"]);
    executes(gateway, upstream, ("/asked", "asked-mute", JSON, "{}"));
    keys(&["release", "done", "--forget"]);
    executes(gateway, upstream, ("/orders", "done", JSON, r#"{"a":1.0,"b":2}"#));
    let listed = run(&[&["keys", "list", "--state", "unknown"], &at[..]].concat());
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.contains("lapsed") && !listed.contains("seen"), "{listed}");
}

/// A record without a settle time may execute until its lease ended, and 30 s more.
fn a_release_is_rejected_until_the_lease_has_lapsed_for_some_time(store: &Upgraded) {
    let why = ["--reason", "a test"];
    let release = |key: &str, more: &[&str]| {
        let output = store.keys(run, &[&["release", key, "--json"], &why[..], more].concat());
        let error: Value = serde_json::from_slice(&output.stderr).unwrap_or_default();
        (output.status.code(), error["code"].as_str().unwrap_or_default().to_owned())
    };
    // A file ended it when it was opened.
    let code = if store.is_file { "may-execute" } else { "in-flight" };
    assert_eq!(release("live", &[]), (Some(1), code.to_owned()));
    assert_eq!(release("live", &["--force"]), (Some(0), String::new()));
    if !store.is_file {
        assert_eq!(release("lapsed", &[]), (Some(0), String::new()));
    }
    let shown = store.keys(ok, &["show", "resolved"]);
    assert!(shown.contains("a fixture"), "{shown}");
}

#[test]
fn records_in_a_file_of_an_earlier_release_are_replayed_and_decided() {
    records_of_an_earlier_release_are_replayed_and_decided(&Upgraded::file());
}

#[test]
fn a_release_in_a_file_is_rejected_until_the_lease_has_lapsed_for_some_time() {
    a_release_is_rejected_until_the_lease_has_lapsed_for_some_time(&Upgraded::file());
}

/// A store on a server is another key space under another name, so that the name is written.
fn a_start_without_a_namespace_is_rejected(store: &Upgraded) {
    let started = ["gateway", "--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"];
    let (code, line) = refused(&words(&started, &store.at()));
    assert_eq!(code, 64);
    let sentence = "set an empty name (\"\") if the store has records of this service";
    assert!(line.contains("--namespace") && line.contains(sentence), "{line}");
}

mod redis {
    use super::*;
    use tokio::task::block_in_place;

    #[tokio::test(flavor = "multi_thread")]
    async fn records_of_an_earlier_release_are_replayed_and_decided() {
        let server = RedisServer::start().await;
        let store = Upgraded::redis(&server).await;
        block_in_place(|| super::a_start_without_a_namespace_is_rejected(&store));
        block_in_place(|| super::records_of_an_earlier_release_are_replayed_and_decided(&store));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_release_is_rejected_until_the_lease_has_lapsed_for_some_time() {
        let server = RedisServer::start().await;
        let store = Upgraded::redis(&server).await;
        block_in_place(|| {
            super::a_release_is_rejected_until_the_lease_has_lapsed_for_some_time(&store);
        });
    }
}

mod postgres {
    use super::*;
    use tokio::task::block_in_place;

    #[tokio::test(flavor = "multi_thread")]
    async fn records_of_an_earlier_release_are_replayed_and_decided() {
        let server = PostgresServer::start().await;
        let store = Upgraded::postgres(&server).await;
        block_in_place(|| super::a_start_without_a_namespace_is_rejected(&store));
        block_in_place(|| super::records_of_an_earlier_release_are_replayed_and_decided(&store));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_release_is_rejected_until_the_lease_has_lapsed_for_some_time() {
        let server = PostgresServer::start().await;
        let store = Upgraded::postgres(&server).await;
        block_in_place(|| {
            super::a_release_is_rejected_until_the_lease_has_lapsed_for_some_time(&store);
        });
    }
}

//! `hapax store quarantine`.

use std::net::SocketAddr;
use std::time::Duration;

use hapax_testkit::servers::RedisServer;
use rustix::process::Signal;
use serde_json::Value;

use crate::shared::blocking;
use crate::world::{Gateway, Upstream, ok, post, receive, refused, run, send, store};

fn is_rejected(address: SocketAddr, key: &str) {
    let answer = post(address, key, "x");
    assert_eq!((answer.status, &*answer.code()), (503, "quarantined"), "{}", answer.body);
}

fn executes(upstream: &Upstream, address: SocketAddr, key: &str) {
    let asked = send(address, key, "x");
    upstream.next().answer("201 Created", "paid");
    assert_eq!(receive(&asked).unwrap().status, 201);
}

/// Posts until the key executes: a process notices the end of a quarantine within three seconds.
fn until_it_executes(upstream: &Upstream, address: SocketAddr, key: &str) {
    loop {
        let asked = send(address, key, "x");
        let answer = std::thread::scope(|scope| {
            let answered = scope.spawn(|| receive(&asked).unwrap());
            while !answered.is_finished() {
                if let Some(request) = upstream.next_within(Duration::from_millis(20)) {
                    request.answer("201 Created", "paid");
                }
            }
            answered.join().unwrap()
        });
        if answer.status == 201 {
            return;
        }
    }
}

fn a_process_that_was_frozen_executes_no_key_in_quarantine(url: &str) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let more = ["--store", url, "--namespace", "shop"];
    let [first, second] = [1, 2].map(|_| Gateway::start(upstream.address, folder.path(), &more));
    executes(&upstream, first.address, "known");
    second.signal(Signal::STOP);
    let audit = folder.path().join("audit.jsonl").display().to_string();
    let at = ["--store", url, "--namespace", "shop", "--audit-file", &audit];
    let words = ["store", "quarantine", "--for", "10m", "--reason", "restored", "--json"];
    let other = ["--store", url, "--namespace", "shpo", "--audit-file", &audit];
    let (code, said) = refused(&[&words[..6], &other].concat());
    assert_eq!(code, 64);
    assert!(said.contains("(\"shop\"), found \"shpo\""), "{said}");
    // The frozen one confirms nothing, and counts as ended once it has written nothing for ten seconds.
    let begun: Value = serde_json::from_str(&ok(&[&words[..], &at].concat())).unwrap();
    let quarantine = &begun["quarantines"][0];
    assert_eq!(quarantine["confirmed"], 1, "{begun}");
    assert_eq!(quarantine["reason"], "restored", "{begun}");
    is_rejected(first.address, "lost");
    second.signal(Signal::CONT);
    is_rejected(second.address, "lost");
    assert_eq!(post(second.address, "known", "x").status, 201);

    let listed = ok(&["store", "quarantine", "list", "--store", url]);
    assert!(listed.contains("namespace \"shop\": from "), "{listed}");
    let end = ["store", "quarantine", "end", "--reason", "clients have given up"];
    assert_eq!(ok(&[&end[..], &at].concat()), "ended\n");
    until_it_executes(&upstream, second.address, "lost");
    let again = run(&[&end[..], &at].concat());
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert_eq!(ok(&["store", "quarantine", "list", "--store", url]), "no quarantine\n");
}

#[tokio::test]
async fn a_process_that_was_frozen_executes_no_key_in_quarantine_on_redis() {
    blocking(RedisServer::start().await, |server| {
        a_process_that_was_frozen_executes_no_key_in_quarantine(&server.url());
    })
    .await;
}

#[test]
fn a_quarantine_of_a_file_begins_with_and_without_its_gateway() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = store(folder.path());
    let begin = |route: &[&str]| {
        let words = ["store", "quarantine", "--for", "10m", "--reason", "restored"];
        run(&[&words[..], &["--store", &url, "--namespace", ""], route].concat())
    };
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let begun = begin(&[]);
    assert!(begun.status.success(), "{begun:?}");
    let said = String::from_utf8(begun.stdout).unwrap();
    assert!(said.contains("1 confirmed, 0 did not"), "{said}");
    is_rejected(gateway.address, "lost");
    assert_eq!(begin(&["--route", "/pay"]).status.code(), Some(64), "it has no such route");
    gateway.kill();

    // Nothing knows the namespace of its gateway.
    let begun = begin(&[]);
    assert_eq!(begun.status.code(), Some(64), "{begun:?}");
    assert!(String::from_utf8(begun.stderr).unwrap().contains("pass --any-namespace"));
    let begun = begin(&["--any-namespace"]);
    assert!(begun.status.success(), "{begun:?}");
    let said = String::from_utf8(begun.stdout).unwrap();
    assert!(said.contains("no running process; one that starts applies it"), "{said}");
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    is_rejected(gateway.address, "lost");
    let end =
        ["store", "quarantine", "end", "--reason", "over", "--store", &url, "--namespace", ""];
    assert_eq!(ok(&end), "ended\n");
    executes(&upstream, gateway.address, "lost");
}

#[test]
fn a_quarantine_without_namespace_duration_or_reason_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let (code, said) =
        refused(&["store", "quarantine", "--for", "1h", "--reason", "r", "--store", &url]);
    assert_eq!(code, 64);
    assert!(said.contains("pass --namespace NAME, or --namespace ''"), "{said}");
    for words in [["--for", "1h"], ["--reason", "r"], ["--namespace", "shop"]] {
        let output = run(&[&["store", "quarantine"], &words[..]].concat());
        assert_eq!(output.status.code(), Some(64), "{output:?}");
    }
}

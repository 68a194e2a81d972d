//! `hapax keys reconcile`.

use serde_json::Value;

use crate::world::{Gateway, Upstream, hapax, post, receive, refused, send, store};

#[test]
fn the_reconcile_url_decides_at_the_request_of_an_operator_without_a_retry() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = format!("http://{}/outcome", upstream.address);
    let policy = ["--on-unknown", "reconcile", "--reconcile-url", &url, "--reconcile-every", "0s"];
    let gateway = Gateway::start(upstream.address, folder.path(), &policy);
    for key in ["a", "b", "c"] {
        let asked = send(gateway.address, key, "x");
        upstream.next().answer("500 Oh", "");
        receive(&asked).unwrap();
    }
    let store = store(folder.path());
    let reconcile = |more: &[&str], answers: &[(&str, &str)]| {
        let words = [&["keys", "reconcile", "--store", &store, "--json"], more].concat();
        let mut command = hapax(&words);
        let running = std::thread::spawn(move || command.output().unwrap());
        for (status, body) in answers {
            let question = upstream.next();
            assert!(question.head.starts_with("GET /outcome "), "{}", question.head);
            assert_eq!(question.header("authorization"), "");
            question.answer(status, body);
        }
        let output = running.join().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let found: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
        let results = found.as_array().unwrap().iter().map(|line| line["result"].clone()).collect();
        (output.status.code().unwrap(), results)
    };
    let expected = |words: &[&str]| words.iter().map(|it| Value::from(*it)).collect::<Vec<_>>();
    let of_a = ["a", "--scope", "Bearer a"];
    assert_eq!(reconcile(&of_a, &[("200 OK", "paid")]), (0, expected(&["happened"])));
    assert_eq!(reconcile(&of_a, &[]), (0, expected(&["decided"])));
    let marked = "404 Not Found\r\nidempotency-outcome: did-not-happen";
    let answers = [("503 Later", ""), (marked, "")];
    let found = reconcile(&["--all"], &answers);
    assert_eq!(found, (1, expected(&["cannot-say", "did-not-happen"])));
    assert_eq!(post(gateway.address, "a", "x").body, "paid");
    gateway.kill();
    let (code, line) = refused(&["keys", "reconcile", "--all", "--store", &store]);
    assert!(code == 64 && line.contains("expected a running gateway"), "{line}");
}

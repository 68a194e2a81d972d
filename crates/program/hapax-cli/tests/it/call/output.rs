//! Credentials of earlier runs, lists, and responses as JSON.

use serde_json::{Value, json};

use super::{Act, Script};
use crate::world::hapax;

#[test]
fn the_right_credentials_continue_after_runs_with_others() {
    let script = Script::new();
    let (url, journal) = (script.bank.url(), script.journal());
    let send = ["call", "--name", "invoice-17", "--server", "plain", "POST", &url, "--wait", "10s"];
    let more = ["--header-env", "authorization=TOKEN", "--journal", journal.to_str().unwrap()];
    let call = |token: &str| {
        let mut call = hapax(&[&send[..], &more].concat());
        call.env("TOKEN", token);
        call
    };
    script.bank.act(Act::Hang);
    let mut first = call("Bearer one").spawn().unwrap();
    script.bank.wait_for(1);
    first.kill().unwrap();
    first.wait().unwrap();
    for _ in 0..2 {
        assert_eq!(call("Bearer two").output().unwrap().status.code(), Some(77));
        assert_eq!(script.list()["pending"][0]["state"], "credentials-changed");
    }
    let right = call("Bearer one").output().unwrap();
    assert_eq!((right.status.code(), &right.stdout[..]), (Some(0), &b"paid"[..]), "{right:?}");
    assert_eq!(script.bank.requests().len(), 2);
    assert_eq!(script.bank.state.lock().unwrap().executions, 1);
}

#[test]
fn lists_show_key_operation_id_of_the_server_and_times() {
    let script = Script::new();
    assert_eq!(script.pay("done", &[]).0, 0);
    script.bank.act(Act::Status(503));
    assert_eq!(script.pay("pending", &["--wait", "1ms"]).0, 75);
    let key = |request: &str| {
        let line = request.lines().find_map(|line| line.strip_prefix("idempotency-key: "));
        line.unwrap().trim_matches('"').to_owned()
    };
    let list = script.list();
    let sent = script.bank.requests();
    for (it, request) in [(&list["finished"][0], &sent[0]), (&list["pending"][0], &sent[1])] {
        assert_eq!((&it["key"], &it["server_operation"]), (&json!(key(request)), &json!("4bf9")));
        let [begun, last] = ["begun", "last_try"].map(|time| it[time].as_str().unwrap());
        assert!(begun.ends_with('Z') && begun <= last, "{it}");
    }
    let text = String::from_utf8(script.call(&["list"]).stdout).unwrap();
    let line = format!("  key {}  server's operation id 4bf9\n", key(&sent[0]));
    let begun = list["finished"][0]["begun"].as_str().unwrap();
    assert!(text.contains(&line) && text.contains(begun), "{text}");
}

#[test]
fn a_response_as_json_has_status_headers_and_body() {
    let script = Script::new();
    let pay = |name: &str| -> (i32, Value) {
        let (code, text) = script.pay(name, &["--output", "json"]);
        (code, serde_json::from_str(&text).unwrap())
    };
    for replayed in [false, true] {
        let (code, response) = pay("paid");
        assert_eq!(
            (code, &response["status"], &response["body"]),
            (0, &json!(201), &json!("paid"))
        );
        let headers = response["headers"].as_array().unwrap();
        assert!(headers.contains(&json!(["content-length", "4"])), "{response}");
        assert_eq!((&response["stored"], &response["replayed"]), (&json!(true), &json!(replayed)));
        assert_eq!((&response["tries"], &response["body_base64"]), (&json!(1), &json!(null)));
    }
    script.bank.act(Act::Bytes(&[0, 255]));
    let (_, binary) = pay("binary");
    assert_eq!((&binary["body"], &binary["body_base64"]), (&json!(null), &json!("AP8=")));

    script.bank.act(Act::Declined(405));
    let url = script.bank.url();
    let words = ["--name", "n", "--server", "hapax", "PUT", &url, "--output=json"];
    let declined = script.call(&words);
    assert_eq!(declined.status.code(), Some(22));
    let response: Value = serde_json::from_slice(&declined.stdout).unwrap();
    assert_eq!((&response["status"], &response["stored"]), (&json!(405), &json!(false)));
    let error = String::from_utf8(declined.stderr).unwrap();
    let line = error.lines().find(|line| line.starts_with('{')).unwrap();
    let error: Value = serde_json::from_str(line).unwrap();
    assert_eq!(error["code"], "answered");
    assert!(error["message"].as_str().unwrap().contains("the name is free"), "{error}");
}

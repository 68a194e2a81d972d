//! Decisions about stuck sagas.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::world::{Paid, Service, is_cancelled};

#[tokio::test(start_paused = true)]
async fn a_retried_step_continues_the_saga_and_the_log_names_the_operator() {
    let service = Service::start();
    service.systems.fail("notify");
    let (started, shown) = service.stuck("k").await;
    assert_eq!(shown["stuck"]["reason"], "exhausted");
    let (status, decided) = service.decide(&shown, "retry", json!({})).await;
    assert_eq!(status, 200, "{decided}");
    assert_eq!(decided["was"]["step"], "notify");
    // It is stuck again, with the decision in its log.
    let again = loop {
        let again = service.until(&started, "stuck").await;
        if again["decisions"].as_array().unwrap().len() == 1 {
            break again;
        }
    };
    let decision = &again["decisions"][0];
    assert_eq!(
        (&decision["who"], &decision["action"], &decision["why"]),
        (&json!("ann"), &json!("retry"), &json!("seen"))
    );
    service.systems.succeed("notify");
    service.decide(&again, "retry", json!({})).await;
    assert_eq!(started.outcome().await.unwrap().cents, 1999);
}

#[tokio::test(start_paused = true)]
async fn a_resolved_step_has_the_result_that_the_operator_gave() {
    let service = Service::start();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    let result = json!({ "id": "by hand", "note": null, "cents": 1999 });
    let happened = json!({ "outcome": "happened", "result": result });
    let (status, decided) = service.decide(&shown, "resolve", happened).await;
    assert_eq!(status, 200, "{decided}");
    let paid = Paid { id: "by hand".to_owned(), note: None, cents: 1999 };
    assert_eq!(started.outcome().await.unwrap(), paid);
}

#[tokio::test(start_paused = true)]
async fn a_step_without_a_result_is_resolved_with_null() {
    let service = Service::start();
    service.systems.fail("notify");
    let (started, shown) = service.stuck("k").await;
    let happened = json!({ "outcome": "happened", "result": null });
    let (status, decided) = service.decide(&shown, "resolve", happened).await;
    assert_eq!(status, 200, "{decided}");
    started.outcome().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_step_that_did_not_happen_is_called_again() {
    let service = Service::start();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    service.systems.succeed("charge");
    // A try of it can no longer take effect.
    sleep(Duration::from_secs(600)).await;
    let (status, decided) =
        service.decide(&shown, "resolve", json!({ "outcome": "did-not-happen" })).await;
    assert_eq!(status, 200, "{decided}");
    assert_eq!(started.outcome().await.unwrap().id, "bank");
}

#[tokio::test(start_paused = true)]
async fn w39_a_step_whose_call_may_still_take_effect_is_not_decided_as_not_happened_without_force()
{
    let did_not_happen = json!({ "outcome": "did-not-happen" });
    for (early, then) in [
        (json!({ "outcome": "happened", "result": paid() }), "the operator"),
        (json!({ "outcome": "did-not-happen", "force": true }), "bank"),
    ] {
        let service = Service::start();
        service.systems.fail("charge");
        let (started, shown) = service.stuck("k").await;
        service.systems.succeed("charge");
        // The try ended just now: its timeout of 30 s, the settle time of 60 s, and 30 s more.
        let until = &shown["stuck"]["may_execute_until"];
        let (status, rejected) = service.decide(&shown, "resolve", did_not_happen.clone()).await;
        assert_eq!((status, &rejected["code"]), (409, &json!("may-execute")), "{rejected}");
        assert_eq!(&rejected["may_execute_until"], until);
        let text = rejected["error"].as_str().unwrap();
        assert!(text.contains("`happened` is accepted now"), "{text}");
        let (status, decided) = service.decide(&shown, "resolve", early).await;
        assert_eq!(status, 200, "{decided}");
        assert_eq!(started.outcome().await.unwrap().id, then);
    }
    let service = Service::start();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    service.systems.succeed("charge");
    let ended = shown["steps"][1]["forward"]["last"].as_str().unwrap();
    let until = shown["stuck"]["may_execute_until"].as_str().unwrap();
    assert_eq!(seconds(until) - seconds(ended), 120.0, "{shown}");
    sleep(Duration::from_secs(119)).await;
    let (status, rejected) = service.decide(&shown, "resolve", did_not_happen.clone()).await;
    assert_eq!(status, 409, "{rejected}");
    sleep(Duration::from_secs(1)).await;
    let (status, decided) = service.decide(&shown, "resolve", did_not_happen).await;
    assert_eq!(status, 200, "{decided}");
    assert_eq!(started.outcome().await.unwrap().id, "bank");
}

fn paid() -> Value {
    json!({ "id": "the operator", "note": null, "cents": 1999 })
}

/// Returns the second of the day of a time.
fn seconds(time: &str) -> f64 {
    let mut parts = time.split(['T', 'Z']).nth(1).unwrap().split(':');
    let mut next = || parts.next().unwrap().parse::<f64>().unwrap();
    3600.0 * next() + 60.0 * next() + next()
}

#[tokio::test(start_paused = true)]
async fn an_aborted_saga_is_undone_and_a_stuck_undo_is_skipped() {
    let service = Service::start();
    service.systems.fail("notify");
    service.systems.fail("free");
    let (started, shown) = service.stuck("k").await;
    let (status, error) = service.decide(&shown, "skip", json!({})).await;
    assert_eq!((status, &error["code"]), (409, &json!("no-undo")));
    let (status, decided) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!(status, 200, "{decided}");
    let shown = loop {
        let shown = service.until(&started, "stuck").await;
        if shown["stuck"]["direction"] == "undo" {
            break shown;
        }
    };
    assert_eq!(
        (&shown["compensating"], &shown["stuck"]["step"]),
        (&json!(true), &json!("reserve"))
    );
    assert_eq!(shown["failure"], "aborted by ann: seen");
    let (status, error) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!((status, &error["code"]), (409, &json!("compensates")), "{error}");
    let (status, decided) = service.decide(&shown, "skip", json!({})).await;
    assert_eq!(status, 200, "{decided}");
    assert!(is_cancelled(&started.outcome().await));
    let (_, ended) = service.get(&format!("/api/sagas/{}", started.id())).await;
    assert_eq!(ended["steps"][0]["undone"], "skipped");
    let (status, error) = service.decide(&shown, "retry", json!({})).await;
    assert_eq!((status, &error["code"]), (409, &json!("ended")));
}

#[tokio::test(start_paused = true)]
async fn a_decision_about_a_saga_that_has_changed_is_rejected() {
    let service = Service::start();
    service.systems.fail("notify");
    let (started, shown) = service.stuck("k").await;
    assert_eq!(service.decide(&shown, "retry", json!({})).await.0, 200);
    let (status, error) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!((status, &error["code"]), (409, &json!("changed")), "{error}");
    let now = service.until(&started, "stuck").await;
    assert!(now["failure"].is_null() && now["write_id"] != shown["write_id"], "{now}");
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_is_not_stuck_is_not_decided() {
    let service = Service::start();
    let started = service.begin("parked", 0).await;
    let shown = service.until(&started, "parked").await;
    for how in ["retry", "skip", "abort"] {
        let (status, error) = service.decide(&shown, how, json!({})).await;
        assert_eq!((status, &error["code"]), (409, &json!("not-stuck")), "{error}");
    }
    assert!(started.signal("go", &()).await.unwrap());
    started.outcome().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_invalid_decision_leaves_no_audit_line() {
    let service = Service::start();
    service.systems.fail("charge");
    let (_, shown) = service.stuck("k").await;
    for (how, more) in [
        ("retry", json!({ "reason": " " })),
        ("retry", json!({ "reason": "two\nlines" })),
        ("retry", json!({ "write_id": "abc" })),
        ("retry", json!({ "force": true })),
        ("resolve", json!({})),
        ("resolve", json!({ "outcome": "happened" })),
        ("resolve", json!({ "outcome": "did-not-happen", "result": 1 })),
        ("resolve", json!({ "outcome": "happened", "result": "x".repeat(65 << 10) })),
    ] {
        let (status, error) = service.decide(&shown, how, more).await;
        assert_eq!((status, &error["code"]), (400, &json!("bad-request")), "{how}: {error}");
    }
    assert_eq!(service.audit_lines(), [Value::Null; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_decision_writes_two_audit_lines_without_the_result() {
    let service = Service::start();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    let (status, _) = service.decide(&shown, "skip", json!({})).await;
    assert_eq!(status, 409);
    let result = json!({ "id": "s3cr3t", "note": "n", "cents": 5 });
    let happened = json!({ "outcome": "happened", "result": result });
    assert_eq!(service.decide(&shown, "resolve", happened).await.0, 200);
    started.outcome().await.unwrap();
    let lines = service.audit_lines();
    let seen: Vec<_> = lines.iter().map(|it| (&it["stage"], &it["saga"], &it["code"])).collect();
    let [intended, done, rejected] = ["intended", "done", "rejected"].map(Value::from);
    let [skip, resolve, no_undo] = ["skip", "resolve", "no-undo"].map(Value::from);
    let null = Value::Null;
    assert_eq!(
        seen,
        [
            (&intended, &skip, &null),
            (&rejected, &skip, &no_undo),
            (&intended, &resolve, &null),
            (&done, &resolve, &null),
        ]
    );
    for line in &lines {
        assert_eq!((&line["who"], &line["why"]), (&json!("ann"), &json!("seen")), "{line}");
        assert_eq!((&line["by"], &line["gateway"]), (&json!("api"), &json!("a service")));
        assert_eq!((&line["id"], &line["write_id"]), (&shown["id"], &shown["write_id"]));
        let before = json!({
            "definition": "place-order", "version": 2, "stuck": "unknown", "step": "charge",
            "direction": "forward",
        });
        assert_eq!(line["before"], before);
        assert!(!line.to_string().contains("s3cr3t"), "{line}");
    }
    assert_eq!(lines[0]["decision"], lines[1]["decision"]);
    assert_ne!(lines[1]["decision"], lines[2]["decision"]);
    assert_eq!(lines[3]["outcome"], "happened");
    assert_eq!(lines[3]["result_sha256"].as_str().unwrap().len(), 64);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_decided_where_the_audit_file_cannot_be_written() {
    let service = Service::start();
    service.systems.fail("notify");
    let (started, shown) = service.stuck("k").await;
    // A folder in its place.
    std::fs::create_dir(&service.audit).unwrap();
    let (status, error) = service.decide(&shown, "retry", json!({})).await;
    assert_eq!((status, &error["code"]), (503, &json!("audit")), "{error}");
    let now = service.until(&started, "stuck").await;
    assert_eq!(now["write_id"], shown["write_id"]);
}

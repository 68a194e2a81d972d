//! Lists and views of sagas.

use std::time::Duration;

use serde_json::{Value, json};

use crate::world::Service;

/// The ids in a list.
fn ids(listed: &Value) -> Vec<&str> {
    listed["sagas"].as_array().unwrap().iter().map(|saga| saga["id"].as_str().unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_stuck_saga_shows_its_step_tries_and_last_error_and_no_argument() {
    let service = Service::start();
    service.systems.fail("charge");
    let (started, shown) = service.stuck("k").await;
    assert_eq!(shown["id"], started.id().to_string());
    assert_eq!((&shown["definition"], &shown["version"]), (&json!("place-order"), &json!(2)));
    let stuck = &shown["stuck"];
    assert_eq!((&stuck["reason"], &stuck["step"]), (&json!("unknown"), &json!("charge")));
    assert_eq!(stuck["direction"], "forward");
    assert!(stuck["since"].as_str().unwrap().starts_with("2026-"), "{shown}");
    let [reserve, charge] = &shown["steps"].as_array().unwrap()[..] else { panic!("{shown}") };
    assert_eq!((&reserve["outcome"], &reserve["result"]), (&json!("happened"), &json!(1999)));
    assert_eq!((&charge["outcome"], &charge["result"]), (&json!("unknown"), &Value::Null));
    assert_eq!(charge["forward"]["tries"], 1);
    assert_eq!(charge["forward"]["error"], "charge did not answer");
    for step in [reserve, charge] {
        assert!(step["argument"].is_null() && step["argument_bytes"].is_u64(), "{step}");
    }
    let (_, listed) = service.get("/api/sagas").await;
    assert_eq!(ids(&listed), [shown["id"].as_str().unwrap()]);
    let row = &listed["sagas"][0];
    assert_eq!((&row["state"], &row["stuck"]), (&json!("stuck"), stuck));
    assert!(!listed.to_string().contains("1999"), "a list has no contents: {listed}");
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_has_ended_shows_its_history_and_is_not_listed() {
    let service = Service::start();
    let started = service.begin("k", 5).await;
    started.outcome().await.unwrap();
    let (status, shown) = service.get(&format!("/api/sagas/{}", started.id())).await;
    assert_eq!((status, &shown["state"]), (200, &json!("ended")));
    let steps: Vec<_> = shown["steps"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(steps, ["reserve", "charge", "notify"]);
    assert!(shown["write_id"].is_null() && shown["steps"][1]["result"].is_null(), "{shown}");
    assert_eq!(ids(&service.get("/api/sagas").await.1), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn sagas_are_listed_by_state_and_definition_in_pages() {
    let service = Service::start();
    let parked = service.begin("parked", 0).await;
    let parked = service.until(&parked, "parked").await;
    assert_eq!(parked["signal"], "go");
    service.systems.fail("charge");
    for key in ["a", "b", "c"] {
        service.stuck(key).await;
    }
    let (_, all) = service.get("/api/sagas").await;
    assert_eq!(ids(&all).len(), 4);
    let (_, stuck) = service.get("/api/sagas?state=stuck&definition=place-order").await;
    assert_eq!(ids(&stuck).len(), 3);
    let (_, waiting) = service.get("/api/sagas?state=parked&definition=place-order:2").await;
    assert_eq!(ids(&waiting), [parked["id"].as_str().unwrap()]);
    for nothing in
        ["state=overdue", "state=running", "definition=other", "definition=place-order:1"]
    {
        let (status, listed) = service.get(&format!("/api/sagas?{nothing}")).await;
        assert_eq!((status, ids(&listed).len()), (200, 0), "{nothing}");
    }
    let (mut paged, mut after) = (Vec::new(), String::new());
    loop {
        let (_, page) = service.get(&format!("/api/sagas?limit=1{after}")).await;
        paged.extend(ids(&page).into_iter().map(str::to_owned));
        let Some(next) = page["next"].as_str() else { break };
        after = format!("&after={next}");
    }
    assert_eq!(paged, ids(&all));
}

#[tokio::test(start_paused = true)]
async fn a_saga_whose_definition_no_process_has_is_overdue_after_ten_minutes() {
    let mut service = Service::start();
    service.systems.fail("charge");
    let (stuck, _) = service.stuck("stuck").await;
    // Its entry is due a lease after the start, and then once a day.
    tokio::time::sleep(Duration::from_secs(60)).await;
    service.stop_driving().await;
    let waiting = service.begin("waiting", 5).await;
    tokio::time::sleep(Duration::from_secs(9 * 60)).await;
    let (_, listed) = service.get("/api/sagas?state=overdue").await;
    assert_eq!(ids(&listed).len(), 0);
    tokio::time::sleep(Duration::from_secs(2 * 60)).await;
    let (_, listed) = service.get("/api/sagas?state=overdue").await;
    assert_eq!(ids(&listed), [waiting.id().to_string()]);
    assert_eq!(listed["sagas"][0]["state"], "overdue");
    // Its lease has lapsed, and its outcome is not unknown.
    let (_, record) = service.get(&format!("/api/keys/{}", waiting.id())).await;
    assert_eq!(record["state"], "in-flight", "{record}");
    let (_, definitions) = service.get("/api/saga-definitions").await;
    let definition = &definitions["definitions"][0];
    assert_eq!(
        (&definition["definition"], &definition["version"], &definition["unfinished"]),
        (&json!("place-order"), &json!(2), &json!(2))
    );
    assert!(definition["overdue"] == true && definition["due_for_s"].as_u64() > Some(600));
    tokio::time::sleep(Duration::from_secs(25 * 60 * 60)).await;
    let (_, listed) = service.get("/api/sagas?state=overdue").await;
    assert_eq!(ids(&listed).len(), 2);
    let (_, shown) = service.get(&format!("/api/sagas/{}", stuck.id())).await;
    assert_eq!((&shown["state"], &shown["overdue"]), (&json!("stuck"), &json!(true)));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_names_no_saga_or_has_no_token_is_rejected() {
    let service = Service::start();
    let id = "0".repeat(64);
    for (path, status, code) in [
        (format!("/api/sagas/{id}"), 404, "not-found"),
        ("/api/sagas/abc".to_owned(), 400, "bad-request"),
        ("/api/sagas?state=done".to_owned(), 400, "bad-request"),
        ("/api/sagas?state=ended".to_owned(), 400, "bad-request"),
        ("/api/sagas?after=1".to_owned(), 400, "bad-request"),
    ] {
        let (found, error) = service.get(&path).await;
        assert_eq!((found, &error["code"]), (status, &json!(code)), "{path}: {error}");
        assert!(error["error"].is_string());
    }
    for path in ["/api/sagas", "/api/saga-definitions"] {
        let (status, error) = service.send("GET", path, "another-sixteen-", String::new()).await;
        assert_eq!((status, &error["code"]), (401, &json!("token")));
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_whose_key_has_another_input_is_listed_as_stuck_and_removed_by_abort() {
    let service = Service::start();
    let started = service.begin("k", 0).await;
    let saga = service.until(&started, "parked").await;
    service.insert(service.entry("k", 1999)).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let (_, listed) = service.get("/api/sagas?state=stuck&definition=place-order:2").await;
    let [id] = ids(&listed)[..] else { panic!("{listed}") };
    assert!(id.starts_with(&format!("{}-", started.id())) && id.len() == 64 + 1 + 32, "{id}");
    let (status, shown) = service.get(&format!("/api/sagas/{id}")).await;
    assert_eq!((status, &shown["id"], &shown["state"]), (200, &json!(id), &json!("stuck")));
    assert_eq!(shown["stuck"]["reason"], "key-reused");
    assert!(shown["stuck"]["detail"].as_str().unwrap().contains("another input"), "{shown}");
    let (_, definitions) = service.get("/api/saga-definitions").await;
    assert_eq!(definitions["definitions"][0]["unfinished"], 1, "{definitions}");
    let (status, error) = service.decide(&shown, "retry", json!({})).await;
    assert_eq!((status, &error["code"]), (409, &json!("not-accepted")));
    let other = json!({ "write_id": "0".repeat(32) });
    let (status, error) = service.decide(&shown, "abort", other).await;
    assert_eq!((status, &error["code"]), (409, &json!("changed")));
    let (status, answer) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!((status, &answer["was"]["stuck"]), (200, &json!("key-reused")), "{answer}");
    let (status, error) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!((status, &error["code"]), (404, &json!("not-found")));
    // The saga that has the key is as it was.
    let (_, listed) = service.get("/api/sagas").await;
    assert_eq!(ids(&listed), [started.id().to_string()]);
    let (_, now) = service.get(&format!("/api/sagas/{}", started.id())).await;
    assert_eq!((&now["state"], &now["write_id"]), (&json!("parked"), &saga["write_id"]));
    let lines = service.audit_lines();
    let done = lines.iter().find(|line| line["stage"] == "done").unwrap();
    assert_eq!((&done["who"], &done["why"]), (&json!("ann"), &json!("seen")));
    assert_eq!((&done["id"], &done["saga"]), (&json!(id), &json!("abort")));
    assert!(done["at"].as_str().unwrap().starts_with("20"), "{done}");
}

#[tokio::test(start_paused = true)]
async fn an_overdue_start_without_a_record_is_shown_and_ends_when_it_is_aborted() {
    let mut service = Service::start();
    service.stop_driving().await;
    let entry = service.entry("k", 1999);
    let id = entry.key.operation;
    service.insert(entry).await;
    let (_, shown) = service.get(&format!("/api/sagas/{id}")).await;
    assert_eq!((&shown["state"], &shown["overdue"]), (&json!("parked"), &json!(false)));
    tokio::time::sleep(Duration::from_secs(11 * 60)).await;
    let (_, listed) = service.get("/api/sagas?state=overdue").await;
    assert_eq!(ids(&listed), [id.to_string()]);
    let (_, shown) = service.get(&format!("/api/sagas/{id}")).await;
    assert_eq!((&shown["state"], &shown["version"]), (&json!("overdue"), &json!(2)));
    let (status, answer) = service.decide(&shown, "abort", json!({})).await;
    assert_eq!((status, &answer["was"]["definition"]), (200, &json!("place-order")), "{answer}");
    let (_, ended) = service.get(&format!("/api/sagas/{id}")).await;
    assert_eq!((&ended["state"], &ended["end"]), (&json!("ended"), &json!("undone")));
    assert_eq!(ended["failure"], "aborted by ann: seen");
    let decision = &ended["decisions"][0];
    assert_eq!((&decision["who"], &decision["why"]), (&json!("ann"), &json!("seen")));
    assert!(decision["at"].as_str().unwrap().starts_with("2026-"), "{decision}");
    assert_eq!(service.get("/api/saga-definitions").await.1["definitions"], json!([]));
}

#[tokio::test(start_paused = true)]
async fn metrics_count_the_sagas_of_the_store_and_are_a_minute_old_at_most() {
    let service = Service::start();
    let parked = service.begin("parked", 0).await;
    service.until(&parked, "parked").await;
    service.systems.fail("charge");
    service.stuck("k").await;
    service.insert(service.entry("parked", 1999)).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let has = |text: &str, line: &str| text.lines().any(|it| it == line);
    let (status, text) = service.text("/api/saga-metrics").await;
    assert_eq!(status, 200, "{text}");
    for line in [
        r#"hapax_sagas_unfinished{definition="place-order",version="2"} 2"#,
        r#"hapax_sagas{definition="place-order",version="2",step="signal/go",state="parked"} 1"#,
        r#"hapax_sagas{definition="place-order",version="2",step="charge",state="stuck"} 1"#,
        r#"hapax_sagas_tries{definition="place-order",version="2",step="charge"} 1"#,
        "hapax_sagas_rejected_starts 1",
        "hapax_sagas_complete 1",
        "hapax_sagas_census_age_seconds 0",
    ] {
        assert!(has(&text, line), "{line} is not in\n{text}");
    }
    service.stuck("l").await;
    let stuck = |count| {
        format!(
            r#"hapax_sagas{{definition="place-order",version="2",step="charge",state="stuck"}} {count}"#
        )
    };
    assert!(has(&service.text("/api/saga-metrics").await.1, &stuck(1)), "not counted again yet");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(has(&service.text("/api/saga-metrics").await.1, &stuck(2)));
    let (status, _) =
        service.send("GET", "/api/saga-metrics", "another-sixteen-", String::new()).await;
    assert_eq!(status, 401);
}

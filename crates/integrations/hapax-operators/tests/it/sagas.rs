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

//! Decisions about records while their requests may still execute.

use std::time::Duration;

use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Key, OnUnknown, OperationRequest, Policy,
    Scope,
};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::world::Service;

/// A request of a gateway.
pub(crate) struct Paid;

impl OperationRequest for Paid {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("http/test").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::builder("test").finish())
    }
}

/// Claims a key as a gateway with an upstream timeout of 60 s does, and crashes.
async fn crash(service: &Service, key: &str) -> String {
    let engine = Idempotency::builder(service.store()).build().unwrap();
    let (scope, key): (_, Key) = (Scope::shared(), key.parse().unwrap());
    let mut policy = Policy { settle: Some(Duration::from_secs(60)), ..Policy::default() };
    policy.terms.on_unknown = OnUnknown::Block;
    let claimed = engine.claim(&scope, &key, &Paid, &policy).await.unwrap();
    let Claim::Execute(lease) = claimed else { panic!("{claimed:?}") };
    drop(lease);
    engine.operation_id(&scope, &key).to_string()
}

async fn decide(service: &Service, shown: &Value, how: &str, more: Value) -> (u16, Value) {
    let mut body = json!({ "fence": shown["fence"], "reason": "seen" });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let path = format!("/api/keys/{}/{how}", shown["id"].as_str().unwrap());
    service.post(&path, &body).await
}

#[tokio::test(start_paused = true)]
async fn w39_did_not_happen_and_release_are_rejected_until_lease_settle_time_and_30_s_have_passed()
{
    let service = Service::start();
    let id = crash(&service, "k").await;
    let path = format!("/api/keys/{id}");
    // The lease is live: its end is not known.
    let (_, shown) = service.get(&path).await;
    assert_eq!((&shown["state"], &shown["may_execute_until"]), (&json!("in-flight"), &Value::Null));
    let (status, rejected) = decide(&service, &shown, "release", json!({})).await;
    assert_eq!((status, &rejected["code"]), (409, &json!("in-flight")));
    // It lapses after 30 s; the request may execute for 60 s and 30 s more.
    sleep(Duration::from_secs(31)).await;
    let (_, shown) = service.get(&path).await;
    let until = &shown["may_execute_until"];
    assert_eq!((&shown["state"], until.is_string()), (&json!("unknown"), true), "{shown}");
    let (_, listed) = service.get("/api/keys").await;
    assert_eq!(&listed["keys"][0]["may_execute_until"], until, "{listed}");
    let did_not = json!({ "outcome": "did-not-happen" });
    for (how, more) in [("release", json!({})), ("resolve", did_not.clone())] {
        let (status, rejected) = decide(&service, &shown, how, more).await;
        assert_eq!((status, &rejected["code"]), (409, &json!("may-execute")), "{rejected}");
        assert_eq!(&rejected["may_execute_until"], until);
        let text = rejected["error"].as_str().unwrap();
        let expected =
            format!("until {} (in 89 s): `happened` is accepted", until.as_str().unwrap());
        assert!(text.contains(&expected), "{text}");
    }
    sleep(Duration::from_secs(88)).await;
    assert_eq!(decide(&service, &shown, "resolve", did_not.clone()).await.0, 409);
    sleep(Duration::from_secs(1)).await;
    let (_, shown) = service.get(&path).await;
    assert_eq!(shown["may_execute_until"], Value::Null);
    let (status, decided) = decide(&service, &shown, "resolve", did_not).await;
    assert_eq!(status, 200, "{decided}");
}

#[tokio::test(start_paused = true)]
async fn w39_happened_is_accepted_and_did_not_happen_forced_while_the_request_may_still_execute() {
    let service = Service::start();
    for (key, how, more) in [
        ("a", "resolve", json!({ "outcome": "happened", "status": 201 })),
        ("b", "resolve", json!({ "outcome": "did-not-happen", "force": true })),
        ("c", "release", json!({ "force": true })),
    ] {
        let id = crash(&service, key).await;
        sleep(Duration::from_secs(31)).await;
        let (_, shown) = service.get(&format!("/api/keys/{id}")).await;
        assert!(shown["may_execute_until"].is_string(), "{shown}");
        let (status, decided) = decide(&service, &shown, how, more).await;
        assert_eq!(status, 200, "{key}: {decided}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_walk_over_undecided_records_has_all_of_them_in_pages() {
    let service = Service::start();
    let mut left = Vec::new();
    for number in 0..600 {
        left.push(crash(&service, &number.to_string()).await);
    }
    let engine = Idempotency::builder(service.store()).build().unwrap();
    let key = "in-progress".parse().unwrap();
    sleep(Duration::from_secs(31)).await;
    let claimed = engine.claim(&Scope::shared(), &key, &Paid, &Policy::default()).await.unwrap();
    assert!(matches!(claimed, Claim::Execute(_)), "{claimed:?}");
    let (mut found, mut pages, mut from) = (Vec::new(), 0, String::new());
    loop {
        let (status, page) = service.get(&format!("/api/keys/undecided{from}")).await;
        assert_eq!(status, 200, "{page}");
        let ids = page["keys"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap());
        found.extend(ids.map(str::to_owned));
        pages += 1;
        let Some(next) = page["next"].as_str() else { break };
        from = format!("?from={next}");
    }
    found.sort();
    left.sort();
    assert_eq!(found, left);
    assert!(pages > 1);
    for wrong in ["0", "0g", "%C3%A9%C3%A9", &"00".repeat(200)] {
        let (status, _) = service.get(&format!("/api/keys/undecided?from={wrong}")).await;
        assert_eq!(status, 400, "{wrong}");
    }
}

//! Searches for the records of a key, and records by the first digits of their ids.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Key, OnUnknown, OperationId,
    OperationRequest, Policy, Scope,
};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::world::Service;

/// A request of a gateway.
struct Described(Value);

impl Described {
    fn new(key: &str, path: &str, route: &str) -> Self {
        Self(json!({ "key": key, "method": "POST", "target": path, "route": route }))
    }
}

impl OperationRequest for Described {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("http/test").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::builder("test").finish())
    }

    fn description(&self) -> Option<Bytes> {
        self.0.is_object().then(|| self.0.to_string().into())
    }
}

fn policy() -> Policy {
    let mut policy = Policy::default();
    policy.terms.on_unknown = OnUnknown::Block;
    policy
}

fn engine(service: &Service) -> Idempotency {
    Idempotency::builder(service.store()).build().unwrap()
}

/// Claims a key for a caller.
async fn claim(engine: &Idempotency, caller: &str, request: &Described) {
    let key: Key = request.0["key"].as_str().unwrap_or("none").parse().unwrap();
    let scope = Scope::of([("caller", caller)]);
    let claimed = engine.claim(&scope, &key, request, &policy()).await.unwrap();
    assert!(matches!(claimed, Claim::Execute(_)), "{claimed:?}");
}

async fn find(service: &Service, query: &Value) -> (u16, Value) {
    service.post("/api/keys/find", query).await
}

fn paths(found: &Value) -> Vec<&str> {
    let keys = found["keys"].as_array().unwrap().iter();
    let mut paths: Vec<_> = keys.map(|key| key["described"]["target"].as_str().unwrap()).collect();
    paths.sort_unstable();
    paths
}

#[tokio::test(start_paused = true)]
async fn a_key_is_found_for_all_callers_by_age_path_and_route() {
    let service = Service::with_secret();
    let engine = engine(&service);
    claim(&engine, "a", &Described::new("k", "/old", "pay")).await;
    sleep(Duration::from_secs(3600)).await;
    claim(&engine, "b", &Described::new("k", "/pay", "pay")).await;
    claim(&engine, "c", &Described::new("k", "/pay/7", "pay")).await;
    claim(&engine, "d", &Described::new("k", "/payments", "other")).await;
    claim(&engine, "e", &Described::new("kk", "/pay", "pay")).await;
    // A request whose description cannot be read, as of a record from before the secret.
    claim(&engine, "f", &Described(Value::Null)).await;
    for (more, expected) in [
        (json!({}), &["/old", "/pay", "/pay/7", "/payments"][..]),
        (json!({ "since_seconds": 60 }), &["/pay", "/pay/7", "/payments"]),
        (json!({ "path": "/pay" }), &["/pay", "/pay/7"]),
        (json!({ "path": "/" }), &["/old", "/pay", "/pay/7", "/payments"]),
        (json!({ "route": "pay", "since_seconds": 3601 }), &["/old", "/pay", "/pay/7"]),
        (json!({ "route": "pa" }), &[]),
    ] {
        let mut query = more;
        query["key"] = "k".into();
        let (status, found) = find(&service, &query).await;
        assert_eq!((status, &paths(&found)[..]), (200, expected), "{query}");
        assert_eq!((&found["searched"], &found["unreadable"]), (&6.into(), &1.into()), "{found}");
        assert_eq!(found["next"], Value::Null);
    }
    for odd in [json!({ "key": "" }), json!({ "key": "k", "from": "?" }), json!({ "kez": "k" })] {
        let (status, rejected) = find(&service, &odd).await;
        assert_eq!((status, &rejected["code"]), (400, &"bad-request".into()), "{odd}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_search_goes_in_steps_that_find_each_record_once() {
    let service = Service::with_secret();
    let engine = engine(&service);
    for caller in 0..700 {
        claim(&engine, &caller.to_string(), &Described::new("k", "/pay", "pay")).await;
    }
    let (mut ids, mut query, mut steps) = (Vec::new(), json!({ "key": "k" }), 0);
    loop {
        let (status, found) = find(&service, &query).await;
        assert_eq!(status, 200, "{found}");
        let keys = found["keys"].as_array().unwrap();
        ids.extend(keys.iter().map(|key| key["id"].as_str().unwrap().to_owned()));
        steps += 1;
        if found["next"].is_null() {
            break;
        }
        query["from"] = found["next"].clone();
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    // Pages of 64 and 128 records each, with which a step has found enough.
    assert_eq!((count, ids.len(), steps), (700, 700, 4));
}

#[tokio::test(start_paused = true)]
async fn a_search_of_a_store_without_a_secret_is_rejected_with_the_reason() {
    let service = Service::start();
    claim(&engine(&service), "a", &Described::new("k", "/pay", "pay")).await;
    let (status, rejected) = find(&service, &json!({ "key": "k" })).await;
    assert_eq!((status, &rejected["code"]), (400, &"no-secret".into()), "{rejected}");
    let text = rejected["error"].as_str().unwrap();
    assert!(text.contains("neither keys nor callers") && text.contains("--secret-file"), "{text}");
    let (status, rejected) = service.post("/api/keys/hash", &json!({ "key": "k" })).await;
    assert_eq!((status, &rejected["code"]), (400, &"no-secret".into()), "{rejected}");
}

/// Claims the operation whose id has these digits at its beginning and its end.
async fn claim_id(service: &Service, first: &str, last: &str) -> String {
    let engine = engine(service);
    let text = format!("{first:0<60}{last}");
    let id = OperationId::from_hex(&text).unwrap();
    let request = Described::new("k", "/pay", "pay");
    let claimed = engine.claim_id(id, &request, &policy()).await.unwrap();
    assert!(matches!(claimed, Claim::Execute(_)), "{claimed:?}");
    text
}

#[tokio::test(start_paused = true)]
async fn a_record_is_named_by_the_first_digits_of_its_id_unless_they_are_those_of_several() {
    let service = Service::with_secret();
    let one = claim_id(&service, "abcdef01", "0000").await;
    let other = claim_id(&service, "abcdef02", "ffff").await;
    let close = claim_id(&service, "abcdef02", "fffe").await;
    for digits in ["abcdef01", "ABCDEF010", &one[..63], &one] {
        let (status, shown) = service.get(&format!("/api/keys/{digits}")).await;
        assert_eq!((status, &shown["id"]), (200, &one.as_str().into()), "{digits}: {shown}");
    }
    for (digits, status, code) in [
        ("abcdef0", 400, "bad-request"),
        ("abcdefgh", 400, "bad-request"),
        ("abcdef03", 404, "not-found"),
        ("ffffffff", 404, "not-found"),
        ("abcdef02", 409, "ambiguous"),
    ] {
        let (found, rejected) = service.get(&format!("/api/keys/{digits}")).await;
        assert_eq!((found, &rejected["code"]), (status, &code.into()), "{digits}: {rejected}");
    }
    // Nothing is decided by digits of several ids, nor about another execution than the one that was seen.
    sleep(Duration::from_secs(3600)).await;
    let (_, shown) = service.get(&format!("/api/keys/{other}")).await;
    let decision = |fence: &Value| json!({ "fence": fence, "reason": "r", "outcome": "happened" });
    let resolve = async |digits: &str, fence: &Value| {
        service.post(&format!("/api/keys/{digits}/resolve"), &decision(fence)).await
    };
    let (status, rejected) = resolve("abcdef02", &shown["fence"]).await;
    assert_eq!((status, &rejected["code"]), (409, &"ambiguous".into()), "{rejected}");
    assert_eq!(rejected["ids"], json!([close, other]));
    assert!(rejected["error"].as_str().unwrap().contains(&close), "{rejected}");
    assert!(service.audit_lines().is_empty());
    let (status, rejected) = resolve("abcdef01", &1.into()).await;
    assert_eq!((status, &rejected["code"]), (409, &"changed".into()), "{rejected}");
    let (_, shown) = service.get("/api/keys/abcdef01").await;
    let (status, decided) = resolve("abcdef01", &shown["fence"]).await;
    assert_eq!((status, &decided["id"]), (200, &one.as_str().into()), "{decided}");
    let release = json!({ "fence": shown["fence"], "reason": "r" });
    assert_eq!(service.post("/api/keys/abcdef02/release", &release).await.0, 409);
    // The error lists the first ids only.
    for last in 0..9 {
        claim_id(&service, "abcdef03", &format!("{last:04}")).await;
    }
    let (_, rejected) = service.get("/api/keys/abcdef03").await;
    assert_eq!(rejected["ids"].as_array().unwrap().len(), 8, "{rejected}");
    assert!(rejected["error"].as_str().unwrap().contains(" and more: add digits"), "{rejected}");
}

/// It may be a part of a file in which there was another id with the same digits.
#[tokio::test(start_paused = true)]
async fn beside_a_damaged_record_only_a_whole_id_is_accepted() {
    let (service, _) = Service::failing();
    let whole = claim_id(&service, "abcdef01", "0000").await;
    claim_id(&service, &"f".repeat(32), "0000").await;
    let (status, rejected) = service.get("/api/keys/abcdef01").await;
    assert_eq!((status, &rejected["code"]), (500, &"corrupt".into()), "{rejected}");
    assert!(rejected["error"].as_str().unwrap().contains("pass the whole id"), "{rejected}");
    assert_eq!(service.get(&format!("/api/keys/{whole}")).await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn the_hashes_of_a_key_and_a_caller_differ_by_both() {
    let service = Service::with_secret();
    let hash = async |body: Value| service.post("/api/keys/hash", &body).await;
    let (status, hashes) = hash(json!({ "key": "k", "scope": "Bearer a" })).await;
    let (key, caller) = (&hashes["key_hash"], &hashes["caller_hash"]);
    assert_eq!(
        (status, key.as_str().unwrap().len(), caller.as_str().unwrap().len()),
        (200, 12, 12)
    );
    // That of the caller is the one that lists of records show.
    let (_, listed) = service.post("/api/callers/hash", &json!({ "value": "Bearer a" })).await;
    assert_eq!(&listed["hash"], caller);
    let (_, one) = hash(json!({ "key": "Bearer a" })).await;
    assert!(one["key_hash"] != *caller && one["caller_hash"].is_null(), "{one}");
    let (_, two) = hash(json!({ "scope": [["x-tenant", "t"], ["x-user", "u"]] })).await;
    assert_eq!(two["caller_hash"].as_str().unwrap().split(',').count(), 2, "{two}");
    assert_eq!(hash(json!({})).await.0, 400);
}

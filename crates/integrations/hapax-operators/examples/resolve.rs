//! An operation whose outcome is unknown, and an operator's decision through the API.
//!
//!     cargo run -p hapax-operators --example resolve

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use hapax_core::{Idempotency, MemoryStore, NaturalKey, SystemEntropy};
use hapax_operators::{AdminToken, Audit, Operators};
use tower::ServiceExt;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let store = Arc::new(MemoryStore::default());
    let engine = Idempotency::builder(store.clone()).build()?;
    let path = folder.path().join("token");
    let token = AdminToken::read_or_make(&path, &SystemEntropy)?;
    let audit = Audit::new(folder.path().join("audit.jsonl"), "example");
    let api = Operators::builder(engine.clone(), store).build(token, audit).router();
    let bearer = format!("Bearer {}", std::fs::read_to_string(&path)?.trim());
    let send = async |method: &str, uri: &str, body: String| {
        let request = Request::builder().method(method).uri(uri).header(AUTHORIZATION, &bearer);
        let request = request.header(CONTENT_TYPE, "application/json").body(Body::from(body))?;
        let response = api.clone().oneshot(request).await?;
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await?;
        println!("{method} {uri}\n{}", String::from_utf8_lossy(&bytes));
        Ok::<_, Box<dyn std::error::Error>>(serde_json::from_slice::<serde_json::Value>(&bytes)?)
    };

    // Whether the charge took effect is unknown: a retry is rejected until an operator decides.
    let key = (NaturalKey::payment("order-9"), 4_200);
    let charge = || async { Err::<String, _>(std::io::Error::other("the bank did not answer")) };
    println!("{:?}", engine.at_most_once(&key, charge).await);
    println!("{:?}", engine.at_most_once(&key, charge).await);

    let found = send("GET", "/api/keys", String::new()).await?;
    let record = &found["keys"][0];
    let id = record["id"].as_str().ok_or("expected a record")?;
    // The fence shows that the operator decides about the execution that they looked at.
    let decision = serde_json::json!({
        "fence": record["fence"],
        "reason": "the bank has no charge",
        "any_kind": true, // of a function, not of an HTTP request
    });
    send("POST", &format!("/api/keys/{id}/release"), decision.to_string()).await?;
    let charge = || async { Ok::<_, std::io::Error>("paid".to_owned()) };
    println!("{:?}", engine.at_most_once(&key, charge).await);
    Ok(())
}

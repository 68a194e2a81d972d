//! Payments that wait for a webhook.

use std::sync::Arc;

use axum::http::{Method, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax::{Clock as _, SystemClock};
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::{Value, json};
use sha2::Sha256;

use crate::world::{Honoring, Listening, port};

/// Base64 of the key `a key of the approver, 32 bytes ..`.
pub(crate) const SECRET: &str =
    concat!("whsec", "_YSBrZXkgb2YgdGhlIGFwcHJvdmVyLCAzMiBieXRlcyAuLg==");
const OTHER_SECRET: &str = concat!("whsec", "_YW5vdGhlciBrZXksIG5vdCBvZiB0aGUgYXBwcm92ZXIgLg==");

struct World {
    _folder: tempfile::TempDir,
    file: String,
    bank: Arc<Honoring>,
    url: String,
    port: u16,
}

impl World {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("payments.db").to_str().unwrap().to_owned();
        let (bank, url) = Honoring::serve(1_000).await;
        Self { _folder: folder, file, bank, url, port: port() }
    }

    /// Starts the service. An approval must arrive within `seconds`.
    async fn service(&self, seconds: u32) -> Listening {
        let arguments = [self.file.as_str(), &self.url, &seconds.to_string()];
        Listening::start(env!("CARGO_BIN_EXE_approval"), self.port, &arguments).await
    }

    /// Returns how often the bank was called, by path.
    fn calls(&self) -> [usize; 3] {
        ["holds", "payments", "releases"]
            .map(|path| self.bank.calls(path).values().flatten().count())
    }
}

/// Sends a webhook. Returns the status.
async fn decide(service: &Listening, secret: &str, id: &str, payment: &str, approved: bool) -> u16 {
    let body = json!({ "payment": payment, "approved": approved }).to_string();
    let time = (SystemClock.now().as_micros() / 1_000_000).to_string();
    let key = STANDARD.decode(secret.split_once('_').unwrap().1).unwrap();
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).unwrap();
    mac.update(format!("{id}.{time}.{body}").as_bytes());
    let signature = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
    let headers =
        [("webhook-id", id), ("webhook-timestamp", &time), ("webhook-signature", &signature)];
    let sent = service.remote.send(Method::POST, "/approvals", &headers, body.into_bytes()).await;
    sent.unwrap().status.as_u16()
}

async fn parked(service: &Listening, payment: &str) {
    service.begin("/payments", payment, &json!(250_000)).await;
    let status = service.until("/payments", payment, &["parked"]).await;
    assert_eq!(status["step"], "signal/approval");
}

async fn end(service: &Listening, payment: &str) -> (StatusCode, Value) {
    let status = service.until("/payments", payment, &["done", "undone", "stuck"]).await;
    let answer = &status["answer"];
    let code = answer["status"].as_u64().unwrap_or_else(|| panic!("{status}"));
    (StatusCode::from_u16(u16::try_from(code).unwrap()).unwrap(), answer["body"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_by_a_signed_webhook_pays_once_after_a_kill() {
    let world = World::new().await;
    let service = world.service(3_600).await;
    parked(&service, "p-1").await;
    service.kill().await;
    let service = world.service(3_600).await;
    assert_eq!(decide(&service, OTHER_SECRET, "d-1", "p-1", true).await, 401);
    assert_eq!(decide(&service, SECRET, "d-2", "p-9", true).await, 404);
    assert_eq!(service.status("/payments", "p-1").await["state"], "parked");
    assert_eq!(world.calls(), [1, 0, 0]);
    for _ in 0..2 {
        assert_eq!(decide(&service, SECRET, "d-3", "p-1", true).await, 204);
    }
    assert_eq!(end(&service, "p-1").await, (StatusCode::CREATED, json!("paid")));
    // The first decision counts.
    assert_eq!(decide(&service, SECRET, "d-4", "p-1", false).await, 204);
    service.kill().await;
    let service = world.service(3_600).await;
    assert_eq!(end(&service, "p-1").await, (StatusCode::CREATED, json!("paid")));
    assert_eq!(world.calls(), [1, 1, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_releases_what_was_held() {
    let world = World::new().await;
    let service = world.service(3_600).await;
    parked(&service, "p-1").await;
    assert_eq!(decide(&service, SECRET, "d-1", "p-1", false).await, 204);
    assert_eq!(end(&service, "p-1").await, (StatusCode::CONFLICT, json!("NotApproved")));
    assert_eq!(world.calls(), [1, 0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payment_without_a_decision_in_time_is_undone_after_a_kill() {
    let world = World::new().await;
    let service = world.service(5).await;
    parked(&service, "p-1").await;
    service.kill().await;
    let service = world.service(5).await;
    assert_eq!(end(&service, "p-1").await, (StatusCode::CONFLICT, json!("TimedOut")));
    assert_eq!(world.calls(), [1, 0, 1]);
}

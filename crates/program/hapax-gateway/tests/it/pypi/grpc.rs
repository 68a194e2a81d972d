//! gRPC's own client, which shares no code with ours, calling with bytes and without a schema.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_core::{Inspect, MemoryCapacity, MemoryStore, SystemClock};
use hapax_gateway::{Gateway, OpenStore};
use hapax_http::server::KeyRule;
use serde_json::Value;

use super::python;
use crate::admin::Away;
use crate::grpc::Server;
use crate::tls::{Authority, listening};

/// Its status, and its answer or what it says.
type Heard = (u64, String);

/// Calls `shop.Charge/Make`: what was heard, and its metadata.
async fn call(to: SocketAddr, ca: Option<&Path>, key: Option<&str>, say: &str) -> (Heard, Value) {
    let mut call = python("call.py");
    call.args([&to.to_string(), "/shop.Charge/Make", say]);
    call.arg(ca.unwrap_or(Path::new("-")));
    call.args(key.map(|key| format!("idempotency-key={key}")));
    let ended = tokio::task::spawn_blocking(move || call.output().unwrap()).await.unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let mut said: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let text = if said["answer"].is_null() { &said["details"] } else { &said["answer"] };
    let heard = (said["code"].as_u64().unwrap(), text.as_str().unwrap().to_owned());
    (heard, said["metadata"].take())
}

fn code((code, said): &Heard) -> (u64, &str) {
    (*code, said.split(':').next().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_16_grpcs_own_client_gets_each_status() {
    let server = Server::start().await;
    let mut config = server.config();
    config.policy.key = KeyRule::Required;
    let store = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let store = Arc::new(Away { store, away: AtomicBool::new(false) });
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let gateway = Gateway::start_on(config, opened).await.unwrap();
    let to = gateway.local_addr();

    for replayed in ["false", "true"] {
        let (heard, metadata) = call(to, None, Some("k"), "pay").await;
        assert_eq!(heard, (0, "run 1".into()));
        assert_eq!(
            (&metadata["idempotency-replayed"], &metadata["x-kept"]),
            (&replayed.into(), &"yes".into())
        );
    }
    // A failure that is final.
    for _ in 0..2 {
        assert_eq!(call(to, None, Some("failed"), "5").await.0, (5, "failed by 2".into()));
    }
    let reused = call(to, None, Some("k"), "pay more").await.0;
    assert_eq!(code(&reused), (9, "key-reused"));
    assert_eq!(code(&call(to, None, None, "pay").await.0), (3, "missing-key"));
    assert_eq!(code(&call(to, None, Some("a, b"), "pay").await.0), (3, "invalid-key"));

    let first = tokio::spawn(async move { call(to, None, Some("slow"), "wait").await.0 });
    crate::world::until("it runs", || server.runs() == 3).await;
    assert_eq!(code(&call(to, None, Some("slow"), "wait").await.0), (10, "in-flight"));
    server.charge.go.notify_one();
    assert_eq!(first.await.unwrap(), (0, "run 3".into()));

    store.away.store(true, Ordering::SeqCst);
    assert_eq!(code(&call(to, None, Some("k"), "pay").await.0), (14, "store-unavailable"));
    assert_eq!(server.runs(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_16_grpcs_own_client_is_served_over_tls() {
    let (server, authority) = (Server::start().await, Authority::new());
    let mut config = server.config();
    listening(&mut config, authority.files("gateway"), None);
    let gateway = Gateway::start(config).await.unwrap();
    let ca = authority.path("ca.pem");
    for replayed in ["false", "true"] {
        let (heard, metadata) = call(gateway.local_addr(), Some(&ca), Some("k"), "pay").await;
        assert_eq!(heard, (0, "run 1".into()));
        assert_eq!(metadata["idempotency-replayed"], replayed);
    }
}

//! How many records wait for a decision, by metrics.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    Claim, Clock, Fingerprint, FingerprintScheme, Idempotency, Inspect, MemoryCapacity,
    MemoryStore, OnUnknown, OperationRequest, Policy, Scope, Store, SystemClock, Terms, Timestamp,
};
use hapax_gateway::{Gateway, OpenStore};
use hapax_testkit::ManualClock;

use crate::world::{Upstream, config, get, post, text};

/// A request of a process that died.
struct Payment;

impl OperationRequest for Payment {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("http/test").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_unknown_and_lapsed_records() {
    const HOUR: u64 = 3600;
    let lease = Duration::from_secs(60);
    // The store's clock is an hour behind, and stands still.
    let now = SystemClock.now().as_micros();
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(now - HOUR * 1_000_000)));
    let store =
        Arc::new(MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, MemoryCapacity::default()));
    let elsewhere = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
    let terms =
        Terms { lease, retention: Duration::from_secs(86_400), on_unknown: OnUnknown::Block };
    let policy = Policy { terms, ..Policy::default() };
    let key = "left".parse().unwrap();
    let claimed = elsewhere.claim(&Scope::shared(), &key, &Payment, &policy).await.unwrap();
    // A lease that is dropped stands for a process that died.
    let Claim::Execute(owner) = claimed else { panic!() };
    drop(owner);
    clock.advance(lease);

    let upstream = Upstream::start(|_| async { text(500, "broken") }).await;
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let gateway = Gateway::start_on(config(upstream.url()), opened).await.unwrap();
    let admin = gateway.admin_addr().unwrap();
    assert_eq!(post(gateway.local_addr(), "/", "unknown", "x").await.status, 500);
    // The census looks through the store in the background.
    let metrics = loop {
        let metrics = get(admin, "/metrics").await.text();
        if !metrics.contains("hapax_census_age_seconds -1") {
            break metrics;
        }
        tokio::task::yield_now().await;
    };
    for state in ["unknown", "lapsed"] {
        let label = format!("state=\"{state}\"");
        let counted = metrics.lines().any(|line| {
            line.starts_with("hapax_undecided{") && line.contains(&label) && line.ends_with(" 1")
        });
        assert!(counted, "one {state} is not in\n{metrics}");
    }
    let oldest =
        metrics.lines().find_map(|line| line.strip_prefix("hapax_undecided_oldest_seconds "));
    let oldest: u64 = oldest.unwrap().parse().unwrap();
    assert!(oldest >= HOUR, "{oldest}");
}

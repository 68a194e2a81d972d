//! A store of others, opened by its own driver.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;

use hapax_core::diagnose::{Finding, Severity};
use hapax_core::driver::{
    DrivenStore, DriverOptions, StoreCount, StoreDriver, StoreDriverError, StoreDriverErrorKind,
};
use hapax_core::store::{
    BoxFuture, Capabilities, Page, Reaped, Snapshot, StoreError, Swap, Swapped,
};
use hapax_core::{Inspect, MemoryStore, OperationId, Store};
use hapax_gateway::{ServerUrl, StoreOpener, StoreUrl};

use crate::world::{Upstream, config, get, post, start};

/// A store on a server `odd`, which is in fact in memory.
#[derive(Debug, Default)]
struct OddStore(MemoryStore);

impl Store for OddStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.0.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.0.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.0.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.0.capabilities()
    }
}

impl Inspect for OddStore {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.0.page(after, limit)
    }
}

impl DrivenStore for OddStore {
    fn cache_name(&self) -> String {
        "odd".into()
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn is_replaced(&self) -> bool {
        false
    }

    fn confirm(&self) -> BoxFuture<'_, Result<(), Box<dyn Error + Send + Sync>>> {
        Box::pin(async { Ok(()) })
    }

    fn counts(&self) -> Vec<StoreCount> {
        vec![StoreCount { name: "odd_total", help: "Deviations things.", value: 7 }]
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

#[derive(Debug)]
struct OddDriver;

impl StoreDriver for OddDriver {
    fn schemes(&self) -> &'static [&'static str] {
        &["odd"]
    }

    fn check(&self, options: &DriverOptions) -> Result<(), StoreDriverError> {
        match options.url.ends_with("/wrong") {
            true => {
                Err(StoreDriverError::new(StoreDriverErrorKind::Options, "expected another path"))
            }
            false => Ok(()),
        }
    }

    fn open(
        &self,
        _: DriverOptions,
    ) -> BoxFuture<'_, Result<Arc<dyn DrivenStore>, StoreDriverError>> {
        Box::pin(async { Ok(Arc::new(OddStore::default()) as Arc<dyn DrivenStore>) })
    }

    fn diagnose(&self, _: DriverOptions) -> BoxFuture<'_, Result<Vec<Finding>, StoreDriverError>> {
        let found = "it is odd".to_owned();
        let (severity, subject) = (Severity::Fine, "oddness");
        Box::pin(
            async move { Ok(vec![Finding { severity, subject, server: None, found, fix: "" }]) },
        )
    }
}

fn opener(url: &str) -> StoreOpener {
    let mut opener = StoreOpener::new(StoreUrl::Server(ServerUrl::new(url)));
    opener.drivers = opener.drivers.with(Arc::new(OddDriver));
    opener
}

#[tokio::test]
async fn a_store_of_an_external_driver_is_served_measured_and_diagnosed() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.store = StoreUrl::Server(ServerUrl::new("odd://localhost"));
    config.drivers = config.drivers.with(Arc::new(OddDriver));
    let gateway = start(config).await;
    let [first, second] = [
        post(gateway.local_addr(), "/", "k", "x").await,
        post(gateway.local_addr(), "/", "k", "x").await,
    ];
    assert_eq!(first.body, second.body);
    assert_eq!(second.header("idempotency-replayed"), "true");
    let metrics = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
    assert!(metrics.contains("\nhapax_store_odd_total 7\n"), "{metrics}");

    let findings = opener("odd://localhost").diagnose().await.unwrap();
    assert!(findings.iter().any(|finding| finding.subject == "oddness"), "{findings:?}");
}

#[tokio::test]
async fn a_driver_rejects_its_options_and_a_scheme_without_driver_is_rejected() {
    let wrong = opener("odd://localhost/wrong").check().unwrap_err().to_string();
    assert_eq!(wrong, "odd://localhost/wrong: expected another path");
    let unknown = opener("even://localhost").check().unwrap_err().to_string();
    assert!(unknown.contains("a store is"), "{unknown}");
}

//! What many callers are told while their disk fails, stands still and fills up, put in order.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hapax_file::{FileOptions, FileStore, SecretSource};
use hapax_testkit::SeededEntropy;
use hapax_testkit::storm::{Storm, StormCounts};
use tokio::time::sleep;

use crate::medium::{Fault, Lies, Medium};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn histories_on_a_disk_that_fails_hangs_and_fills_up() {
    let medium = Medium::new(Vec::new(), Lies::None);
    let options = FileOptions::new("in memory").secret(SecretSource::None);
    let store = Arc::new(FileStore::open_on(Arc::new(medium.clone()), options).unwrap());
    let dice = SeededEntropy::new(16);
    let rounds = AtomicU32::new(0);
    let harm = async {
        loop {
            medium.set_fault(Fault::Sync(dice.below(6) as u32));
            sleep(Duration::from_millis(10)).await;
            medium.set_fault(Fault::None);
            medium.hold();
            sleep(Duration::from_millis(dice.below(20))).await;
            medium.release();
            sleep(Duration::from_millis(10)).await;
            medium.set_fault(Fault::Full);
            sleep(Duration::from_millis(dice.below(10))).await;
            medium.set_fault(Fault::None);
            medium.forget_log();
            rounds.fetch_add(1, Relaxed);
            sleep(Duration::from_millis(10)).await;
        }
    };
    let enough = |told: &StormCounts| {
        let reached = told.stored > 500 && told.loads > 500 && told.unavailable > 20;
        reached && rounds.load(Relaxed) > 10 && store.stats().reopened > 10 && told.ambiguous > 20
    };
    let storm = Storm { pause: Duration::from_millis(1), ..Storm::of(10_000, 16) };
    let stores = [Arc::clone(&store)];
    let told = tokio::select! {
        told = storm.run_until(&stores, enough) => told,
        () = harm => unreachable!("harm has no end"),
    };
    assert!(told.stored > 500 && told.loads > 500 && told.unavailable > 20, "{told:?}");
}

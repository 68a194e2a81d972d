//! Periodic tasks of a gateway.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::Store;
use hapax_proxy::Upstreams;
use hapax_proxy::tls::AllCertificates;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::metrics::Metrics;

/// Interval of the removal of expired records.
const REAP_EVERY: Duration = Duration::from_secs(10);

/// Records that one round removes, and the pause before the next round while there are more. Other
/// callers of the store take precedence: at most 12,800 records are removed a second.
const REAP_LIMIT: NonZeroU32 = NonZeroU32::MIN.saturating_add(255);
const REAP_PAUSE: Duration = Duration::from_millis(20);

/// Interval of the removal of idle upstream connections.
const PRUNE_EVERY: Duration = Duration::from_millis(500);

/// Interval of the checks for changed certificate files. The files are small.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Runs all periodic tasks until the future is dropped.
pub(crate) async fn housekeeping(
    store: Arc<dyn Store>,
    observed: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    upstreams: Arc<Upstreams>,
    certificates: AllCertificates,
) {
    let forgotten = AtomicU64::default();
    tokio::join!(
        reap(&*store, &metrics.reaped),
        reap(&*observed, &forgotten),
        prune(&upstreams),
        look(&certificates),
    );
}

async fn look(certificates: &AllCertificates) {
    let mut said = String::new();
    loop {
        sleep(LOOK_EVERY).await;
        match certificates.reload().await {
            Ok(()) => said.clear(),
            // A repeated error of unchanged files is logged once.
            Err(error) if error.to_string() == said => {}
            Err(error) => {
                said = error.to_string();
                tracing::warn!(%error, "certificates are unusable: the previous ones stay in force");
            }
        }
    }
}

async fn reap(store: &dyn Store, removed: &AtomicU64) {
    loop {
        let pause = match store.reap(REAP_LIMIT).await {
            Ok(reaped) => {
                removed.fetch_add(reaped.removed.into(), Ordering::Relaxed);
                if reaped.more { REAP_PAUSE } else { REAP_EVERY }
            }
            Err(error) => {
                tracing::warn!(%error, "expired records could not be removed");
                REAP_EVERY
            }
        };
        sleep(pause).await;
    }
}

async fn prune(upstreams: &Upstreams) {
    let mut ticks = interval(PRUNE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        upstreams.prune();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
    use hapax_core::{OperationId, StoreError};
    use tokio::time::{Instant, timeout};

    use super::*;

    /// A store whose rounds of reaping return these results in turn, with the time of each call.
    #[derive(Debug)]
    struct Rounds {
        next: Mutex<Vec<Result<Reaped, StoreError>>>,
        asked: Mutex<Vec<Instant>>,
    }

    impl Store for Rounds {
        fn swap(&self, _: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
            Box::pin(async { Err(StoreError::unavailable("not asked for")) })
        }

        fn load<'a>(&'a self, _: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
            Box::pin(async { Err(StoreError::unavailable("not asked for")) })
        }

        fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
            assert_eq!(limit, REAP_LIMIT);
            self.asked.lock().unwrap().push(Instant::now());
            let round = self.next.lock().unwrap().pop();
            Box::pin(async move { round.unwrap_or(Ok(Reaped::default())) })
        }

        fn capabilities(&self) -> Capabilities<'_> {
            Capabilities::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_follow_each_other_while_there_is_more_and_failures_end_nothing() {
        let full = || Ok(Reaped { removed: 256, more: true });
        let last = Ok(Reaped { removed: 3, more: false });
        let away = Err(StoreError::unavailable("away"));
        let store = Rounds {
            next: Mutex::new(vec![full(), away, last, full(), full()]),
            asked: Mutex::default(),
        };
        let removed = AtomicU64::default();
        let begun = Instant::now();
        let run = timeout(Duration::from_secs(25), reap(&store, &removed)).await;
        assert!(run.is_err());
        let asked = store.asked.lock().unwrap();
        let after = asked.iter().map(|at| (*at - begun).as_millis()).collect::<Vec<_>>();
        assert_eq!(after, [0, 20, 40, 10_040, 20_040, 20_060]);
        assert_eq!(removed.load(Ordering::Relaxed), 3 * 256 + 3);
    }
}

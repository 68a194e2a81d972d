//! Reconciliation without a retry in the background, of the undecided records that the census lists.
//!
//! 1. Nothing is read and nothing is requested while no route reconciles.
//! 2. A pass requests the reconcile URLs about a limited number of records, some at a time. A record without a verdict
//!    pauses, and so does a route after several of them, so that a service that fails is not flooded.
//! 3. At shutdown no further request is sent, and those in progress are concluded. The future may be dropped at any
//!    await: a hook without a verdict is called again after its timeout.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{Entropy, Inspect, OperationId, Reconciled, SystemEntropy};
use hapax_operators::{Census, RecordView};
use hapax_proxy::{Shutdown, ShutdownPhase};
use tokio::time::{Instant, sleep};

use super::backoff::{Backoff, CallResult};
use super::unretried::{NotRequested, UnretriedReconciler};

/// Reconcile requests in progress at once.
const CONCURRENT: usize = 4;

/// Time after which the same warning is repeated.
const WARN_AGAIN: Duration = Duration::from_secs(3600);

/// Records about which no request is sent, by the index of their reason.
pub(crate) type NotRequestedCounts = [u64; NotRequested::CODES.len()];

/// Reconciles listed records again and again.
#[derive(Debug)]
pub(crate) struct BackgroundReconciler {
    pub(crate) reconciler: Arc<UnretriedReconciler>,
    pub(crate) census: Arc<Census>,
    /// The store through which the census walks, if nothing else makes it walk.
    pub(crate) walked: Option<Arc<dyn Inspect>>,
    pub(crate) shutdown: Shutdown,
    pub(crate) every: Duration,
    /// Largest number of records of a pass.
    pub(crate) limit: usize,
}

/// State between passes.
struct Passes {
    backoff: Mutex<Backoff>,
    /// The counts of the last warning, and its time.
    warned: Option<(NotRequestedCounts, Instant)>,
}

impl BackgroundReconciler {
    /// Runs until the gateway drains.
    pub(crate) async fn run(self) {
        let mut passes = Passes { backoff: Mutex::new(Backoff::new(self.every)), warned: None };
        let mut pause = varied(self.every);
        loop {
            tokio::select! {
                () = self.shutdown.reached(ShutdownPhase::Draining) => return,
                () = sleep(pause) => {}
            }
            pause = varied(self.every);
            if !self.reconciler.current.load().reconciles() {
                continue;
            }
            let begun = Instant::now();
            tokio::select! {
                () = self.shutdown.reached(ShutdownPhase::Draining) => return,
                () = self.walk() => {}
            }
            // At most half of the time.
            pause = pause.max(begun.elapsed());
            // Boxed, since it is large: several operations at once.
            Box::pin(self.pass(&mut passes)).await;
        }
    }

    async fn walk(&self) {
        let Some(store) = &self.walked else { return };
        if let Err(error) = self.census.walk(&**store, true).await {
            tracing::debug!(%error, "a walk of the census ended early");
        }
    }

    /// Reconciles the records that are due.
    async fn pass(&self, passes: &mut Passes) {
        let (listed, mut not_requested) = self.listed(&passes.backoff);
        let (queue, failed) = (Mutex::new(listed), Mutex::new((0, None)));
        let work = || async {
            while self.shutdown.phase() < ShutdownPhase::Draining {
                let next = lock(&queue).pop_front();
                let Some((id, view)) = next else { return };
                if let Err(error) = self.call(id, &view, &passes.backoff).await {
                    let mut failed = lock(&failed);
                    *failed = (failed.0 + 1, Some(error));
                }
            }
        };
        const { assert!(CONCURRENT == 4, "as many as are joined") };
        tokio::join!(work(), work(), work(), work());
        let (count, error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = error {
            not_requested[error.index()] += count;
            tracing::warn!(records = count, %error, "reconciliations without a retry failed");
        }
        self.reconciler.metrics.unretried.set_not_requested(&not_requested);
        passes.warn(not_requested);
    }

    /// Returns the records that are due, and the counts of those about which no request is sent.
    fn listed(
        &self,
        backoff: &Mutex<Backoff>,
    ) -> (VecDeque<(OperationId, RecordView)>, NotRequestedCounts) {
        let (snapshot, now) = (self.reconciler.current.load_full(), Instant::now());
        let mut not_requested = NotRequestedCounts::default();
        let mut backoff = lock(backoff);
        backoff.begin();
        let listed = self.census.reconcilable(self.limit, |id, view| {
            match self.reconciler.route(&snapshot, view) {
                Ok((route, _)) => backoff.rank(id, view.fence, &route.name, now),
                Err(reason) => {
                    not_requested[reason.index()] += 1;
                    None
                }
            }
        });
        backoff.listed();
        (listed.into(), not_requested)
    }

    async fn call(
        &self,
        id: OperationId,
        view: &RecordView,
        backoff: &Mutex<Backoff>,
    ) -> Result<(), NotRequested> {
        let described = view.described.as_ref();
        let route = described.and_then(|it| it.route.as_deref()).unwrap_or_default();
        if !lock(backoff).may_call(route, Instant::now()) {
            return Ok(());
        }
        let reconciled = self.reconciler.reconcile(id, view, self.every).await;
        let result = match &reconciled {
            Ok(Reconciled::Happened | Reconciled::DidNotHappen) => CallResult::Verdict,
            Ok(Reconciled::CannotSay) => CallResult::NoVerdict,
            Ok(Reconciled::NotYet { retry_in }) => CallResult::Later(*retry_in),
            Ok(Reconciled::Decided) => CallResult::Decided,
            Ok(Reconciled::InFlight | Reconciled::Blocked) | Err(_) => CallResult::Later(self.every),
        };
        lock(backoff).ended((id, view.fence), route, result, Instant::now());
        reconciled.map(drop)
    }
}

impl Passes {
    /// Warns of records about which no request is sent, when their numbers change and then each hour.
    fn warn(&mut self, counts: NotRequestedCounts) {
        let reasons = counts.iter().zip(NotRequested::CODES);
        // Those of other namespaces are those of other services.
        let reasons = reasons.filter(|(count, code)| **count > 0 && *code != "other-namespace");
        let reasons: Vec<_> = reasons.map(|(count, code)| format!("{code}: {count}")).collect();
        let again = self.warned.is_none_or(|(last, at)| last != counts || at.elapsed() >= WARN_AGAIN);
        if reasons.is_empty() || !again {
            return;
        }
        self.warned = Some((counts, Instant::now()));
        tracing::warn!(
            records = reasons.join(", "),
            "the reconcile URL is not requested about undecided operations without a retry: their retries or an operator \
             decide; `hapax keys reconcile --all` prints the reason for each"
        );
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete: nothing here panics half way through one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a time from three to five quarters of `every`, so that gateways do not begin at once.
fn varied(every: Duration) -> Duration {
    let mut random = [0; 1];
    // Without randomness they may begin at once.
    let _ = SystemEntropy.fill(&mut random);
    (every / 4 * 3).saturating_add(every / 2 / 255 * u32::from(random[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_varies_by_a_quarter() {
        let every = Duration::from_secs(60);
        for _ in 0..100 {
            let varied = varied(every);
            assert!((45..=75).contains(&varied.as_secs()), "{varied:?}");
        }
        assert!(varied(Duration::MAX) > every);
    }
}

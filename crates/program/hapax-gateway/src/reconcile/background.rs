//! Reconciliation without a retry in the background, of the undecided records that the census lists.
//!
//! 1. Nothing is read and nothing is requested while no route reconciles.
//! 2. A pass requests the reconcile URLs about a limited number of records, some at a time. A record without a verdict
//!    pauses, and so does a route after several of them, so that a service that fails is not flooded.
//! 3. A panic ends a pass and not the reconciliation: the passes begin anew after an interval.
//! 4. At shutdown no further request is sent, and those in progress are concluded. The future may be dropped at any
//!    await: a hook without a verdict is called again after its timeout.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{Entropy, Inspect, OperationId, Reconciled, SystemEntropy};
use hapax_operators::{Census, RecordView, supervised};
use hapax_proxy::{Shutdown, ShutdownPhase};
use tokio::time::{Instant, sleep};

use super::backoff::{Backoff, CallResult};
use super::unretried::{NotRequested, UnretriedReconciler};

/// Reconcile requests in progress at once.
const CONCURRENT: usize = 4;

/// Time after which a warning of the same reasons is repeated.
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
    warned: Warned,
}

/// The reasons of the last warnings, and the time of the last one.
#[derive(Debug, Default)]
struct Warned(Option<([bool; NotRequested::CODES.len()], Instant)>);

impl BackgroundReconciler {
    /// Runs until the gateway drains. After a panic it begins anew, with an interval's pause.
    pub(crate) async fn run(self) {
        supervised("the reconciliation without retries", || self.passes()).await;
    }

    async fn passes(&self) {
        let backoff = Mutex::new(Backoff::new(self.every));
        let mut passes = Passes { backoff, warned: Warned::default() };
        let mut pause = varied(self.every);
        loop {
            tokio::select! {
                () = self.shutdown.reached(ShutdownPhase::Draining) => return,
                () = sleep(pause) => {}
            }
            pause = varied(self.every);
            if !self.reconciler.current.load().reconciles() {
                // Those of a pass before a reload.
                let none = NotRequestedCounts::default();
                self.reconciler.metrics.unretried.set_not_requested(&none);
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
        let (listed, not_requested) = self.listed(&passes.backoff);
        let (queue, not_requested) = (Mutex::new(listed), Mutex::new(not_requested));
        let work = || async {
            while self.shutdown.phase() < ShutdownPhase::Draining {
                let next = lock(&queue).pop_front();
                let Some((id, view)) = next else { return };
                if let Err(reason) = self.call(id, &view, &passes.backoff).await {
                    tracing::debug!(%id, %reason, "a reconciliation without a retry failed");
                    lock(&not_requested)[reason.index()] += 1;
                }
            }
        };
        const { assert!(CONCURRENT == 4, "as many as are joined") };
        tokio::join!(work(), work(), work(), work());
        let not_requested = not_requested.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.reconciler.metrics.unretried.set_not_requested(&not_requested);
        if passes.warned.is_due(&not_requested, Instant::now()) {
            warn(&not_requested);
        }
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
                Ok((route, _)) => {
                    let rank = backoff.rank(id, view.fence, &route.name, now);
                    if rank.is_none() && backoff.is_blocked(id, view.fence) {
                        not_requested[NotRequested::Blocked.index()] += 1;
                    }
                    rank
                }
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
            Ok(Reconciled::Decided) => {
                // Another process decided it since the last walk.
                self.census.forget(&id, view.fence);
                CallResult::Decided
            }
            Ok(Reconciled::Blocked) | Err(NotRequested::Blocked) => CallResult::Blocked,
            Ok(Reconciled::InFlight) | Err(_) => CallResult::Later(self.every),
        };
        lock(backoff).ended((id, view.fence), route, result, Instant::now());
        reconciled.map(drop)
    }
}

impl Warned {
    /// Returns whether a warning is due, and notes it: for a reason without one, and then each hour. So there are at most
    /// as many warnings in an hour as reasons, whatever the numbers of records do.
    fn is_due(&mut self, counts: &NotRequestedCounts, now: Instant) -> bool {
        let mut reasons = [false; NotRequested::CODES.len()];
        for ((reason, count), code) in reasons.iter_mut().zip(counts).zip(NotRequested::CODES) {
            *reason = *count > 0 && !is_elsewhere(code);
        }
        let last = self.0.filter(|(_, at)| now.saturating_duration_since(*at) < WARN_AGAIN);
        let (warned, at) = last.unwrap_or(([false; NotRequested::CODES.len()], now));
        let is_new = reasons.iter().zip(warned).any(|(reason, warned)| *reason && !warned);
        if is_new {
            for (reason, warned) in reasons.iter_mut().zip(warned) {
                *reason |= warned;
            }
            self.0 = Some((reasons, at));
        }
        is_new
    }
}

/// Returns whether a reason is that of records of other services.
fn is_elsewhere(code: &str) -> bool {
    code == "other-namespace"
}

/// Warns of records about which no request is sent.
fn warn(counts: &NotRequestedCounts) {
    let reasons = counts.iter().zip(NotRequested::CODES);
    let reasons = reasons.filter(|(count, code)| **count > 0 && !is_elsewhere(code));
    let reasons: Vec<_> = reasons.map(|(count, code)| format!("{code}: {count}")).collect();
    tracing::warn!(
        records = reasons.join(", "),
        "the reconcile URL is not requested about undecided operations without a retry: their retries or an operator \
         decide; `hapax keys reconcile --all` prints the reason for each"
    );
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
    fn a_reason_has_one_warning_in_an_hour_whatever_its_numbers_do() {
        let (mut warned, begun) = (Warned::default(), Instant::now());
        let [blocked, failed] = [0, 7];
        for (seconds, counts, expected) in [
            (0, vec![], false),
            // The records of other namespaces are those of other services.
            (1, vec![(2, 9)], false),
            (2, vec![(blocked, 1)], true),
            (62, vec![(blocked, 2)], false),
            (122, vec![], false),
            (182, vec![(blocked, 1)], false),
            (242, vec![(failed, 1)], true),
            (302, vec![(blocked, 3), (failed, 1)], false),
            (3601, vec![(failed, 1)], false),
            (3602, vec![(blocked, 1)], true),
            (3603, vec![(failed, 1)], true),
        ] {
            let mut found = NotRequestedCounts::default();
            for (index, count) in counts {
                found[index] = count;
            }
            let now = begun + Duration::from_secs(seconds);
            assert_eq!(warned.is_due(&found, now), expected, "{seconds}");
        }
    }

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

//! Pauses after reconcile requests without a verdict, of a record and of a route.

use std::collections::HashMap;
use std::time::Duration;

use hapax_core::OperationId;
use tokio::time::Instant;

/// Requests in a row without a verdict after which a route pauses. After the pause one more is enough.
const MOST_FAILURES: u32 = 4;

/// Times that a pause is doubled, at most: of a record to 64 intervals, of a route to 16.
const RECORD_DOUBLINGS: u32 = 6;
const ROUTE_DOUBLINGS: u32 = 4;

/// The longest pause that a clock represents.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// Results of a request, as far as pauses depend on them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallResult {
    /// There was a verdict.
    Verdict,
    /// There was none.
    NoVerdict,
    /// No request was sent, and only a retry or an operator can decide.
    Blocked,
    /// No request was sent; one may be sent after this time.
    Later(Duration),
    /// There is nothing to decide any more.
    Decided,
}

/// The pauses. It has one entry for each listed record about which a request was sent, and for each route.
#[derive(Debug)]
pub(super) struct Backoff {
    every: Duration,
    pass: u64,
    records: HashMap<OperationId, RecordPause>,
    routes: HashMap<String, RoutePause>,
}

#[derive(Debug)]
struct RecordPause {
    fence: u64,
    failures: u32,
    /// True if only a retry or an operator can decide.
    blocked: bool,
    due: Instant,
    /// The last pass that listed the record.
    pass: u64,
}

#[derive(Debug, Default)]
struct RoutePause {
    failures: u32,
    pauses: u32,
    due: Option<Instant>,
}

impl Backoff {
    /// Creates pauses of multiples of `every`.
    pub(super) fn new(every: Duration) -> Self {
        Self { every, pass: 0, records: HashMap::new(), routes: HashMap::new() }
    }

    /// Begins a pass.
    pub(super) const fn begin(&mut self) {
        self.pass += 1;
    }

    /// Returns the number of failures of a listed record; `None` if it or its route pauses.
    pub(super) fn rank(
        &mut self,
        id: &OperationId,
        fence: u64,
        route: &str,
        now: Instant,
    ) -> Option<u32> {
        let failures = match self.records.get_mut(id).filter(|record| record.fence == fence) {
            Some(record) => {
                record.pass = self.pass;
                if now < record.due {
                    return None;
                }
                record.failures
            }
            None => 0,
        };
        self.may_call(route, now).then_some(failures)
    }

    /// Returns whether only a retry or an operator can decide a listed record.
    pub(super) fn is_blocked(&self, id: &OperationId, fence: u64) -> bool {
        self.records.get(id).is_some_and(|record| record.fence == fence && record.blocked)
    }

    /// Removes the records that this pass did not list.
    pub(super) fn listed(&mut self) {
        let pass = self.pass;
        self.records.retain(|_, record| record.pass == pass);
    }

    /// Returns whether the hook of a route may be called.
    pub(super) fn may_call(&self, route: &str, now: Instant) -> bool {
        self.routes.get(route).and_then(|route| route.due).is_none_or(|due| due <= now)
    }

    /// Takes the result of a request.
    pub(super) fn ended(
        &mut self,
        (id, fence): (OperationId, u64),
        route: &str,
        result: CallResult,
        now: Instant,
    ) {
        let known = self.records.remove(&id).filter(|record| record.fence == fence);
        let failures = known.map_or(0, |record| record.failures);
        let (failures, pause) = match result {
            CallResult::Decided => return,
            CallResult::Verdict => {
                self.routes.remove(route);
                return;
            }
            CallResult::Later(pause) => (failures, pause),
            CallResult::NoVerdict | CallResult::Blocked => {
                (failures.saturating_add(1), self.doubled(failures, RECORD_DOUBLINGS))
            }
        };
        if result == CallResult::NoVerdict {
            self.failed(route, now);
        }
        let blocked = result == CallResult::Blocked;
        let (due, pass) = (after(now, pause), self.pass);
        self.records.insert(id, RecordPause { fence, failures, blocked, due, pass });
    }

    /// Notes a failure of a route. While the route pauses, those of requests that were in progress when its pause began
    /// do not lengthen it.
    fn failed(&mut self, route: &str, now: Instant) {
        if !self.may_call(route, now) {
            return;
        }
        let pauses = self.routes.get(route).map_or(0, |route| route.pauses);
        let pause = self.doubled(pauses, ROUTE_DOUBLINGS);
        let route = self.routes.entry(route.to_owned()).or_default();
        route.failures += 1;
        if route.failures >= MOST_FAILURES {
            route.failures = MOST_FAILURES - 1;
            route.pauses = route.pauses.saturating_add(1);
            route.due = Some(after(now, pause));
        }
    }

    fn doubled(&self, times: u32, most: u32) -> Duration {
        self.every.saturating_mul(1 << times.min(most))
    }
}

fn after(now: Instant, pause: Duration) -> Instant {
    now.checked_add(pause.min(LONGEST)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(60);

    fn id(number: u8) -> OperationId {
        OperationId::from_bytes([number; 32])
    }

    #[test]
    fn a_record_without_a_verdict_pauses_for_doubled_times_up_to_64_intervals() {
        let (mut backoff, mut now) = (Backoff::new(EVERY), Instant::now());
        for (failures, intervals) in [1, 2, 4, 8, 16, 32, 64, 64].into_iter().enumerate() {
            backoff.begin();
            // Each failure is of another route: no route pauses.
            let route = failures.to_string();
            assert_eq!(backoff.rank(&id(1), 7, &route, now), Some(failures as u32));
            backoff.listed();
            backoff.ended((id(1), 7), &route, CallResult::NoVerdict, now);
            let due = now + intervals * EVERY;
            assert_eq!(backoff.rank(&id(1), 7, "", due - Duration::from_millis(1)), None);
            // Another execution of the operation has its own pauses.
            assert_eq!(backoff.rank(&id(1), 8, "", now), Some(0));
            now = due;
        }
        backoff.begin();
        backoff.listed();
        assert!(backoff.records.is_empty(), "it is no longer listed");
    }

    #[test]
    fn a_route_pauses_after_four_failures_in_a_row_and_then_after_each_until_a_verdict() {
        let (mut backoff, mut now) = (Backoff::new(EVERY), Instant::now());
        for number in 0..3 {
            backoff.ended((id(number), 1), "pay", CallResult::NoVerdict, now);
            assert!(backoff.may_call("pay", now));
        }
        for (number, intervals) in (3..).zip([1, 2, 4, 8, 16, 16]) {
            backoff.ended((id(number), 1), "pay", CallResult::NoVerdict, now);
            assert!(!backoff.may_call("pay", now));
            assert_eq!(backoff.rank(&id(99), 1, "pay", now), None);
            assert!(backoff.may_call("refund", now));
            now += intervals * EVERY;
            assert!(backoff.may_call("pay", now));
        }
        backoff.ended((id(50), 1), "pay", CallResult::Verdict, now);
        backoff.ended((id(51), 1), "pay", CallResult::NoVerdict, now);
        assert!(backoff.may_call("pay", now));
    }

    #[test]
    fn requests_in_progress_when_a_route_pauses_do_not_lengthen_its_pause() {
        let (mut backoff, mut now) = (Backoff::new(EVERY), Instant::now());
        for (pass, intervals) in [1, 2, 4].into_iter().enumerate() {
            // Those of a pass end at once.
            for number in 0..8 {
                let id = id(8 * pass as u8 + number);
                backoff.ended((id, 1), "pay", CallResult::NoVerdict, now);
            }
            let due = now + intervals * EVERY;
            assert!(!backoff.may_call("pay", due - Duration::from_millis(1)));
            assert!(backoff.may_call("pay", due), "{intervals}");
            now = due;
        }
    }

    #[test]
    fn a_record_that_a_retry_has_to_decide_leaves_its_place_to_others() {
        let (mut backoff, mut now) = (Backoff::new(EVERY), Instant::now());
        for (failures, intervals) in [1, 2, 4].into_iter().enumerate() {
            assert_eq!(backoff.rank(&id(1), 1, "pay", now), Some(failures as u32));
            backoff.ended((id(1), 1), "pay", CallResult::Blocked, now);
            assert_eq!(backoff.rank(&id(1), 1, "pay", now), None);
            assert!(backoff.is_blocked(&id(1), 1) && !backoff.is_blocked(&id(1), 2));
            now += intervals * EVERY;
        }
        // The service of the route has not failed.
        for number in 2..9 {
            backoff.ended((id(number), 1), "pay", CallResult::Blocked, now);
        }
        assert!(backoff.may_call("pay", now));
        backoff.ended((id(1), 1), "pay", CallResult::NoVerdict, now);
        assert!(!backoff.is_blocked(&id(1), 1));
    }

    #[test]
    fn a_record_that_was_not_requested_keeps_its_failures_until_its_time() {
        let (mut backoff, now) = (Backoff::new(EVERY), Instant::now());
        backoff.ended((id(1), 1), "", CallResult::NoVerdict, now);
        let later = now + EVERY;
        backoff.ended((id(1), 1), "", CallResult::Later(EVERY), later);
        assert_eq!(backoff.rank(&id(1), 1, "", later), None);
        assert_eq!(backoff.rank(&id(1), 1, "", later + EVERY), Some(1));
        backoff.ended((id(1), 1), "", CallResult::Later(Duration::MAX), later);
        assert_eq!(backoff.rank(&id(1), 1, "", later + EVERY), None);
        backoff.ended((id(1), 1), "", CallResult::Decided, later);
        assert!(backoff.records.is_empty());
    }
}

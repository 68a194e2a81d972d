//! Activity of the requests on one HTTP/2 connection, and detection of abuse.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use http::Response;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Requests that a client may reset; beyond this number, no more than those that were answered.
const MAX_RESETS: usize = 100;

/// Requests in progress on one connection, and their progress.
#[derive(Debug)]
pub(super) struct Activity {
    since: Instant,
    busy: AtomicUsize,
    /// Time at which the last request ended, or the connection began, in milliseconds after its
    /// beginning.
    last_ms: AtomicU64,
    answered: AtomicUsize,
    taken_back: AtomicUsize,
    abused: Notify,
    answers: Mutex<Vec<Weak<AtomicU64>>>,
}

/// States of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ConnectionState {
    Alive,
    /// No request has been in progress for too long.
    Idle,
    /// The client has received nothing of a response for too long.
    Stalled,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            busy: AtomicUsize::new(0),
            last_ms: AtomicU64::new(0),
            answered: AtomicUsize::new(0),
            taken_back: AtomicUsize::new(0),
            abused: Notify::new(),
            answers: Mutex::default(),
        }
    }

    /// Returns the earliest time at which the state can change.
    pub(super) fn look_at(&self, idle: Duration, stall: Duration) -> Instant {
        let now = Instant::now();
        // A response that begins to wait from now on has the complete timeout.
        let most = now + stall;
        let due = if self.busy.load(Ordering::Acquire) == 0 {
            self.at(self.last_ms.load(Ordering::Acquire)) + idle
        } else {
            self.turns().into_iter().map(|ms| self.at(ms) + stall).min().unwrap_or(most)
        };
        // A state that is already due is found at once, but not polled in a busy loop while it
        // lasts.
        due.min(most).max(now + Duration::from_millis(1))
    }

    pub(super) fn state(&self, idle: Duration, stall: Duration) -> ConnectionState {
        let now = Instant::now();
        if self.turns().into_iter().any(|ms| self.at(ms) + stall <= now) {
            return ConnectionState::Stalled;
        }
        let quiet = self.busy.load(Ordering::Acquire) == 0;
        let last = self.at(self.last_ms.load(Ordering::Acquire));
        if quiet && last + idle <= now { ConnectionState::Idle } else { ConnectionState::Alive }
    }

    /// Restarts the idle time.
    pub(super) fn restart_idle_time(&self) {
        self.last_ms.store(self.now_ms(), Ordering::Release);
    }

    /// Resolves when the client has reset too many requests.
    pub(super) async fn abused(&self) {
        self.abused.notified().await;
    }

    /// Counts a request as in progress until the last clone is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> StreamActivity {
        self.busy.fetch_add(1, Ordering::AcqRel);
        StreamActivity(Arc::new(Request {
            activity: Arc::clone(self),
            answered: AtomicUsize::new(0),
        }))
    }

    /// Watches a response until it is dropped.
    pub(super) fn watch(self: &Arc<Self>) -> ResponsePace {
        let turn = Arc::new(AtomicU64::new(OURS));
        let mut answers = self.answers();
        // Bounded by the responses in progress and those that just ended.
        answers.retain(|answer| answer.strong_count() > 0);
        answers.push(Arc::downgrade(&turn));
        drop(answers);
        ResponsePace { activity: Arc::clone(self), turn }
    }

    /// Returns, for each response that waits for the client, the time since when it does.
    fn turns(&self) -> Vec<u64> {
        let turns = self.answers().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        turns.iter().map(|turn| turn.load(Ordering::Acquire)).filter(|ms| *ms != OURS).collect()
    }

    fn answers(&self) -> MutexGuard<'_, Vec<Weak<AtomicU64>>> {
        // No change can panic half way.
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, ms: u64) -> Instant {
        self.since + Duration::from_millis(ms)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(OURS - 1)
    }
}

/// A request in progress.
#[derive(Clone, Debug)]
pub(super) struct StreamActivity(Arc<Request>);

#[derive(Debug)]
struct Request {
    activity: Arc<Activity>,
    answered: AtomicUsize,
}

impl StreamActivity {
    /// Counts the request as answered: dropping it later does not count as a reset.
    pub(super) fn answered<B>(&self, response: Response<B>) -> Response<B> {
        self.0.answered.store(1, Ordering::Release);
        self.0.activity.answered.fetch_add(1, Ordering::AcqRel);
        response
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let Activity { busy, last_ms, answered, taken_back, abused, .. } = &*self.activity;
        last_ms.store(self.activity.now_ms(), Ordering::Release);
        busy.fetch_sub(1, Ordering::AcqRel);
        if self.answered.load(Ordering::Acquire) == 0 {
            let back = taken_back.fetch_add(1, Ordering::AcqRel) + 1;
            if back > MAX_RESETS && back > answered.load(Ordering::Acquire) {
                abused.notify_one();
            }
        }
    }
}

/// Marks a response that does not wait for the client: the gateway has no piece for it yet.
const OURS: u64 = u64::MAX;

/// Progress of a response: it waits for the gateway or for the client.
#[derive(Debug)]
pub(super) struct ResponsePace {
    activity: Arc<Activity>,
    turn: Arc<AtomicU64>,
}

impl ResponsePace {
    pub(super) fn is_ours(&self) {
        self.turn.store(OURS, Ordering::Release);
    }

    /// Marks that h2 has a piece, and will request the next one when the client has received it.
    pub(super) fn wait_for_client(&self) {
        self.turn.store(self.activity.now_ms(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(30);
    const STALL: Duration = Duration::from_secs(10);

    async fn pass(time: Duration) {
        tokio::time::advance(time).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_requests_becomes_idle() {
        let activity = Arc::new(Activity::new());
        pass(IDLE - Duration::from_secs(1)).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        let busy = activity.begin();
        pass(2 * IDLE).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        drop(busy);
        pass(IDLE - Duration::from_secs(1)).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        assert_eq!(activity.look_at(IDLE, STALL), Instant::now() + Duration::from_secs(1));
        assert_eq!(activity.look_at(2 * IDLE, STALL), Instant::now() + STALL);
        pass(Duration::from_secs(1)).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Idle);
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_that_waits_for_the_upstream_does_not_count_as_stalled() {
        let activity = Arc::new(Activity::new());
        let (_busy, pace) = (activity.begin(), activity.watch());
        pass(2 * STALL).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        pace.wait_for_client();
        assert_eq!(activity.look_at(IDLE, STALL), Instant::now() + STALL);
        pass(STALL).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Stalled);
        pace.is_ours();
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        pace.wait_for_client();
        drop(pace);
        pass(2 * STALL).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_resets_more_requests_than_are_answered_is_detected() {
        let activity = Arc::new(Activity::new());
        let abused = || async {
            tokio::time::timeout(Duration::from_millis(1), activity.abused()).await.is_ok()
        };
        for _ in 0..MAX_RESETS {
            drop(activity.begin());
        }
        assert!(!abused().await);
        for _ in 0..=MAX_RESETS {
            drop(activity.begin().answered(Response::new(())));
        }
        drop(activity.begin());
        assert!(!abused().await);
        drop(activity.begin());
        assert!(abused().await);
    }
}

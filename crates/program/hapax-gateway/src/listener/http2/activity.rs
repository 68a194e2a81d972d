//! Whether a connection's client does its part.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use http::Response;
use tokio::sync::Notify;
use tokio::time::Instant;

/// So many requests may a client take back, and beyond that no more than it lets be answered.
const TAKEN_BACK: usize = 100;

/// What is under way on one connection, and how it goes.
#[derive(Debug)]
pub(super) struct Activity {
    since: Instant,
    busy: AtomicUsize,
    /// When the last request ended, or the connection began, in milliseconds since it began.
    last_ms: AtomicU64,
    answered: AtomicUsize,
    taken_back: AtomicUsize,
    abused: Notify,
    answers: Mutex<Vec<Weak<AtomicU64>>>,
}

/// How a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ConnectionState {
    Alive,
    /// Nothing has been under way for too long.
    Idle,
    /// The client has taken nothing of an answer for too long.
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

    /// When its state is worth a look: no change of it is earlier.
    pub(super) fn look_at(&self, idle: Duration, stall: Duration) -> Instant {
        let now = Instant::now();
        // An answer that begins to wait from now on has all of it.
        let most = now + stall;
        let due = if self.busy.load(Ordering::Acquire) == 0 {
            self.at(self.last_ms.load(Ordering::Acquire)) + idle
        } else {
            self.turns().into_iter().map(|ms| self.at(ms) + stall).min().unwrap_or(most)
        };
        // What is due already is found so at once; but not again and again while it stays so.
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

    /// Counts idleness anew.
    pub(super) fn begin_to_leave(&self) {
        self.last_ms.store(self.now_ms(), Ordering::Release);
    }

    /// Resolves when the client takes back too much.
    pub(super) async fn abused(&self) {
        self.abused.notified().await;
    }

    /// A request is under way until the last clone is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> StreamActivity {
        self.busy.fetch_add(1, Ordering::AcqRel);
        StreamActivity(Arc::new(Request {
            activity: Arc::clone(self),
            answered: AtomicUsize::new(0),
        }))
    }

    /// Watches an answer until it is dropped.
    pub(super) fn watch(self: &Arc<Self>) -> ResponsePace {
        let turn = Arc::new(AtomicU64::new(OURS));
        let mut answers = self.answers();
        // No longer than the answers there are, and those that just ended.
        answers.retain(|answer| answer.strong_count() > 0);
        answers.push(Arc::downgrade(&turn));
        drop(answers);
        ResponsePace { activity: Arc::clone(self), turn }
    }

    /// Since when it has been the client's turn, by answer.
    fn turns(&self) -> Vec<u64> {
        let turns = self.answers().iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        turns.iter().map(|turn| turn.load(Ordering::Acquire)).filter(|ms| *ms != OURS).collect()
    }

    fn answers(&self) -> MutexGuard<'_, Vec<Weak<AtomicU64>>> {
        // Nothing here panics half way through a change.
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, ms: u64) -> Instant {
        self.since + Duration::from_millis(ms)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(OURS - 1)
    }
}

/// A request under way.
#[derive(Clone, Debug)]
pub(super) struct StreamActivity(Arc<Request>);

#[derive(Debug)]
struct Request {
    activity: Arc<Activity>,
    answered: AtomicUsize,
}

impl StreamActivity {
    /// It has its answer: whatever becomes of it now, it was not taken back.
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
            if back > TAKEN_BACK && back > answered.load(Ordering::Acquire) {
                abused.notify_one();
            }
        }
    }
}

/// It is ours: there is nothing for the client to take yet.
const OURS: u64 = u64::MAX;

/// Whose turn it is with an answer.
#[derive(Debug)]
pub(super) struct ResponsePace {
    activity: Arc<Activity>,
    turn: Arc<AtomicU64>,
}

impl ResponsePace {
    pub(super) fn is_ours(&self) {
        self.turn.store(OURS, Ordering::Release);
    }

    /// It was given a piece, and will be asked for the next one.
    pub(super) fn is_the_clients(&self) {
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
    async fn a_connection_is_idle_when_nothing_was_under_way_for_long() {
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
    async fn an_answer_that_waits_for_the_upstream_is_not_the_clients_fault() {
        let activity = Arc::new(Activity::new());
        let (_busy, pace) = (activity.begin(), activity.watch());
        pass(2 * STALL).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        pace.is_the_clients();
        assert_eq!(activity.look_at(IDLE, STALL), Instant::now() + STALL);
        pass(STALL).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Stalled);
        pace.is_ours();
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
        pace.is_the_clients();
        drop(pace);
        pass(2 * STALL).await;
        assert_eq!(activity.state(IDLE, STALL), ConnectionState::Alive);
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_back_more_than_is_answered_is_told_apart() {
        let activity = Arc::new(Activity::new());
        let abused = || async {
            tokio::time::timeout(Duration::from_millis(1), activity.abused()).await.is_ok()
        };
        for _ in 0..TAKEN_BACK {
            drop(activity.begin());
        }
        assert!(!abused().await);
        for _ in 0..=TAKEN_BACK {
            drop(activity.begin().answered(Response::new(())));
        }
        drop(activity.begin());
        assert!(!abused().await);
        drop(activity.begin());
        assert!(abused().await);
    }
}

//! The state of an unfinished saga, as its caller sees it.

use std::time::Duration;

use hapax_core::Timestamp;
use serde_json::{Map, Value};

use crate::log::{Direction, Log, LogTime};
use crate::operator::SagaView;

/// Bounds of the time after which a client looks again.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The state of an unfinished saga, and the time after which to look again.
pub(super) struct Progress {
    pub(super) members: Map<String, Value>,
    pub(super) retry_after: Duration,
}

impl Progress {
    /// Returns the state of a saga that has just begun.
    pub(super) fn begun() -> Self {
        Self { members: state("running"), retry_after: RETRY[0] }
    }

    /// Returns the state that operators see, without what only they may see: errors of other
    /// systems, and decisions.
    pub(super) fn of(view: &SagaView) -> Self {
        match &view.log {
            Some(log) => of_log(log, view.now),
            None => Self::begun(),
        }
    }
}

fn of_log(log: &Log, now: Timestamp) -> Progress {
    let now = LogTime::from(now);
    let parked = log.parked.as_ref().map(|parked| parked.until.since(now));
    let (mut members, retry_after) = match (&log.stuck, parked) {
        (Some(stuck), _) => {
            let mut members = state("stuck");
            members.insert("reason".into(), stuck.reason.as_str().into());
            (members, RETRY[1])
        }
        (None, Some(rest)) => {
            let mut members = state("parked");
            members.insert("parked_for".into(), seconds(rest).into());
            (members, rest)
        }
        // The interval doubles while the saga runs.
        (None, None) => (state("running"), now.since(log.started).min(RETRY[1] / 2)),
    };
    let direction = log.direction();
    if let Some(step) = log.current_step() {
        members.insert("step".into(), step.name.as_str().into());
        members.insert("nth".into(), step.nth.into());
        members.insert("tries".into(), step.tries(direction).begun.into());
    }
    if direction == Direction::Undo {
        members.insert("compensating".into(), true.into());
    }
    Progress { members, retry_after: retry_after.clamp(RETRY[0], RETRY[1]) }
}

fn state(state: &str) -> Map<String, Value> {
    Map::from_iter([("state".to_owned(), Value::from(state))])
}

fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

//! The step log: the state of a saga, which is the checkpoint of its record.
//!
//! 1. It has every step that the flow requested, with argument, tries and outcome, in the order of
//!    their first requests; the error that began the compensation; and the decisions of operators.
//! 2. Times are those of the store's clock.
//! 3. It is encoded with the names of its fields, so that a version that adds fields reads older logs.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{EntryId, Key, OperationId, SETTLE_MARGIN, Timestamp, value};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An encoded value. Its `Debug` form shows its length only.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Blob(pub Bytes);

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Blob;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Blob, E> {
                Ok(Blob(Bytes::copy_from_slice(bytes)))
            }

            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Blob, E> {
                Ok(Blob(bytes.into()))
            }
        }
        deserializer.deserialize_byte_buf(Visitor)
    }
}

/// A time of the store's clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LogTime(u64);

impl LogTime {
    /// Returns this time plus `duration`.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(Timestamp::from_micros(self.0).after(duration).as_micros())
    }

    /// Returns the time from `earlier` to this one; zero if this one is not later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl From<Timestamp> for LogTime {
    fn from(time: Timestamp) -> Self {
        Self(time.as_micros())
    }
}

impl From<LogTime> for Timestamp {
    fn from(time: LogTime) -> Self {
        Self::from_micros(time.0)
    }
}

/// Whether a step runs or is undone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Direction {
    /// The step runs.
    Forward,
    /// The step is undone.
    Undo,
}

impl Direction {
    /// Returns the word for it in keys and texts.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Undo => "undo",
        }
    }
}

/// The tries of a step in one direction.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Tries {
    /// Tries that have begun, or begun since an operator decided `retry`. Saved before the call.
    pub begun: u32,
    /// Begin of the first of these tries: the retry's time counts from it.
    pub since: Option<LogTime>,
    /// True while a try is in progress, or until the next execution if its process died.
    pub open: bool,
    /// True if a try that has ended, or whose process died, may have had an effect.
    pub arrived: bool,
    /// Begin of the first try that may have had an effect: the lifetime of the step's key counts from it.
    pub first: Option<LogTime>,
    /// Time until which the last try may have called: its end, or the takeover from its process. Its
    /// begin while it is in progress.
    pub last: Option<LogTime>,
    /// Time before which no further try begins; of a pause, its end.
    pub retry_at: Option<LogTime>,
    /// Calls of the reconcile function without a verdict.
    pub checks: u32,
    /// End of the first of them.
    #[serde(default)]
    pub checked: Option<LogTime>,
    /// Text of the last error.
    pub error: Option<String>,
    /// The value that was prepared for the last try.
    #[serde(default)]
    pub prepared: Option<Blob>,
}

impl Tries {
    /// Begins a try. The log must be saved before the call.
    pub(crate) fn begin(&mut self, now: LogTime) {
        self.begun = self.begun.saturating_add(1);
        self.open = true;
        self.since.get_or_insert(now);
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.retry_at = None;
    }

    /// Grants new tries.
    fn grant(&mut self) {
        (self.begun, self.since, self.retry_at) = (0, None, None);
        (self.checks, self.checked) = (0, None);
    }

    /// Takes back the begin of a try that was surely not called.
    pub(crate) fn not_begun(&mut self) {
        self.not_sent();
        self.begun = self.begun.saturating_sub(1);
        if self.begun == 0 {
            self.since = None;
        }
    }

    /// Ends a try that was not sent.
    pub(crate) fn not_sent(&mut self) {
        self.open = false;
        if !self.arrived {
            self.first = None;
        }
    }

    /// Ends a try whose result is unknown.
    pub(crate) fn unknown(&mut self) {
        self.open = false;
        self.arrived = true;
    }
}

/// Outcome of a step.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StepOutcome {
    /// The step happened, with this result.
    Happened(Blob),
    /// The step was rejected, with this error, and has no effect.
    Rejected(Blob),
}

/// End of the undo of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum UndoEnd {
    /// The undo succeeded.
    Undone,
    /// The step did not happen, or it has no undo and its effect stays.
    Nothing,
    /// An operator skipped it.
    Skipped,
}

impl UndoEnd {
    /// Returns the word for it in texts.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undone => "undone",
            Self::Nothing => "nothing",
            Self::Skipped => "skipped",
        }
    }
}

/// A step that the flow requested.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StepLog {
    /// Its name.
    pub name: String,
    /// Its number among the requests of this name.
    pub nth: u32,
    /// Its argument.
    pub argument: Blob,
    /// The tries to run it.
    pub forward: Tries,
    /// Its outcome; `None` while it is unknown.
    pub outcome: Option<StepOutcome>,
    /// The tries to undo it.
    pub undo: Tries,
    /// The end of the undo.
    pub undone: Option<UndoEnd>,
}

impl StepLog {
    pub(crate) fn new(name: &str, nth: u32, argument: Blob) -> Self {
        Self {
            name: name.to_owned(),
            nth,
            argument,
            forward: Tries::default(),
            outcome: None,
            undo: Tries::default(),
            undone: None,
        }
    }

    /// Returns the key of its calls in a direction, as
    /// [`StepContext::key`](crate::StepContext::key) does; `None` of a pause.
    #[must_use]
    pub fn key(&self, saga: &OperationId, direction: Direction) -> Option<Key> {
        crate::note::called_key(saga, direction, &self.name, self.nth)
    }

    /// Returns the tries in a direction.
    #[must_use]
    pub const fn tries(&self, direction: Direction) -> &Tries {
        match direction {
            Direction::Forward => &self.forward,
            Direction::Undo => &self.undo,
        }
    }

    /// Grants new tries in a direction. A pause has none: its end stays.
    pub(crate) fn grant(&mut self, direction: Direction) {
        if !crate::note::is_pause(&self.name) {
            self.tries_mut(direction).grant();
        }
    }

    pub(crate) const fn tries_mut(&mut self, direction: Direction) -> &mut Tries {
        match direction {
            Direction::Forward => &mut self.forward,
            Direction::Undo => &mut self.undo,
        }
    }
}

/// The reason for a compensation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Failure {
    /// The flow returned this error.
    Error(Blob),
    /// The saga was cancelled, or aborted by an operator.
    Cancelled {
        /// The reason that was given.
        reason: String,
    },
}

/// The reason for which a saga is stuck: no step runs before an operator decides.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StuckReason {
    /// The tries of a step are exhausted.
    Exhausted,
    /// [`MAX_CRASHES`](crate::run::MAX_CRASHES) executions in a row ended without progress: their
    /// process died, or they lost their lease.
    Crashed,
    /// The step may have happened, and nothing can determine whether it did.
    Unknown,
    /// The called system no longer honors the step's key.
    KeyExpired,
    /// The flow requests other steps than the log has.
    Diverged,
    /// A logged value does not have the type that the definition expects.
    Unreadable,
    /// The definition cannot run a step: it has no such step, or no database for a `within` step, or a
    /// signal has no name.
    NoSuchStep,
    /// An argument, a prepared value, a result, an error or the step log exceeds its limit, or a value cannot
    /// be serialized.
    TooLarge,
    /// The flow panicked.
    Panicked,
    /// A reason of the step's own, by its name.
    Step(String),
}

impl StuckReason {
    /// Returns the word for it in texts.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Exhausted => "exhausted",
            Self::Crashed => "crashed",
            Self::Unknown => "unknown",
            Self::KeyExpired => "key-expired",
            Self::Diverged => "diverged",
            Self::Unreadable => "unreadable",
            Self::NoSuchStep => "no-such-step",
            Self::TooLarge => "too-large",
            Self::Panicked => "panicked",
            Self::Step(reason) => reason,
        }
    }
}

/// A stuck saga.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stuck {
    /// The reason.
    pub reason: StuckReason,
    /// The step, by its position in the log.
    pub step: Option<usize>,
    /// The direction.
    pub direction: Direction,
    /// Sentence that says what was expected, what was found, and what to do.
    pub detail: String,
    /// Time at which it became stuck.
    pub since: LogTime,
    /// Time from which no try of the step can take effect any more: the timeout of the last one and the settle
    /// time have passed. `None` if none may have had an effect, and in logs of earlier releases.
    #[serde(default)]
    pub quiet: Option<LogTime>,
}

impl Stuck {
    /// Returns the time before which a decision that the step did not happen is rejected without `force`:
    /// [`SETTLE_MARGIN`] after no try of it can take effect any more.
    #[must_use]
    pub fn may_take_effect_until(&self) -> Option<LogTime> {
        self.quiet.map(|quiet| quiet.after(SETTLE_MARGIN))
    }
}

/// A parked saga: no process runs it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Parked {
    /// Time at which it continues.
    pub until: LogTime,
    /// Name of the signal that it waits for.
    pub signal: Option<String>,
}

/// A decision of an operator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LoggedDecision {
    /// The operator.
    pub by: String,
    /// The time.
    pub at: LogTime,
    /// The reason.
    pub reason: String,
    /// The decision as [`SagaDecision::as_str`](crate::SagaDecision::as_str) names it: `retry`,
    /// `resolve happened`, `resolve did-not-happen`, `skip` or `abort`.
    pub action: String,
}

/// The step log.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Log {
    /// Name of the definition.
    pub definition: String,
    /// Its version.
    pub version: u32,
    /// Id of the schedule's entry.
    pub entry: [u8; 16],
    /// True if the entry is known to have been inserted. If not, nothing was called unless the entry
    /// exists.
    #[serde(default = "is_inserted")]
    pub inserted: bool,
    /// Begin of the saga.
    pub started: LogTime,
    /// The steps.
    pub steps: Vec<StepLog>,
    /// The reason for the compensation; no step runs forward once there is one.
    pub failure: Option<Failure>,
    /// Number of the execution that saved the log last; zero before the first save.
    pub attempt: u32,
    /// Executions in a row that ended without progress.
    pub crashes: u32,
    /// Set if no process runs the saga.
    pub parked: Option<Parked>,
    /// Set if an operator has to decide.
    pub stuck: Option<Stuck>,
    /// The decisions of operators.
    pub decisions: Vec<LoggedDecision>,
}

/// The largest log that can be configured, in bytes.
pub const MAX_LOG: usize = 1 << 20;

/// The greatest number of steps.
pub const MAX_STEPS: usize = 1_000;

impl Log {
    pub(crate) fn new(definition: &str, version: u32, entry: EntryId, started: LogTime) -> Self {
        Self {
            definition: definition.to_owned(),
            version,
            entry: *entry.as_bytes(),
            inserted: false,
            started,
            steps: Vec::new(),
            failure: None,
            attempt: 0,
            crashes: 0,
            parked: None,
            stuck: None,
            decisions: Vec::new(),
        }
    }

    /// Decodes a checkpoint.
    ///
    /// # Errors
    /// [`value::ValueError`] if the checkpoint is no log.
    pub fn decode(checkpoint: &[u8]) -> Result<Self, value::ValueError> {
        value::read(checkpoint)
    }

    /// Encodes the log as a checkpoint. It may exceed the limit of the definition by what the last
    /// result needs, but not [`hapax_core::codec::MAX_CHECKPOINT`].
    ///
    /// # Errors
    /// [`value::ValueError`] if it is larger.
    pub fn encode(&self) -> Result<Bytes, value::ValueError> {
        value::write(self, hapax_core::codec::MAX_CHECKPOINT)
    }

    /// Returns about the number of bytes of the encoded log.
    #[must_use]
    pub fn size(&self) -> usize {
        const STEP: usize = 400;
        let step = |step: &StepLog| {
            let outcome = match &step.outcome {
                Some(StepOutcome::Happened(blob) | StepOutcome::Rejected(blob)) => blob.0.len(),
                None => 0,
            };
            STEP + step.name.len() + step.argument.0.len() + outcome
        };
        self.steps.iter().map(step).sum()
    }

    /// Returns the executions in a row that ended without progress, if attempt number `attempt` of the
    /// record continues the log. Those between did not save. The last one that did has crashed, unless
    /// it parked the saga.
    #[must_use]
    pub(crate) fn crashes_before(&self, attempt: u32) -> u32 {
        let between = attempt.saturating_sub(self.attempt).saturating_sub(1);
        let last = u32::from(self.attempt > 0 && self.parked.is_none());
        self.crashes.saturating_add(between).saturating_add(last)
    }

    /// Notes that nothing was called since the saga was claimed: no try has begun, and none has crashed.
    pub fn not_begun(&mut self, now: LogTime) {
        for step in &mut self.steps {
            if step.forward.open {
                step.forward.not_begun();
            }
        }
        self.parked = Some(Parked { until: now, signal: None });
    }

    /// Returns the latest time that the log has, of those that are not the end of a pause.
    #[must_use]
    pub(crate) fn latest(&self) -> LogTime {
        let tries = self.steps.iter().flat_map(|step| [&step.forward, &step.undo]);
        let tries = tries.flat_map(|it| [it.since, it.first, it.last, it.checked]).flatten();
        let stuck = self.stuck.iter().map(|stuck| stuck.since);
        let decided = self.decisions.iter().map(|decision| decision.at);
        tries.chain(stuck).chain(decided).fold(self.started, LogTime::max)
    }

    /// Returns whether the saga runs forward or is undone.
    #[must_use]
    pub const fn direction(&self) -> Direction {
        match self.failure {
            Some(_) => Direction::Undo,
            None => Direction::Forward,
        }
    }

    /// Returns the step that runs, waits or is stuck; `None` between steps.
    #[must_use]
    pub fn current_step(&self) -> Option<&StepLog> {
        let stuck = self.stuck.as_ref().and_then(|stuck| self.steps.get(stuck.step?));
        stuck.or_else(|| {
            let is_open = |step: &&StepLog| match self.direction() {
                Direction::Forward => step.outcome.is_none(),
                Direction::Undo => step.undo.begun > 0 && step.undone.is_none(),
            };
            self.steps.iter().rev().find(is_open)
        })
    }

    /// Returns the position of a step.
    #[must_use]
    pub fn find(&self, name: &str, nth: u32) -> Option<usize> {
        self.steps.iter().position(|step| step.nth == nth && step.name == name)
    }
}

/// Earlier releases saved no log before the entry was inserted.
const fn is_inserted() -> bool {
    true
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

    use super::*;

    #[test]
    fn the_size_of_a_log_is_about_that_of_its_encoding() {
        let now = LogTime(1_790_000_000_000_000);
        let mut log = Log::new("place-order", 1, EntryId::from_bytes([7; 16]), now);
        for nth in 0..100 {
            let mut step = StepLog::new("reserve", nth, Blob(Bytes::from_static(b"argument")));
            step.forward.begin(now);
            step.forward.unknown();
            step.outcome = Some(StepOutcome::Happened(Blob(Bytes::from_static(b"result"))));
            log.steps.push(step);
        }
        let encoded = log.encode().unwrap();
        assert_eq!(Log::decode(&encoded).unwrap(), log);
        let (size, encoded) = (log.size(), encoded.len());
        assert!(encoded <= size && size <= encoded * 2, "{encoded} bytes, estimated {size}");
    }
}

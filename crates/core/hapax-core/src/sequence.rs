//! The order of numbered messages: a pure state machine for one aggregate.
//!
//! A producer numbers the messages of an aggregate 1, 2, 3, … without omissions. A consumer applies
//! them once and in this order, although they arrive repeatedly, out of order or not at all:
//!
//! | the number is | step |
//! | --- | --- |
//! | at most the last one applied | duplicate |
//! | the next | apply; then [`SequenceState::next`] for the messages that wait |
//! | beyond, within the limits of the [`GapPolicy`] | wait: store it, to apply it later |
//! | beyond, over a limit | the policy's [`GapAction`] |
//!
//! The state is one number for each aggregate, plus the messages that wait after a gap, so its size
//! does not grow with the number of messages, and a duplicate of any age is recognized.
//!
//! ```
//! use std::num::NonZeroU64;
//! use std::time::Duration;
//! use hapax_core::Timestamp;
//! use hapax_core::sequence::{GapAction, GapPolicy, SequenceState, SequenceStep};
//!
//! let policy = GapPolicy::new(100, Duration::from_secs(60), GapAction::DeadLetter);
//! let now = Timestamp::default();
//! let number = |number| NonZeroU64::new(number).unwrap();
//! let (step, state) = SequenceState::default().arrive(number(1), false, now, &policy);
//! assert_eq!((step, state.applied), (SequenceStep::Apply(1), 1));
//! let (step, state) = state.arrive(number(3), false, now, &policy);
//! assert_eq!((step, state.waiting), (SequenceStep::Wait, 1));
//! let (step, _) = state.arrive(number(1), false, now, &policy);
//! assert_eq!(step, SequenceStep::Duplicate);
//! ```

use std::num::NonZeroU64;
use std::time::Duration;

use crate::clock::Timestamp;

/// Action on a message after a gap that is over a limit of its [`GapPolicy`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GapAction {
    /// The consumer fetches the missing messages from the producer.
    Fetch,
    /// The message becomes a dead letter.
    DeadLetter,
    /// The missing messages are skipped, and count as applied.
    Accept,
}

/// The handling of messages after a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GapPolicy {
    max_waiting: u32,
    max_wait: Duration,
    then: GapAction,
}

impl GapPolicy {
    /// Creates a policy: at most `max_waiting` messages of an aggregate wait after a gap, for
    /// at most `max_wait`; then comes the action.
    #[must_use]
    pub const fn new(max_waiting: u32, max_wait: Duration, then: GapAction) -> Self {
        Self { max_waiting, max_wait, then }
    }
}

/// State of one aggregate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SequenceState {
    /// Number of the last message that was applied or skipped; 0 before the first.
    pub applied: u64,
    /// Number of messages that wait.
    pub waiting: u32,
    /// Lowest number of a message that waits.
    pub lowest_waiting: Option<u64>,
    /// Time since which the next message is missing, while others wait.
    pub gap_since: Option<Timestamp>,
}

/// Step to take with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a message whose step is not taken is lost"]
pub enum SequenceStep {
    /// Apply the message with this number, and store the new state in the same transaction.
    Apply(u64),
    /// Acknowledge the message: it was applied or skipped, or waits.
    Duplicate,
    /// Store the message, which waits for those before it, and the new state; then acknowledge it.
    Wait,
    /// Make the message a dead letter: the gap before it is over a limit.
    DeadLetter,
    /// Fetch the missing messages from the first number to the last one. The message that arrived is
    /// neither applied nor stored: it is to be delivered again.
    Fetch {
        /// First missing number.
        first: u64,
        /// Last missing number.
        last: u64,
    },
    /// Store the new state: the numbers from the first to the last count as applied. Then decide
    /// again.
    Skip {
        /// First missing number.
        first: u64,
        /// Last missing number.
        last: u64,
    },
    /// Nothing to do before this time, unless a message arrives; `None`: no message waits.
    Idle(Option<Timestamp>),
}

impl SequenceState {
    /// Decides about the message `number`, at the time `now`; `is_waiting` is true if a message with
    /// this number waits. Returns the step, and the state once the step is taken.
    pub fn arrive(
        self,
        number: NonZeroU64,
        is_waiting: bool,
        now: Timestamp,
        policy: &GapPolicy,
    ) -> (SequenceStep, Self) {
        let number = number.get();
        if number <= self.applied || is_waiting {
            return (SequenceStep::Duplicate, self);
        }
        if number == self.applied.saturating_add(1) {
            return (SequenceStep::Apply(number), self.advanced(number, now));
        }
        let gap_since = self.gap_since.unwrap_or(now);
        if self.waiting < policy.max_waiting && now < gap_since.after(policy.max_wait) {
            let lowest = self.lowest_waiting.map_or(number, |lowest| lowest.min(number));
            let waiting = Self {
                waiting: self.waiting + 1,
                lowest_waiting: Some(lowest),
                gap_since: Some(gap_since),
                ..self
            };
            return (SequenceStep::Wait, waiting);
        }
        self.over_limit(self.lowest_waiting.map_or(number, |lowest| lowest.min(number)), policy)
    }

    /// Decides about the messages that wait: after a message was applied, and when a time of
    /// [`SequenceStep::Idle`] is reached. Returns the step for the lowest one, and the state once
    /// the step is taken; the caller then sets `lowest_waiting` to the lowest number that is left.
    pub fn next(self, now: Timestamp, policy: &GapPolicy) -> (SequenceStep, Self) {
        let Some(lowest) = self.lowest_waiting else {
            return (SequenceStep::Idle(None), self);
        };
        let waiting = self.waiting.saturating_sub(1);
        let gap_since = self.gap_since.filter(|_| waiting > 0);
        let taken = Self { waiting, lowest_waiting: None, gap_since, ..self };
        if lowest <= self.applied {
            return (SequenceStep::Duplicate, taken);
        }
        if lowest == self.applied.saturating_add(1) {
            return (SequenceStep::Apply(lowest), taken.advanced(lowest, now));
        }
        let until = self.gap_since.unwrap_or(now).after(policy.max_wait);
        if now < until {
            return (SequenceStep::Idle(Some(until)), self);
        }
        match policy.then {
            GapAction::DeadLetter => (SequenceStep::DeadLetter, taken),
            GapAction::Fetch | GapAction::Accept => self.over_limit(lowest, policy),
        }
    }

    /// Returns the step for the gap before `beyond`.
    fn over_limit(self, beyond: u64, policy: &GapPolicy) -> (SequenceStep, Self) {
        let (first, last) = (self.applied.saturating_add(1), beyond.saturating_sub(1));
        match policy.then {
            GapAction::Fetch => (SequenceStep::Fetch { first, last }, self),
            GapAction::DeadLetter => (SequenceStep::DeadLetter, self),
            GapAction::Accept => {
                (SequenceStep::Skip { first, last }, Self { applied: last, ..self })
            }
        }
    }

    /// Returns the state after `number` was applied: the next gap begins now.
    fn advanced(self, number: u64, now: Timestamp) -> Self {
        Self { applied: number, gap_since: (self.waiting > 0).then_some(now), ..self }
    }
}

//! The sequences of messages, in every order of a small world.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::sequence::{GapAction, GapPolicy, SequenceState, SequenceStep};

const MAX_WAIT: Duration = Duration::from_secs(60);
const MAX_WAITING: u32 = 2;

/// A consumer that takes the steps, as one with a database does.
#[derive(Clone, Default)]
struct Consumer {
    state: SequenceState,
    waiting: BTreeSet<u64>,
    now: Timestamp,
    applied: Vec<u64>,
    skipped: BTreeSet<u64>,
    dead: Vec<u64>,
}

impl Consumer {
    fn receive(&mut self, number: u64, policy: &GapPolicy) -> SequenceStep {
        let is_waiting = self.waiting.contains(&number);
        let numbered = NonZeroU64::new(number).unwrap();
        let (step, state) = self.state.arrive(numbered, is_waiting, self.now, policy);
        self.state = state;
        match step {
            SequenceStep::Apply(number) => self.applied.push(number),
            SequenceStep::Wait => assert!(self.waiting.insert(number), "stored twice"),
            SequenceStep::DeadLetter => self.dead.push(number),
            SequenceStep::Skip { first, last } => {
                self.skipped.extend(first..=last);
                self.check();
                self.drain(policy);
                return self.receive(number, policy);
            }
            SequenceStep::Duplicate | SequenceStep::Fetch { .. } => {}
            SequenceStep::Idle(_) => panic!("nothing to do"),
        }
        self.check();
        self.drain(policy);
        step
    }

    fn drain(&mut self, policy: &GapPolicy) {
        loop {
            let lowest = self.waiting.first().copied();
            let (step, state) = self.state.next(self.now, policy);
            self.state = state;
            match step {
                SequenceStep::Apply(number) => {
                    assert_eq!(Some(number), lowest);
                    self.waiting.remove(&number);
                    self.applied.push(number);
                }
                SequenceStep::DeadLetter => self.dead.extend(self.waiting.pop_first()),
                SequenceStep::Duplicate => drop(self.waiting.pop_first()),
                SequenceStep::Skip { first, last } => self.skipped.extend(first..=last),
                SequenceStep::Idle(_) | SequenceStep::Fetch { .. } => return,
                SequenceStep::Wait => panic!("stored again"),
            }
            self.state.lowest_waiting = self.waiting.first().copied();
            self.check();
        }
    }

    fn check(&self) {
        assert_eq!(self.state.waiting as usize, self.waiting.len());
        assert_eq!(self.state.lowest_waiting, self.waiting.first().copied());
        assert!(self.state.waiting <= MAX_WAITING);
        assert!(self.applied.is_sorted_by(|one, other| one < other), "{:?}", self.applied);
        let through: BTreeSet<u64> = self.applied.iter().chain(&self.skipped).copied().collect();
        assert_eq!(through, (1..=self.state.applied).collect(), "a number is missing");
        assert_eq!(through.len(), self.applied.len() + self.skipped.len(), "applied and skipped");
        assert_eq!(self.state.gap_since.is_some(), self.state.waiting > 0);
    }
}

fn explore(
    consumer: &Consumer,
    depth: u32,
    arrived: BTreeSet<u64>,
    policy: &GapPolicy,
    ends: &mut u64,
) {
    // Without fetching, dead letters and skips, all that arrived without a gap is applied.
    let whole = (1..).take_while(|number| arrived.contains(number)).count() as u64;
    if consumer.dead.is_empty() {
        assert!(consumer.state.applied >= whole || consumer.state.waiting >= MAX_WAITING);
    }
    if depth == 0 {
        *ends += 1;
        return;
    }
    for number in 1..=4 {
        let mut next = consumer.clone();
        let step = next.receive(number, policy);
        let mut arrived = arrived.clone();
        if !matches!(step, SequenceStep::Fetch { .. } | SequenceStep::DeadLetter) {
            arrived.insert(number);
        }
        explore(&next, depth - 1, arrived, policy, ends);
    }
    let mut next = consumer.clone();
    next.now = next.now.after(MAX_WAIT);
    next.drain(policy);
    explore(&next, depth - 1, arrived, policy, ends);
}

#[test]
fn every_order_of_messages_is_applied_in_sequence_and_once() {
    for then in [GapAction::Fetch, GapAction::DeadLetter, GapAction::Accept] {
        let policy = GapPolicy::new(MAX_WAITING, MAX_WAIT, then);
        let mut ends = 0;
        explore(&Consumer::default(), 7, BTreeSet::new(), &policy, &mut ends);
        assert_eq!(ends, 5_u64.pow(7));
    }
}

#[test]
fn messages_out_of_order_and_repeated_are_applied_once() {
    let policy = GapPolicy::new(MAX_WAITING, MAX_WAIT, GapAction::DeadLetter);
    let mut consumer = Consumer::default();
    let steps = [1, 3, 2, 2, 1].map(|number| consumer.receive(number, &policy));
    use SequenceStep::{Apply, Duplicate, Wait};
    assert_eq!(steps, [Apply(1), Wait, Apply(2), Duplicate, Duplicate]);
    assert_eq!(consumer.applied, [1, 2, 3]);
}

#[test]
fn a_gap_over_a_limit_follows_its_policy() {
    for (then, expected) in [
        (GapAction::Fetch, SequenceStep::Fetch { first: 1, last: 1 }),
        (GapAction::DeadLetter, SequenceStep::DeadLetter),
        (GapAction::Accept, SequenceStep::Apply(4)),
    ] {
        let policy = GapPolicy::new(MAX_WAITING, MAX_WAIT, then);
        let mut consumer = Consumer::default();
        assert_eq!(consumer.receive(2, &policy), SequenceStep::Wait);
        assert_eq!(consumer.receive(3, &policy), SequenceStep::Wait);
        assert_eq!(consumer.receive(4, &policy), expected, "{then:?}");
    }
}

#[test]
fn a_gap_ends_its_wait_at_the_same_time_for_all_that_wait() {
    let policy = GapPolicy::new(10, MAX_WAIT, GapAction::Accept);
    let start = Timestamp::from_micros(1);
    let number = |number| NonZeroU64::new(number).unwrap();
    let (_, state) = SequenceState::default().arrive(number(3), false, start, &policy);
    let later = start.after(MAX_WAIT / 2);
    let (_, state) = state.arrive(number(5), false, later, &policy);
    let until = start.after(MAX_WAIT);
    assert_eq!(state.next(later, &policy).0, SequenceStep::Idle(Some(until)));
    assert_eq!(state.next(until, &policy).0, SequenceStep::Skip { first: 1, last: 2 });
}

//! Tests that break each rule of the judge once.

use super::*;

const KEY: &str = "key";

/// A ledger into which an upstream and a client write.
struct Play(Ledger);

impl Play {
    fn new(policy: OnUnknownPolicy) -> Self {
        let mut ledger = Ledger::new(policy);
        ledger.asked_for(KEY);
        Self(ledger)
    }

    /// Executes in the incarnation `incarnation` of a gateway whose earlier incarnations have
    /// ended.
    fn executes(mut self, fence: u64, incarnation: u64) -> Self {
        self.0.dead.extend(0..incarnation);
        self.0.begin(KEY, fence, incarnation);
        self.0.take_effect(KEY, fence);
        self
    }

    fn declines(mut self, fence: u64, incarnation: u64) -> Self {
        self.0.dead.extend(0..incarnation);
        self.0.begin(KEY, fence, incarnation);
        self.0.decline(KEY, fence);
        self
    }

    fn answers(self, fence: u64, replayed: bool) -> Self {
        let effect = UpstreamResponse::of(KEY, fence);
        self.answers_with(ClientResponse { effect, fence: Some(fence), replayed })
    }

    fn answers_with(mut self, answer: ClientResponse) -> Self {
        self.0.answer(KEY, &answer);
        self
    }

    fn unknown(mut self) -> Self {
        let answered = self.0.is_answered(KEY);
        self.0.unknown(KEY, answered);
        self
    }

    #[track_caller]
    fn fine(mut self) -> TortureCounts {
        let (counts, violations) = self.0.verdict();
        assert_eq!(violations, [""; 0]);
        counts
    }

    #[track_caller]
    fn breaks(mut self, promise: &str) {
        let (_, violations) = self.0.verdict();
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(violations[0].contains(promise), "{violations:?}");
    }
}

#[test]
fn an_answer_and_its_replays_are_fine_under_every_policy() {
    for policy in OnUnknownPolicy::ALL {
        let counts = Play::new(policy).executes(1, 0).answers(1, false).answers(1, true).fine();
        assert_eq!((counts.answered, counts.replays, counts.duplicates), (1, 1, 0));
        Play::new(policy).declines(1, 0).executes(2, 0).answers(2, false).fine();
    }
}

#[test]
fn reexecute_may_execute_again_in_the_next_life_only() {
    let again = || Play::new(OnUnknownPolicy::Reexecute).executes(1, 0);
    let counts = again().executes(2, 1).answers(2, false).fine();
    assert_eq!((counts.executed_again, counts.answers_lost, counts.duplicates), (1, 1, 1));
    again().executes(2, 0).breaks("though the gateway lived");
}

#[test]
fn nor_does_another_gateway_while_the_first_lives() {
    let begun = || {
        let mut play = Play::new(OnUnknownPolicy::Reexecute);
        play.0.begin(KEY, 1, 0);
        play
    };
    let mut beside = begun();
    beside.0.begin(KEY, 2, 1);
    beside.breaks("though the gateway lived");
    let mut after = begun();
    after.0.killed(0, true);
    after.0.begin(KEY, 2, 1);
    after.fine();
}

#[test]
fn block_never_executes_again() {
    Play::new(OnUnknownPolicy::Block).executes(1, 0).unknown().fine();
    let mut play = Play::new(OnUnknownPolicy::Block);
    play.0.begin(KEY, 1, 0);
    play.0.killed(0, true);
    play.0.begin(KEY, 2, 1);
    play.breaks("again under block");
}

#[test]
fn reconcile_takes_effect_once() {
    let mut play = Play::new(OnUnknownPolicy::Reconcile).executes(1, 0);
    assert_eq!(play.0.reconcile(KEY, 1), Some(1));
    play.answers(1, true).fine();
    Play::new(OnUnknownPolicy::Reconcile).executes(1, 0).executes(2, 1).breaks("took effect twice");
}

#[test]
fn what_the_hook_ruled_out_takes_no_effect_later() {
    let mut play = Play::new(OnUnknownPolicy::Reconcile);
    play.0.begin(KEY, 1, 0);
    assert_eq!(play.0.reconcile(KEY, 1), None);
    play.0.begin(KEY, 2, 1);
    assert!(play.0.take_effect(KEY, 2));
    assert!(!play.0.take_effect(KEY, 1));
    play.answers(2, false).fine();
}

#[test]
fn nothing_executes_after_an_answer() {
    Play::new(OnUnknownPolicy::Reexecute)
        .executes(1, 0)
        .answers(1, false)
        .executes(2, 1)
        .breaks("executed after it was answered");
}

#[test]
fn fences_grow() {
    Play::new(OnUnknownPolicy::Reexecute).declines(2, 0).declines(2, 1).breaks("does not follow");
    Play::new(OnUnknownPolicy::Reexecute).declines(2, 0).declines(1, 1).breaks("does not follow");
}

#[test]
fn what_a_dead_gateway_sent_may_come_late() {
    let mut play = Play::new(OnUnknownPolicy::Reexecute);
    play.0.killed(0, true);
    play.executes(2, 1).answers(2, false).executes(1, 0).answers(2, true).fine();
    let mut play = Play::new(OnUnknownPolicy::Block);
    play.0.killed(0, true);
    let mut play = play.executes(2, 1);
    play.0.begin(KEY, 1, 0);
    play.breaks("again under block");
}

#[test]
fn an_answer_stays_as_it_was() {
    let answered =
        || Play::new(OnUnknownPolicy::Reexecute).executes(1, 0).executes(2, 1).answers(2, false);
    answered().answers(1, true).breaks("answered for fence 2, then for 1");
    answered().answers(2, false).breaks("neither is marked");
    Play::new(OnUnknownPolicy::Block).executes(1, 0).answers(1, true).answers(1, false).fine();
    let mut effect = UpstreamResponse::of(KEY, 2);
    effect.body.push(0);
    answered()
        .answers_with(ClientResponse { effect, fence: Some(2), replayed: true })
        .breaks("changed");
    let mut effect = UpstreamResponse::of(KEY, 2);
    effect.status += 1;
    answered()
        .answers_with(ClientResponse { effect, fence: Some(2), replayed: true })
        .breaks("changed");
}

#[test]
fn an_answer_comes_from_an_effect() {
    Play::new(OnUnknownPolicy::Block).declines(1, 0).answers(1, false).breaks("took no effect");
}

#[test]
fn unknown_is_said_where_it_may_be() {
    Play::new(OnUnknownPolicy::Reexecute)
        .executes(1, 0)
        .unknown()
        .breaks("unknown under reexecute");
    Play::new(OnUnknownPolicy::Block)
        .executes(1, 0)
        .answers(1, false)
        .unknown()
        .breaks("after it was answered");
}

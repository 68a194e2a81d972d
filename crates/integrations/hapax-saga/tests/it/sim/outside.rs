//! The systems that steps call, and a record of the effects there.

use std::collections::{BTreeMap, BTreeSet};

use hapax_core::Verdict;
use hapax_saga::log::{Blob, Direction, StepLog, StepOutcome};
use hapax_saga::run::{Call, TryEnd};

use super::checks;
use super::flows::{Kind, StepSpec, UNREADABLE, blob, number, spec_of, unreadable};
use super::plan::{CALL_TIMEOUT, MS, SECOND, SETTLE};
use super::world::{Slot, W, World};

/// An effect of a step.
#[derive(Clone, Debug)]
pub(crate) struct EffectFact {
    pub(crate) id: u64,
    pub(crate) undone: bool,
}

/// What happened to a step of a saga.
#[derive(Debug, Default)]
pub(crate) struct StepFacts {
    pub(crate) argument: Option<u64>,
    pub(crate) effects: Vec<EffectFact>,
    /// Results that it returned.
    pub(crate) returned: BTreeSet<u64>,
    /// The answer under its key, and when it was first given.
    memory: Option<(u64, Result<u64, u64>)>,
    /// First use of the undo's key.
    undo_memory: Option<u64>,
    /// Tries up to this fence and number are rejected.
    barred: (u64, u32),
    is_closed: bool,
    /// True if its undo was called.
    is_undone: bool,
    /// True while a call of a step that may not be repeated is not known to be without effect.
    once_open: bool,
    /// Begin of the last call.
    pub(crate) last_begun: Option<u64>,
}

/// The called systems.
#[derive(Default, Debug)]
pub(crate) struct Outside {
    pub(crate) steps: BTreeMap<(usize, String, u32), StepFacts>,
    fences: BTreeMap<usize, u64>,
    /// Sagas of which an undo was called.
    pub(crate) undone: BTreeSet<usize>,
    effects: u64,
}

impl Outside {
    /// Returns the id of the next effect.
    pub(crate) fn next_effect(&mut self) -> u64 {
        self.effects += 1;
        self.effects + 1_000
    }

    /// Inserts the row of a step that writes in the database of the records.
    pub(crate) fn insert(&mut self, call: &OutsideCall, effect: u64) {
        let facts = self.steps.entry(call.key()).or_default();
        facts.effects.push(EffectFact { id: effect, undone: false });
        facts.returned.insert(effect);
    }

    /// Deletes it.
    pub(crate) fn delete(&mut self, call: &OutsideCall) {
        self.undone.insert(call.saga);
        for effect in &mut self.steps.entry(call.key()).or_default().effects {
            effect.undone = true;
        }
    }
}

/// A call, as its system receives it.
#[derive(Clone)]
pub(crate) struct OutsideCall {
    pub(crate) saga: usize,
    pub(crate) name: String,
    pub(crate) nth: u32,
    pub(crate) argument: u64,
    pub(crate) outcome: Option<StepOutcome>,
    pub(crate) number: u32,
    pub(crate) fence: u64,
}

impl OutsideCall {
    pub(crate) fn new(saga: usize, step: &StepLog, call: &Call, fence: u64) -> Self {
        Self {
            saga,
            name: step.name.clone(),
            nth: step.nth,
            argument: number(&step.argument),
            outcome: step.outcome.clone(),
            number: call.number,
            fence,
        }
    }

    fn key(&self) -> (usize, String, u32) {
        (self.saga, self.name.clone(), self.nth)
    }

    fn spec(&self) -> StepSpec {
        spec_of(&self.name).expect("the flow has only these steps")
    }
}

/// Reply of a system; `None` for one that breaks off.
type Reply<T> = Option<T>;

/// Sends something to a system, a time after the begin of the call: it arrives after a time, and the reply
/// may be lost.
fn transmit<T: 'static>(
    w: &W,
    spent: u64,
    slot: &Slot<Reply<T>>,
    receive: impl FnOnce(&W) -> Reply<T> + 'static,
) {
    let slot = slot.clone();
    let is_late = w.fault(w.plan.calls);
    if is_late {
        w.count("call late");
    }
    let last = (CALL_TIMEOUT + SETTLE - SECOND).saturating_sub(spent);
    let bound = if is_late { last.max(50 * MS) } else { 50 * MS };
    w.after(MS + w.dice.below(bound), move |w| {
        let reply = receive(w);
        if w.fault(w.plan.calls) {
            return w.count("reply of a call lost");
        }
        w.after(MS + w.dice.below(20 * MS), move |w| w.fill(&slot, reply));
    });
}

/// Begins a call of a step.
pub(crate) fn begin(w: &W, call: &OutsideCall) {
    checks::sent(w, call, Direction::Forward);
    let mut outside = w.outside.borrow_mut();
    outside.steps.entry(call.key()).or_default().last_begun = Some(w.now());
}

/// Calls a step, a time after its begin. The call may fail before anything was sent.
pub(crate) fn call(w: &W, call: OutsideCall, spent: u64) -> Slot<Reply<TryEnd>> {
    let slot = Slot::default();
    if w.fault(w.plan.calls) {
        w.count("call not sent");
        w.fill(&slot, Some(TryEnd::NotSent("not connected".to_owned())));
        return slot;
    }
    transmit(w, spent, &slot, move |w| w.called(&call));
    slot
}

/// Calls the undo of a step.
pub(crate) fn undo(w: &W, call: OutsideCall) -> Slot<Reply<Result<(), String>>> {
    let slot = Slot::default();
    checks::sent(w, &call, Direction::Undo);
    let mut outside = w.outside.borrow_mut();
    outside.undone.insert(call.saga);
    outside.steps.entry(call.key()).or_default().is_undone = true;
    drop(outside);
    transmit(w, 0, &slot, move |w| w.undone(&call));
    slot
}

/// Calls the reconcile function of a step.
pub(crate) fn reconcile(w: &W, call: OutsideCall) -> Slot<Reply<Verdict<Blob>>> {
    let slot = Slot::default();
    transmit(w, 0, &slot, move |w| Some(w.reconciled(&call)));
    slot
}

impl World {
    /// Returns false for a call of an execution that was taken over.
    fn admits(&self, outside: &mut Outside, call: &OutsideCall) -> bool {
        let fence = outside.fences.entry(call.saga).or_default();
        *fence = (*fence).max(call.fence);
        !self.plan.fences || call.fence >= *fence
    }

    fn called(&self, call: &OutsideCall) -> Reply<TryEnd> {
        let now = self.now();
        let mut outside = self.outside.borrow_mut();
        let is_admitted = self.admits(&mut outside, call);
        let has_undone = outside.undone.contains(&call.saga);
        let effect = outside.next_effect();
        let facts = outside.steps.entry(call.key()).or_default();
        if !is_admitted || facts.is_closed || (call.fence, call.number) <= facts.barred {
            self.count("call fenced");
            return None;
        }
        if *facts.argument.get_or_insert(call.argument) != call.argument {
            self.fail("one argument per step", || describe(call));
        }
        match call.spec().kind {
            Kind::Keyed(lifetime) => match &facts.memory {
                Some((first, answer)) if now - first <= lifetime => {
                    let end = match answer {
                        Ok(id) => TryEnd::Happened(blob(*id)),
                        Err(error) => TryEnd::Rejected(blob(*error)),
                    };
                    return Some(end);
                }
                Some(_) => {
                    self.count("key forgotten");
                    self.fail("no key is used after its lifetime", || describe(call));
                }
                None => {}
            },
            Kind::Once => {
                if facts.once_open {
                    self.fail("a step that may not be repeated is called once", || describe(call));
                }
                facts.once_open = true;
            }
            Kind::Again | Kind::Within => {}
        }
        // It broke down before it did anything.
        if self.fault(self.plan.calls) {
            self.count("call failed");
            return None;
        }
        if self.dice.below(12) == 0 {
            self.count("call rejected");
            let error = 10 + self.dice.below(5);
            facts.memory = Some((now, Err(error)));
            return Some(TryEnd::Rejected(blob(error)));
        }
        // A late try does no harm before the undo of its own step, which waits for it, if the step
        // may be repeated; or if its effect stays anyway.
        let is_harmless = call.spec().kind == Kind::Again || !call.spec().undo;
        let is_harmless = is_harmless && !facts.is_undone;
        if has_undone && !is_harmless {
            self.fail("no step runs forward after the first undo", || describe(call));
        }
        facts.effects.push(EffectFact { id: effect, undone: false });
        facts.memory = Some((now, Ok(effect)));
        facts.returned.insert(effect);
        self.tell(|| format!("{} has the effect {effect}", describe(call)));
        if self.fault(self.plan.calls / 4) {
            self.count("result unreadable");
            facts.returned.insert(UNREADABLE);
            return Some(TryEnd::Happened(unreadable()));
        }
        Some(TryEnd::Happened(blob(effect)))
    }

    fn undone(&self, call: &OutsideCall) -> Reply<Result<(), String>> {
        let now = self.now();
        let mut outside = self.outside.borrow_mut();
        if !self.admits(&mut outside, call) {
            self.count("call fenced");
            return None;
        }
        checks::undo_arrived(self, &outside, call);
        let facts = outside.steps.entry(call.key()).or_default();
        if let Kind::Keyed(lifetime) = call.spec().kind {
            let first = *facts.undo_memory.get_or_insert(now);
            if now - first > lifetime {
                self.fail("no key is used after its lifetime", || describe(call));
            }
        }
        if self.fault(self.plan.calls) {
            self.count("undo failed");
            return Some(Err("failed".to_owned()));
        }
        match &call.outcome {
            Some(StepOutcome::Happened(result)) => {
                let id = number(result);
                let is_known =
                    id == UNREADABLE || facts.effects.iter().any(|effect| effect.id == id);
                if !is_known {
                    self.fail("an undo gets the result of its step", || describe(call));
                }
                // A step of the clock ends settle times early, also that of an earlier try of a step
                // without a key.
                facts.is_closed |= self.plan.lapses && call.spec().kind == Kind::Again;
            }
            Some(StepOutcome::Rejected(_)) if call.spec().kind != Kind::Again => {
                self.fail("a rejected step is not undone", || describe(call));
            }
            // An earlier try of a step without a key may have had an effect.
            Some(StepOutcome::Rejected(_)) | None => {
                self.count("undo of an unknown step");
                facts.is_closed |= self.plan.guards;
            }
        }
        for effect in &mut facts.effects {
            effect.undone = true;
        }
        self.tell(|| format!("{} is undone", describe(call)));
        Some(Ok(()))
    }

    fn reconciled(&self, call: &OutsideCall) -> Verdict<Blob> {
        let mut outside = self.outside.borrow_mut();
        let facts = outside.steps.entry(call.key()).or_default();
        if self.dice.below(5) == 0 {
            self.count("reconciled: cannot say");
            return Verdict::CannotSay;
        }
        if let Some(effect) = facts.effects.last() {
            self.count("reconciled: happened");
            return Verdict::Happened(blob(effect.id));
        }
        self.count("reconciled: did not happen");
        if self.plan.guards {
            facts.barred = facts.barred.max((call.fence, call.number));
        }
        facts.once_open = false;
        facts.memory = None;
        self.tell(|| format!("{} did not happen", describe(call)));
        Verdict::DidNotHappen
    }

    /// Returns whether a step happened, for an operator, who also ensures that no try up to this
    /// fence will. `None`: a call may be in progress.
    pub(crate) fn inspect(&self, saga: usize, step: &StepLog, fence: u64) -> Option<Option<u64>> {
        let mut outside = self.outside.borrow_mut();
        let facts = outside.steps.entry((saga, step.name.clone(), step.nth)).or_default();
        if facts.last_begun.is_some_and(|begun| self.now() < begun + CALL_TIMEOUT + SETTLE) {
            return None;
        }
        if facts.effects.is_empty() {
            if self.plan.guards {
                facts.barred = facts.barred.max((fence, u32::MAX));
            }
            (facts.once_open, facts.memory) = (false, None);
        }
        Some(facts.effects.last().map(|effect| effect.id))
    }
}

pub(crate) fn describe(call: &OutsideCall) -> String {
    let OutsideCall { saga, name, nth, number, fence, .. } = call;
    format!("saga {saga}: `{name}` number {nth}, try {number}, fence {}", fence % 1_000_000_000_000)
}

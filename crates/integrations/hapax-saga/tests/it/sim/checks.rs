//! The invariants, during a schedule and at its end.

use hapax_core::store::StoredRecord;
use hapax_core::{OperationId, RecordState, value};
use hapax_saga::log::{Blob, Direction, Failure, Log, LogTime, StepOutcome, Tries};
use hapax_saga::run::SagaEnd;

use super::bugs::Bug;
use super::clients;
use super::facts::{ANY_GENERATION, End, SagaFacts, SignalFacts, saga_of, signal_of};
use super::flows::{Expected, Kind, expected, number, spec_of};
use super::outside::{Outside, OutsideCall, describe};
use super::plan::{HOUR, duration};
use super::store::all;
use super::world::{W, World};

/// Checks a write that the store has just made.
pub(crate) fn written(
    w: &W,
    id: &OperationId,
    before: Option<&StoredRecord>,
    after: &StoredRecord,
) {
    if let Some((saga, generation, name)) = signal_of(id) {
        if before.is_none()
            && let RecordState::Done(outcome) = &after.record.state
        {
            let value = value::read(outcome.bytes()).expect("a signal is a number");
            let facts =
                SignalFacts { value, stored: w.store_now(), answered: false, answered_at: None };
            let saga = &mut w.facts.borrow_mut().sagas[saga];
            match saga.generation == Some(generation) || generation == ANY_GENERATION {
                true => drop(saga.signals.insert(name, facts)),
                false => w.count("signal to an earlier saga"),
            }
        }
        return;
    }
    let Some(saga) = saga_of(id) else { return };
    let mut facts = w.facts.borrow_mut();
    let facts = &mut facts.sagas[saga];
    let generation = Some(after.record.generation);
    if facts.generation != generation {
        let now = w.store_now();
        let is_kept = |it: &StoredRecord| it.keep_until.is_none_or(|until| now < until);
        if facts.end.is_some() && !before.is_some_and(is_kept) {
            begin_next(w, saga, facts);
        }
        // Those of the earlier generation do not reach this one.
        (facts.generation, facts.signals) = (generation, Default::default());
    }
    if let Some(before) = before {
        amended(w, saga, facts, before, after);
    }
    if facts.end.is_some() && !matches!(after.record.state, RecordState::Done(_)) {
        w.fail("an ended saga does not begin again", || format!("saga {saga}"));
    }
    match &after.record.state {
        RecordState::Done(outcome) => {
            if facts.end.is_some() {
                return;
            }
            let (end, log) = read_end(outcome.bytes());
            if let Some(last) = facts.log.take() {
                continues(w, saga, &last, &log);
            }
            facts.request = Some(after.record.fingerprint);
            facts.log = Some(log);
            w.tell(|| format!("saga {saga} ends: {end:?}"));
            w.count(match end {
                End::Done(_) => "saga done",
                End::Failed(_) | End::Cancelled => "saga undone",
            });
            facts.end = Some(end);
            clients::plan_next(w, saga, facts);
            return;
        }
        RecordState::Released if facts.log.is_some() => {
            w.fail("a saga that has begun is not released", || format!("saga {saga}"));
        }
        _ => {}
    }
    let is_changed =
        before.is_none_or(|before| before.record.checkpoint != after.record.checkpoint);
    let Some(checkpoint) = after.record.checkpoint.as_ref().filter(|_| is_changed) else {
        if facts.log.is_some() && after.record.checkpoint.is_none() {
            w.fail("no saga begins twice", || format!("saga {saga} begins with no log"));
        }
        return;
    };
    let log = Log::decode(checkpoint).expect("a log");
    if facts.request.is_some_and(|request| request != after.record.fingerprint) {
        w.fail("no saga begins twice", || format!("saga {saga} continues another request"));
    }
    facts.request = Some(after.record.fingerprint);
    if let Some(last) = facts.log.take() {
        continues(w, saga, &last, &log);
    }
    w.tell(|| format!("saga {saga} is saved: {}", show(&log)));
    facts.log = Some(log);
}

/// Checks a saga whose outcome has expired, and takes note of the next one under its key.
fn begin_next(w: &W, saga: usize, facts: &mut SagaFacts) {
    w.count("next saga under a key");
    w.tell(|| format!("the next saga {saga} begins"));
    check(w, saga, facts);
    let next = SagaFacts::new(saga, facts.next.take().into_iter().collect());
    let unclear = facts.unclear;
    *facts = SagaFacts { unclear, ..next };
    // All systems have forgotten its keys by now.
    let mut outside = w.outside.borrow_mut();
    outside.steps.retain(|(of, ..), _| *of != saga);
    outside.undone.remove(&saga);
}

/// Checks, if a write is an amendment, that the saga was parked.
fn amended(w: &World, saga: usize, facts: &SagaFacts, before: &StoredRecord, after: &StoredRecord) {
    let (was, is) = (&before.record, &after.record);
    let is_in_flight = was.state == RecordState::InFlight && is.state == RecordState::InFlight;
    if !is_in_flight || was.lease_id == is.lease_id || was.attempt != is.attempt {
        return;
    }
    // Who has adopted a stuck saga only parks it again.
    let is_parked = facts.log.as_ref().is_some_and(|log| {
        log.stuck.is_some() || log.parked.is_some() && log.attempt == was.attempt
    });
    if !is_parked {
        w.fail("no saga that runs is amended", || format!("saga {saga}"));
    }
}

/// Checks that a log continues the last one.
fn continues(w: &World, saga: usize, last: &Log, log: &Log) {
    let fail = |what: &str| {
        w.fail("a log continues the last one", || {
            format!("saga {saga}: {what}\n{}\n{}", show(last), show(log))
        });
    };
    if log.started != last.started || log.entry != last.entry {
        fail("another saga");
    }
    if last.failure.is_some() && log.failure != last.failure {
        fail("the reason of the compensation changed");
    }
    if !log.decisions.starts_with(&last.decisions) {
        fail("a decision is lost");
    }
    if log.attempt < last.attempt {
        fail("an older attempt");
    }
    if log.steps.len() < last.steps.len() {
        fail("a step is lost");
    }
    let is_retry = log.decisions.len() > last.decisions.len();
    for (step, last) in log.steps.iter().zip(&last.steps) {
        if (&step.name, step.nth, &step.argument) != (&last.name, last.nth, &last.argument) {
            fail("a step is another one");
        }
        if last.outcome.is_some() && step.outcome != last.outcome {
            fail("an outcome changed");
        }
        if last.undone.is_some() && step.undone != last.undone {
            fail("the end of an undo changed");
        }
        // A try that was in progress is taken back if it was not called: by a shutdown or a cancellation
        // between its save and its call.
        let is_less = |now: &Tries, last: &Tries| {
            let taken_back = last.open && !now.open && now.begun + 1 == last.begun;
            now.begun < last.begun && !taken_back
        };
        if (is_less(&step.forward, &last.forward) || is_less(&step.undo, &last.undo)) && !is_retry {
            fail("a try is lost");
        }
    }
}

pub(crate) fn show(log: &Log) -> String {
    let steps = log.steps.iter().map(|step| {
        let (f, u) = (&step.forward, &step.undo);
        let outcome = match &step.outcome {
            Some(StepOutcome::Happened(_)) => "happened",
            Some(StepOutcome::Rejected(_)) => "rejected",
            None if f.open => "open",
            None if f.arrived => "unknown",
            None => "-",
        };
        format!("{}.{} {}x {outcome} {}x {:?}", step.name, step.nth, f.begun, u.begun, step.undone)
    });
    let stuck = log.stuck.as_ref().map(|stuck| (&stuck.reason, &stuck.detail));
    format!(
        "attempt {} crashes {} failure {:?} parked {} stuck {stuck:?} [{}]",
        log.attempt,
        log.crashes,
        log.failure,
        log.parked.is_some(),
        steps.collect::<Vec<_>>().join(", ")
    )
}

/// Encodes the end of a saga, and its last log, as its outcome.
pub(crate) fn write_end(end: &SagaEnd, log: &Log) -> bytes::Bytes {
    let (tag, blob) = match end {
        SagaEnd::Done(blob) => (0, blob.clone()),
        SagaEnd::Undone(Failure::Error(blob)) => (1, blob.clone()),
        SagaEnd::Undone(Failure::Cancelled { .. }) => (2, Blob::default()),
    };
    value::write(&(tag, blob, log), 1 << 20).expect("an outcome is short")
}

fn read_end(bytes: &[u8]) -> (End, Log) {
    let (tag, blob, log): (u8, Blob, Log) = value::read(bytes).expect("an outcome");
    let end = match tag {
        0 => End::Done(value::read(&blob.0).expect("an output")),
        1 => End::Failed(number(&blob)),
        _ => End::Cancelled,
    };
    (end, log)
}

/// Checks the schedule after an entry was removed.
pub(crate) fn removed(w: &World, id: &OperationId) {
    let Some(saga) = saga_of(id) else { return };
    let facts = w.facts.borrow();
    let facts = &facts.sagas[saga];
    if facts.is_unfinished() && !has_entry(w, facts) {
        w.fail("no entry is missing while its saga is unfinished", || format!("saga {saga}"));
    }
}

fn has_entry(w: &World, facts: &SagaFacts) -> bool {
    let of = facts.request.or(facts.accepted);
    let store = w.store.borrow();
    let mut entries = store.entries.range(all(facts.id));
    match &facts.log {
        // Every other one is removed when it is looked at.
        Some(log) => entries.any(|(key, _)| *key.id.as_bytes() == log.entry),
        None => entries.any(|(_, entry)| Some(entry.note.fingerprint) == of),
    }
}

/// Checks that a start may be answered.
pub(crate) fn accepted(w: &World, saga: usize) {
    let facts = w.facts.borrow();
    let facts = &facts.sagas[saga];
    if facts.is_unfinished() && !has_entry(w, facts) {
        w.fail("no saga is accepted without an entry", || format!("saga {saga}"));
    }
}

/// Checks a call that is sent now.
pub(crate) fn sent(w: &W, call: &OutsideCall, direction: Direction) {
    w.tell(|| format!("{} {} is sent", describe(call), direction.as_str()));
    w.facts.borrow_mut().sagas[call.saga].called = true;
    let facts = w.facts.borrow();
    let facts = &facts.sagas[call.saga];
    let seen = w.load(&facts.id);
    let Some(stored) = seen.stored else {
        return w.fail("no call without a record", || describe(call));
    };
    let is_own = stored.fence.get() == call.fence && seen.now < stored.lease_until;
    // By a step of the store's clock, of which a frozen runner learns too late: another one may have
    // ended the saga meanwhile.
    if w.plan.lapses && !is_own {
        return;
    }
    if !is_own {
        return w.fail("a stale runner calls nothing", || describe(call));
    }
    if !has_entry(w, facts) {
        w.fail("no call without an entry", || describe(call));
    }
    let Some(log) = &facts.log else {
        return w.fail("a try is saved before its call", || describe(call));
    };
    let Some(step) = log.find(&call.name, call.nth).map(|at| &log.steps[at]) else {
        return w.fail("a try is saved before its call", || describe(call));
    };
    let tries = step.tries(direction);
    let is_saved = tries.open && tries.begun == call.number;
    if !is_saved && !w.has(Bug::UndoesInOrder) {
        w.fail("a try is saved before its call", || describe(call));
    }
    match direction {
        // Found by the order of the undos.
        _ if w.has(Bug::UndoesInOrder) => {}
        Direction::Forward if log.failure.is_some() => {
            w.fail("no step runs forward after the first undo", || describe(call));
        }
        Direction::Undo if log.failure.is_none() => {
            w.fail("the reason of a compensation is saved before an undo", || describe(call));
        }
        Direction::Forward | Direction::Undo => {}
    }
}

/// Checks an undo that arrives.
pub(crate) fn undo_arrived(w: &World, outside: &Outside, call: &OutsideCall) {
    let facts = w.facts.borrow();
    let facts = &facts.sagas[call.saga];
    let Some(log) = &facts.log else { return };
    let Some(at) = log.find(&call.name, call.nth) else { return };
    for step in &log.steps[at + 1..] {
        if !spec_of(&step.name).is_some_and(|spec| spec.undo)
            || facts.skipped.contains(&(step.name.clone(), step.nth))
        {
            continue;
        }
        let key = (call.saga, step.name.clone(), step.nth);
        let effects = outside.steps.get(&key).map_or(&[][..], |facts| &facts.effects);
        if effects.iter().any(|effect| !effect.undone) {
            w.fail("steps are undone in reverse", || {
                format!("{} before `{}` number {}", describe(call), step.name, step.nth)
            });
        }
    }
}

/// Checks, a while after the last fault, that nothing waits without need.
pub(crate) fn quiet(w: &W) {
    let now = w.store_now();
    for (saga, facts) in w.facts.borrow().sagas.iter().enumerate() {
        if !facts.is_unfinished() {
            continue;
        }
        if !has_entry(w, facts) {
            w.fail("no entry is missing while its saga is unfinished", || format!("saga {saga}"));
        }
        // An operator who was not answered repeats the decision; until then the saga is woken when it
        // would have been looked at as a stuck one.
        let decisions = facts.log.as_ref().map_or(&[][..], |log| &log.decisions);
        if !decisions.iter().all(|it| facts.decisions.contains(&it.reason)) {
            continue;
        }
        let Some(stored) = w.store.borrow().records.get(&facts.id).cloned() else {
            w.fail("no record expires before its saga ends", || format!("saga {saga}"));
            continue;
        };
        if stored.keep_until.is_some_and(|until| until <= stored.lease_until.max(now)) {
            w.fail("no record expires before its saga ends", || format!("saga {saga}"));
        }
        let store = w.store.borrow();
        let entry = store.entries.range(all(facts.id)).map(|(_, entry)| entry.due).min();
        // A store whose leases all lapsed still has the times of its entries. A postponement that
        // arrives late, or after a step of the clock, makes an entry due later by as much.
        let parked = facts.log.as_ref().and_then(|log| log.parked.as_ref());
        let is_early =
            |due| parked.is_none_or(|it| it.until.after(duration(4 * HOUR)) < LogTime::from(due));
        let late = stored.lease_until.max(now).after(duration(4 * HOUR));
        if entry.is_some_and(|due| due > late && is_early(due)) {
            w.fail("an entry is due when its lease ends", || format!("saga {saga}"));
        }
        let Some(log) = &facts.log else { continue };
        if log.stuck.is_some() {
            continue;
        }
        let Some(parked) = &log.parked else { continue };
        let is_far = LogTime::from(now.after(duration(HOUR))) < parked.until;
        let waits = |name: &str| facts.signals.get(name).is_some_and(|signal| signal.answered);
        if parked.signal.as_deref().is_some_and(waits) && is_far {
            w.fail("an answered signal wakes its saga", || format!("saga {saga}: {}", show(log)));
        }
        if waits("") && log.failure.is_none() && is_far {
            w.fail("an answered cancellation wakes its saga", || format!("saga {saga}"));
        }
    }
}

/// Checks every saga at the end.
pub(crate) fn finally(w: &W) {
    for (saga, facts) in w.facts.borrow().sagas.iter().enumerate() {
        check(w, saga, facts);
    }
}

fn check(w: &World, saga: usize, facts: &SagaFacts) {
    let is_stuck = facts.log.as_ref().is_some_and(|log| log.stuck.is_some());
    let log = facts.log.as_ref().map(show);
    if facts.is_unfinished() && !is_stuck {
        w.fail("every saga ends", || format!("saga {saga}: {log:?}"));
    }
    let was_promised = facts.unclear == 0 && facts.accepted.is_none() && facts.withdrawn > 0;
    if was_promised && facts.log.is_some() {
        w.fail("a start that was withdrawn begins nothing", || format!("saga {saga}"));
    }
    let Some(log) = &facts.log else { return };
    for decision in &facts.decisions {
        if !log.decisions.iter().any(|it| it.reason == *decision) {
            w.fail("no decision is lost", || format!("saga {saga}: {decision}"));
        }
    }
    check_end(w, saga, facts, log);
    check_signals(w, saga, facts, log);
    check_effects(w, saga, facts, log);
}

fn check_end(w: &World, saga: usize, facts: &SagaFacts, log: &Log) {
    let Some(end) = &facts.end else { return };
    let fingerprint = facts.request.or(facts.accepted);
    let note = facts.notes.iter().find(|note| Some(note.fingerprint) == fingerprint);
    let Some(note) = note else { return };
    let matches = match (end, &log.failure) {
        (End::Cancelled, Some(Failure::Cancelled { .. })) => true,
        (End::Done(results), None) => {
            let results = Expected::Returned(results.clone());
            [false, true].into_iter().any(|changed| expected(&note.input, changed, log) == results)
        }
        (End::Failed(error), Some(Failure::Error(blob))) => {
            let error = (*error == number(blob)).then_some(Expected::Failed(*error));
            [false, true]
                .into_iter()
                .any(|changed| Some(expected(&note.input, changed, log)) == error)
        }
        _ => false,
    };
    if !matches {
        w.fail("the outcome is what the flow computes", || {
            format!("saga {saga}: {end:?}, {}", show(log))
        });
    }
}

fn check_signals(w: &World, saga: usize, facts: &SagaFacts, log: &Log) {
    for step in &log.steps {
        let Some(name) = step.name.strip_prefix("signal/") else { continue };
        let Some(signal) = facts.signals.get(name) else {
            if matches!(step.outcome, Some(StepOutcome::Happened(_))) {
                w.fail("a signal reaches its own saga only", || format!("saga {saga}: {name}"));
            }
            continue;
        };
        let in_time =
            step.forward.retry_at.is_some_and(|until| LogTime::from(signal.stored) < until);
        match &step.outcome {
            Some(StepOutcome::Happened(value)) if number(value) != signal.value => {
                w.fail("the first signal counts", || format!("saga {saga}"));
            }
            Some(StepOutcome::Rejected(_)) if !in_time => w.count("signal missed"),
            Some(StepOutcome::Rejected(_)) if signal.answered => {
                w.fail("a signal in time is received", || format!("saga {saga}: {}", show(log)));
            }
            _ => {}
        }
    }
}

fn check_effects(w: &World, saga: usize, facts: &SagaFacts, log: &Log) {
    for ((of, name, nth), step) in &w.outside.borrow().steps {
        let Some(spec) = spec_of(name).filter(|_| *of == saga) else { continue };
        let fail = |what: &'static str| {
            let effects = &step.effects;
            w.fail(what, || {
                format!("saga {saga}: `{name}` number {nth} {effects:?}, {}", show(log))
            });
        };
        if spec.kind != Kind::Again && step.effects.len() > 1 {
            fail("a step has one effect");
        }
        let logged = log.find(name, *nth).map(|at| &log.steps[at]);
        let Some(logged) = logged else {
            if !step.effects.is_empty() {
                fail("a step with an effect is in the log");
            }
            continue;
        };
        match &logged.outcome {
            Some(StepOutcome::Happened(value)) if !step.returned.contains(&number(value)) => {
                fail("a logged result is that of the effect");
            }
            Some(StepOutcome::Rejected(_))
                if !step.effects.is_empty() && spec.kind != Kind::Again =>
            {
                fail("a rejected step has no effect");
            }
            _ => {}
        }
        let is_skipped = facts.skipped.contains(&(name.clone(), *nth));
        let is_undone = matches!(facts.end, Some(End::Failed(_) | End::Cancelled));
        let is_left = step.effects.iter().any(|effect| !effect.undone);
        if is_undone && spec.undo && is_left && !is_skipped {
            fail("every step with an undo is undone");
        }
        if matches!(facts.end, Some(End::Done(_))) && step.effects.iter().any(|it| it.undone) {
            fail("no step of a saga that is done is undone");
        }
    }
}

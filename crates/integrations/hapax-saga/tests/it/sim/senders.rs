//! Senders of signals and cancellations, and operators.

use std::time::Duration;

use hapax_core::exchange::{Next, WriteExchange, WriteResult};
use hapax_core::schedule::EntryKey;
use hapax_core::store::{Draft, Snapshot, Stamp, StoredRecord, Swap, Swapped};
use hapax_core::{
    Amendment, EntryId, Fingerprint, FingerprintScheme, LeaseId, Notes, OnUnknown, OperationId,
    Outcome, Record, RecordState, Terms, WriteId, value,
};
use hapax_saga::SagaDecision;
use hapax_saga::log::{Direction, Log, StuckReason};

use super::bugs::Bug;
use super::clients;
use super::facts::{ANY_GENERATION, saga_id, signal_id};
use super::flows::spec_of;
use super::node::{N, Node};
use super::operator;
use super::plan::{DAY, duration};
use super::store;

/// Looks for a signal, by name; the cancellation has the empty name. The outer `None`: no reply.
pub(crate) async fn signal(
    node: &Node,
    saga: usize,
    generation: LeaseId,
    name: &str,
) -> Option<Option<u64>> {
    let seen = node.load(name_of(node, saga, generation, name)).await?;
    Some(seen.stored.and_then(|stored| match stored.record.state {
        RecordState::Done(outcome) => value::read(outcome.bytes()).ok(),
        _ => None,
    }))
}

fn name_of(node: &Node, saga: usize, generation: LeaseId, name: &str) -> OperationId {
    let bug = node.w.has(Bug::SignalsAnyGeneration);
    signal_id(saga, if bug { ANY_GENERATION } else { generation }, name)
}

/// Sends a signal: stores it for the saga that is unfinished now, and wakes the saga. Then it counts
/// as answered.
pub(crate) async fn send(node: N, saga: usize, name: String, number: u64) {
    let w = &node.w;
    let Some(Snapshot { now, stored }) = node.load(saga_id(saga)).await else { return };
    let is_kept = |it: &StoredRecord| it.keep_until.is_none_or(|until| now < until);
    let unfinished = stored.filter(is_kept).map(|stored| stored.record);
    let unfinished = unfinished.filter(|record| record.state == RecordState::InFlight);
    let Some(generation) = unfinished.map(|record| record.generation) else {
        return w.count("signal rejected");
    };
    if put_signal(&node, saga, generation, &name, number).await.is_none() {
        return;
    }
    let answer = || {
        w.tell(|| format!("signal `{name}` to saga {saga} is answered"));
        let facts = &mut w.facts.borrow_mut().sagas[saga];
        let signal = facts.signals.get_mut(&name);
        if let Some(signal) = signal.filter(|_| facts.generation == Some(generation)) {
            signal.answered = true;
            signal.answered_at.get_or_insert(w.now());
        }
    };
    if w.has(Bug::AnswersBeforeTheWakeUp) {
        answer();
    }
    w.critical_point(node.number, 5 * w.plan.crashes).await;
    if wake(&node, saga).await.is_some() {
        answer();
    }
}

pub(crate) async fn put_signal(
    node: &Node,
    saga: usize,
    generation: LeaseId,
    name: &str,
    number: u64,
) -> Option<()> {
    let w = &node.w;
    let lease_id = LeaseId::fresh(&w.ids).ok()?;
    let retention = duration(365 * DAY);
    let record = Record {
        scheme: FingerprintScheme::new("saga-signal/1").ok()?,
        fingerprint: Fingerprint::from_bytes([0; 32]),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms: Terms { lease: Duration::ZERO, retention, on_unknown: OnUnknown::Reexecute },
        checkpoint: None,
        notes: Notes::default(),
        extensions: hapax_core::Extensions::default(),
        state: RecordState::Done(Outcome::new("saga-signal/1", value::write(&number, 64).ok()?)),
    };
    let lease = Duration::ZERO;
    let draft = Draft { record, stamp: Stamp::NextFence, lease, keep: Some(retention) };
    let write_id = WriteId::fresh(&w.ids).ok()?;
    let id = name_of(node, saga, generation, name);
    let swap = Swap { id, expected: None, write_id, draft };
    for _ in 0..5 {
        // A conflict: another signal was first, whose sender may have died before the wake-up.
        if store::swap(w, node.number, &swap).await.is_some() {
            return Some(());
        }
    }
    None
}

/// Lets a parked saga continue now. `None`: that is not known.
pub(crate) async fn wake(node: &Node, saga: usize) -> Option<()> {
    let w = &node.w;
    for _ in 0..20 {
        let Some(seen) = node.load(saga_id(saga)).await else { continue };
        let Some((log, runs)) = parked(node, &seen) else {
            w.count("sender saw it run");
            return Some(());
        };
        if runs {
            // Its runner may crash before its first save, and the entry may be due much later.
            w.count("sender saw it adopted");
            return make_due(node, saga, &log).await;
        }
        match amend(node, saga, seen, None).await {
            Some(WriteResult::Recorded(_)) => {
                make_due(node, saga, &log).await?;
                w.count("sender woke");
                return Some(());
            }
            // It has changed since it was read.
            Some(_) => {}
            None => return None,
        }
    }
    None
}

/// Returns the log of a saga that is parked and not stuck, and whether a runner has adopted it since:
/// with its first save it writes its own attempt.
fn parked(node: &Node, seen: &Snapshot) -> Option<(Log, bool)> {
    let stored = seen.stored.as_ref()?;
    let log = Log::decode(stored.record.checkpoint.as_ref()?).ok()?;
    let runs = log.attempt != stored.record.attempt && !node.w.has(Bug::WakesTheRunning);
    let is_in_flight = stored.record.state == RecordState::InFlight;
    (is_in_flight && log.parked.is_some() && log.stuck.is_none()).then_some((log, runs))
}

async fn amend(
    node: &Node,
    saga: usize,
    seen: Snapshot,
    checkpoint: Option<bytes::Bytes>,
) -> Option<WriteResult> {
    let expected = seen.stored.as_ref()?.write_id;
    let amendment = Amendment { expected, checkpoint, lease: Duration::ZERO };
    let w = &node.w;
    let begun = WriteExchange::amend(saga_id(saga), seen, amendment, &w.ids);
    let (mut exchange, mut next) = begun.ok()?;
    loop {
        let swap = match next {
            Next::Ready(result) => return Some(result),
            Next::Send(swap) => swap,
        };
        let mut reply: Option<Swapped> = None;
        for _ in 0..5 {
            reply = store::swap(w, node.number, &swap).await;
            if reply.is_some() {
                break;
            }
        }
        next = exchange.receive(reply?, &w.ids).ok()?;
    }
}

async fn make_due(node: &Node, saga: usize, log: &Log) -> Option<()> {
    let key = EntryKey { operation: saga_id(saga), id: EntryId::from_bytes(log.entry) };
    for _ in 0..5 {
        let made = store::postpone(&node.w, node.number, key, None, Duration::ZERO).await;
        if made.is_some() {
            return Some(());
        }
    }
    None
}

/// Looks for what a parked saga waits for, after it was parked. Returns whether it was woken; `None`
/// if it is not known whether it has to be.
pub(crate) async fn second_look(
    node: &Node,
    saga: usize,
    record: Option<Record>,
    log: &Log,
) -> Option<bool> {
    let Some(generation) = record.map(|record| record.generation).filter(|_| log.stuck.is_none())
    else {
        return Some(false);
    };
    let signal_of = log.parked.as_ref().and_then(|parked| parked.signal.as_deref());
    for name in [Some(""), signal_of].into_iter().flatten() {
        if name.is_empty() && log.failure.is_some() {
            continue;
        }
        if signal(node, saga, generation, name).await?.is_some() {
            wake(node, saga).await?;
            return Some(true);
        }
    }
    Some(false)
}

/// The same for a saga whose entry is due before it is. `None`: the entry may be postponed.
pub(crate) async fn look_again(node: &Node, saga: usize, stored: &StoredRecord) -> Option<bool> {
    let seen = Snapshot { now: hapax_core::Timestamp::default(), stored: Some(stored.clone()) };
    let (log, runs) = parked(node, &seen)?;
    if runs {
        return None;
    }
    match second_look(node, saga, Some(stored.record.clone()), &log).await {
        Some(false) => {
            let waits_for = log.parked.as_ref().and_then(|parked| parked.signal.as_deref());
            if waits_for.is_some() || node.w.dice.below(4) == 0 {
                clients::react(&node.w, saga, waits_for.unwrap_or_default());
            }
            None
        }
        Some(true) => Some(true),
        None => Some(false),
    }
}

/// Lets an operator decide about a saga, if it is stuck.
pub(crate) async fn operate(node: N, saga: usize, number: u64) {
    let w = &node.w;
    let Some(seen) = node.load(saga_id(saga)).await else { return };
    let Some(stored) = &seen.stored else { return };
    let checkpoint = stored.record.checkpoint.as_ref();
    let Some(mut log) = checkpoint.and_then(|log| Log::decode(log).ok()) else { return };
    let Some(stuck) = log.stuck.clone() else { return };
    let reason = format!("decision {number}");
    let now = node.store_now();
    let step = stuck.step.map(|at| log.steps[at].clone());
    let is_unreadable = stuck.reason == StuckReason::Unreadable;
    let may_be_far = is_unreadable || stuck.reason == StuckReason::Diverged || w.dice.below(3) == 0;
    let decision = match (stuck.direction, &step) {
        (Direction::Undo, Some(step)) if w.dice.below(2) == 0 => {
            // Skipped by somebody who knows.
            let key = (step.name.clone(), step.nth);
            w.facts.borrow_mut().sagas[saga].skipped.insert(key);
            SagaDecision::Skip
        }
        (Direction::Forward, Some(step))
            if spec_of(&step.name).is_some() && !is_unreadable && w.dice.below(2) == 0 =>
        {
            match w.inspect(saga, step, stored.fence.get()) {
                Some(truth) => operator::resolve(truth),
                None => return,
            }
        }
        (Direction::Forward, _) if may_be_far => SagaDecision::Abort,
        _ => SagaDecision::Retry,
    };
    let action = operator::word(&decision);
    operator::decide(&mut log, &decision, &reason, now);
    let Ok(checkpoint) = log.encode() else { return };
    let amended = amend(&node, saga, seen, Some(checkpoint)).await;
    if let Some(WriteResult::Recorded(_)) = amended {
        w.count(action);
        w.tell(|| format!("an operator decides about saga {saga}: {action}"));
        if make_due(&node, saga, &log).await.is_some() {
            w.facts.borrow_mut().sagas[saga].decisions.push(reason);
        }
    }
}

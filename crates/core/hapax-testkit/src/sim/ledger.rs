//! The ledger: every write that the model store accepted, by its sender's purpose. It is derived
//! from the promises, not from the state machine, and checks that machine.

use hapax_core::exchange::Ownership;
use hapax_core::store::{StoredRecord, Swap};
use hapax_core::{Extensions, LeaseId, OnUnknown, RecordState, Timestamp};

pub(super) use super::model::{
    Checked, Effect, Generation, KeyModel, ModelExecution, NEVER, Phase, PromiseViolation,
    Redirects, SimVerdict, SwapPurpose, SwapSender, ensure,
};
use super::plan;

/// Facts about all keys, executions and outcomes.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) keys: Vec<KeyModel>,
    pub(super) executions: Vec<ModelExecution>,
    pub(super) generations: Vec<Generation>,
    /// Outcomes that were ever recorded, and those that were reported to their owner as lost.
    pub(super) recorded: Vec<bool>,
    pub(super) denied: Vec<bool>,
    /// True if the clock stepped back by more than a lease: fences of purged keys may then fall
    /// back.
    pub(super) far_back: bool,
}

impl Ledger {
    pub(super) fn reset(&mut self, keys: usize, outcomes: usize) {
        self.keys.clear();
        self.keys.resize(keys, KeyModel::ABSENT);
        self.executions.clear();
        self.generations.clear();
        for set in [&mut self.recorded, &mut self.denied] {
            set.clear();
            set.resize(outcomes, false);
        }
        self.far_back = false;
    }

    /// Returns the facts about a key when the store's clock shows `clock`.
    pub(super) fn look(&mut self, key: usize, clock: u64) -> KeyModel {
        let truth = &mut self.keys[key];
        truth.clock = clock;
        truth.latest = truth.latest.max(clock);
        *truth
    }

    /// Notes that the store removed a record.
    pub(super) fn purged(&mut self, key: usize, clock: u64) -> Checked {
        let truth = self.look(key, clock);
        let absent = KeyModel { highest_fence: truth.highest_fence, ..KeyModel::ABSENT };
        self.keys[key] = KeyModel { version: truth.version + 1, latest: clock, clock, ..absent };
        let expired = truth.phase != Phase::Absent && truth.was_expired();
        match truth.phase {
            Phase::Done => ensure(expired, "S10", "an outcome was purged before its time"),
            _ => ensure(expired, "S10", "an unfinished record was purged before its time"),
        }
    }

    /// Notes a write that the store accepted. Returns the execution that this admits, if any.
    pub(super) fn wrote(
        &mut self,
        key: usize,
        clock: u64,
        fence: u64,
        meaning: SwapPurpose,
        by: SwapSender,
        swap: &Swap,
    ) -> Result<Option<u32>, PromiseViolation> {
        let before = self.look(key, clock);
        let mut now = before;
        now.version += 1;
        now.latest = clock;
        let keep = |now: &KeyModel, more: u64| match now.strict {
            OnUnknown::Block | OnUnknown::Reconcile => NEVER,
            OnUnknown::Reexecute => clock + now.retention + more,
        };
        match meaning {
            SwapPurpose::Execute { anew, attempt, asked } => {
                if !before.echo {
                    check_admission(&before, anew, asked, &by)?;
                    // A claim may replace its own earlier swap, for which it never returned an
                    // execution.
                    let own = |one: &ModelExecution| one.exchange == by.exchange && !one.told;
                    let own = self.executions.get(before.execution as usize).is_some_and(own);
                    let alive = !own && self.runs_in(&before, by.process);
                    let unfinished = matches!(before.phase, Phase::Held | Phase::Unknown);
                    let itself = unfinished && alive && asked.is_none();
                    ensure(!itself, "S1", "a process took over from its own execution")?;
                }
                now.redirects = redirects(swap);
                let same = now.redirects == before.redirects;
                // The record may have been read before it expired or after.
                let over = before.was_expired() && now.redirects == Redirects::default();
                ensure(
                    same || over || before.echo || by.again,
                    "redirect",
                    "a claim changed redirects",
                )?;
                let highest = before.highest_fence;
                let free_fall = before.phase == Phase::Absent && self.far_back;
                ensure(fence > highest || free_fall, "S6", "a fence is not larger than the last")?;
                let execution = self.enter(key, &before, anew, attempt, fence, &by, swap);
                let entered = &self.executions[execution as usize];
                now.strict = if anew { by.policy } else { before.strict.max(by.policy) };
                (now.phase, now.execution, now.generation) =
                    (Phase::Held, execution, entered.generation);
                (now.attempts, now.checkpoint) = (entered.attempt, entered.checkpoint);
                (now.request, now.lease, now.retention) = (by.request, by.lease, by.retention);
                (now.lease_until, now.reconciling) = (clock + by.lease, false);
                now.settle = if anew { by.settle } else { before.settle.max(by.settle) };
                now.lapsed = false;
                now.keep_until = keep(&now, 0);
                now.highest_fence = fence;
                now.echo = by.again || (before.echo && !anew);
                self.keys[key] = now;
                return Ok(Some(execution));
            }
            SwapPurpose::Own => {
                let own = self
                    .executions
                    .get(before.execution as usize)
                    .map(|execution| execution.exchange);
                let own = before.phase == Phase::Held && own == Some(by.exchange);
                ensure(own, "S2", "a claim extended what it does not own")?;
                now.lease_until = clock + by.lease;
                now.keep_until = keep(&now, by.lease.saturating_sub(now.retention));
            }
            SwapPurpose::Announce { after, timeout } => {
                if !before.echo {
                    check_hook_call(&before, after, &by)?;
                }
                called(&mut now, timeout);
                now.keep_until = keep(&now, timeout);
            }
            SwapPurpose::Call { fence, policy, after, timeout, pause, .. } => {
                let owner = self.executions.get(before.execution as usize).map(|it| it.fence);
                let listed = owner == Some(fence);
                if !before.echo {
                    ensure(listed, "reconcile", "a hook was called about what was not listed")?;
                    check_call_without_retry(&before, policy, (after, pause))?;
                }
                called(&mut now, timeout);
                now.keep_until = keep(&now, timeout);
            }
            SwapPurpose::Conclude { said, asked } | SwapPurpose::Settle { said, asked } => {
                let same = before.phase == Phase::Unknown && before.version == asked;
                ensure(
                    same || before.echo,
                    "reconcile",
                    "a verdict counted after the record had changed",
                )?;
                (now.reconciling, now.lease_until) = (false, clock);
                match said {
                    SimVerdict::Happened(outcome) => self.finish(&mut now, outcome, None),
                    SimVerdict::DidNotHappen if matches!(meaning, SwapPurpose::Settle { .. }) => {
                        let retention = now.retention;
                        release(&mut now, retention);
                        if let Some(it) = self.generations.get_mut(before.generation as usize) {
                            let happened = it.one && it.effects > 0 && !before.echo;
                            ensure(!happened, "reconcile", "released an operation that happened")?;
                            it.denied |= !before.echo;
                        }
                    }
                    SimVerdict::DidNotHappen | SimVerdict::CannotSay => {
                        now.keep_until = keep(&now, 0)
                    }
                }
            }
            SwapPurpose::Operator { fence, force, forget, outcome } => {
                let owner =
                    self.executions.get(before.execution as usize).map(|execution| execution.fence);
                let seen = owner == Some(fence) || before.echo;
                ensure(seen, "operator", "changed what was not seen")?;
                ensure(!before.vacant(), "operator", "resolved what was not there")?;
                let live = before.phase == Phase::Held && !before.was_lapsed();
                ensure(
                    !live || force || before.echo,
                    "operator",
                    "a live lease was resolved without force",
                )?;
                let over = before.phase == Phase::Done;
                (now.reconciling, now.lease_until) = (false, clock);
                match outcome {
                    Some(outcome) => {
                        ensure(!over, "S3", "an operator replaced an outcome")?;
                        self.finish(&mut now, outcome, None);
                    }
                    None => {
                        let told = !over || forget;
                        ensure(told, "S3", "an outcome was removed without `forget`")?;
                        let settled = before.latest >= before.may_execute_until();
                        ensure(
                            settled || force || before.echo,
                            "operator",
                            "decided that it did not happen while it may still execute",
                        )?;
                        release(&mut now, 0);
                    }
                }
            }
            _ => self.hold(&before, &mut now, meaning, &by, keep)?,
        }
        self.keys[key] = now;
        Ok(None)
    }

    fn hold(
        &mut self,
        before: &KeyModel,
        now: &mut KeyModel,
        meaning: SwapPurpose,
        by: &SwapSender,
        keep: impl Fn(&KeyModel, u64) -> u64,
    ) -> Checked {
        let own = !before.vacant() && self.owns(before, by.execution);
        ensure(own, "S2", "an owner changed a record that it does not own")?;
        let held = before.phase == Phase::Held;
        let clock = now.latest;
        match meaning {
            SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_) => {
                ensure(held, "S2", "an owner renewed a record that was not in flight")?;
                let lease =
                    if let SwapPurpose::Renew { lease } = meaning { lease } else { now.lease };
                now.lease_until = clock + lease;
                now.keep_until = keep(now, lease.saturating_sub(now.retention));
                if let SwapPurpose::Checkpoint(checkpoint) = meaning {
                    now.checkpoint = Some(checkpoint);
                }
            }
            SwapPurpose::Complete { outcome, retention } => {
                ensure(
                    held || before.phase == Phase::Unknown,
                    "S3",
                    "an outcome was overwritten by a late one",
                )?;
                (now.reconciling, now.lease_until) = (false, clock);
                self.finish(now, outcome, retention);
            }
            SwapPurpose::Abandon { seen_outcome } => {
                ensure(held, "S2", "an owner abandoned a record that was not in flight")?;
                (now.phase, now.reconciling, now.lease_until) = (Phase::Unknown, false, clock);
                now.seen_outcome = seen_outcome;
                (now.ended, now.lapsed) = (clock, false);
                now.keep_until = keep(now, 0);
            }
            SwapPurpose::Withdraw { keep: more } => {
                ensure(held, "S2", "an owner withdrew a record that was not in flight")?;
                now.lease_until = clock;
                now.attempts = now.attempts.saturating_sub(1);
                match self.executions.get_mut(before.execution as usize) {
                    Some(one) if one.takeover && now.strict == OnUnknown::Reexecute => {
                        // The record of the owner before it, which crashed.
                        one.dropped = true;
                        now.keep_until = keep(now, 0);
                    }
                    _ => release(now, more),
                }
            }
            SwapPurpose::Release { keep } | SwapPurpose::Redirect { keep, .. } => {
                ensure(held, "S2", "an owner released a record that was not in flight")?;
                now.lease_until = clock;
                if let SwapPurpose::Redirect { outcome, .. } = meaning {
                    now.redirects[usize::from(before.request)] = Some(outcome);
                }
                release(now, keep);
            }
            _ => ensure(false, "sim", "an owner's write has another purpose")?,
        }
        Ok(())
    }

    /// Checks that a stored record agrees with the ledger.
    pub(super) fn check_record(&self, truth: &KeyModel, stored: Option<&StoredRecord>) -> Checked {
        let Some(stored) = stored else {
            return ensure(truth.phase == Phase::Absent, "table", "a record is missing");
        };
        let record = &stored.record;
        let state = match &record.state {
            RecordState::InFlight => truth.phase == Phase::Held,
            RecordState::Released => truth.phase == Phase::Released,
            RecordState::Done(outcome) => {
                truth.phase == Phase::Done && plan::number(outcome.bytes()) == truth.outcome
            }
            RecordState::Unknown { seen, reconciling } => {
                let seen_outcome = seen.as_ref().map(|seen| plan::number(seen.bytes()));
                truth.phase == Phase::Unknown
                    && seen_outcome == truth.seen_outcome
                    && *reconciling == truth.reconciling
            }
        };
        let unfinished = matches!(truth.phase, Phase::Held | Phase::Unknown);
        let checkpoint = record.checkpoint.as_ref().map(plan::number);
        let keep = stored.keep_until.map_or(NEVER, Timestamp::as_micros);
        ensure(state, "table", "a record is in another state")?;
        ensure(record.attempt == truth.attempts, "attempts", "a record has another attempt")?;
        ensure(record.terms.on_unknown == truth.strict, "table", "a record has another policy")?;
        ensure(keep == truth.keep_until, "table", "a record has another retention")?;
        let redirects = redirects_of(&record.extensions) == truth.redirects;
        ensure(redirects, "redirect", "a record has other redirects")?;
        let lease = stored.lease_until.as_micros() == truth.lease_until;
        ensure(lease || !unfinished, "table", "a record is held for another time")?;
        let same = checkpoint == truth.checkpoint;
        ensure(same || !unfinished, "checkpoint", "a record has another checkpoint")?;
        let owner = self.executions.get(truth.execution as usize);
        let hook = owner.and_then(|owner| owner.hook).map(plan::description);
        let described = record.extensions.describes(record.lease_id);
        let named = record.notes.description.clone().filter(|_| described);
        ensure(
            named == hook || !unfinished,
            "reconcile",
            "a record names the hook of another execution",
        )
    }

    /// Returns whether `execution` owns a key, by its lease id. A copy of its claim that lands on a
    /// purged key restores that lease id.
    pub(super) fn owns(&self, truth: &KeyModel, execution: u32) -> bool {
        let lease_id = |execution: u32| {
            self.executions.get(execution as usize).map(|execution| execution.lease_id)
        };
        truth.phase != Phase::Absent && lease_id(truth.execution) == lease_id(execution)
    }

    #[allow(clippy::too_many_arguments, reason = "private, called once")]
    fn enter(
        &mut self,
        key: usize,
        before: &KeyModel,
        anew: bool,
        attempt: u32,
        fence: u64,
        by: &SwapSender,
        swap: &Swap,
    ) -> u32 {
        let generation = if anew {
            let one = by.policy >= OnUnknown::Reconcile;
            self.generations.push(Generation { effects: 0, one, denied: false });
            self.generations.len() as u32 - 1
        } else {
            before.generation
        };
        let attempt = match before.phase {
            // The record may have been read before it expired or after: both numbers are right.
            Phase::Released if before.was_expired() && attempt == 1 => 1,
            Phase::Released => before.attempts + 1,
            _ if anew => 1,
            _ => before.attempts + 1,
        };
        self.executions.push(ModelExecution {
            key: key as u8,
            exchange: by.exchange,
            generation,
            lease_id: swap.draft.record.lease_id,
            record_life: swap.draft.record.generation,
            fence,
            attempt,
            checkpoint: if anew { None } else { before.checkpoint },
            lease: by.lease,
            takeover: !anew,
            told: false,
            effect: Effect::None,
            stray: false,
            dropped: false,
            running: self.running(&swap.draft.record.lease_id),
            hook: by.hook,
        });
        self.executions.len() as u32 - 1
    }

    fn finish(&mut self, now: &mut KeyModel, outcome: u16, retention: Option<u64>) {
        self.recorded[usize::from(outcome)] = true;
        now.retention = retention.unwrap_or(now.retention);
        (now.phase, now.outcome, now.checkpoint) = (Phase::Done, outcome, None);
        now.keep_until = now.latest + now.retention;
    }

    /// Returns the execution to which a claim was admitted under the fence of `ownership`. A claim
    /// may have several: a copy of its swap may land again on a purged key.
    pub(super) fn entered(&self, exchange: u32, ownership: &Ownership) -> Option<u32> {
        let fence = ownership.fence().get();
        let same = |one: &ModelExecution| one.exchange == exchange && one.fence == fence;
        self.executions.iter().rposition(same).map(|at| at as u32)
    }

    /// Drops every execution of a claim without a write.
    pub(super) fn dropped(&mut self, exchange: u32) {
        let of_claim =
            self.executions.iter_mut().filter(|execution| execution.exchange == exchange);
        of_claim.for_each(|execution| (execution.dropped, execution.running) = (true, None));
    }

    /// Ends every execution of a claim whose caller does not execute it.
    pub(super) fn end_unused_executions(&mut self, exchange: u32) {
        for execution in
            self.executions.iter_mut().filter(|execution| execution.exchange == exchange)
        {
            execution.running = None;
        }
    }

    /// Ends every execution of a claim under another lease id than the one that its caller got, or that is withdrawn: an
    /// earlier swap of the claim may land late, on a purged key.
    pub(super) fn end_other_executions(&mut self, exchange: u32, lease_id: LeaseId) {
        let is_other =
            |one: &&mut ModelExecution| one.exchange == exchange && one.lease_id != lease_id;
        self.executions.iter_mut().filter(is_other).for_each(|one| one.running = None);
    }

    /// Returns the process that uses a lease id: a copy of its claim may land again on a purged
    /// key.
    fn running(&self, lease_id: &LeaseId) -> Option<u8> {
        self.executions.iter().filter(|one| one.lease_id == *lease_id).find_map(|one| one.running)
    }

    /// Notes that an execution has ended, or that its worker has left it.
    pub(super) fn ended(&mut self, execution: u32) {
        let Some(lease_id) =
            self.executions.get(execution as usize).map(|execution| execution.lease_id)
        else {
            return;
        };
        for execution in
            self.executions.iter_mut().filter(|execution| execution.lease_id == lease_id)
        {
            execution.running = None;
        }
    }

    /// Notes that a process has crashed, with everything that it executed.
    pub(super) fn died(&mut self, process: u8) {
        for execution in
            self.executions.iter_mut().filter(|execution| execution.running == Some(process))
        {
            execution.running = None;
        }
    }

    /// Returns whether the owner of a record executes in `process`.
    pub(super) fn runs_in(&self, truth: &KeyModel, process: u8) -> bool {
        self.executions
            .get(truth.execution as usize)
            .is_some_and(|one| one.running == Some(process))
    }

    /// Returns whether any execution of a key is in progress in `process`.
    pub(super) fn busy_in(&self, key: u8, process: u8) -> bool {
        self.executions.iter().any(|one| one.key == key && one.running == Some(process))
    }

    /// Notes an effect in the system downstream.
    pub(super) fn effect(&mut self, execution: u32) -> Checked {
        let execution = &mut self.executions[execution as usize];
        execution.effect = Effect::Applied;
        let Generation { effects, one, denied } =
            &mut self.generations[execution.generation as usize];
        *effects += 1;
        ensure(!*denied, "S5", "an operation had its effect after its hook had denied it")?;
        ensure(*effects == 1 || !*one, "S5", "an operation had its effect twice in one generation")
    }
}

/// Notes a call of the hook.
fn called(now: &mut KeyModel, timeout: u64) {
    if now.phase == Phase::Held {
        now.seen_outcome = None;
        (now.ended, now.lapsed) = (now.lease_until, true);
    }
    (now.phase, now.reconciling) = (Phase::Unknown, true);
    now.lease_until = now.latest + timeout;
}

fn release(now: &mut KeyModel, keep: u64) {
    (now.phase, now.checkpoint) = (Phase::Released, None);
    // A redirect is known for as long as an outcome.
    let redirects = if now.redirects == Redirects::default() { 0 } else { now.retention };
    now.keep_until = now.latest + now.lease.max(keep).max(redirects);
}

fn redirects(swap: &Swap) -> Redirects {
    redirects_of(&swap.draft.record.extensions)
}

fn redirects_of(extensions: &Extensions) -> Redirects {
    let mut redirects = Redirects::default();
    for redirect in extensions.redirects() {
        let request = plan::request_number(&redirect.scheme, &redirect.fingerprint);
        redirects[request] = Some(plan::number(redirect.outcome.bytes()));
    }
    redirects
}

/// Checks that an execution may be admitted.
fn check_admission(before: &KeyModel, anew: bool, asked: Option<u32>, by: &SwapSender) -> Checked {
    let kept = !before.vacant() && !before.was_expired();
    let redirected = before.redirects[usize::from(by.request)].is_some() && !before.was_expired();
    ensure(!redirected, "redirect", "a redirected request ran")?;
    match before.phase {
        Phase::Held if kept || !anew => {
            ensure(before.was_lapsed(), "S1", "a live lease was taken over")?;
        }
        Phase::Done => ensure(!kept, "S3", "an operation ran again within its retention")?,
        Phase::Absent | Phase::Released | Phase::Held | Phase::Unknown => {}
    }
    if anew {
        return ensure(!kept, "S5", "an unfinished operation was taken for a new one");
    }
    let unfinished = matches!(before.phase, Phase::Held | Phase::Unknown);
    ensure(unfinished, "S3", "took over a record that was not unfinished")?;
    ensure(before.request == by.request, "S4", "took over another request's record")?;
    match before.strict.max(by.policy) {
        OnUnknown::Reexecute => Ok(()),
        OnUnknown::Block => ensure(false, "S5", "ran again under block"),
        OnUnknown::Reconcile => {
            let answered = before.phase == Phase::Unknown && asked == Some(before.version);
            ensure(answered, "S5", "ran again without a hook's word on what was there")
        }
    }
}

/// Checks that a hook may be called.
fn check_hook_call(before: &KeyModel, after: u64, by: &SwapSender) -> Checked {
    let policy = before.strict.max(by.policy);
    ensure(policy == OnUnknown::Reconcile, "reconcile", "a hook was called under another policy")?;
    ensure(before.request == by.request, "S4", "a hook was called for another request")?;
    match before.phase {
        Phase::Held => {
            let due = before.latest >= before.lease_until.saturating_add(after);
            ensure(due, "reconcile", "a hook was called while the owner may still execute")
        }
        Phase::Unknown => {
            let alone = !before.reconciling || before.was_lapsed();
            ensure(alone, "reconcile", "a hook was called twice at a time")
        }
        _ => ensure(false, "reconcile", "a hook was called for a record that was not undecided"),
    }
}

/// Checks that a hook may be called without a retry.
fn check_call_without_retry(
    before: &KeyModel,
    policy: OnUnknown,
    (after, pause): (u64, u64),
) -> Checked {
    let both = [before.strict, policy] == [OnUnknown::Reconcile; 2];
    ensure(both, "reconcile", "a hook was called without a retry under another policy")?;
    let fresh = before.checkpoint.is_none();
    ensure(fresh, "checkpoint", "a hook was called about what a retry may continue")?;
    let from = match before.phase {
        Phase::Held => before.lease_until.saturating_add(after),
        Phase::Unknown => before.lease_until.saturating_add(pause),
        _ => NEVER,
    };
    ensure(from != NEVER, "reconcile", "a hook was called for a record that was not undecided")?;
    let due = before.latest >= from.max(before.sent_until());
    ensure(due, "reconcile", "a hook was called without a retry before the request had ended")
}

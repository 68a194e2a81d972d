//! What is true: a ledger of every write that the model store took, kept by what its sender set
//! out to do. It is written from the promises, not from the state machine, and judges that.

use hapax_core::exchange::Ownership;
use hapax_core::store::{StoredRecord, Swap};
use hapax_core::{LeaseId, OnUnknown, RecordState, Timestamp};

pub(super) use super::model::{
    Checked, Effect, KeyModel, ModelExecution, NEVER, Phase, PromiseViolation, SimVerdict,
    SwapPurpose, SwapSender, ensure,
};
use super::plan;

/// Keeps the ledger of all keys.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) keys: Vec<KeyModel>,
    pub(super) executions: Vec<ModelExecution>,
    /// Effects of each life, and whether there may be but one.
    pub(super) generations: Vec<(u8, bool)>,
    /// Outcomes that were ever recorded, and those whose holder was told that it is lost.
    pub(super) recorded: Vec<bool>,
    pub(super) denied: Vec<bool>,
    /// The clock stepped back by more than a lease: fences of purged keys are not promised.
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

    /// What is true of a key when the store's clock shows `clock`.
    pub(super) fn look(&mut self, key: usize, clock: u64) -> KeyModel {
        let truth = &mut self.keys[key];
        truth.clock = clock;
        truth.latest = truth.latest.max(clock);
        *truth
    }

    /// The store removed a cell.
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

    /// The store took a write. Answers the execution that this let in, if any.
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
                    judge_entry(&before, anew, asked, &by)?;
                    // A claim may replace its own earlier swap, which no answer let it execute.
                    let own = |one: &ModelExecution| one.exchange == by.exchange && !one.told;
                    let own = self.executions.get(before.execution as usize).is_some_and(own);
                    let alive = !own && self.runs_in(&before, by.process);
                    let unfinished = matches!(before.phase, Phase::Held | Phase::Unknown);
                    let itself = unfinished && alive && asked.is_none();
                    ensure(!itself, "S1", "a process took over from its own execution")?;
                }
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
                    judge_question(&before, after, &by)?;
                }
                if before.phase == Phase::Held {
                    now.glimpse = None;
                }
                (now.phase, now.reconciling) = (Phase::Unknown, true);
                now.lease_until = clock + timeout;
                now.keep_until = keep(&now, timeout);
            }
            SwapPurpose::Conclude { said, asked } => {
                let same = before.phase == Phase::Unknown && before.version == asked;
                ensure(
                    same || before.echo,
                    "reconcile",
                    "an answer counted after the record had changed",
                )?;
                (now.reconciling, now.lease_until) = (false, clock);
                match said {
                    SimVerdict::Happened(outcome) => self.finish(&mut now, outcome, None),
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
                        ensure(told, "S3", "an outcome was forgotten unasked")?;
                        release(&mut now);
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
        ensure(own, "S2", "a holder changed a record that it does not own")?;
        let held = before.phase == Phase::Held;
        let clock = now.latest;
        match meaning {
            SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_) => {
                ensure(held, "S2", "a holder renewed what was no longer in flight")?;
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
            SwapPurpose::Abandon { glimpse } => {
                ensure(held, "S2", "a holder gave up what was no longer in flight")?;
                (now.phase, now.reconciling, now.lease_until) = (Phase::Unknown, false, clock);
                now.glimpse = glimpse;
                now.keep_until = keep(now, 0);
            }
            _ => {
                ensure(held, "S2", "a holder released what was no longer in flight")?;
                now.lease_until = clock;
                release(now);
            }
        }
        Ok(())
    }

    /// Whether a cell says what is true.
    pub(super) fn judge_cell(&self, truth: &KeyModel, stored: Option<&StoredRecord>) -> Checked {
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
                let glimpse = seen.as_ref().map(|seen| plan::number(seen.bytes()));
                truth.phase == Phase::Unknown
                    && glimpse == truth.glimpse
                    && *reconciling == truth.reconciling
            }
        };
        let unfinished = matches!(truth.phase, Phase::Held | Phase::Unknown);
        let checkpoint = record.checkpoint.as_ref().map(plan::number);
        let keep = stored.keep_until.map_or(NEVER, Timestamp::as_micros);
        ensure(state, "table", "a record is in another state")?;
        ensure(record.terms.on_unknown == truth.strict, "table", "a record has another policy")?;
        ensure(keep == truth.keep_until, "table", "a record is kept for another time")?;
        let lease = stored.lease_until.as_micros() == truth.lease_until;
        ensure(lease || !unfinished, "table", "a record is held for another time")?;
        let same = checkpoint == truth.checkpoint;
        ensure(same || !unfinished, "checkpoint", "a record has another checkpoint")
    }

    /// Whether the execution `tenure` owns a key: by its grant, which a copy of its claim that
    /// landed on a purged key brings back.
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
            self.generations.push((0, by.policy >= OnUnknown::Reconcile));
            self.generations.len() as u32 - 1
        } else {
            before.generation
        };
        let attempt = match before.phase {
            // Seen while it was still kept, or after: both are right.
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
        });
        self.executions.len() as u32 - 1
    }

    fn finish(&mut self, now: &mut KeyModel, outcome: u16, retention: Option<u64>) {
        self.recorded[usize::from(outcome)] = true;
        now.retention = retention.unwrap_or(now.retention);
        (now.phase, now.outcome, now.checkpoint) = (Phase::Done, outcome, None);
        now.keep_until = now.latest + now.retention;
    }

    /// What a claim was let in with under a fence. It may be more than one thing: a copy may land
    /// again on a purged key.
    pub(super) fn entered(&self, exchange: u32, ownership: &Ownership) -> Option<u32> {
        let fence = ownership.fence().get();
        let same = |one: &ModelExecution| one.exchange == exchange && one.fence == fence;
        self.executions.iter().rposition(same).map(|at| at as u32)
    }

    /// Whatever a claim was let in with is let go without a word.
    pub(super) fn dropped(&mut self, exchange: u32) {
        let of_claim =
            self.executions.iter_mut().filter(|execution| execution.exchange == exchange);
        of_claim.for_each(|execution| (execution.dropped, execution.running) = (true, None));
    }

    /// Whatever a claim was let in with is not for it to execute.
    pub(super) fn turned_away(&mut self, exchange: u32) {
        for execution in
            self.executions.iter_mut().filter(|execution| execution.exchange == exchange)
        {
            execution.running = None;
        }
    }

    /// The process in which a grant is in use: a copy of its claim may land again on a purged key.
    fn running(&self, lease_id: &LeaseId) -> Option<u8> {
        self.executions.iter().filter(|one| one.lease_id == *lease_id).find_map(|one| one.running)
    }

    /// An execution has ended, or its worker has left it.
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

    /// A process has died, and what it executed with it.
    pub(super) fn died(&mut self, process: u8) {
        for execution in
            self.executions.iter_mut().filter(|execution| execution.running == Some(process))
        {
            execution.running = None;
        }
    }

    /// Whether the owner of a record is under way in `process`.
    pub(super) fn runs_in(&self, truth: &KeyModel, process: u8) -> bool {
        self.executions
            .get(truth.execution as usize)
            .is_some_and(|one| one.running == Some(process))
    }

    /// Whether any execution of a key is under way in `process`.
    pub(super) fn busy_in(&self, key: u8, process: u8) -> bool {
        self.executions.iter().any(|one| one.key == key && one.running == Some(process))
    }

    /// An effect reached the system downstream.
    pub(super) fn effect(&mut self, execution: u32) -> Checked {
        let execution = &mut self.executions[execution as usize];
        execution.effect = Effect::Applied;
        let (effects, one) = &mut self.generations[execution.generation as usize];
        *effects += 1;
        ensure(*effects == 1 || !*one, "S5", "an operation had its effect twice in one life")
    }
}

fn release(now: &mut KeyModel) {
    (now.phase, now.checkpoint) = (Phase::Released, None);
    now.keep_until = now.latest + now.lease;
}

/// Whether an execution may be let in.
fn judge_entry(before: &KeyModel, anew: bool, asked: Option<u32>, by: &SwapSender) -> Checked {
    let kept = !before.vacant() && !before.was_expired();
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
    ensure(unfinished, "S3", "took over what was not unfinished")?;
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

/// Whether a hook may be asked.
fn judge_question(before: &KeyModel, after: u64, by: &SwapSender) -> Checked {
    let policy = before.strict.max(by.policy);
    ensure(policy == OnUnknown::Reconcile, "reconcile", "a hook was asked under another policy")?;
    ensure(before.request == by.request, "S4", "a hook was asked for another request")?;
    match before.phase {
        Phase::Held => {
            let due = before.latest >= before.lease_until.saturating_add(after);
            ensure(due, "reconcile", "a hook was asked while the owner may still be at work")
        }
        Phase::Unknown => {
            let alone = !before.reconciling || before.was_lapsed();
            ensure(alone, "reconcile", "a hook was asked twice at a time")
        }
        _ => ensure(false, "reconcile", "a hook was asked about what was not in doubt"),
    }
}

//! The driver of the simulation: performs the effects of a run.

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use hapax_core::machine::OwnerAction;
use hapax_core::schedule::EntryKey;
use hapax_core::{EntryId, Outcome, Verdict};
use hapax_saga::log::{Blob, Log, StepOutcome, StuckReason};
use hapax_saga::run::{Call, Effect, Run, RunEvent, SagaEnd, StuckCause, TryEnd, UndoFailure};

use super::bugs::Bug;
use super::checks;
use super::clients;
use super::flows::{Expected, Kind, STEPS, UNREADABLE, blob, expected, large, number, spec_of};
use super::node::{N, SimLease, Started, Wrote};
use super::outside::{self, OutsideCall};
use super::plan::{CALL_TIMEOUT, DAY, EXPIRY, HOUR, LEASE, MS, SECOND, SETTLE, duration, micros};
use super::senders;
use super::store::{self, Note};
use super::world::{Slot, W};

/// The lease is lost, or may be.
pub(super) struct Dropped;

/// Runs a saga until it ends, parks, or loses its lease.
pub(crate) async fn drive(
    node: N,
    lease: SimLease,
    entry: EntryKey,
    note: Rc<Note>,
    starting: Option<Slot<Started>>,
) {
    let w = Rc::clone(&node.w);
    let log = lease.ownership.checkpoint().map(|log| Log::decode(log).expect("a log"));
    let changed = w.now() >= w.plan.change_at;
    if changed {
        w.count("flow changed");
    }
    let log = log.map(|mut log| {
        if starting.is_some() {
            log.not_begun(node.store_now());
        }
        altered(&w, log, &note, changed)
    });
    let version = match w.has(Bug::RunsOtherVersions) {
        true => w.newest_version(node.number),
        false => log.as_ref().map_or(note.version, |log| log.version),
    };
    let id = log.as_ref().map_or(entry.id, |log| EntryId::from_bytes(log.entry));
    let entry = EntryKey { id, ..entry };
    let (attempt, now) = (lease.ownership.attempt(), node.store_now());
    let definition = match (version, changed) {
        (2, _) => &w.definitions.second,
        (_, true) => &w.definitions.changed,
        (_, false) => &w.definitions.first,
    };
    let mut run = definition.simulate(log, id, attempt, now, &note.input).expect("an input");
    if starting.is_none() {
        run.inserted();
    }
    let (looked_from, not_called) = (0, Cell::new(false));
    let mut driver = Driver { w, node, lease, entry, note, run, looked_from, not_called, starting };
    let mut ended = driver.run().await;
    if driver.not_called.get() {
        driver.run.interrupt(driver.node.store_now());
        ended = driver.park().await;
    }
    if ended.is_err() {
        driver.w.count("run dropped");
        driver.w.tell(|| format!("a run of saga {} is dropped", driver.note.saga));
    }
}

pub(super) struct Driver {
    pub(super) w: W,
    pub(super) node: N,
    pub(super) lease: SimLease,
    entry: EntryKey,
    note: Rc<Note>,
    pub(super) run: Run,
    /// Time at which the last look for a cancellation began.
    looked_from: u64,
    /// Set if a call was not made, because the lease may have lapsed.
    not_called: Cell<bool>,
    /// The answer to a start whose entry is to be inserted.
    starting: Option<Slot<Started>>,
}

impl Driver {
    async fn run(&mut self) -> Result<(), Dropped> {
        loop {
            let mut now = self.node.store_now();
            if self.w.has(Bug::UndoesWithoutSettling) && self.run.log().failure.is_some() {
                now = now.after(duration(CALL_TIMEOUT + SETTLE));
            }
            let cx = &mut Context::from_waker(Waker::noop());
            let Poll::Ready(effect) = self.run.advance(cx, now) else {
                self.w.fail("a flow waits for steps only", || format!("{:?}", self.run));
                return Err(Dropped);
            };
            let ends = matches!(effect, Effect::Park | Effect::Complete(_));
            if !ends && self.w.fault(self.w.plan.shutdowns) {
                self.w.count("shutdown");
                self.run.interrupt(self.node.store_now());
                return self.park().await;
            }
            let starting = self.starting.take();
            let inserting = starting.map(|it| self.node.insert(self.entry, &self.note, it));
            let saved = match &effect {
                Effect::Save => Some(self.save().await?),
                _ => None,
            };
            if let Some(inserting) = inserting {
                // Longer than an insertion is repeated.
                let until = self.w.now() + HOUR;
                let skips = self.w.has(Bug::CallsBeforeTheEntry);
                if !skips && self.wait(&inserting, until).await? != Some(true) {
                    return self.not_accepted().await;
                }
                self.run.inserted();
            }
            let event = match effect {
                Effect::Save => RunEvent::Saved(saved.flatten()),
                // No step of the simulation prepares its tries.
                Effect::Prepare(_) => unreachable!("a step that prepares"),
                Effect::Call(call) if self.is_within(&call) => self.call_within(call).await?,
                Effect::Undo(call) if self.is_within(&call) => self.undo_within(call).await?,
                Effect::Call(call) => RunEvent::Called(self.call(call).await?),
                Effect::Undo(call) => RunEvent::Undone(self.undo(call).await?),
                Effect::Reconcile(call) => RunEvent::Reconciled(self.reconcile(call).await?),
                Effect::Look(name) => {
                    clients::react(&self.w, self.note.saga, &name);
                    let value = self.look(&name).await?;
                    if value.is_some() {
                        self.w.count("signal received");
                    }
                    RunEvent::Signal(value.map(blob))
                }
                Effect::LookForCancellation => {
                    self.looked_from = self.w.now();
                    let reason = self.look("").await?;
                    RunEvent::Cancelled(reason.map(|reason| reason.to_string()))
                }
                Effect::Wait(until) => {
                    let span = micros(until.since(self.node.store_now()));
                    let slot = Slot::<()>::default();
                    self.wait(&slot, self.w.now() + span).await?;
                    continue;
                }
                Effect::Park => return self.park().await,
                Effect::Complete(end) => return self.complete(&end).await,
            };
            if matches!(&event, RunEvent::Saved(Some(_)) | RunEvent::Cancelled(Some(_))) {
                self.w.count("cancelled");
            }
            if matches!(event, RunEvent::Called(TryEnd::Unknown(_))) && self.w.dice.below(4) == 0 {
                clients::react(&self.w, self.note.saga, "");
            }
            self.run.resume(event, self.node.store_now(), &self.w.ids);
        }
    }

    /// Parks a saga that starts, whose entry may exist.
    async fn not_accepted(&mut self) -> Result<(), Dropped> {
        if self.w.has(Bug::ReleasesWhatMayBeAccepted) {
            let withdraw = self.lease.ownership.withdraw();
            return self.write(withdraw).await;
        }
        self.w.count("start parked");
        self.run.interrupt(self.node.store_now());
        self.park().await
    }

    async fn save(&mut self) -> Result<Option<String>, Dropped> {
        let log = self.saved_log();
        let checkpoint = log.encode().map_err(|_| Dropped)?;
        self.looked_from = self.w.now();
        // Both at the same time: so it may be before or after.
        let is_first = self.w.dice.below(2) == 0;
        let mut reason = if is_first { self.cancellation().await? } else { None };
        let action = OwnerAction::Checkpoint { checkpoint, lease: duration(LEASE) };
        self.write(action).await?;
        if !is_first {
            reason = self.cancellation().await?;
        }
        Ok(reason)
    }

    async fn cancellation(&self) -> Result<Option<String>, Dropped> {
        if self.run.log().failure.is_some() {
            return Ok(None);
        }
        let value = match self.w.has(Bug::CallsWithoutALook) {
            true => {
                let generation = self.lease.ownership.generation();
                senders::signal(&self.node, self.note.saga, generation, "").await.flatten()
            }
            false => self.look("").await?,
        };
        Ok(value.map(|value| value.to_string()))
    }

    /// Checks that no cancellation had been answered before the look for one.
    pub(super) fn check_cancelled(&self, what: &'static str) {
        let facts = self.w.facts.borrow();
        let cancelled = facts.sagas[self.note.saga].signals.get("").and_then(|it| it.answered_at);
        if cancelled.is_some_and(|at| at < self.looked_from) {
            self.w.fail(what, || format!("saga {}", self.note.saga));
        }
    }

    async fn write(&mut self, action: OwnerAction) -> Result<(), Dropped> {
        match self.node.write(&mut self.lease, action).await {
            Wrote::Recorded => Ok(()),
            Wrote::Lost | Wrote::Unclear => Err(Dropped),
        }
    }

    async fn look(&self, name: &str) -> Result<Option<u64>, Dropped> {
        loop {
            let generation = self.lease.ownership.generation();
            match senders::signal(&self.node, self.note.saga, generation, name).await {
                Some(value) => return Ok(value),
                None if self.w.now() >= self.lease.until => return Err(Dropped),
                None => self.w.sleep(SECOND / 5).await,
            }
        }
    }

    /// Waits until a time, and renews the lease meanwhile.
    async fn wait<T>(&mut self, slot: &Slot<T>, until: u64) -> Result<Option<T>, Dropped> {
        loop {
            let next = until.min(self.lease.renew_at);
            if let Some(value) = self.w.receive(slot, next).await {
                return Ok(Some(value));
            }
            if self.w.now() >= until {
                return Ok(None);
            }
            if self.w.now() >= self.lease.renew_at {
                self.w.count("renewed");
                self.write(OwnerAction::Renew { lease: duration(LEASE) }).await?;
            }
        }
    }

    /// Checks, just before a call, that the lease cannot have lapsed.
    pub(super) async fn check_lease(&self) -> Result<(), Dropped> {
        self.w.point(self.node.number).await;
        if self.w.now() < self.lease.until || self.w.has(Bug::CallsWithoutALease) {
            if self.w.plan.lapses && self.w.fault(self.w.plan.freezes) {
                // No process can exclude that it is frozen after its last look, or that the call takes
                // long: the called systems then have to reject its fence.
                self.w.count("freeze after the look at the lease");
                if self.w.dice.below(2) == 0 {
                    clients::step_clock(&self.w, 60 * SECOND);
                }
                let until = self.w.now() + self.w.dice.below(35 * SECOND);
                self.w.sleep(until - self.w.now()).await;
                // Nothing helps against a longer one, if the lifetime of a key ends within it.
                if self.w.now() > until + SECOND {
                    return Err(Dropped);
                }
            }
            return Ok(());
        }
        self.w.count("lease lapsed before a call");
        self.not_called.set(true);
        Err(Dropped)
    }

    fn is_within(&self, call: &Call) -> bool {
        let name = &self.run.log().steps[call.step].name;
        spec_of(name).is_some_and(|spec| spec.kind == Kind::Within)
    }

    pub(super) fn outside(&self, call: &Call) -> OutsideCall {
        let step = &self.run.log().steps[call.step];
        OutsideCall::new(self.note.saga, step, call, self.lease.ownership.fence().get())
    }

    async fn call(&mut self, call: Call) -> Result<TryEnd, Dropped> {
        self.check_cancelled("no step runs forward after an answered cancellation");
        self.check_lease().await?;
        if self.panics() {
            return Ok(self.panicked());
        }
        let (to, begun, timeout) = (self.outside(&call), self.w.now(), micros(call.timeout));
        outside::begin(&self.w, &to);
        if self.w.dice.below(4) == 0 && !self.first_request(begun + timeout).await? {
            self.w.count("freeze in a call");
            return Ok(TryEnd::Unknown("no time is left".to_owned()));
        }
        let slot = outside::call(&self.w, to, self.w.now() - begun);
        let end = self.wait(&slot, begun + timeout).await?.flatten();
        if self.panics() {
            return Ok(self.panicked());
        }
        Ok(match end {
            Some(TryEnd::Happened(_)) if self.w.fault(self.w.plan.calls / 4) => {
                self.w.count("result too large");
                let detail = "planted".to_owned();
                match self.w.has(Bug::TakesLargeResultsForNothing) {
                    true => TryEnd::Faulted(StuckCause { reason: StuckReason::TooLarge, detail }),
                    false => TryEnd::Happened(large()),
                }
            }
            end => end.unwrap_or_else(|| TryEnd::Unknown("no reply".to_owned())),
        })
    }

    /// Makes the first request of a call of two, which has no effect. Returns whether the function is
    /// polled after it: not if its timeout ended while the process was frozen.
    async fn first_request(&mut self, until: u64) -> Result<bool, Dropped> {
        let slot = Slot::default();
        let reply = slot.clone();
        self.w.after(MS + self.w.dice.below(50 * MS), move |w| w.fill(&reply, ()));
        self.w.point(self.node.number).await;
        self.wait(&slot, until).await?;
        Ok(self.w.now() < until || self.w.has(Bug::CallsAfterItsTimeout))
    }

    /// Returns whether the function of a step panics here.
    fn panics(&self) -> bool {
        self.w.fault(self.w.plan.calls / 4)
    }

    fn panicked(&self) -> TryEnd {
        self.w.count("step panicked");
        match self.w.has(Bug::TakesPanicsForNothing) {
            true => TryEnd::NotSent("it panicked".to_owned()),
            false => TryEnd::Unknown("it panicked".to_owned()),
        }
    }

    async fn undo(&mut self, call: Call) -> Result<Result<(), UndoFailure>, Dropped> {
        self.check_lease().await?;
        let mut outside = self.outside(&call);
        if let Some(StepOutcome::Happened(result)) = &outside.outcome
            && number(result) == UNREADABLE
        {
            let (reason, detail) = (StuckReason::Unreadable, "no number".to_owned());
            return Ok(Err(UndoFailure::Faulted(StuckCause { reason, detail })));
        }
        if self.w.has(Bug::UndoesInOrder) {
            outside = self.first_undo(&call).unwrap_or(outside);
        }
        let slot = outside::undo(&self.w, outside);
        let end = self.wait(&slot, self.w.now() + micros(call.timeout)).await?.flatten();
        let end = end.unwrap_or_else(|| Err("no reply".to_owned()));
        Ok(end.map_err(UndoFailure::Error))
    }

    async fn reconcile(&mut self, call: Call) -> Result<Verdict<Blob>, Dropped> {
        self.check_lease().await?;
        let slot = outside::reconcile(&self.w, self.outside(&call));
        let end = self.wait(&slot, self.w.now() + micros(call.timeout)).await?.flatten();
        Ok(end.unwrap_or(Verdict::CannotSay))
    }

    /// Parks the saga, and looks once more. The entry is due at the latest when a running saga's
    /// lease would end, and whoever finds it due moves it.
    async fn park(&mut self) -> Result<(), Dropped> {
        let log = self.run.log().clone();
        let Some(parked) = &log.parked else { return Err(Dropped) };
        if let Some(stuck) = &log.stuck {
            self.w.count(match stuck.reason {
                StuckReason::Exhausted => "stuck: exhausted",
                StuckReason::Crashed => "stuck: crashed",
                StuckReason::Unknown => "stuck: unknown",
                StuckReason::KeyExpired => "stuck: key expired",
                StuckReason::Diverged => "stuck: diverged",
                StuckReason::TooLarge => "stuck: too large",
                StuckReason::Unreadable => "stuck: unreadable",
                _ => "stuck: other",
            });
            if stuck.reason == StuckReason::Diverged && self.w.now() < self.w.plan.change_at {
                self.w.fail("a flow that did not change does not diverge", || checks::show(&log));
            }
        }
        if let Some(name) = &parked.signal {
            clients::react(&self.w, self.note.saga, name);
        } else if log.stuck.is_none() && self.w.dice.below(8) == 0 {
            clients::react(&self.w, self.note.saga, "");
        }
        if self.w.fault(250) {
            self.w.sleep(self.w.dice.below(5 * SECOND)).await;
        }
        let checkpoint = log.encode().map_err(|_| Dropped)?;
        let lease = parked.until.since(self.node.store_now());
        self.write(OwnerAction::Checkpoint { checkpoint, lease }).await?;
        self.w.count("parked");
        if self.w.has(Bug::ParksWithoutASecondLook) {
            return Ok(());
        }
        self.w.critical_point(self.node.number, 5 * self.w.plan.crashes).await;
        let stored = self.lease.ownership.record().cloned();
        let is_woken = senders::second_look(&self.node, self.note.saga, stored, &log).await;
        if is_woken == Some(true) {
            self.w.count("second look woke");
        }
        Ok(())
    }

    async fn complete(&mut self, end: &SagaEnd) -> Result<(), Dropped> {
        if let SagaEnd::Done(_) = end {
            self.check_cancelled("no saga is done after an answered cancellation");
        }
        let outcome = Outcome::new("saga/1", checks::write_end(end, self.run.log()));
        let (w, number) = (Rc::clone(&self.w), self.node.number);
        if w.has(Bug::RemovesBeforeCompletion) {
            store::remove(&w, number, self.entry).await;
        }
        let days = if self.w.plan.expires { EXPIRY } else { 30 * DAY };
        let retention = Some(duration(days));
        self.write(OwnerAction::Complete { outcome, retention }).await?;
        store::remove(&w, number, self.entry).await;
        Ok(())
    }

    /// Returns the log that is saved: that of the run, unless a bug is planted.
    fn saved_log(&self) -> Log {
        let mut log = self.run.log().clone();
        let has_undone = log.steps.iter().any(|step| step.undone.is_some());
        if self.w.has(Bug::UndoesBeforeTheReason) && !has_undone {
            log.failure = None;
        }
        if self.w.has(Bug::CountsTriesAfterwards) {
            for step in &mut log.steps {
                for tries in [&mut step.forward, &mut step.undo] {
                    if tries.open {
                        tries.begun -= 1;
                        tries.open = false;
                        tries.first = tries.first.filter(|_| tries.arrived);
                    }
                }
            }
        }
        log
    }

    /// Returns the undo of the first step that needs one, instead of the last.
    fn first_undo(&self, call: &Call) -> Option<OutsideCall> {
        let log = self.run.log();
        let undos: Vec<usize> = (0..=call.step)
            .filter(|at| {
                let step = &log.steps[*at];
                let happened = matches!(step.outcome, Some(StepOutcome::Happened(_)));
                happened && spec_of(&step.name).is_some_and(|spec| spec.undo)
            })
            .collect();
        let at = *undos.first()?;
        Some(self.outside(&Call { step: at, ..*call }))
    }
}

/// Returns the log with which a run continues: the saved one, unless a bug is planted.
fn altered(w: &W, mut log: Log, note: &Note, changed: bool) -> Log {
    if w.has(Bug::RepeatsOnce) {
        for step in &mut log.steps {
            if spec_of(&step.name).is_some_and(|spec| spec.kind == Kind::Once) && step.forward.open
            {
                step.forward.open = false;
                step.forward.first = None;
            }
        }
    }
    if w.has(Bug::ReplacesUnreadableResults) {
        for step in &mut log.steps {
            if let Some(StepOutcome::Happened(value)) = &mut step.outcome
                && number(value) == UNREADABLE
            {
                *value = blob(0);
            }
        }
    }
    if w.has(Bug::ResumesByPosition) && changed {
        let mut prefix = log.clone();
        for at in 0..log.steps.len() {
            prefix.steps = log.steps[..at].to_vec();
            let next = expected(&note.input, changed, &prefix);
            let Expected::Unfinished { step: Some((step, nth)), argument } = next else { continue };
            log.steps[at].name = STEPS[usize::from(step)].name.to_owned();
            log.steps[at].nth = nth;
            log.steps[at].argument = blob(argument);
        }
    }
    log
}

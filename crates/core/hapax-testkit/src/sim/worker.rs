//! Workers: they claim, execute and end, and sometimes give up in between.

use std::time::Duration;

use hapax_core::exchange::{self, ClaimExchange, Executions, Ownership, WriteResult};
use hapax_core::machine::OwnerAction;
use hapax_core::store::Snapshot;
use hapax_core::{OnUnknown, Timestamp};

use super::bug::Bug;
use super::ledger::{Effect, KeyModel, PromiseViolation, SwapPurpose, ensure};
use super::plan::{self, KEYS, MS, WORKERS, micros};
use super::tally::{Event as Count, Fault};
use super::world::{
    Activity, ExchangeKind, LoadOrigin, OPERATORS, SimClaim, SimEvent, SimExchange, SimExecution,
    WorkerStep, World, note,
};

impl World {
    pub(super) fn worker_goes(&mut self, worker: u8, what: WorkerStep) {
        match what {
            WorkerStep::Start => {
                if self.processes[usize::from(worker)].tries == 0 {
                    self.processes[usize::from(worker)].key = self.below(KEYS as u64) as u8;
                }
                let process = &self.processes[usize::from(worker)];
                let key = usize::from(process.key);
                // As the engine does: no claim expects absence if this process executes the key.
                let seen = if process.executions.executes(&plan::key(key)) {
                    let truth = self.ledger.look(key, self.store.clock(self.now));
                    self.processes[usize::from(worker)].seen = truth;
                    self.store.load(key, self.now)
                } else {
                    Snapshot { now: Timestamp::default(), stored: None }
                };
                self.claim(worker, seen);
            }
            WorkerStep::Renew => self.renew(worker),
            WorkerStep::Send => self.send_effect(worker),
            WorkerStep::End => {
                let finish = match &mut self.processes[usize::from(worker)].activity {
                    Activity::Working(work) => {
                        work.ending = true;
                        work.renewing.is_none()
                    }
                    _ => false,
                };
                // The engine awaits a renewal in progress. A worker that does not must do no harm.
                if finish || self.chance(300) {
                    self.finish(worker);
                }
            }
        }
    }

    fn claim(&mut self, worker: u8, seen: Snapshot) {
        let mut terms = self.plan.terms(&self.rng.0);
        let policy = terms.on_unknown;
        let settle = self.plan.settle(&self.rng.0);
        let hook = self.plan.hook(&self.rng.0, policy);
        if self.bug == Some(Bug::IgnoresTheClaimersPolicy) {
            terms.on_unknown = OnUnknown::Reexecute;
        }
        // The others have no description, as one that is too long.
        let is_described = worker % 2 == 1 && terms.on_unknown == OnUnknown::Reconcile;
        let described = is_described.then_some(worker);
        let request = u8::from(self.chance(self.plan.other_request));
        let scheme = u8::from(self.chance(self.plan.other_scheme));
        let process = &mut self.processes[usize::from(worker)];
        process.activity = Activity::Talking;
        let (key, epoch, operation) = (process.key, process.epoch, process.operation);
        let executions = match self.bug {
            Some(Bug::TakesOverFromItself) => Executions::default(),
            _ => process.executions.clone(),
        };
        let claim = exchange::ClaimRequest {
            scheme: plan::scheme(scheme),
            fingerprint: plan::fingerprint(request, scheme),
            terms,
            settle,
            hook,
            may_reconcile: true,
            executions,
            description: described.map(plan::description),
            keep_released: Duration::from_micros(self.below(4_000 * MS)),
            adopts: false,
            quarantine: None,
        };
        let name = plan::key(usize::from(key));
        let Ok((claiming, next)) = ClaimExchange::start_at(name, claim, seen, &self.ids.0) else {
            return self.no_entropy();
        };
        let talk = ExchangeKind::Claim(SimClaim {
            claiming,
            request,
            scheme,
            policy,
            lease: micros(terms.lease),
            retention: micros(terms.retention),
            settle: settle.map(micros),
            hook: hook.map(|hook| (micros(hook.after), micros(hook.timeout))),
            described,
            execution: None,
            asked: None,
        });
        let exchange = self.begin(SimExchange {
            process: worker,
            epoch,
            operation,
            key,
            message: 0,
            sends: 0,
            waiting: false,
            ambiguous: false,
            background: false,
            over: false,
            talk,
        });
        note!(self, "worker {worker} claims k{key} for request {request}: {policy:?}, c{exchange}");
        // If the claim needs no swap, its answer depends on what the waiter loaded.
        let truth = self.processes[usize::from(worker)].seen;
        self.claim_goes(exchange, next, &truth, false, None);
    }

    pub(super) fn begin_work(
        &mut self,
        exchange: u32,
        ownership: Ownership,
        execution: Option<u32>,
    ) {
        self.count(Count::Execute);
        let worker = self.convs[exchange as usize].process;
        let Some(execution) = self.ledger.entered(exchange, &ownership).or(execution) else {
            return self.judge(Err(PromiseViolation {
                promise: "S1",
                what: "answered to execute, but no claim was written",
            }));
        };
        let entered = &mut self.ledger.executions[execution as usize];
        let checkpoint = ownership.checkpoint().map(plan::number);
        let takeover = ownership.is_takeover() == entered.takeover;
        let judged = ensure(!entered.told, "S1", "answered to execute twice")
            .and(ensure(takeover, "takeover", "answered wrongly whether it is a takeover"))
            .and(ensure(ownership.fence().get() == entered.fence, "S6", "wrong fence"))
            .and(ensure(ownership.attempt() == entered.attempt, "attempts", "wrong attempt"))
            .and(ensure(checkpoint == entered.checkpoint, "checkpoint", "wrong checkpoint"));
        entered.told = true;
        entered.running = Some(plan::process(worker));
        let lease_id = entered.lease_id;
        if entered.takeover {
            self.tally.event(Count::Takeover);
        }
        let lease = entered.lease;
        self.ledger.end_other_executions(exchange, lease_id);
        self.judge(judged);
        note!(self, "worker {worker} executes under fence {}", ownership.fence());
        let work = SimExecution {
            ownership,
            execution,
            exchange,
            lease,
            renewing: None,
            ending: false,
            lost: false,
            checkpoints: 0,
        };
        self.processes[usize::from(worker)].activity = Activity::Working(Box::new(work));
        let length = match self.below(10) {
            0 => self.below(4_000 * MS),
            1..4 => self.below(1_500 * MS),
            _ => 5 * MS + self.below(95 * MS),
        };
        if self.chance(750) {
            let when = self.below(length);
            self.go(worker, when, WorkerStep::Send);
        }
        self.go(worker, lease / 3, WorkerStep::Renew);
        self.go(worker, length, WorkerStep::End);
    }

    fn working(&mut self, worker: u8) -> Option<&mut SimExecution> {
        match &mut self.processes[usize::from(worker)].activity {
            Activity::Working(work) => Some(work),
            _ => None,
        }
    }

    fn renew(&mut self, worker: u8) {
        let checkpoint = self.chance(200);
        // Sometimes for much longer, as before a transaction.
        let times = if self.chance(50) { 10 } else { 1 };
        let Some(work) = self.working(worker) else { return };
        if work.lost || work.renewing.is_some() {
            return;
        }
        let (exchange, execution) = (work.exchange, work.execution);
        let (action, meaning) = if checkpoint {
            work.checkpoints += 1;
            let number = (execution as u16) << 3 | work.checkpoints & 7;
            (
                OwnerAction::Checkpoint {
                    checkpoint: plan::bytes(number % 4_096),
                    lease: Duration::from_micros(work.lease),
                },
                SwapPurpose::Checkpoint(number % 4_096),
            )
        } else {
            let lease = work.lease * times;
            (
                OwnerAction::Renew { lease: Duration::from_micros(lease) },
                SwapPurpose::Renew { lease },
            )
        };
        let ownership = work.ownership.clone();
        let renewing = self.begin_write(exchange, &ownership, action, meaning, execution, false);
        if let Some(work) = self.working(worker) {
            work.renewing = renewing;
        }
    }

    /// Passes the result of a renewal to its worker.
    pub(super) fn renewed(&mut self, exchange: u32, worker: u8, wrote: WriteResult) {
        let leave = self.chance(500);
        let Some(work) = self.working(worker) else { return };
        if work.renewing != Some(exchange) {
            return;
        }
        work.renewing = None;
        let ending = work.ending;
        match wrote {
            WriteResult::Recorded(seen) => {
                work.ownership.update(seen);
                let every = work.lease / 3;
                self.go(worker, every, WorkerStep::Renew);
            }
            WriteResult::Lost | WriteResult::Gone => {
                work.lost = true;
                let execution = work.execution;
                self.meets(exchange, worker);
                if leave {
                    self.ledger.ended(execution);
                    return self.end_operation(worker, false);
                }
            }
            _ => {}
        }
        if ending {
            self.finish(worker);
        }
    }

    /// Passes the conflicting record of a renewal to the ownership.
    fn meets(&mut self, exchange: u32, worker: u8) {
        let ExchangeKind::Write(write) = &self.convs[exchange as usize].talk else { return };
        let seen = write.writing.seen().clone();
        if let Some(work) = self.working(worker) {
            work.ownership.note_conflict(&seen);
        }
    }

    fn send_effect(&mut self, worker: u8) {
        let Some(work) = self.working(worker) else { return };
        let execution = work.execution;
        self.ledger.executions[execution as usize].effect = Effect::Sent;
        let delay = self.latency(Fault::EffectDelayed);
        self.at(delay, SimEvent::Effect { execution });
    }

    fn finish(&mut self, worker: u8) {
        let process = &mut self.processes[usize::from(worker)];
        let work = match std::mem::take(&mut process.activity) {
            Activity::Working(work) => work,
            other => {
                process.activity = other;
                return;
            }
        };
        process.activity = Activity::Talking;
        let execution = work.execution;
        let outcome = execution as u16;
        let complete = |retention: Option<u64>| {
            let action = OwnerAction::Complete {
                outcome: plan::outcome(outcome),
                retention: retention.map(Duration::from_micros),
            };
            (action, SwapPurpose::Complete { outcome, retention })
        };
        let retention = self.chance(100).then_some(1_200 * MS);
        let seen_outcome = self.chance(500).then_some(outcome);
        let dice = self.below(10);
        let redirects = self.chance(self.plan.redirects);
        let keep = micros(work.ownership.keep_released());
        let (action, meaning) = match (self.ledger.executions[execution as usize].effect, dice) {
            (_, 0) => {
                note!(self, "worker {worker} lets go of its lease");
                self.tally.fault(Fault::Dropped);
                self.ledger.dropped(work.exchange);
                return self.end_operation(worker, false);
            }
            (Effect::Applied, 1) | (Effect::Sent, _) | (_, 1 | 2) => (
                OwnerAction::Abandon { seen: seen_outcome.map(plan::outcome) },
                SwapPurpose::Abandon { seen_outcome },
            ),
            (Effect::Applied, _) | (_, 3..6) => complete(retention),
            (_, 6 | 7) if redirects => (
                OwnerAction::Redirect {
                    outcome: plan::outcome(outcome),
                    keep: work.ownership.keep_released(),
                },
                SwapPurpose::Redirect { outcome, keep },
            ),
            (Effect::None, 9) => (work.ownership.withdraw(), SwapPurpose::Withdraw { keep }),
            _ => (work.ownership.release(), SwapPurpose::Release { keep }),
        };
        self.begin_write(work.exchange, &work.ownership, action, meaning, execution, false);
    }

    /// Decides after an error of the store whether the exchange is given up; returns true if
    /// nothing more is sent.
    pub(super) fn is_given_up(&mut self, exchange: u32) -> bool {
        let SimExchange { process, operation, ambiguous, background, ref talk, .. } =
            self.convs[exchange as usize];
        let meaning = match talk {
            ExchangeKind::Write(write) => Some(write.meaning),
            ExchangeKind::Claim(_) => None,
        };
        let silent = self.bug == Some(Bug::TakesLostReplyForSuccess) && ambiguous;
        if let Some(SwapPurpose::Complete { .. }) = meaning
            && silent
        {
            let key = usize::from(self.convs[exchange as usize].key);
            let truth = self.ledger.look(key, self.store.clock(self.now));
            let seen = Snapshot { now: Timestamp::default(), stored: None };
            self.wrote(exchange, WriteResult::Recorded(seen), Some(&truth));
            return true;
        }
        if background || !self.fails(250) {
            return false;
        }
        let current = self.operation_of(process) == operation;
        let state = &mut self.convs[exchange as usize];
        match meaning {
            None if !ambiguous => {
                note!(self, "c{exchange} is given up: nothing was sent");
                state.over = true;
                self.release_owned(exchange);
                self.end_operation(process, true);
            }
            None => {
                note!(self, "c{exchange} is given up, it may have landed");
                state.background = true;
                self.tally.fault(Fault::ClaimGivenUp);
                state.over = self.bug == Some(Bug::LeavesAbandonedClaims);
                self.end_operation(process, true);
            }
            Some(SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_)) => {
                state.over = true;
                if ambiguous {
                    self.tally.fault(Fault::RenewalGivenUp);
                }
                if current {
                    self.renewal_given_up(exchange, process);
                }
            }
            Some(
                SwapPurpose::Operator { .. }
                | SwapPurpose::Call { .. }
                | SwapPurpose::Settle { .. },
            ) => state.over = true,
            Some(_) => {
                note!(self, "c{exchange} is deferred");
                state.background = true;
                self.tally.fault(Fault::CompletionDeferred);
                if current {
                    self.end_operation(process, false);
                }
            }
        }
        self.convs[exchange as usize].over
    }

    /// Releases an earlier swap of the claim that landed late, on a purged key, and that the claim
    /// has found.
    fn release_owned(&mut self, exchange: u32) {
        let ExchangeKind::Claim(claim) = &mut self.convs[exchange as usize].talk else { return };
        let ownership = claim.claiming.owned();
        claim.claiming.unregister();
        let entered =
            ownership.as_ref().and_then(|ownership| self.ledger.entered(exchange, ownership));
        if entered.is_none() {
            self.ledger.end_unused_executions(exchange);
        }
        if let Some(ownership) = ownership
            && let Some(execution) = entered
        {
            let lease_id = self.ledger.executions[execution as usize].lease_id;
            self.ledger.end_other_executions(exchange, lease_id);
            self.begin_write(
                exchange,
                &ownership,
                ownership.withdraw(),
                SwapPurpose::Withdraw { keep: micros(ownership.keep_released()) },
                execution,
                true,
            );
        }
    }

    fn renewal_given_up(&mut self, exchange: u32, worker: u8) {
        let Some(work) = self.working(worker) else { return };
        if work.renewing != Some(exchange) {
            return;
        }
        work.renewing = None;
        let (ending, soon) = (work.ending, work.lease / 12);
        if ending {
            self.finish(worker);
        } else {
            self.go(worker, soon, WorkerStep::Renew);
        }
    }

    pub(super) fn wait(&mut self, worker: u8) {
        self.processes[usize::from(worker)].tries += 1;
        self.processes[usize::from(worker)].activity = Activity::Idle;
        let operation = self.operation_of(worker);
        self.at(250 * MS, SimEvent::Look { looker: LoadOrigin::Waiter { worker, operation } });
    }

    pub(super) fn waiter_looked(&mut self, worker: u8, found: Option<(Snapshot, KeyModel)>) {
        if self.processes[usize::from(worker)].tries > 8 {
            return self.end_operation(worker, false);
        }
        match found {
            Some((seen, truth)) if !truth.live() => {
                self.processes[usize::from(worker)].seen = truth;
                self.claim(worker, seen);
            }
            _ => self.wait(worker),
        }
    }

    /// Ends the worker's operation. `again` is true if its client may retry.
    pub(super) fn end_operation(&mut self, worker: u8, again: bool) {
        if worker == OPERATORS {
            return;
        }
        let again = again && self.chance(500);
        let process = &mut self.processes[usize::from(worker)];
        process.operation += 1;
        process.activity = Activity::Idle;
        if again && process.tries < 3 {
            process.tries += 1;
        } else {
            process.tries = 0;
            process.left = process.left.saturating_sub(1);
        }
        if process.left == 0 {
            process.activity = Activity::Over;
            self.calm = (0..WORKERS as u8).all(|worker| self.is_over(worker));
            if self.calm {
                note!(self, "all is calm");
            }
            return;
        }
        let pause = self.below(300 * MS);
        self.go(worker, pause, WorkerStep::Start);
    }
}

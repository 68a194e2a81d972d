//! Exchanges: what the core receives, and what it requests next.

use hapax_core::RecordState;
use hapax_core::exchange::{ClaimResult, Next, Ownership, WriteResult};
use hapax_core::machine::{OwnerAction, Verdict};
use hapax_core::store::{Swap, Swapped};

use super::bug::{self, Bug};
use super::claims::{ClaimAnswer, ClaimContext};
use super::ledger::{KeyModel, Phase, PromiseViolation, SimVerdict, SwapPurpose, ensure};
use super::plan::{self, micros};
use super::tally::{Event as Count, Fault};
use super::world::{Activity, ExchangeKind, SimExchange, SimWrite, World, note};

impl World {
    /// Passes a definite reply to an exchange's swap to the core.
    pub(super) fn receive(&mut self, exchange: u32, mut swapped: Swapped, truth: KeyModel) {
        self.convs[exchange as usize].waiting = false;
        if let Some(bug) = self.bug {
            if self.write_late_verdict(bug, exchange, &swapped) {
                return;
            }
            bug::alter_reply(bug, self, &self.convs[exchange as usize], &mut swapped);
            if bug == Bug::CompletesOnceOnly
                && self.report_completion_as_lost(exchange, &swapped, &truth)
            {
                return;
            }
        }
        let stored = matches!(swapped, Swapped::Stored(_));
        // From here on the claim knows of its own late swap, and must release it.
        if !stored
            && truth.phase == Phase::Held
            && let Some(execution) = self.ledger.executions.get_mut(truth.execution as usize)
            && execution.exchange == exchange
        {
            execution.stray = false;
        }
        note!(self, "c{exchange} receives {}", words(&swapped));
        let state = &mut self.convs[exchange as usize];
        match &mut state.talk {
            ExchangeKind::Claim(claim) if state.background => {
                let ownership = claim.claiming.receive_late(swapped);
                state.over = true;
                let entered = ownership
                    .as_ref()
                    .and_then(|ownership| self.ledger.entered(exchange, ownership));
                if entered.is_none() {
                    self.ledger.end_unused_executions(exchange);
                }
                if let Some(ownership) = ownership
                    && let Some(execution) = entered
                {
                    let lease_id = self.ledger.executions[execution as usize].lease_id;
                    self.ledger.end_other_executions(exchange, lease_id);
                    self.count(Count::Released);
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
            ExchangeKind::Claim(claim) => {
                if let Swapped::Conflict(seen) = &swapped
                    && let Some(stored) = &seen.stored
                    && stored.record.terms.on_unknown != claim.policy
                {
                    self.tally.fault(Fault::MixedPolicies);
                }
                match claim.claiming.receive(swapped, &self.ids.0) {
                    Ok(next) => self.claim_goes(exchange, next, &truth, stored, None),
                    Err(_) => self.no_entropy(),
                }
            }
            ExchangeKind::Write(write) => match write.writing.receive(swapped, &self.ids.0) {
                Ok(next) => self.write_goes(exchange, next, Some(&truth)),
                Err(_) => self.no_entropy(),
            },
        }
    }

    pub(super) fn no_entropy(&mut self) {
        self.judge(Err(PromiseViolation { promise: "sim", what: "seeded entropy failed" }));
    }

    pub(super) fn claim_goes(
        &mut self,
        exchange: u32,
        next: Next<ClaimResult>,
        truth: &KeyModel,
        stored: bool,
        said: Option<SimVerdict>,
    ) {
        match next {
            Next::Send(swap) => {
                let meaning = self.claim_means(exchange, &swap, said);
                self.post(exchange, swap, meaning);
            }
            Next::Ready(claimed) => self.claimed(exchange, claimed, truth, stored),
        }
    }

    fn claim_means(&self, exchange: u32, swap: &Swap, said: Option<SimVerdict>) -> SwapPurpose {
        let ExchangeKind::Claim(claim) = &self.convs[exchange as usize].talk else {
            return SwapPurpose::Own;
        };
        let record = &swap.draft.record;
        let asked = claim.asked.map(|(version, _)| version);
        match (&record.state, swap.draft.stamp) {
            (RecordState::InFlight, hapax_core::store::Stamp::NextFence) => SwapPurpose::Execute {
                anew: record.generation == record.lease_id,
                attempt: record.attempt,
                asked: asked.filter(|_| said.is_some()),
            },
            (RecordState::InFlight, _) => SwapPurpose::Own,
            (RecordState::Unknown { reconciling: true, .. }, _) => {
                let (after, timeout) = claim.hook.unwrap_or_default();
                SwapPurpose::Announce { after, timeout }
            }
            _ => SwapPurpose::Conclude {
                said: said.unwrap_or(SimVerdict::CannotSay),
                asked: asked.unwrap_or_default(),
            },
        }
    }

    fn claimed(&mut self, exchange: u32, claimed: ClaimResult, truth: &KeyModel, stored: bool) {
        let state = &mut self.convs[exchange as usize];
        let ExchangeKind::Claim(claim) = &mut state.talk else { return };
        let message = &self.messages[state.message as usize];
        let answered = match message.meaning {
            SwapPurpose::Conclude { said, .. } if stored => Some(said),
            _ => None,
        };
        let asker = ClaimContext {
            request: claim.request,
            policy: claim.policy,
            hook_after: claim.hook.map(|(after, _)| after),
            answered,
            process: plan::process(state.process),
            key: state.key,
        };
        let worker = state.process;
        let told = match claimed {
            ClaimResult::Execute(ownership) => {
                let execution = message.execution.filter(|_| stored).or(claim.execution);
                state.over = true;
                return self.begin_work(exchange, ownership, execution);
            }
            ClaimResult::Rehash(scheme) => {
                self.count(Count::Rehash);
                return self.rehash(exchange, scheme, truth);
            }
            ClaimResult::Reconcile(fence) => {
                let about = claim.asked.map(|(_, execution)| execution);
                self.count(Count::Ask);
                let right = about.map(|execution| self.ledger.executions[execution as usize].fence);
                let judged =
                    ensure(right == Some(fence.get()), "reconcile", "calls the hook, wrong fence");
                self.judge(judged);
                return self.ask(exchange);
            }
            // No claim of this simulator adopts a record, or is in quarantine.
            ClaimResult::NotFound | ClaimResult::Quarantined { .. } => {
                state.over = true;
                self.judge(ensure(false, "claim", "a claim ended in a way that it cannot end"));
                return self.end_operation(worker, true);
            }
            ClaimResult::Contended => {
                state.over = true;
                self.ledger.end_unused_executions(exchange);
                self.count(Count::Contended);
                return self.end_operation(worker, true);
            }
            ClaimResult::Replay(replay) => {
                let redirect = truth.redirect(claim.request);
                self.count(match redirect {
                    Some(_) => Count::RedirectReplay,
                    None => Count::Replay,
                });
                ClaimAnswer::Replay {
                    outcome: plan::number(replay.outcome.bytes()),
                    fence: replay.fence.get(),
                    expires_in: replay.expires_in.map_or(u64::MAX, |rest| rest.as_micros() as u64),
                }
            }
            ClaimResult::InFlight { remaining, .. } => {
                self.count(Count::InFlight);
                ClaimAnswer::InFlight { remaining: remaining.as_micros() as u64 }
            }
            ClaimResult::Mismatch => {
                self.count(Count::Mismatch);
                ClaimAnswer::Mismatch
            }
            ClaimResult::Unknown { .. } => {
                self.count(Count::Unknown);
                ClaimAnswer::Unknown
            }
        };
        self.convs[exchange as usize].over = true;
        note!(self, "c{exchange} returns {told:?}");
        let judged = self.ledger.judge_claim(truth, told, &asker);
        self.ledger.end_unused_executions(exchange);
        self.judge(judged);
        if matches!(told, ClaimAnswer::InFlight { .. }) && self.chance(400) {
            self.wait(worker);
        } else {
            let again = !matches!(told, ClaimAnswer::Replay { .. } | ClaimAnswer::Mismatch);
            self.end_operation(worker, again);
        }
    }

    fn rehash(&mut self, exchange: u32, scheme: hapax_core::FingerprintScheme, truth: &KeyModel) {
        let number = plan::scheme_number(&scheme);
        let ExchangeKind::Claim(claim) = &mut self.convs[exchange as usize].talk else { return };
        let other = number != claim.scheme;
        claim.scheme = number;
        let fingerprint = plan::fingerprint(claim.request, number);
        let next = claim.claiming.rehashed(scheme, fingerprint, &self.ids.0);
        self.judge(ensure(other, "fingerprint", "requests the scheme that it was given"));
        match next {
            Ok(next) => self.claim_goes(exchange, next, truth, false, None),
            Err(_) => self.no_entropy(),
        }
    }

    /// Passes the hook's verdict to a claimer.
    pub(super) fn answer(&mut self, exchange: u32, said: SimVerdict) {
        let verdict = match said {
            SimVerdict::Happened(outcome) => Verdict::Happened(plan::outcome(outcome)),
            SimVerdict::DidNotHappen => Verdict::DidNotHappen,
            SimVerdict::CannotSay => Verdict::CannotSay,
        };
        let key = usize::from(self.convs[exchange as usize].key);
        let clock = self.store.clock(self.now);
        let truth = self.ledger.look(key, clock);
        let ExchangeKind::Claim(claim) = &mut self.convs[exchange as usize].talk else { return };
        match claim.claiming.reconciled(verdict, &self.ids.0) {
            Ok(next) => self.claim_goes(exchange, next, &truth, false, Some(said)),
            Err(_) => self.no_entropy(),
        }
    }

    /// Begins an owner's write; returns its exchange.
    pub(super) fn begin_write(
        &mut self,
        on_behalf_of: u32,
        ownership: &Ownership,
        action: OwnerAction,
        meaning: SwapPurpose,
        execution: u32,
        background: bool,
    ) -> Option<u32> {
        let Ok((writing, next)) = ownership.write(action, &self.ids.0) else {
            self.no_entropy();
            return None;
        };
        let SimExchange { process, epoch, operation, key, .. } = self.convs[on_behalf_of as usize];
        // A renewal may be given up; its worker has the ownership.
        let renewal = matches!(meaning, SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_));
        let ownership = (!renewal).then(|| ownership.clone());
        let talk =
            ExchangeKind::Write(SimWrite { writing, execution, meaning, landed: false, ownership });
        let operation = if background { operation } else { self.operation_of(process) };
        let exchange = self.begin(SimExchange {
            process,
            epoch,
            operation,
            key,
            message: 0,
            sends: 0,
            waiting: false,
            ambiguous: false,
            background,
            over: false,
            talk,
        });
        self.write_goes(exchange, next, None);
        Some(exchange)
    }

    pub(super) fn operation_of(&self, process: u8) -> u32 {
        self.processes[usize::from(process)].operation
    }

    pub(super) fn begin(&mut self, exchange: SimExchange) -> u32 {
        self.convs.push(exchange);
        self.convs.len() as u32 - 1
    }

    pub(super) fn write_goes(
        &mut self,
        exchange: u32,
        next: Next<WriteResult>,
        truth: Option<&KeyModel>,
    ) {
        match next {
            Next::Send(swap) => {
                let ExchangeKind::Write(write) = &self.convs[exchange as usize].talk else {
                    return;
                };
                let meaning = write.meaning;
                self.post(exchange, swap, meaning);
            }
            Next::Ready(wrote) => self.wrote(exchange, wrote, truth),
        }
    }

    pub(super) fn wrote(
        &mut self,
        exchange: u32,
        mut wrote: WriteResult,
        truth: Option<&KeyModel>,
    ) {
        let state = &mut self.convs[exchange as usize];
        state.over = true;
        let ExchangeKind::Write(write) = &mut state.talk else { return };
        write.ownership = None;
        let (meaning, execution, landed) = (write.meaning, write.execution, write.landed);
        let (process, operation, background) = (state.process, state.operation, state.background);
        if let (
            Some(Bug::ReportsLateAsLost),
            SwapPurpose::Complete { .. },
            WriteResult::Recorded(seen),
        ) = (self.bug, meaning, &wrote)
        {
            let since = self.ledger.executions[execution as usize].fence;
            let lease = self.ledger.executions[execution as usize].lease;
            if seen.now.as_micros() > since + lease {
                wrote = WriteResult::Lost;
            }
        }
        note!(self, "c{exchange}: {meaning:?} ends: {}", said(&wrote));
        if let (SwapPurpose::Operator { fence, force, forget, outcome }, Some(truth)) =
            (meaning, truth)
        {
            let asked = (fence, force, forget, outcome);
            let judged = self.ledger.judge_operator(truth, asked, landed, &wrote);
            self.judge(judged);
            return self.operator_hears(meaning, &wrote);
        }
        if let (SwapPurpose::Call { .. } | SwapPurpose::Settle { .. }, Some(truth)) =
            (meaning, truth)
        {
            let judged = self.ledger.judge_call(truth, meaning, landed, &wrote);
            self.judge(judged);
            return self.reconciler_hears(meaning, wrote, truth);
        }
        if let Some(truth) = truth {
            let judged = self.ledger.judge_write(truth, execution, meaning, landed, &wrote);
            self.judge(judged);
        }
        self.count(match (&wrote, meaning) {
            (WriteResult::Lost, _) => Count::Lost,
            (WriteResult::Gone, _) => Count::Gone,
            (WriteResult::Recorded(_), SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_)) => {
                Count::Renewed
            }
            (WriteResult::Recorded(_), SwapPurpose::Redirect { .. }) => Count::Redirected,
            (WriteResult::Recorded(_), _) => Count::Recorded,
            _ => Count::Contended,
        });
        if !matches!(meaning, SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_)) {
            self.ledger.ended(execution);
        }
        if matches!(wrote, WriteResult::Contended) {
            let claim = self.ledger.executions[execution as usize].exchange;
            self.ledger.dropped(claim);
        }
        if self.operation_of(process) != operation {
            return;
        }
        match meaning {
            SwapPurpose::Renew { .. } | SwapPurpose::Checkpoint(_) => {
                self.renewed(exchange, process, wrote)
            }
            _ if background => {}
            _ => self.end_operation(process, false),
        }
    }

    /// Implements [`Bug::AcceptsLateVerdicts`] and [`Bug::SettlesLate`]: writes the verdict over any record.
    fn write_late_verdict(&mut self, bug: Bug, exchange: u32, swapped: &Swapped) -> bool {
        let message = &self.messages[self.convs[exchange as usize].message as usize];
        let answer = match message.meaning {
            SwapPurpose::Settle { .. } => bug == Bug::SettlesLate,
            SwapPurpose::Conclude { .. } | SwapPurpose::Execute { asked: Some(_), .. } => {
                bug == Bug::AcceptsLateVerdicts
            }
            _ => false,
        };
        let Swapped::Conflict(seen) = swapped else { return false };
        let (true, Some(stored)) = (answer, &seen.stored) else { return false };
        let mut again = message.swap.clone();
        let meaning = message.meaning;
        again.expected = Some(stored.write_id);
        if let Ok(write_id) = hapax_core::WriteId::fresh(&self.ids.0) {
            again.write_id = write_id;
        }
        self.post(exchange, again, meaning);
        true
    }

    /// Implements [`Bug::CompletesOnceOnly`]: reports a completion that is recorded already as
    /// lost.
    fn report_completion_as_lost(
        &mut self,
        exchange: u32,
        swapped: &Swapped,
        truth: &KeyModel,
    ) -> bool {
        let ExchangeKind::Write(write) = &self.convs[exchange as usize].talk else { return false };
        let Swapped::Conflict(seen) = swapped else { return false };
        let done = seen.stored.as_ref().is_some_and(|stored| {
            matches!(stored.record.state, RecordState::Done(_))
                && stored.record.lease_id
                    == self.ledger.executions[write.execution as usize].lease_id
        });
        if !done || !matches!(write.meaning, SwapPurpose::Complete { .. }) {
            return false;
        }
        self.wrote(exchange, WriteResult::Lost, Some(truth));
        true
    }

    pub(super) fn is_over(&self, worker: u8) -> bool {
        matches!(self.processes[usize::from(worker)].activity, Activity::Over)
    }
}

fn words(swapped: &Swapped) -> String {
    match swapped {
        Swapped::Stored(stamped) => format!("stored, fence {}", stamped.fence),
        Swapped::Conflict(seen) => match &seen.stored {
            None => "conflict: no record".to_owned(),
            Some(stored) => format!(
                "conflict: {:?} {:?} of {:?} generation {:?}, lease {:?}, kept {:?}, now {:?}",
                stored.write_id,
                stored.record.state,
                stored.record.lease_id,
                stored.record.generation,
                stored.lease_until,
                stored.keep_until,
                seen.now
            ),
        },
    }
}

const fn said(wrote: &WriteResult) -> &'static str {
    match wrote {
        WriteResult::Recorded(_) => "recorded",
        WriteResult::Lost => "lost",
        WriteResult::Gone => "gone",
        WriteResult::NotFound => "not found",
        WriteResult::Rejected => "rejected",
        WriteResult::MayExecute { .. } => "may still execute",
        WriteResult::Saga => "of a saga",
        WriteResult::Changed => "changed",
        WriteResult::Contended => "contended",
    }
}

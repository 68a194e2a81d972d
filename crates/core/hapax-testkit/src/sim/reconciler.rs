//! Reconcilers: they load a record, call the hook about it without a retry, and conclude with its verdict.

use std::time::Duration;

use hapax_core::exchange::{Next, WriteExchange, WriteResult};
use hapax_core::machine::{Announcement, HookTiming, Verdict};
use hapax_core::store::Snapshot;
use hapax_core::{FencingToken, OnUnknown, Terms, WriteId};

use super::bug::Bug;
use super::ledger::{KeyModel, Phase, SimVerdict, SwapPurpose};
use super::plan::{self, KEYS, MS, micros};
use super::tally::{Event as Count, Fault};
use super::world::{
    ExchangeKind, LoadOrigin, OPERATORS, SimEvent, SimExchange, SimWrite, World, note,
};

const HOOK: HookTiming =
    HookTiming { after: Duration::from_millis(200), timeout: Duration::from_millis(300) };

/// Number of times at which a reconciler finds nothing to list before it lists what there is.
const PASSES: u8 = 8;

#[derive(Debug, Default)]
pub(super) struct Reconciler {
    pub(super) key: u8,
    passes: u8,
    /// Fence of the record that was listed.
    listed: Option<u64>,
    seen: Option<(Snapshot, KeyModel)>,
    /// The announcement that was written, and what the ledger has about it.
    announced: Option<(WriteId, Snapshot, KeyModel)>,
}

impl World {
    pub(super) fn reconciler_begins(&mut self) {
        let key = self.below(KEYS as u64) as u8;
        // Processes list the same records.
        for _ in 0..1 + self.below(3) {
            let reconciler = self.reconcilers.len() as u32;
            self.reconcilers.push(Reconciler { key, passes: PASSES, ..Reconciler::default() });
            let looker = LoadOrigin::Reconciler { reconciler };
            let delay = self.below(400 * MS);
            self.at(delay, SimEvent::Look { looker });
        }
    }

    pub(super) fn reconciler_looked(
        &mut self,
        reconciler: u32,
        found: Option<(Snapshot, KeyModel)>,
    ) {
        let looker = LoadOrigin::Reconciler { reconciler };
        let Some(found) = found else { return self.at(500 * MS, SimEvent::Look { looker }) };
        let undecided = matches!(found.1.phase, Phase::Unknown | Phase::Held) && !found.1.live();
        let state = &mut self.reconcilers[reconciler as usize];
        if state.listed.is_none() && !undecided && state.passes > 0 {
            state.passes -= 1;
            let delay = 300 * MS + self.below(600 * MS);
            return self.at(delay, SimEvent::Look { looker });
        }
        let Some(fence) = found.0.stored.as_ref().map(|stored| stored.fence.get()) else { return };
        // The record is listed, and loaded once more before the call, which may be much later.
        if state.listed.is_none() {
            state.listed = Some(fence);
            let most = if self.chance(500) { 50 * MS } else { 3_000 * MS };
            let delay = self.below(most);
            return self.at(delay, SimEvent::Look { looker });
        }
        state.seen = Some(found);
        self.reconciler_announces(reconciler);
    }

    fn reconciler_announces(&mut self, reconciler: u32) {
        let Reconciler { key, listed, seen, .. } = &mut self.reconcilers[reconciler as usize];
        let (key, Some(fence)) = (*key, *listed) else { return };
        let Some((mut seen, truth)) = seen.take() else { return };
        let policy = match self.below(20) {
            0 => OnUnknown::Block,
            1 => OnUnknown::Reexecute,
            _ => OnUnknown::Reconcile,
        };
        let lease = Duration::from_micros(1_000 * MS);
        let pause = Duration::from_micros([0, 500 * MS][self.below(2) as usize]);
        match (self.bug, &mut seen.stored) {
            (Some(Bug::CallsHookWithoutRetryTooSoon), Some(stored)) if !truth.live() => {
                stored.lease_until = Default::default();
            }
            (Some(Bug::ReconcilesUnseenExecution), Some(stored)) => {
                stored.fence = FencingToken::new(fence);
            }
            (Some(Bug::ReconcilesWithoutItsCheckpoint), Some(stored)) => {
                stored.record.checkpoint = None;
            }
            _ => {}
        }
        let announcement = Announcement {
            expected: FencingToken::new(fence),
            terms: Terms { lease, retention: lease, on_unknown: policy },
            hook: HOOK,
            pause,
            quarantine: None,
        };
        let name = plan::key(usize::from(key));
        let Ok((writing, next)) = WriteExchange::announce(name, seen, announcement, &self.ids.0)
        else {
            return self.no_entropy();
        };
        note!(self, "a reconciler calls the hook about k{key} at fence {fence}: {policy:?}");
        let meaning = SwapPurpose::Call {
            reconciler,
            fence,
            policy,
            after: micros(HOOK.after),
            timeout: micros(HOOK.timeout),
            pause: micros(pause),
        };
        self.reconciler_writes(key, (writing, next), meaning, &truth);
    }

    fn reconciler_writes(
        &mut self,
        key: u8,
        (writing, next): (WriteExchange, Next<WriteResult>),
        meaning: SwapPurpose,
        truth: &KeyModel,
    ) {
        let talk = ExchangeKind::Write(SimWrite {
            writing,
            execution: truth.execution,
            meaning,
            landed: false,
            ownership: None,
        });
        let exchange = self.begin(SimExchange {
            process: OPERATORS,
            epoch: 0,
            operation: 0,
            key,
            message: 0,
            sends: 0,
            waiting: false,
            ambiguous: false,
            background: false,
            over: false,
            talk,
        });
        self.write_goes(exchange, next, Some(truth));
    }

    /// Takes the result of an announcement or a conclusion.
    pub(super) fn reconciler_hears(
        &mut self,
        meaning: SwapPurpose,
        wrote: WriteResult,
        truth: &KeyModel,
    ) {
        match (meaning, wrote) {
            (
                SwapPurpose::Call { reconciler, .. },
                WriteResult::Recorded(Snapshot { now, stored: Some(stored) }),
            ) => {
                self.count(Count::Called);
                let write_id = stored.write_id;
                let seen = Snapshot { now, stored: Some(stored) };
                self.reconcilers[reconciler as usize].announced = Some((write_id, seen, *truth));
                if self.fails(100) {
                    return note!(self, "a reconciler is dropped before it calls the hook");
                }
                // Some services are slow.
                let most = if self.chance(300) { 2_000 * MS } else { 20 * MS };
                let delay = MS + self.below(most);
                self.at(delay, SimEvent::Consult { reconciler });
            }
            (SwapPurpose::Call { reconciler, .. }, WriteResult::MayExecute { until }) => {
                self.count(Count::CalledEarly);
                let passes = &mut self.reconcilers[reconciler as usize].passes;
                if let Some(left) = passes.checked_sub(1) {
                    *passes = left;
                    let looker = LoadOrigin::Reconciler { reconciler };
                    let delay = until.as_micros().saturating_sub(truth.clock).min(5_000 * MS);
                    self.at(delay, SimEvent::Look { looker });
                }
            }
            (SwapPurpose::Call { .. }, _) => self.count(Count::NotCalled),
            (SwapPurpose::Settle { said, .. }, WriteResult::Recorded(_)) => {
                self.count(match said {
                    SimVerdict::Happened(_) => Count::SettledHappened,
                    SimVerdict::DidNotHappen => Count::SettledDidNot,
                    SimVerdict::CannotSay => Count::NotSettled,
                });
            }
            (SwapPurpose::Settle { .. }, _) => self.count(Count::SettledLate),
            _ => {}
        }
    }

    /// The hook's verdict is about the execution of the announcement.
    pub(super) fn consult(&mut self, reconciler: u32) {
        let Reconciler { key, announced, .. } = &self.reconcilers[reconciler as usize];
        let (key, Some((_, _, truth))) = (*key, announced) else { return };
        let said = self.verdict_about(usize::from(key), truth.execution);
        note!(self, "a reconciler hears of k{key}: {:?}", Self::said(said));
        if self.fails(50) {
            return note!(self, "a reconciler is dropped before it concludes");
        }
        let delay = self.latency(Fault::AnswerDelayed);
        self.at(delay, SimEvent::Conclude { reconciler, said });
    }

    pub(super) fn reconciler_concludes(&mut self, reconciler: u32, said: u32) {
        let Reconciler { key, announced, .. } = &mut self.reconcilers[reconciler as usize];
        let (key, Some((announced, seen, truth))) = (*key, announced.take()) else { return };
        let said = Self::said(said);
        let verdict = match said {
            SimVerdict::Happened(outcome) => Verdict::Happened(plan::outcome(outcome)),
            SimVerdict::DidNotHappen => Verdict::DidNotHappen,
            SimVerdict::CannotSay => Verdict::CannotSay,
        };
        let name = plan::key(usize::from(key));
        let started = WriteExchange::conclude(name, seen, announced, (verdict, None), &self.ids.0);
        let Ok(started) = started else { return self.no_entropy() };
        let meaning = SwapPurpose::Settle { said, asked: truth.version };
        self.reconciler_writes(key, started, meaning, &truth);
    }
}

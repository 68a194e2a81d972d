//! The system downstream: effects, fences, and the hook.

use super::ledger::{Effect, SimVerdict};
use super::plan::KEYS;
use super::plan::MS;
use super::tally::{Event as Count, Fault};
use super::world::{ExchangeKind, SimEvent, World, note};

#[derive(Debug, Default)]
pub(super) struct Downstream {
    /// Fences up to these are rejected: the hook answered that they did not happen.
    refused: [u64; KEYS],
    /// Largest fence of an effect: later effects with a smaller one are rejected.
    highest: [u64; KEYS],
}

impl World {
    /// Returns what the hook answers about an execution. After *did not happen* its fence is rejected.
    pub(super) fn verdict_about(&mut self, key: usize, execution: u32) -> u32 {
        let asked = &self.ledger.executions[execution as usize];
        if asked.effect == Effect::Applied {
            self.tally.event(Count::VerdictHappened);
            return 2 + execution;
        }
        if self.chance(300) {
            self.count(Count::VerdictCannotSay);
            return 0;
        }
        let refused = &mut self.downstream.refused[key];
        *refused = asked.fence.max(*refused);
        self.tally.event(Count::VerdictDidNotHappen);
        1
    }

    pub(super) fn effect(&mut self, execution: u32) {
        let sender = &mut self.ledger.executions[execution as usize];
        let key = usize::from(sender.key);
        let fence = sender.fence;
        let Downstream { refused, highest } = &mut self.downstream;
        if fence <= refused[key] || fence < highest[key] {
            sender.effect = Effect::Rejected;
            note!(self, "k{key}: the effect under fence {fence} is rejected");
            return self.count(Count::EffectRejected);
        }
        highest[key] = fence;
        note!(self, "k{key}: the effect under fence {fence}");
        self.count(Count::Effect);
        let judged = self.ledger.effect(execution);
        self.judge(judged);
    }

    /// Calls the hook for a claimer, or crashes the claimer.
    pub(super) fn ask(&mut self, exchange: u32) {
        if self.fails(100) {
            note!(self, "c{exchange} is dropped before it calls the hook");
            let state = &mut self.convs[exchange as usize];
            state.over = true;
            if let ExchangeKind::Claim(claim) = &mut state.talk {
                claim.claiming.unregister();
            }
            let worker = state.process;
            self.ledger.end_unused_executions(exchange);
            return self.end_operation(worker, true);
        }
        let delay = MS + self.below(20 * MS);
        self.at(delay, SimEvent::Inquire { exchange });
    }

    pub(super) fn inquire(&mut self, exchange: u32) {
        let state = &self.convs[exchange as usize];
        let ExchangeKind::Claim(claim) = &state.talk else { return };
        let Some((_, execution)) = claim.asked else { return };
        let said = self.verdict_about(usize::from(state.key), execution);
        note!(self, "c{exchange} calls the hook: {:?}", Self::said(said));
        let delay = self.latency(Fault::AnswerDelayed);
        self.at(delay, SimEvent::Verdict { exchange, said });
    }

    pub(super) fn verdict(&mut self, exchange: u32, said: u32) {
        let state = &self.convs[exchange as usize];
        if !state.over && self.operation_of(state.process) == state.operation {
            let said: SimVerdict = Self::said(said);
            self.answer(exchange, said);
        }
    }
}

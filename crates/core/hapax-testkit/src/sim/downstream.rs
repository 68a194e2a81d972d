//! The system downstream: effects, fences, and the hook that is asked about them.

use super::ledger::{Effect, SimVerdict};
use super::plan::KEYS;
use super::plan::MS;
use super::tally::{Event as Count, Fault};
use super::world::{ExchangeKind, SimEvent, World, note};

#[derive(Debug, Default)]
pub(super) struct Downstream {
    /// Fences up to here are refused: the hook said that they did not happen.
    refused: [u64; KEYS],
    /// The largest fence that had an effect: what comes later with a smaller one is refused.
    highest: [u64; KEYS],
}

impl World {
    pub(super) fn effect(&mut self, execution: u32) {
        let sender = &mut self.ledger.executions[execution as usize];
        let key = usize::from(sender.key);
        let fence = sender.fence;
        let Downstream { refused, highest } = &mut self.downstream;
        if fence <= refused[key] || fence < highest[key] {
            sender.effect = Effect::Rejected;
            note!(self, "k{key}: the effect under fence {fence} is refused");
            return self.count(Count::EffectRefused);
        }
        highest[key] = fence;
        note!(self, "k{key}: the effect under fence {fence}");
        self.count(Count::Effect);
        let judged = self.ledger.effect(execution);
        self.judge(judged);
    }

    /// A claimer puts its question to the hook, or dies of it.
    pub(super) fn ask(&mut self, exchange: u32) {
        if self.fails(100) {
            note!(self, "c{exchange} does not ask after all");
            let state = &mut self.convs[exchange as usize];
            state.over = true;
            if let ExchangeKind::Claim(claim) = &mut state.talk {
                claim.claiming.unregister();
            }
            let worker = state.process;
            self.ledger.turned_away(exchange);
            return self.end_operation(worker, true);
        }
        let delay = MS + self.below(20 * MS);
        self.at(delay, SimEvent::Inquire { exchange });
    }

    pub(super) fn inquire(&mut self, exchange: u32) {
        let state = &self.convs[exchange as usize];
        let ExchangeKind::Claim(claim) = &state.talk else { return };
        let Some((_, execution)) = claim.asked else { return };
        let (key, asked) = (usize::from(state.key), &self.ledger.executions[execution as usize]);
        let said = if asked.effect == Effect::Applied {
            self.tally.event(Count::SaidHappened);
            2 + execution
        } else if self.chance(200) {
            self.count(Count::SaidNothing);
            0
        } else {
            let refused = &mut self.downstream.refused[key];
            *refused = asked.fence.max(*refused);
            self.tally.event(Count::SaidDidNot);
            1
        };
        note!(self, "c{exchange} asks, the hook says {:?}", Self::said(said));
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

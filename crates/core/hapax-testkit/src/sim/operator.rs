//! Operators: they load a record, wait, and decide.

use hapax_core::FencingToken;
use hapax_core::exchange::{WriteExchange, WriteResult};
use hapax_core::machine::{DefiniteVerdict, Resolve};
use hapax_core::store::Snapshot;

use super::bug::Bug;
use super::ledger::{KeyModel, SwapPurpose};
use super::plan::{self, KEYS, MS, OPERATORS_OUTCOMES};
use super::tally::{Event as Count, Fault};
use super::world::{
    ExchangeKind, LoadOrigin, OPERATORS, SimEvent, SimExchange, SimWrite, World, note,
};

#[derive(Debug)]
pub(super) struct Operator {
    pub(super) key: u8,
    seen: Option<(Snapshot, KeyModel)>,
}

impl World {
    pub(super) fn operator_looks(&mut self) {
        let operator = self.operators.len() as u32;
        let key = self.below(KEYS as u64) as u8;
        self.operators.push(Operator { key, seen: None });
        let looker = LoadOrigin::Operator { operator };
        // Some wait until requests that may still execute have ended.
        let pause = if self.chance(300) { 28_000 * MS + self.below(8_000 * MS) } else { MS };
        self.at(pause, SimEvent::Look { looker });
    }

    pub(super) fn operator_looked(&mut self, operator: u32, found: Option<(Snapshot, KeyModel)>) {
        let Some(found) = found else {
            let looker = LoadOrigin::Operator { operator };
            return self.at(500 * MS, SimEvent::Look { looker });
        };
        let worth = found.0.stored.is_some();
        self.operators[operator as usize].seen = Some(found);
        // Some decide at once, some much later.
        let most = if self.chance(500) { 50 * MS } else { 3_000 * MS };
        let thought = self.below(most);
        if worth {
            self.at(thought, SimEvent::Resolve { operator });
        }
    }

    pub(super) fn operator_resolves(&mut self, operator: u32) {
        let Operator { key, seen } = &mut self.operators[operator as usize];
        let key = *key;
        let Some((seen, truth)) = seen.take() else { return };
        let Some(fence) = seen.stored.as_ref().map(|stored| stored.fence.get()) else { return };
        let (force, forget) = (self.chance(400), self.chance(400));
        let outcome = self.chance(400).then_some(OPERATORS_OUTCOMES + operator as u16);
        let resolution = match outcome {
            Some(outcome) => DefiniteVerdict::Happened(plan::outcome(outcome)),
            None => DefiniteVerdict::DidNotHappen,
        };
        let expected = FencingToken::new(fence);
        let mut resolve =
            Resolve { expected, force, forget, resolution, note: None, restart: false };
        match self.bug {
            Some(Bug::DecidesBeforeItSettled) if !truth.live() => resolve.force = true,
            Some(Bug::ResolvesWithoutForce) if truth.live() => resolve.force = true,
            _ => {}
        }
        let name = plan::key(usize::from(key));
        let Ok((writing, next)) = WriteExchange::resolve(name, seen, resolve, &self.ids.0) else {
            return self.no_entropy();
        };
        note!(
            self,
            "an operator resolves k{key} at fence {fence}, force {force}, forget {forget}: {outcome:?}"
        );
        let meaning = SwapPurpose::Operator { fence, force, forget, outcome };
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
        self.write_goes(exchange, next, Some(&truth));
    }

    pub(super) fn operator_hears(&mut self, meaning: SwapPurpose, wrote: &WriteResult) {
        let SwapPurpose::Operator { force, outcome, .. } = meaning else { return };
        if matches!(wrote, WriteResult::MayExecute { .. }) {
            return self.count(Count::OperatorEarly);
        }
        if !matches!(wrote, WriteResult::Recorded(_)) {
            return self.count(Count::OperatorRejected);
        }
        self.tally.fault(match outcome {
            Some(_) => Fault::OperatorHappened,
            None => Fault::OperatorDidNot,
        });
        if force {
            self.tally.fault(Fault::OperatorForced);
        }
    }
}

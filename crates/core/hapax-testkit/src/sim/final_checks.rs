//! Checks after all faults have ended: nothing is left behind, and every key can be claimed again.

use std::time::Duration;

use hapax_core::exchange::{ClaimExchange, ClaimRequest, ClaimResult, Next};
use hapax_core::{OnUnknown, Terms};

use super::ledger::{
    Checked, KeyModel, NEVER, Phase, PromiseViolation, SwapPurpose, SwapSender, ensure,
};
use super::plan::{self, KEYS, MS};
use super::world::{OPERATORS, World, note};

/// Lease of the final claims.
const LEASE: u64 = 1_000 * MS;
/// Longer than any retention that has an end.
const AGES: u64 = 60 * LEASE;

impl World {
    pub(super) fn last_judgement(&mut self) -> Checked {
        let unfinished = self.convs.iter().any(|exchange| {
            let alive = self.processes[usize::from(exchange.process)].epoch == exchange.epoch;
            alive && exchange.process != OPERATORS && !exchange.over
        });
        ensure(!unfinished, "L5", "a deferred write was never stored")?;
        for key in 0..KEYS {
            self.no_execution_is_left(key)?;
        }
        // A clock that stepped back lengthens leases, and some leases are ten times as long.
        self.now += 12 * LEASE + self.plan.back;
        for key in 0..KEYS {
            self.claimable(key)?;
        }
        self.now += AGES;
        self.reap();
        for key in 0..KEYS {
            let truth = self.ledger.look(key, self.store.clock(self.now));
            let kept = truth.keep_until == NEVER;
            ensure(kept || self.store.records[key].is_none(), "L4", "a record outlives its time")?;
        }
        match self.violation {
            Some(violation) => Err(violation),
            None => Ok(()),
        }
    }

    /// Checks that a record in flight belongs to a process that crashed, or to a dropped lease.
    fn no_execution_is_left(&mut self, key: usize) -> Checked {
        let truth = self.ledger.look(key, self.store.clock(self.now));
        if truth.phase != Phase::Held || truth.was_expired() {
            return Ok(());
        }
        let execution = &self.ledger.executions[truth.execution as usize];
        let exchange = &self.convs[execution.exchange as usize];
        let died = self.processes[usize::from(exchange.process)].epoch != exchange.epoch;
        ensure(died || execution.dropped || execution.stray, "L6", "a claim was left behind")
    }

    /// Checks that a claim under `reexecute` by any process gets the true result at once.
    fn claimable(&mut self, key: usize) -> Checked {
        let clock = self.store.clock(self.now);
        let truth = self.ledger.look(key, clock);
        note!(self, "k{key} in the end: {truth:?}");
        let terms = Terms {
            lease: Duration::from_micros(LEASE),
            retention: Duration::from_micros(10 * LEASE),
            on_unknown: OnUnknown::Reexecute,
        };
        let claim = ClaimRequest {
            scheme: plan::scheme(0),
            fingerprint: plan::fingerprint(truth.request, 0),
            terms,
            settle: None,
            hook: None,
            may_reconcile: true,
            executions: Default::default(),
            description: None,
            keep_released: Duration::ZERO,
            adopts: false,
            quarantine: None,
        };
        let name = plan::key(key);
        let entropy = &self.ids.0;
        let broken = PromiseViolation { promise: "L1", what: "a claim failed in the end" };
        let (mut claiming, mut next) =
            ClaimExchange::start(name, claim, entropy).map_err(|_| broken)?;
        for _ in 0..5 {
            match next {
                Next::Ready(ClaimResult::Rehash(scheme)) => {
                    let number = plan::scheme_number(&scheme);
                    let fingerprint = plan::fingerprint(truth.request, number);
                    next = claiming.rehashed(scheme, fingerprint, entropy).map_err(|_| broken)?;
                }
                Next::Ready(claimed) => return judge_end(&truth, &claimed),
                Next::Send(swap) => {
                    let (swapped, write) = self.store.judge(key, self.now, &swap);
                    if write {
                        let fence = self.store.write(key, self.now, &swap);
                        let meaning = SwapPurpose::Execute {
                            anew: swap.draft.record.generation == swap.draft.record.lease_id,
                            attempt: swap.draft.record.attempt,
                            asked: None,
                        };
                        let by = SwapSender {
                            exchange: u32::MAX,
                            process: u8::MAX,
                            execution: 0,
                            request: truth.request,
                            policy: OnUnknown::Reexecute,
                            lease: LEASE,
                            retention: 10 * LEASE,
                            settle: None,
                            hook: None,
                            again: false,
                        };
                        self.ledger.wrote(key, clock, fence, meaning, by, &swap)?;
                    }
                    next = claiming.receive(swapped, entropy).map_err(|_| broken)?;
                }
            }
        }
        Err(broken)
    }
}

fn judge_end(truth: &KeyModel, claimed: &ClaimResult) -> Checked {
    let free = truth.vacant() || truth.expired();
    let again = truth.strict == OnUnknown::Reexecute;
    if let Some(redirect) = truth.redirect(truth.request) {
        let replayed = matches!(claimed, ClaimResult::Replay(replay)
            if plan::number(replay.outcome.bytes()) == redirect);
        return ensure(replayed, "redirect", "a redirected request is not redirected in the end");
    }
    let right = match claimed {
        ClaimResult::Execute(_) => free || (truth.phase != Phase::Done && again),
        ClaimResult::Replay(replay) => {
            !free
                && truth.phase == Phase::Done
                && plan::number(replay.outcome.bytes()) == truth.outcome
        }
        ClaimResult::Unknown { .. } => !free && truth.phase != Phase::Done && !again,
        _ => false,
    };
    ensure(right, "L1", "a key cannot be claimed again as its policy says")
}

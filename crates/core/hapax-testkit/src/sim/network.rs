//! The network between processes and store: swaps, loads, and their faults.

use hapax_core::store::{Swap, Swapped};

use super::bug::{self, Bug};
use super::ledger::{SwapPurpose, SwapSender};
use super::plan::{self, MS, TIMEOUT};
use super::tally::{Event as Count, Fault};
use super::world::{ExchangeKind, LoadOrigin, Reply, SimEvent, SwapMessage, World, note};

impl World {
    /// Sends a swap for the first time.
    pub(super) fn post(&mut self, exchange: u32, mut swap: Swap, meaning: SwapPurpose) {
        let message = self.messages.len() as u32;
        let state = &mut self.convs[exchange as usize];
        (state.message, state.sends, state.ambiguous) = (message, 0, false);
        state.waiting = true;
        note!(
            self,
            "c{exchange} of {}: k{} {:?} -> {:?}, {meaning:?}",
            state.process,
            state.key,
            swap.expected,
            swap.write_id
        );
        if let Some(bug) = self.bug {
            let policy = match &state.talk {
                ExchangeKind::Claim(claim) => claim.policy,
                ExchangeKind::Write(_) => swap.draft.record.terms.on_unknown,
            };
            bug::alter_swap(bug, policy, meaning, &mut swap);
        }
        self.messages.push(SwapMessage {
            swap,
            exchange,
            meaning,
            landed: false,
            answered: false,
            execution: None,
        });
        self.transmit(exchange);
    }

    /// Sends a copy of an exchange's swap.
    pub(super) fn transmit(&mut self, exchange: u32) {
        let state = &mut self.convs[exchange as usize];
        state.sends += 1;
        let (message, sends) = (state.message, state.sends);
        if self.fails(self.plan.refuse) {
            self.tally.fault(Fault::Unavailable);
            self.at(2 * MS, SimEvent::Reject { exchange, sends });
            return;
        }
        if self.fails(self.plan.lose) {
            self.tally.fault(Fault::RequestLost);
            note!(self, "c{exchange}: a copy is lost");
        } else {
            let delay = self.latency(Fault::RequestDelayed);
            self.at(delay, SimEvent::Arrive { message });
        }
        if self.fails(self.plan.repeat) {
            self.tally.fault(Fault::RequestRepeated);
            let delay = self.long_delay();
            self.at(delay, SimEvent::Arrive { message });
        }
        let patience = TIMEOUT << sends.min(4);
        self.at(patience, SimEvent::Timeout { exchange, message, sends });
    }

    /// Returns a few milliseconds, or longer than any timeout.
    pub(super) fn latency(&mut self, fault: Fault) -> u64 {
        let chance = match fault {
            // These messages are rarer, so that they are late more often.
            Fault::EffectDelayed | Fault::AnswerDelayed => 200,
            _ => self.plan.delay,
        };
        if self.fails(chance) {
            self.tally.fault(fault);
            return self.long_delay();
        }
        MS / 2 + self.below(4 * MS)
    }

    fn long_delay(&self) -> u64 {
        let most = match self.below(20) {
            0 => 20_000,
            1..6 => 3_000,
            _ => 300,
        };
        TIMEOUT + self.below(most * MS)
    }

    pub(super) fn arrive(&mut self, message: u32) {
        let SwapMessage { swap, exchange, .. } = &self.messages[message as usize];
        let key = usize::from(self.convs[*exchange as usize].key);
        let (swapped, write) = self.store.judge(key, self.now, swap);
        if !write {
            return self.send_reply(message, swapped);
        }
        match self.bug {
            Some(Bug::ChecksThenSets) if self.chance(100) => {
                let pause = self.below(60 * MS);
                self.at(pause, SimEvent::Set { message });
            }
            Some(Bug::LosesWrites) if self.chance(20) => self.send_reply(message, swapped),
            _ => {
                self.write(message, key);
                self.send_reply(message, swapped);
            }
        }
    }

    /// Does the second half of a write that was checked before.
    pub(super) fn set(&mut self, message: u32) {
        let SwapMessage { swap, exchange, .. } = &self.messages[message as usize];
        let key = usize::from(self.convs[*exchange as usize].key);
        let mut fresh = swap.clone();
        fresh.expected = self.store.records[key].as_ref().map(|stored| stored.write_id);
        let (swapped, _) = self.store.judge(key, self.now, &fresh);
        self.write(message, key);
        self.send_reply(message, swapped);
    }

    fn write(&mut self, message: u32, key: usize) {
        let SwapMessage { swap, exchange, meaning, landed, .. } = &self.messages[message as usize];
        let (exchange, meaning, again) = (*exchange, *meaning, *landed);
        let fence = self.store.write(key, self.now, swap);
        let clock = self.store.clock(self.now);
        note!(self, "c{exchange}: {:?} is written, fence {fence}, clock {clock}", swap.write_id);
        let state = &mut self.convs[exchange as usize];
        let terms = &swap.draft.record.terms;
        let by = match &mut state.talk {
            ExchangeKind::Claim(claim) => SwapSender {
                exchange,
                process: plan::process(state.process),
                execution: 0,
                request: claim.request,
                policy: claim.policy,
                lease: claim.lease,
                retention: claim.retention,
                settle: claim.settle,
                hook: claim.described,
                again,
            },
            ExchangeKind::Write(write) => {
                write.landed = true;
                SwapSender {
                    exchange,
                    process: plan::process(state.process),
                    execution: write.execution,
                    request: 0,
                    policy: terms.on_unknown,
                    lease: 0,
                    retention: 0,
                    settle: None,
                    hook: None,
                    again,
                }
            }
        };
        let judged = self.ledger.wrote(key, clock, fence, meaning, by, swap);
        let id = message;
        let message = &mut self.messages[message as usize];
        message.landed = true;
        match judged {
            Ok(entered) => {
                let truth = self.ledger.keys[key];
                message.execution = entered;
                if let ExchangeKind::Claim(claim) = &mut state.talk {
                    claim.execution = entered.or(claim.execution);
                    if matches!(meaning, SwapPurpose::Announce { .. }) {
                        claim.asked = Some((truth.version, truth.execution));
                    }
                }
                if let Some(entered) = entered
                    && !state.over
                    && self.processes[usize::from(state.process)].epoch == state.epoch
                {
                    let process = plan::process(state.process);
                    self.ledger.executions[entered as usize].running = Some(process);
                }
                // The sender has another exchange, or gets another answer.
                let late = state.over || state.message != id || message.answered;
                if let Some(entered) = entered
                    && late
                {
                    self.ledger.executions[entered as usize].stray = true;
                    self.tally.event(Count::Stray);
                }
            }
            Err(violation) => self.judge(Err(violation)),
        }
    }

    fn send_reply(&mut self, message: u32, swapped: Swapped) {
        let exchange = self.messages[message as usize].exchange;
        let key = usize::from(self.convs[exchange as usize].key);
        self.count(match &swapped {
            Swapped::Stored(_) => Count::Stored,
            Swapped::Conflict(_) => Count::Conflict,
        });
        let clock = self.store.clock(self.now);
        let truth = self.ledger.look(key, clock);
        let reply = self.replies.len() as u32;
        self.replies.push(Reply { swapped, truth });
        self.messages[message as usize].answered = true;
        if self.fails(self.plan.lose) {
            self.tally.fault(Fault::ReplyLost);
            note!(self, "c{exchange}: a reply is lost");
        } else {
            let delay = self.latency(Fault::ReplyDelayed);
            self.at(delay, SimEvent::Reply { exchange, message, reply });
        }
        if self.fails(self.plan.repeat) {
            self.tally.fault(Fault::ReplyRepeated);
            let delay = self.long_delay();
            self.at(delay, SimEvent::Reply { exchange, message, reply });
        }
    }

    pub(super) fn reply(&mut self, exchange: u32, message: u32, reply: u32) {
        let state = &self.convs[exchange as usize];
        // A reply to an earlier swap does not concern this one.
        if state.over || !state.waiting || state.message != message {
            return;
        }
        let Reply { swapped, truth } = self.replies[reply as usize].clone();
        self.receive(exchange, swapped, truth);
    }

    pub(super) fn refused(&mut self, exchange: u32, sends: u32) {
        let state = &self.convs[exchange as usize];
        if state.over || !state.waiting || state.sends != sends {
            return;
        }
        note!(self, "c{exchange}: the store is unavailable");
        if !self.is_given_up(exchange) {
            self.transmit(exchange);
        }
    }

    pub(super) fn timeout(&mut self, exchange: u32, message: u32, sends: u32) {
        let state = &mut self.convs[exchange as usize];
        if state.over || !state.waiting || state.message != message || state.sends != sends {
            return;
        }
        state.ambiguous = true;
        note!(self, "c{exchange}: no reply");
        if self.is_given_up(exchange) {
            return;
        }
        match self.bug {
            Some(Bug::ResolvesByLoading) => {
                let looker = LoadOrigin::Carrier { exchange, message };
                self.at(MS, SimEvent::Look { looker });
            }
            _ => self.transmit(exchange),
        }
    }

    pub(super) fn look(&mut self, looker: LoadOrigin) {
        let key = match looker {
            LoadOrigin::Operator { operator } => self.operators[operator as usize].key,
            LoadOrigin::Reconciler { reconciler } => self.reconcilers[reconciler as usize].key,
            LoadOrigin::Waiter { worker, .. } => self.processes[usize::from(worker)].key,
            LoadOrigin::Carrier { exchange, .. } => self.convs[exchange as usize].key,
        };
        let mut seen = 0;
        if self.fails(self.plan.fail_load) {
            self.tally.fault(Fault::LoadFailed);
        } else {
            let clock = self.store.clock(self.now);
            let found = self.store.load(usize::from(key), self.now);
            let truth = self.ledger.look(usize::from(key), clock);
            let judged = self.ledger.check_record(&truth, found.stored.as_ref());
            self.judge(judged);
            self.looks.push((found, truth));
            seen = self.looks.len() as u32;
        }
        let delay = MS + self.below(4 * MS);
        self.at(delay, SimEvent::Looked { looker, seen });
    }

    /// Passes on the result of a load. `seen` is its number, from 1; 0 is a load that failed.
    pub(super) fn looked(&mut self, looker: LoadOrigin, seen: u32, happening: SimEvent) {
        let found = seen.checked_sub(1).map(|at| self.looks[at as usize].clone());
        match looker {
            LoadOrigin::Operator { operator } => self.operator_looked(operator, found),
            LoadOrigin::Reconciler { reconciler } => self.reconciler_looked(reconciler, found),
            LoadOrigin::Waiter { worker, operation } => {
                if !self.asleep(worker, happening)
                    && self.processes[usize::from(worker)].operation == operation
                {
                    self.waiter_looked(worker, found);
                }
            }
            LoadOrigin::Carrier { exchange, message } => {
                let state = &self.convs[exchange as usize];
                let dead = self.processes[usize::from(state.process)].epoch != state.epoch;
                if dead || state.over || !state.waiting || state.message != message {
                    return;
                }
                let Some((found, truth)) = found else { return self.transmit(exchange) };
                let write_id = self.messages[message as usize].swap.write_id;
                match &found.stored {
                    Some(stored) if stored.write_id == write_id => {
                        let stamped = hapax_core::store::Stamped {
                            now: found.now,
                            fence: stored.fence,
                            lease_until: stored.lease_until,
                        };
                        self.receive(exchange, Swapped::Stored(stamped), truth);
                    }
                    _ => self.receive(exchange, Swapped::Conflict(found), truth),
                }
            }
        }
    }
}

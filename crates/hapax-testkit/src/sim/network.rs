//! Between processes and store: swaps, loads, and what becomes of them on the way.

use hapax::store::{Swap, Swapped};

use super::bug::{self, Bug};
use super::plan::{self, MS, TIMEOUT};
use super::tally::{Event as Count, Fault};
use super::truth::{Meaning, Writer};
use super::world::{Happening, Letter, Looker, Reply, Talk, World, note};

impl World {
    /// Sends a swap for the first time.
    pub(super) fn post(&mut self, conv: u32, mut swap: Swap, meaning: Meaning) {
        let letter = self.letters.len() as u32;
        let state = &mut self.convs[conv as usize];
        (state.letter, state.sends, state.ambiguous) = (letter, 0, false);
        state.waiting = true;
        note!(
            self,
            "c{conv} of {}: k{} {:?} -> {:?}, {meaning:?}",
            state.process,
            state.key,
            swap.expected,
            swap.write_id
        );
        if let Some(bug) = self.bug {
            let policy = match &state.talk {
                Talk::Claim(claim) => claim.policy,
                Talk::Write(_) => swap.draft.record.terms.on_unknown,
            };
            bug::spoil(bug, policy, meaning, &mut swap);
        }
        self.letters.push(Letter {
            swap,
            conv,
            meaning,
            landed: false,
            answered: false,
            tenure: None,
        });
        self.transmit(conv);
    }

    /// Sends a copy of a conversation's swap.
    pub(super) fn transmit(&mut self, conv: u32) {
        let state = &mut self.convs[conv as usize];
        state.sends += 1;
        let (letter, sends) = (state.letter, state.sends);
        if self.fails(self.plan.refuse) {
            self.tally.fault(Fault::Unavailable);
            self.at(2 * MS, Happening::Reject { conv, sends });
            return;
        }
        if self.fails(self.plan.lose) {
            self.tally.fault(Fault::RequestLost);
            note!(self, "c{conv}: a copy is lost");
        } else {
            let delay = self.latency(Fault::RequestDelayed);
            self.at(delay, Happening::Arrive { letter });
        }
        if self.fails(self.plan.repeat) {
            self.tally.fault(Fault::RequestRepeated);
            let delay = self.long_delay();
            self.at(delay, Happening::Arrive { letter });
        }
        let patience = TIMEOUT << sends.min(4);
        self.at(patience, Happening::Timeout { conv, letter, sends });
    }

    /// A few milliseconds, or longer than anybody waits.
    pub(super) fn latency(&mut self, fault: Fault) -> u64 {
        let chance = match fault {
            // Rarer messages: later more often.
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

    pub(super) fn arrive(&mut self, letter: u32) {
        let Letter { swap, conv, .. } = &self.letters[letter as usize];
        let key = usize::from(self.convs[*conv as usize].key);
        let (swapped, write) = self.store.judge(key, self.now, swap);
        if !write {
            return self.send_reply(letter, swapped);
        }
        match self.bug {
            Some(Bug::ChecksThenSets) if self.chance(100) => {
                let pause = self.below(60 * MS);
                self.at(pause, Happening::Set { letter });
            }
            Some(Bug::LosesWrites) if self.chance(20) => self.send_reply(letter, swapped),
            _ => {
                self.write(letter, key);
                self.send_reply(letter, swapped);
            }
        }
    }

    /// The second half of a write that was checked before.
    pub(super) fn set(&mut self, letter: u32) {
        let Letter { swap, conv, .. } = &self.letters[letter as usize];
        let key = usize::from(self.convs[*conv as usize].key);
        let mut fresh = swap.clone();
        fresh.expected = self.store.records[key].as_ref().map(|stored| stored.write_id);
        let (swapped, _) = self.store.judge(key, self.now, &fresh);
        self.write(letter, key);
        self.send_reply(letter, swapped);
    }

    fn write(&mut self, letter: u32, key: usize) {
        let Letter { swap, conv, meaning, landed, .. } = &self.letters[letter as usize];
        let (conv, meaning, again) = (*conv, *meaning, *landed);
        let fence = self.store.write(key, self.now, swap);
        let clock = self.store.clock(self.now);
        note!(self, "c{conv}: {:?} is written, fence {fence}, clock {clock}", swap.write_id);
        let state = &mut self.convs[conv as usize];
        let terms = &swap.draft.record.terms;
        let by = match &mut state.talk {
            Talk::Claim(claim) => Writer {
                conv,
                process: plan::process(state.process),
                tenure: 0,
                request: claim.request,
                policy: claim.policy,
                lease: claim.lease,
                retention: claim.retention,
                again,
            },
            Talk::Write(write) => {
                write.landed = true;
                Writer {
                    conv,
                    process: plan::process(state.process),
                    tenure: write.tenure,
                    request: 0,
                    policy: terms.on_unknown,
                    lease: 0,
                    retention: 0,
                    again,
                }
            }
        };
        let judged = self.ledger.wrote(key, clock, fence, meaning, by, swap);
        let id = letter;
        let letter = &mut self.letters[letter as usize];
        letter.landed = true;
        match judged {
            Ok(entered) => {
                let truth = self.ledger.keys[key];
                letter.tenure = entered;
                if let Talk::Claim(claim) = &mut state.talk {
                    claim.tenure = entered.or(claim.tenure);
                    if matches!(meaning, Meaning::Announce { .. }) {
                        claim.asked = Some((truth.version, truth.tenure));
                    }
                }
                if let Some(entered) = entered
                    && !state.over
                    && self.processes[usize::from(state.process)].epoch == state.epoch
                {
                    let process = plan::process(state.process);
                    self.ledger.tenures[entered as usize].running = Some(process);
                }
                // The sender has moved on, or is being told something else.
                let late = state.over || state.letter != id || letter.answered;
                if let Some(entered) = entered
                    && late
                {
                    self.ledger.tenures[entered as usize].stray = true;
                    self.tally.event(Count::Stray);
                }
            }
            Err(violation) => self.judge(Err(violation)),
        }
    }

    fn send_reply(&mut self, letter: u32, swapped: Swapped) {
        let conv = self.letters[letter as usize].conv;
        let key = usize::from(self.convs[conv as usize].key);
        self.count(match &swapped {
            Swapped::Stored(_) => Count::Stored,
            Swapped::Conflict(_) => Count::Conflict,
        });
        let clock = self.store.clock(self.now);
        let truth = self.ledger.look(key, clock);
        let reply = self.replies.len() as u32;
        self.replies.push(Reply { swapped, truth });
        self.letters[letter as usize].answered = true;
        if self.fails(self.plan.lose) {
            self.tally.fault(Fault::ReplyLost);
            note!(self, "c{conv}: a reply is lost");
        } else {
            let delay = self.latency(Fault::ReplyDelayed);
            self.at(delay, Happening::Reply { conv, letter, reply });
        }
        if self.fails(self.plan.repeat) {
            self.tally.fault(Fault::ReplyRepeated);
            let delay = self.long_delay();
            self.at(delay, Happening::Reply { conv, letter, reply });
        }
    }

    pub(super) fn reply(&mut self, conv: u32, letter: u32, reply: u32) {
        let state = &self.convs[conv as usize];
        // An answer to an earlier swap says nothing about this one.
        if state.over || !state.waiting || state.letter != letter {
            return;
        }
        let Reply { swapped, truth } = self.replies[reply as usize].clone();
        self.receive(conv, swapped, truth);
    }

    pub(super) fn refused(&mut self, conv: u32, sends: u32) {
        let state = &self.convs[conv as usize];
        if state.over || !state.waiting || state.sends != sends {
            return;
        }
        note!(self, "c{conv}: the store is unavailable");
        if !self.forsaken(conv) {
            self.transmit(conv);
        }
    }

    pub(super) fn timeout(&mut self, conv: u32, letter: u32, sends: u32) {
        let state = &mut self.convs[conv as usize];
        if state.over || !state.waiting || state.letter != letter || state.sends != sends {
            return;
        }
        state.ambiguous = true;
        note!(self, "c{conv}: no answer");
        if self.forsaken(conv) {
            return;
        }
        match self.bug {
            Some(Bug::ResolvesByLoading) => {
                let looker = Looker::Carrier { conv, letter };
                self.at(MS, Happening::Look { looker });
            }
            _ => self.transmit(conv),
        }
    }

    pub(super) fn look(&mut self, looker: Looker) {
        let key = match looker {
            Looker::Operator { operator } => self.operators[operator as usize].key,
            Looker::Waiter { worker, .. } => self.processes[usize::from(worker)].key,
            Looker::Carrier { conv, .. } => self.convs[conv as usize].key,
        };
        let mut seen = 0;
        if self.fails(self.plan.fail_load) {
            self.tally.fault(Fault::LoadFailed);
        } else {
            let clock = self.store.clock(self.now);
            let found = self.store.load(usize::from(key), self.now);
            let truth = self.ledger.look(usize::from(key), clock);
            let judged = self.ledger.judge_cell(&truth, found.stored.as_ref());
            self.judge(judged);
            self.looks.push((found, truth));
            seen = self.looks.len() as u32;
        }
        let delay = MS + self.below(4 * MS);
        self.at(delay, Happening::Looked { looker, seen });
    }

    /// `seen` is the number of the look, from 1; 0 is a load that failed.
    pub(super) fn looked(&mut self, looker: Looker, seen: u32, happening: Happening) {
        let found = seen.checked_sub(1).map(|at| self.looks[at as usize].clone());
        match looker {
            Looker::Operator { operator } => self.operator_looked(operator, found),
            Looker::Waiter { worker, operation } => {
                if !self.asleep(worker, happening)
                    && self.processes[usize::from(worker)].operation == operation
                {
                    self.waiter_looked(worker, found);
                }
            }
            Looker::Carrier { conv, letter } => {
                let state = &self.convs[conv as usize];
                let dead = self.processes[usize::from(state.process)].epoch != state.epoch;
                if dead || state.over || !state.waiting || state.letter != letter {
                    return;
                }
                let Some((found, truth)) = found else { return self.transmit(conv) };
                let write_id = self.letters[letter as usize].swap.write_id;
                match &found.stored {
                    Some(stored) if stored.write_id == write_id => {
                        let stamped = hapax::store::Stamped {
                            now: found.now,
                            fence: stored.fence,
                            lease_until: stored.lease_until,
                        };
                        self.receive(conv, Swapped::Stored(stamped), truth);
                    }
                    _ => self.receive(conv, Swapped::Conflict(found), truth),
                }
            }
        }
    }
}

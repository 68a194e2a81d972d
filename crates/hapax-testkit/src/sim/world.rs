//! The world of a schedule: time, processes, and what happens next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hapax::exchange::Executions;
use hapax::store::Snapshot;

use super::bug::Bug;
pub(super) use super::parts::{
    Activity, ClaimTalk, Conv, Dice, Happening, Ids, Letter, Looker, Process, Reply, SimExecution,
    Talk, What, WriteTalk,
};
use super::plan::{self, KEYS, MS, OPERATIONS, PAST_RETENTION, Plan, WORKERS};
use super::store::ModelStore;
use super::tally::{Event as Count, Fault, Tally};
use super::truth::{Judged, Ledger, SimVerdict, Truth, Violation, ensure};
use crate::SeededEntropy;

/// Says what happens, where somebody listens.
macro_rules! note {
    ($world:expr, $($words:tt)*) => {
        if let Some(trace) = &mut $world.trace {
            let ms = $world.now as f64 / 1_000.0;
            trace.push(format!("{ms:>12.3} ms  {}", format_args!($($words)*)));
        }
    };
}
pub(super) use note;

/// The operators' process. It neither crashes nor pauses.
pub(super) const OPERATORS: u8 = WORKERS as u8;

/// Nothing happens in between.
const GRAIN: u64 = MS / 2;

/// A schedule that goes on for longer does not end.
const MOST_EVENTS: u32 = 60_000;

#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) rng: Dice,
    pub(super) ids: Ids,
    pub(super) plan: Plan,
    pub(super) bug: Option<Bug>,
    pub(super) tally: Tally,
    pub(super) trace: Option<Vec<String>>,
    pub(super) violation: Option<Violation>,
    pub(super) now: u64,
    sequence: u32,
    queue: BinaryHeap<Reverse<(u64, u32, Happening)>>,
    pub(super) store: ModelStore,
    pub(super) ledger: Ledger,
    pub(super) processes: [Process; WORKERS + 1],
    pub(super) convs: Vec<Conv>,
    pub(super) letters: Vec<Letter>,
    pub(super) replies: Vec<Reply>,
    pub(super) looks: Vec<(Snapshot, Truth)>,
    pub(super) operators: Vec<super::operator::Operator>,
    pub(super) downstream: super::downstream::Downstream,
    /// Nothing goes wrong any more: what is under way comes to its end.
    pub(super) calm: bool,
    stepped_back: u64,
}

impl World {
    /// A world with a bug, or none; it tells what happens if it is to.
    pub(super) fn new(bug: Option<Bug>, tell: bool) -> Self {
        Self { bug, trace: tell.then(Vec::new), ..Self::default() }
    }

    /// Plays the schedule of `seed` to its end, or to the first broken promise.
    pub(super) fn play(&mut self, seed: u64) -> Judged {
        self.reset(seed);
        let mut events = 0;
        while let Some(Reverse((at, _, happening))) = self.queue.pop() {
            self.now = self.now.max(at);
            self.happen(happening);
            events += 1;
            if let Some(violation) = self.violation {
                return Err(violation);
            }
            ensure(events < MOST_EVENTS, "liveness", "the schedule does not end")?;
        }
        self.tally.schedules += 1;
        self.last_judgement()
    }

    fn reset(&mut self, seed: u64) {
        // Seeds in a row give unrelated schedules.
        self.rng = Dice(SeededEntropy::new(SeededEntropy::new(seed).next()));
        self.ids = Ids(SeededEntropy::new(SeededEntropy::new(!seed).next()));
        self.plan = Plan::draw(&self.rng.0);
        self.violation = None;
        (self.now, self.sequence, self.stepped_back, self.calm) = (0, 0, 0, false);
        self.queue.clear();
        self.store.reset(KEYS);
        self.ledger.reset(KEYS, plan::OUTCOMES);
        self.processes = std::array::from_fn(|_| Process::default());
        self.start_anew(0..WORKERS as u8);
        self.convs.clear();
        self.letters.clear();
        self.replies.clear();
        self.looks.clear();
        self.operators.clear();
        self.downstream = super::downstream::Downstream::default();
        note!(self, "seed {seed}: {:?}", self.plan);
        for worker in 0..WORKERS as u8 {
            self.processes[usize::from(worker)].left = OPERATIONS;
            let delay = self.below(300 * MS);
            self.go(worker, delay, What::Start);
        }
        self.foretell();
    }

    /// What will go wrong by itself, and when.
    fn foretell(&mut self) {
        const HORIZON: u64 = 12_000 * MS;
        for _ in 0..self.plan.crashes {
            let worker = self.below(WORKERS as u64) as u8;
            self.at(self.below(HORIZON), Happening::Crash { worker });
        }
        for _ in 0..self.plan.pauses {
            let worker = self.below(WORKERS as u64) as u8;
            let micros = match self.below(4) {
                0 => PAST_RETENTION + self.below(4_000 * MS),
                _ => 1_100 * MS + self.below(2_000 * MS),
            };
            self.at(self.below(HORIZON), Happening::Pause { worker, micros });
        }
        for _ in 0..self.plan.steps {
            let micros = match self.below(3) {
                0 => (1_100 * MS + self.below(15_000 * MS)) as i64,
                _ => -(self.below(self.plan.back) as i64),
            };
            let micros = micros - micros % GRAIN as i64;
            self.at(self.below(HORIZON), Happening::Step { micros });
        }
        for _ in 0..self.plan.operators {
            self.at(self.below(HORIZON), Happening::Operator);
        }
        for _ in 0..self.plan.reaps {
            self.at(self.below(2 * HORIZON), Happening::Reap);
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Arrive { letter } => self.arrive(letter),
            Happening::Set { letter } => self.set(letter),
            Happening::Reply { conv, letter, reply } if self.awake(conv, happening) => {
                self.reply(conv, letter, reply);
            }
            Happening::Reject { conv, sends } if self.awake(conv, happening) => {
                self.refused(conv, sends);
            }
            Happening::Timeout { conv, letter, sends } if self.awake(conv, happening) => {
                self.timeout(conv, letter, sends);
            }
            Happening::Verdict { conv, said } if self.awake(conv, happening) => {
                self.verdict(conv, said);
            }
            // The process is dead, or asleep.
            Happening::Reply { .. }
            | Happening::Reject { .. }
            | Happening::Timeout { .. }
            | Happening::Verdict { .. } => {}
            Happening::Look { looker } => self.look(looker),
            Happening::Looked { looker, seen } => self.looked(looker, seen, happening),
            Happening::Go { worker, operation, what } => {
                if !self.asleep(worker, happening)
                    && self.processes[usize::from(worker)].operation == operation
                {
                    self.worker_goes(worker, what);
                }
            }
            Happening::Effect { tenure } => self.effect(tenure),
            Happening::Inquire { conv } => self.inquire(conv),
            Happening::Crash { worker } => self.crash(worker),
            Happening::Pause { worker, micros } => self.pause(worker, micros),
            Happening::Step { micros } => self.step_clock(micros),
            Happening::Reap => self.reap(),
            Happening::Operator => self.operator_looks(),
            Happening::Resolve { operator } => self.operator_resolves(operator),
        }
    }

    /// Whether the process of `conv` is there to hear of it; asleep, it hears of it later.
    fn awake(&mut self, conv: u32, happening: Happening) -> bool {
        let Conv { process, epoch, .. } = self.convs[conv as usize];
        self.processes[usize::from(process)].epoch == epoch && !self.asleep(process, happening)
    }

    pub(super) fn asleep(&mut self, process: u8, happening: Happening) -> bool {
        let until = self.processes[usize::from(process)].paused_until;
        let asleep = until > self.now;
        if asleep {
            self.at(until - self.now, happening);
        }
        asleep
    }

    fn crash(&mut self, worker: u8) {
        if self.calm || matches!(self.processes[usize::from(worker)].activity, Activity::Over) {
            return;
        }
        self.tally.fault(Fault::Crash);
        let process = plan::process(worker);
        self.ledger.died(process);
        let together = (0..WORKERS as u8).filter(|worker| plan::process(*worker) == process);
        self.start_anew(together.clone());
        for worker in together {
            note!(self, "worker {worker} crashes");
            self.processes[usize::from(worker)].epoch += 1;
            if !self.is_over(worker) {
                self.end_operation(worker, false);
            }
        }
    }

    /// Gives workers of one process, or of all, an empty registry of executions.
    fn start_anew(&mut self, workers: impl Iterator<Item = u8>) {
        let fresh: [Executions; WORKERS] = std::array::from_fn(|_| Executions::default());
        for worker in workers {
            let executions = fresh[usize::from(plan::process(worker))].clone();
            self.processes[usize::from(worker)].executions = executions;
        }
    }

    fn pause(&mut self, worker: u8, micros: u64) {
        if self.calm {
            return;
        }
        let together =
            (0..WORKERS as u8).filter(|one| plan::process(*one) == plan::process(worker));
        let past = if micros >= PAST_RETENTION {
            Fault::PausePastRetention
        } else {
            Fault::PausePastLease
        };
        self.tally.fault(past);
        for worker in together {
            note!(self, "worker {worker} stands still for {} ms", micros / MS);
            let process = &mut self.processes[usize::from(worker)];
            process.paused_until = process.paused_until.max(self.now + micros);
        }
    }

    fn step_clock(&mut self, micros: i64) {
        if self.calm {
            return;
        }
        if micros < 0 {
            let left = self.plan.back.saturating_sub(self.stepped_back);
            let back = micros.unsigned_abs().min(left);
            self.stepped_back += back;
            // A lapse that the step undoes has been one.
            let clock = self.store.clock(self.now);
            for key in 0..KEYS {
                self.ledger.look(key, clock);
            }
            self.ledger.far_back = self.plan.far_back();
            self.store.offset -= back as i64;
            self.tally.fault(Fault::ClockBack);
            note!(self, "the store's clock steps back by {} ms", back / MS);
        } else {
            self.store.offset += micros;
            self.tally.fault(Fault::ClockForward);
            note!(self, "the store's clock steps forward by {} ms", micros as u64 / MS);
        }
    }

    pub(super) fn reap(&mut self) {
        let clock = self.store.clock(self.now);
        for key in self.store.reap(self.now, self.bug) {
            self.tally.fault(Fault::Purge);
            note!(self, "k{key} is purged");
            let judged = self.ledger.purged(key, clock);
            self.judge(judged);
        }
    }

    pub(super) fn judge(&mut self, judged: Judged) {
        if let Err(violation) = judged {
            note!(self, "BROKEN {}: {}", violation.promise, violation.what);
            self.violation = self.violation.or(Some(violation));
        }
    }

    pub(super) fn at(&mut self, delay: u64, happening: Happening) {
        // Coarse, so that deadlines are met to the microsecond.
        let at = (self.now + delay).next_multiple_of(GRAIN);
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence, happening)));
    }

    pub(super) fn go(&mut self, worker: u8, delay: u64, what: What) {
        let operation = self.processes[usize::from(worker)].operation;
        self.at(delay, Happening::Go { worker, operation, what });
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.rng.0.below(bound)
    }

    /// Whether something of this chance, per mille, happens.
    pub(super) fn chance(&self, per_mille: u64) -> bool {
        self.below(1_000) < per_mille
    }

    /// Whether a fault of this chance happens now.
    pub(super) fn fails(&self, per_mille: u64) -> bool {
        !self.calm && self.chance(per_mille)
    }

    pub(super) fn count(&mut self, event: Count) {
        self.tally.event(event);
    }

    pub(super) const fn said(said: u32) -> SimVerdict {
        match said {
            0 => SimVerdict::CannotSay,
            1 => SimVerdict::DidNotHappen,
            outcome => SimVerdict::Happened((outcome - 2) as u16),
        }
    }
}

//! The world of a schedule: time, processes, and the events to come.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hapax_core::exchange::Executions;
use hapax_core::store::Snapshot;

use super::bug::Bug;
use super::ledger::{Checked, KeyModel, Ledger, PromiseViolation, SimVerdict, ensure};
use super::plan::{self, KEYS, MS, OPERATIONS, PAST_RETENTION, Plan, WORKERS};
pub(super) use super::schedule::{
    Activity, Dice, ExchangeKind, Ids, LoadOrigin, Process, Reply, SimClaim, SimEvent, SimExchange,
    SimExecution, SimWrite, SwapMessage, WorkerStep,
};
use super::store::ModelStore;
use super::tally::{Event as Count, Fault, Tally};
use crate::SeededEntropy;

/// Adds a line to the trace, if there is one.
macro_rules! note {
    ($world:expr, $($words:tt)*) => {
        if let Some(trace) = &mut $world.trace {
            let ms = $world.now as f64 / 1_000.0;
            trace.push(format!("{ms:>12.3} ms  {}", format_args!($($words)*)));
        }
    };
}
pub(super) use note;

/// The process of operators and reconcilers, which neither crashes nor pauses.
pub(super) const OPERATORS: u8 = WORKERS as u8;

/// Distance of times at which events happen.
const GRAIN: u64 = MS / 2;

/// Limit of events; a schedule with more does not end.
const MOST_EVENTS: u32 = 60_000;

#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) rng: Dice,
    pub(super) ids: Ids,
    pub(super) plan: Plan,
    pub(super) bug: Option<Bug>,
    pub(super) tally: Tally,
    pub(super) trace: Option<Vec<String>>,
    pub(super) violation: Option<PromiseViolation>,
    pub(super) now: u64,
    sequence: u32,
    queue: BinaryHeap<Reverse<(u64, u32, SimEvent)>>,
    pub(super) store: ModelStore,
    pub(super) ledger: Ledger,
    pub(super) processes: [Process; WORKERS + 1],
    pub(super) convs: Vec<SimExchange>,
    pub(super) messages: Vec<SwapMessage>,
    pub(super) replies: Vec<Reply>,
    pub(super) looks: Vec<(Snapshot, KeyModel)>,
    pub(super) operators: Vec<super::operator::Operator>,
    pub(super) reconcilers: Vec<super::reconciler::Reconciler>,
    pub(super) downstream: super::downstream::Downstream,
    /// True after the last operation: no more faults happen, and requests in progress end.
    pub(super) calm: bool,
    stepped_back: u64,
}

impl World {
    /// Returns a world, with a planted bug if there is one, and with a trace if `tell` is set.
    pub(super) fn new(bug: Option<Bug>, tell: bool) -> Self {
        Self { bug, trace: tell.then(Vec::new), ..Self::default() }
    }

    /// Plays the schedule of `seed` to its end, or to the first broken promise.
    pub(super) fn play(&mut self, seed: u64) -> Checked {
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
        // Consecutive seeds give unrelated schedules.
        self.rng = Dice(SeededEntropy::new(SeededEntropy::new(seed).next()));
        self.ids = Ids(SeededEntropy::new(SeededEntropy::new(!seed).next()));
        self.plan = Plan::draw(&self.rng.0);
        if seed % 2 == 1 {
            self.plan.reconcilers = 8 + self.below(16);
        }
        self.violation = None;
        (self.now, self.sequence, self.stepped_back, self.calm) = (0, 0, 0, false);
        self.queue.clear();
        self.store.reset(KEYS);
        self.ledger.reset(KEYS, plan::OUTCOMES);
        self.processes = std::array::from_fn(|_| Process::default());
        self.start_anew(0..WORKERS as u8);
        self.convs.clear();
        self.messages.clear();
        self.replies.clear();
        self.looks.clear();
        self.operators.clear();
        self.reconcilers.clear();
        self.downstream = super::downstream::Downstream::default();
        note!(self, "seed {seed}: {:?}", self.plan);
        for worker in 0..WORKERS as u8 {
            self.processes[usize::from(worker)].left = OPERATIONS;
            let delay = self.below(300 * MS);
            self.go(worker, delay, WorkerStep::Start);
        }
        self.schedule_faults();
    }

    /// Schedules crashes, pauses, clock steps, operators, reconcilers and reaping.
    fn schedule_faults(&mut self) {
        const HORIZON: u64 = 12_000 * MS;
        for _ in 0..self.plan.crashes {
            let worker = self.below(WORKERS as u64) as u8;
            self.at(self.below(HORIZON), SimEvent::Crash { worker });
        }
        for _ in 0..self.plan.pauses {
            let worker = self.below(WORKERS as u64) as u8;
            let micros = match self.below(4) {
                0 => PAST_RETENTION + self.below(4_000 * MS),
                _ => 1_100 * MS + self.below(2_000 * MS),
            };
            self.at(self.below(HORIZON), SimEvent::Pause { worker, micros });
        }
        for _ in 0..self.plan.steps {
            let micros = match self.below(3) {
                0 => (1_100 * MS + self.below(15_000 * MS)) as i64,
                _ => -(self.below(self.plan.back) as i64),
            };
            let micros = micros - micros % GRAIN as i64;
            self.at(self.below(HORIZON), SimEvent::Step { micros });
        }
        for _ in 0..self.plan.operators {
            self.at(self.below(HORIZON), SimEvent::Operator);
        }
        for _ in 0..self.plan.reconcilers {
            self.at(self.below(HORIZON), SimEvent::Reconciler);
        }
        for _ in 0..self.plan.reaps {
            self.at(self.below(2 * HORIZON), SimEvent::Reap);
        }
    }

    fn happen(&mut self, happening: SimEvent) {
        match happening {
            SimEvent::Arrive { message } => self.arrive(message),
            SimEvent::Set { message } => self.set(message),
            SimEvent::Reply { exchange, message, reply } if self.awake(exchange, happening) => {
                self.reply(exchange, message, reply);
            }
            SimEvent::Reject { exchange, sends } if self.awake(exchange, happening) => {
                self.refused(exchange, sends);
            }
            SimEvent::Timeout { exchange, message, sends } if self.awake(exchange, happening) => {
                self.timeout(exchange, message, sends);
            }
            SimEvent::Verdict { exchange, said } if self.awake(exchange, happening) => {
                self.verdict(exchange, said);
            }
            // The process has crashed or is paused.
            SimEvent::Reply { .. }
            | SimEvent::Reject { .. }
            | SimEvent::Timeout { .. }
            | SimEvent::Verdict { .. } => {}
            SimEvent::Look { looker } => self.look(looker),
            SimEvent::Looked { looker, seen } => self.looked(looker, seen, happening),
            SimEvent::Go { worker, operation, what } => {
                if !self.asleep(worker, happening)
                    && self.processes[usize::from(worker)].operation == operation
                {
                    self.worker_goes(worker, what);
                }
            }
            SimEvent::Effect { execution } => self.effect(execution),
            SimEvent::Inquire { exchange } => self.inquire(exchange),
            SimEvent::Crash { worker } => self.crash(worker),
            SimEvent::Pause { worker, micros } => self.pause(worker, micros),
            SimEvent::Step { micros } => self.step_clock(micros),
            SimEvent::Reap => self.reap(),
            SimEvent::Operator => self.operator_looks(),
            SimEvent::Resolve { operator } => self.operator_resolves(operator),
            SimEvent::Reconciler => self.reconciler_begins(),
            SimEvent::Consult { reconciler } => self.consult(reconciler),
            SimEvent::Conclude { reconciler, said } => self.reconciler_concludes(reconciler, said),
        }
    }

    /// Returns whether the process of an exchange can receive an event. A paused process receives
    /// it later.
    fn awake(&mut self, exchange: u32, happening: SimEvent) -> bool {
        let SimExchange { process, epoch, .. } = self.convs[exchange as usize];
        self.processes[usize::from(process)].epoch == epoch && !self.asleep(process, happening)
    }

    pub(super) fn asleep(&mut self, process: u8, happening: SimEvent) -> bool {
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
            note!(self, "worker {worker} pauses for {} ms", micros / MS);
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
            // Notes the latest time before the step, which does not undo a lapse.
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

    pub(super) fn judge(&mut self, judged: Checked) {
        if let Err(violation) = judged {
            note!(self, "BROKEN {}: {}", violation.promise, violation.what);
            self.violation = self.violation.or(Some(violation));
        }
    }

    pub(super) fn at(&mut self, delay: u64, happening: SimEvent) {
        // Coarse, so that events coincide with deadlines to the microsecond.
        let at = (self.now + delay).next_multiple_of(GRAIN);
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence, happening)));
    }

    pub(super) fn go(&mut self, worker: u8, delay: u64, what: WorkerStep) {
        let operation = self.processes[usize::from(worker)].operation;
        self.at(delay, SimEvent::Go { worker, operation, what });
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.rng.0.below(bound)
    }

    /// Returns true with this chance, per mille.
    pub(super) fn chance(&self, per_mille: u64) -> bool {
        self.below(1_000) < per_mille
    }

    /// Returns true with this chance, per mille, while faults happen.
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

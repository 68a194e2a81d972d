//! The saga of the simulation: its flow interprets the program in its input.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Verdict, value};
use hapax_saga::log::{Blob, Log, StepOutcome};
use hapax_saga::{
    FlowContext, Saga, StepContext, StepEffect, StepError, StepHandle, StepRetry, UndoError,
};
use hapax_testkit::SeededEntropy;
use serde::{Deserialize, Serialize};

use super::plan::{CALL_TIMEOUT, DAY, HOUR, LIFETIME, SETTLE, duration};

/// The promise of a called system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Keyed(u64),
    Once,
    Again,
    Within,
}

/// A step of the definition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSpec {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) undo: bool,
    pub(crate) reconcile: bool,
}

const fn spec(name: &'static str, kind: Kind, undo: bool, reconcile: bool) -> StepSpec {
    StepSpec { name, kind, undo, reconcile }
}

pub(crate) const STEPS: [StepSpec; 10] = [
    spec("pay", Kind::Keyed(DAY), true, false),
    spec("book", Kind::Keyed(LIFETIME), true, true),
    spec("mail", Kind::Keyed(LIFETIME), false, false),
    spec("wire", Kind::Once, true, true),
    spec("ship", Kind::Once, true, false),
    spec("post", Kind::Once, false, true),
    spec("look", Kind::Again, false, false),
    spec("hold", Kind::Again, true, false),
    spec("row", Kind::Within, true, false),
    spec("note", Kind::Within, false, false),
];

pub(crate) fn spec_of(name: &str) -> Option<StepSpec> {
    STEPS.into_iter().find(|spec| spec.name == name)
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Instruction {
    /// Runs a step. Strict: a rejection ends the flow with its error.
    Step {
        step: u8,
        nth: u32,
        strict: bool,
    },
    Sleep {
        name: u8,
        seconds: u64,
    },
    Signal {
        name: u8,
        seconds: u64,
        strict: bool,
    },
    /// Skips instructions, as the results so far say.
    Branch {
        skip: u8,
    },
    Fail,
}

/// The input of a saga.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Input {
    pub(crate) salt: u64,
    pub(crate) program: Vec<Instruction>,
    /// Position of the instruction that the changed flow runs after its successor.
    pub(crate) swap: Option<u8>,
}

pub(crate) const FAILED: u64 = 1;
pub(crate) const NO_SIGNAL: u64 = 2;

impl Input {
    pub(crate) fn draw(dice: &SeededEntropy) -> Self {
        let mut program = Vec::new();
        let mut used = [0_u32; STEPS.len()];
        let shape = dice.below(6);
        let length = 3 + dice.below(4);
        for at in 0..length {
            let repeated = shape == 2 && at > 0;
            let step = match program.last() {
                Some(Instruction::Step { step, .. }) if repeated => *step,
                _ => dice.below(STEPS.len() as u64) as u8,
            };
            let nth = used[usize::from(step)];
            used[usize::from(step)] += 1;
            program.push(Instruction::Step { step, nth, strict: dice.below(4) > 0 });
        }
        let place = |dice: &SeededEntropy| dice.below(length + 1) as usize;
        if shape == 1 {
            program.insert(place(dice), Instruction::Branch { skip: 1 + dice.below(2) as u8 });
        }
        if shape == 3 || shape == 5 {
            let seconds =
                [5, 20, 900, DAY / 1_000_000, 3 * DAY / 1_000_000][dice.below(5) as usize];
            program.insert(place(dice), Instruction::Sleep { name: 0, seconds });
        }
        if shape >= 4 {
            let seconds =
                [3, 30, 600, HOUR / 1_000_000, 2 * DAY / 1_000_000][dice.below(5) as usize];
            let strict = dice.below(2) == 0;
            program.insert(place(dice), Instruction::Signal { name: 0, seconds, strict });
        }
        if dice.below(4) == 0 {
            let at = program.len() - dice.below(2) as usize;
            program.insert(at, Instruction::Fail);
        }
        let is_step = |at: usize| matches!(program.get(at), Some(Instruction::Step { .. }));
        let swap = (0..program.len()).rfind(|at| is_step(*at) && is_step(at + 1));
        Self { salt: dice.next(), swap: swap.map(|at| at as u8), program }
    }

    /// Returns the program of the flow before or after its change.
    pub(crate) fn program(&self, changed: bool) -> Vec<Instruction> {
        let mut program = self.program.clone();
        if let Some(at) = self.swap.filter(|_| changed) {
            program.swap(usize::from(at), usize::from(at) + 1);
        }
        program
    }
}

pub(crate) const fn mix(a: u64, b: u64) -> u64 {
    let z = (a ^ b.rotate_left(32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ (z >> 17)
}

/// Returns the argument of a step after the results in `acc`.
pub(crate) const fn argument(acc: u64, step: u8, nth: u32) -> u64 {
    mix(acc, ((step as u64) << 32) | nth as u64)
}

type SimStep = StepHandle<u64, u64, u64>;
pub(crate) type SimSaga = Saga<Input, Vec<u64>, u64>;

async fn flow(
    op: FlowContext,
    steps: Arc<[SimStep]>,
    input: Input,
    changed: bool,
) -> Result<Vec<u64>, u64> {
    let program = input.program(changed);
    let (mut acc, mut results, mut at) = (input.salt, Vec::new(), 0);
    while let Some(instruction) = program.get(at) {
        at += 1;
        match *instruction {
            Instruction::Step { step, nth, strict } => {
                let run = op.run(steps[usize::from(step)].nth(nth), argument(acc, step, nth));
                match run.await {
                    Ok(result) => {
                        results.push(result);
                        acc = mix(acc, result);
                    }
                    Err(error) if strict => return Err(error),
                    Err(error) => acc = mix(acc, error),
                }
            }
            Instruction::Sleep { name, seconds } => {
                op.sleep(&format!("n{name}"), Duration::from_secs(seconds)).await;
            }
            Instruction::Signal { name, seconds, strict } => {
                let name = signal_name(name);
                match op.signal::<u64>(&name, Duration::from_secs(seconds)).await {
                    Some(value) => {
                        results.push(value);
                        acc = mix(acc, value);
                    }
                    None if strict => return Err(NO_SIGNAL),
                    None => {}
                }
            }
            Instruction::Branch { skip } => at += usize::from(skip) * (acc & 1) as usize,
            Instruction::Fail => return Err(FAILED),
        }
    }
    Ok(results)
}

pub(crate) fn signal_name(name: u8) -> String {
    format!("s{name}")
}

/// The definitions: the first version, the same after a change of its flow, and the second one.
pub(crate) struct Definitions {
    pub(crate) first: SimSaga,
    pub(crate) changed: SimSaga,
    pub(crate) second: SimSaga,
}

impl Definitions {
    pub(crate) fn new() -> Self {
        Self { first: define(1, false), changed: define(1, true), second: define(2, true) }
    }
}

fn define(version: u32, changed: bool) -> SimSaga {
    let mut saga = Saga::define("simulated", version, ()).max_value(MAX_VALUE);
    let steps: Arc<[SimStep]> = STEPS
        .into_iter()
        .map(|spec| {
            // The simulation performs the calls itself.
            let call = async |_: StepContext<()>, _: u64| {
                Err::<u64, StepError<u64>>(StepError::not_sent("no"))
            };
            let step = match spec.kind {
                Kind::Keyed(lifetime) => saga.keyed(spec.name, duration(lifetime), call),
                Kind::Once => saga.once(spec.name, call),
                Kind::Again => saga.again(spec.name, call),
                Kind::Within => saga.within(spec.name, call),
            };
            let timeout = duration(CALL_TIMEOUT);
            let pauses = (Duration::from_millis(500), Duration::from_secs(40));
            let retry = StepRetry::default().tries(4).timeout(timeout).pauses(pauses.0, pauses.1);
            let undo_retry = StepRetry::within(Duration::from_secs(86_400))
                .timeout(timeout)
                .pauses(pauses.0, pauses.1);
            let step = step.retry(retry).undo_retry(undo_retry).settle(duration(SETTLE));
            let step = match spec.reconcile {
                true => {
                    step.reconcile(async |_: StepContext<()>, _: u64| Verdict::<u64>::CannotSay)
                }
                false => step,
            };
            match spec.undo {
                true => step.undo(async |_: StepContext<()>, _: u64, _: StepEffect<u64>| {
                    Ok::<(), UndoError>(())
                }),
                false => step.no_undo(),
            }
        })
        .collect();
    let built = saga.flow(move |op, input: Input| flow(op, Arc::clone(&steps), input, changed));
    built.expect("the definition is valid")
}

/// The end of a flow by the outcomes in a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Expected {
    Returned(Vec<u64>),
    Failed(u64),
    /// It needs a step that the log does not have.
    Unfinished {
        step: Option<(u8, u32)>,
        argument: u64,
    },
}

/// Computes the end of a flow from its log, without its code.
pub(crate) fn expected(input: &Input, changed: bool, log: &Log) -> Expected {
    let program = input.program(changed);
    let (mut acc, mut results, mut at) = (input.salt, Vec::new(), 0);
    let outcome_of = |name: &str, nth: u32| log.steps[log.find(name, nth)?].outcome.clone();
    while let Some(instruction) = program.get(at) {
        at += 1;
        match *instruction {
            Instruction::Fail => return Expected::Failed(FAILED),
            Instruction::Branch { skip } if acc & 1 == 1 => at += usize::from(skip),
            Instruction::Branch { .. } => {}
            Instruction::Sleep { name, .. } => {
                if outcome_of(&format!("sleep/n{name}"), 0).is_none() {
                    return Expected::Unfinished { step: None, argument: 0 };
                }
            }
            Instruction::Signal { name, strict, .. } => {
                match outcome_of(&format!("signal/{}", signal_name(name)), 0) {
                    None => return Expected::Unfinished { step: None, argument: 0 },
                    Some(StepOutcome::Happened(value)) => {
                        let value = number(&value);
                        results.push(value);
                        acc = mix(acc, value);
                    }
                    Some(StepOutcome::Rejected(_)) if strict => return Expected::Failed(NO_SIGNAL),
                    Some(StepOutcome::Rejected(_)) => {}
                }
            }
            Instruction::Step { step, nth, strict } => {
                match outcome_of(STEPS[usize::from(step)].name, nth) {
                    None => {
                        let argument = argument(acc, step, nth);
                        return Expected::Unfinished { step: Some((step, nth)), argument };
                    }
                    Some(StepOutcome::Happened(value)) => {
                        let value = number(&value);
                        if value == UNREADABLE {
                            return Expected::Unfinished { step: None, argument: 0 };
                        }
                        results.push(value);
                        acc = mix(acc, value);
                    }
                    Some(StepOutcome::Rejected(error)) if strict => {
                        return Expected::Failed(number(&error));
                    }
                    Some(StepOutcome::Rejected(error)) => acc = mix(acc, number(&error)),
                }
            }
        }
    }
    Expected::Returned(results)
}

/// Returns the number in a blob, or [`UNREADABLE`].
pub(crate) fn number(blob: &Blob) -> u64 {
    value::read(&blob.0).unwrap_or(UNREADABLE)
}

/// Limit of a value of a step.
const MAX_VALUE: usize = 1_000;

/// A result that cannot be stored, because it is too large.
pub(crate) fn large() -> Blob {
    Blob(value::write(&"x".repeat(2 * MAX_VALUE), 4 * MAX_VALUE).expect("the limit is larger"))
}

/// Stands for a result that no flow can read.
pub(crate) const UNREADABLE: u64 = u64::MAX;

/// A result of another type than that of its step.
pub(crate) fn unreadable() -> Blob {
    Blob(value::write("a text", 64).expect("a text is short"))
}

pub(crate) fn blob(number: u64) -> Blob {
    Blob(value::write(&number, 64).expect("a number is short"))
}

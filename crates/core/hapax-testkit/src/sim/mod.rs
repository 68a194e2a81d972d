//! A seeded simulation of workers, operators, reconcilers, a hook, a store and the network between them,
//! with every kind of fault, and a ledger of the facts.
//!
//! 1. A seed determines a schedule: at least four workers with ten operations each, over three
//!    keys. The same seed gives the same schedule.
//! 2. The code under test is Hapax's own: [`exchange`](hapax_core::exchange) and the state machine
//!    behind it, without a runtime and without a future.
//! 3. The ledger records each write that the store accepts by its sender's purpose, and compares
//!    every answer with it. It is derived from the promises and shares no code with the state
//!    machine.
//! 4. A schedule that breaks a promise is played again with a trace of each step.
//!
//! ```
//! let tally = hapax_testkit::sim::run(0..200).expect("no promise is broken");
//! assert_eq!(tally.schedules, 200);
//! ```

mod bug;
mod claims;
mod downstream;
mod exchange;
mod final_checks;
mod ledger;
mod model;
mod network;
mod operator;
mod plan;
mod reconciler;
mod schedule;
mod store;
mod tally;
mod worker;
mod world;

use std::fmt;
use std::ops::Range;

pub use bug::Bug;
pub use model::PromiseViolation;
pub use tally::{Event, Fault, Tally};
use world::World;

/// A schedule that broke a promise.
#[derive(Clone, Debug)]
pub struct SimFailure {
    /// Seed of the schedule: play it again with [`run_seed`].
    pub seed: u64,
    /// The broken promise.
    pub violation: PromiseViolation,
    /// Trace of the schedule until then, a line for each step.
    pub trace: Vec<String>,
}

impl std::error::Error for SimFailure {}

impl fmt::Display for SimFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.trace {
            writeln!(f, "{line}")?;
        }
        let PromiseViolation { promise, what } = self.violation;
        write!(f, "seed {}: {promise}: {what}", self.seed)
    }
}

/// Plays the schedules of `seeds`.
///
/// # Errors
/// The first [`SimFailure`].
pub fn run(seeds: Range<u64>) -> Result<Tally, Box<SimFailure>> {
    play(seeds, None)
}

/// Plays the schedule of one seed.
///
/// # Errors
/// The [`SimFailure`] of this schedule.
pub fn run_seed(seed: u64) -> Result<Tally, Box<SimFailure>> {
    run(seed..seed + 1)
}

/// Plays the schedules of `seeds` with a bug planted, until it is found.
///
/// # Errors
/// The [`SimFailure`] that found it.
pub fn hunt(bug: Bug, seeds: Range<u64>) -> Result<Tally, Box<SimFailure>> {
    play(seeds, Some(bug))
}

fn play(seeds: Range<u64>, bug: Option<Bug>) -> Result<Tally, Box<SimFailure>> {
    let mut world = World::new(bug, false);
    for seed in seeds {
        if let Err(violation) = world.play(seed) {
            let mut again = World::new(bug, true);
            let replayed = again.play(seed);
            debug_assert_eq!(replayed, Err(violation), "a seed gives one schedule");
            let trace = again.trace.unwrap_or_default();
            return Err(Box::new(SimFailure { seed, violation, trace }));
        }
    }
    Ok(world.tally)
}

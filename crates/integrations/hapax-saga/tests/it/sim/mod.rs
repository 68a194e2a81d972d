//! A seeded simulation of sagas: processes, their clients, senders of signals, operators, a store and
//! the network to it, and the systems that steps call, with every kind of fault.
//!
//! 1. A seed determines a schedule; the same seed gives the same schedule.
//! 2. The code under test is the step log and the run of this crate, and the exchanges of the core.
//!    The driver is written here: a planted bug is a change of it.
//! 3. What really happened is recorded where it happens: in the store, and in the called systems.
//! 4. A schedule has faults for minutes to days. Then nothing fails, and every saga has to end.
//!
//! `HAPAX_SAGA_SEEDS` sets the number of schedules, `HAPAX_SAGA_SEED` plays one with its trace;
//! with `HAPAX_SAGA_BUG` a bug is planted in it.

mod bugs;
mod checks;
mod clients;
mod drive;
mod facts;
mod flows;
mod node;
mod operator;
mod outside;
mod plan;
mod senders;
mod store;
mod tally;
mod tests;
mod within;
mod world;

use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use bugs::Bug;
use flows::Definitions;
use tally::Tally;
use world::{Violation, World};

/// A schedule that broke an invariant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SimFailure {
    pub(crate) seed: u64,
    pub(crate) violation: Violation,
    pub(crate) trace: Vec<String>,
}

impl fmt::Display for SimFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.trace {
            writeln!(f, "{line}")?;
        }
        let Violation { what, detail } = &self.violation;
        write!(f, "HAPAX_SAGA_SEED={}: {what}: {detail}", self.seed)
    }
}

/// Plays the schedules of `seeds` in this thread, until one breaks an invariant.
pub(crate) fn play(
    seeds: impl Iterator<Item = u64>,
    bug: Option<Bug>,
) -> Result<Tally, Box<SimFailure>> {
    let definitions = Rc::new(Definitions::new());
    let mut tally = Tally::default();
    for seed in seeds {
        let world = World::new(seed, bug, Rc::clone(&definitions), false);
        clients::play(&world);
        tally.add(&world.tally.borrow());
        let Some(violation) = world.violation() else {
            world.clear();
            continue;
        };
        world.clear();
        let again = World::new(seed, bug, definitions, true);
        clients::play(&again);
        let trace = again.trace.as_ref().map(|trace| trace.borrow().clone()).unwrap_or_default();
        again.clear();
        return Err(Box::new(SimFailure { seed, violation, trace }));
    }
    Ok(tally)
}

/// Plays the schedules of `seeds` in as many threads as there are processors.
pub(crate) fn run(seeds: Range<u64>) -> Result<Tally, Box<SimFailure>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let parts: Vec<_> = (0..threads)
        .map(|part| {
            let seeds = seeds.clone().skip(part).step_by(threads);
            std::thread::spawn(move || play(seeds, None))
        })
        .collect();
    let mut tally = Tally::default();
    for part in parts {
        tally.add(&part.join().expect("a schedule does not panic")?);
    }
    Ok(tally)
}

//! A simulation that finds a planted bug, and prints the seed with which it can be replayed.
//!
//!     cargo run --release -p hapax-testkit --example planted_bug

use hapax_testkit::sim::{self, Bug};

fn main() {
    let seeds = 0..100_000;
    for bug in Bug::ALL.iter().copied() {
        match sim::hunt(bug, seeds.clone()) {
            Ok(_) => println!("{bug:?}: not found in {} seeds", seeds.end),
            Err(found) => println!("{bug:?}: seed {}: {:?}", found.seed, found.violation),
        }
    }
}

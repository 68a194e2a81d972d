//! Checks that every change must pass.

#![allow(clippy::disallowed_methods, reason = "it times builds, not the product")]

use std::time::{Duration, Instant};

use crate::setup::Skip;
use crate::sh::{Failure, Outcome};
use crate::{features, lint, long, test, tools};

type Step = (&'static str, fn() -> Outcome);

const STEPS: [Step; 6] = [
    ("lint", lint::run),
    ("features", features::run),
    ("deny", tools::deny),
    ("test", || test::run(&Skip::default())),
    ("sim", || long::sim(100_000, 0)),
    ("fuzz", || tools::fuzz(10, None)),
];

pub(crate) fn run() -> Outcome {
    let mut times: Vec<(&str, Duration)> = Vec::new();
    for (name, step) in STEPS {
        eprintln!("\nxtask ci: {name}");
        let start = Instant::now();
        let outcome = step();
        times.push((name, start.elapsed()));
        if let Err(failure) = outcome {
            summary(&times, "failed");
            return Err(Failure::new(format!("step `{name}` failed: {failure}")));
        }
    }
    summary(&times, "ok");
    Ok(())
}

fn summary(times: &[(&str, Duration)], last: &str) {
    println!();
    for (at, (name, time)) in times.iter().enumerate() {
        let verdict = if at + 1 == times.len() { last } else { "ok" };
        println!("{name:<9} {verdict:<8} {:>7.1} s", time.as_secs_f64());
    }
}

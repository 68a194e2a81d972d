//! Checks that every change must pass.

#![allow(clippy::disallowed_methods, reason = "it times builds, not the product")]

use std::time::{Duration, Instant};

use crate::setup::Skip;
use crate::sh::{Failure, Outcome, Run};
use crate::{features, lint, long, producers, test, tools};

type Step = (&'static str, fn() -> Outcome);

const STEPS: [Step; 6] = [
    ("lint", lint::run),
    ("features", features::run),
    ("deny", tools::deny),
    ("test", || test::run(&Skip::default())),
    ("sim", || long::sim(100_000, 0)),
    ("fuzz", || tools::fuzz(5, None)),
];

/// Steps that only `--all` runs: they need frameworks of others.
const MORE: [Step; 1] = [("producers", || producers::run(1_000, &[]))];

/// Space that a build of everything needs in the target folder, with a margin, in GB.
const DISK: u64 = 20;

/// Runs the steps, with `all` also [`MORE`].
pub(crate) fn run(all: bool) -> Outcome {
    check_disk()?;
    let mut times: Vec<(&str, Duration)> = Vec::new();
    for (name, step) in STEPS.into_iter().chain(MORE.into_iter().filter(|_| all)) {
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

/// Checks the space for the target folder: what is free, and what the folder has. On a full disk linkers and tests
/// fail with errors that do not name the cause.
fn check_disk() -> Outcome {
    let target = test::target()?;
    let free = Run::new("df").args(["-Pk"]).args([&target]).read()?;
    let free = free.lines().nth(1).and_then(|line| line.split_whitespace().nth(3));
    let used = Run::new("du").args(["-sk"]).args([&target]).read()?;
    let used = used.split_whitespace().next();
    let gigabytes =
        |kibibytes: &str| kibibytes.parse::<u64>().ok().map(|it| it * 1024 / 1_000_000_000);
    let (Some(free), Some(used)) = (free.and_then(gigabytes), used.and_then(gigabytes)) else {
        return Err(Failure::new("expected numbers of df and du, found another output"));
    };
    if free + used >= DISK {
        return Ok(());
    }
    let target = target.display();
    Err(Failure::new(format!(
        "expected {DISK} GB of disk for {target}, found {free} GB free and {used} GB used by it: free disk, for \
         example by `cargo clean` in other checkouts"
    )))
}

fn summary(times: &[(&str, Duration)], last: &str) {
    println!();
    for (at, (name, time)) in times.iter().enumerate() {
        let verdict = if at + 1 == times.len() { last } else { "ok" };
        println!("{name:<9} {verdict:<8} {:>7.1} s", time.as_secs_f64());
    }
}

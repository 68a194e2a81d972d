//! Runs that find more the longer they last.

use crate::Command;
use crate::sh::{Failure, Outcome, Run};

pub(crate) const SIM: Command = Command {
    name: "sim",
    summary: "simulate installations under faults, from seeds",
    help: "Plays whole schedules of claims, crashes, lost and delayed messages, pauses and
clock steps, and checks every promise. A failure prints its seed.

  --seeds N       how many schedules (1000000)
  --from SEED     the first one (0)
  --seed SEED     only this one, printed step by step",
    run: |args| {
        let only: Option<u64> = args.value("--seed")?;
        let seeds = args.value("--seeds")?.unwrap_or(1_000_000);
        let from = args.value("--from")?.unwrap_or(0);
        args.finish()?;
        match only {
            Some(seed) => simulate(&[("--seed", seed)]),
            None => sim(seeds, from),
        }
    },
};

pub(crate) const TORTURE: Command = Command {
    name: "torture",
    summary: "kill gateways under load, and drop or tear what their file had not synced",
    help: "Two runs. Real gateways on files get SIGKILL at random instants while clients retry:
every response that a client got must be replayed, and no key may execute twice where
that is forbidden. Then images of the file as a power failure may leave it are opened:
nothing that was acknowledged may be missing.

  --kills N       kills of a gateway (500); 0 leaves the first run out
  --images N      images (1000); 0 leaves the second run out
  --seed N        of the instants and of the losses (1)",
    run: |args| {
        let kills = args.value("--kills")?.unwrap_or(500);
        let images = args.value("--images")?.unwrap_or(1000);
        let seed = args.value("--seed")?.unwrap_or(1);
        args.finish()?;
        torture(kills, images, seed)
    },
};

/// Simulates `seeds` schedules, beginning with `from`.
pub(crate) fn sim(seeds: u64, from: u64) -> Outcome {
    simulate(&[("--seeds", seeds), ("--from", from)])
}

fn simulate(options: &[(&str, u64)]) -> Outcome {
    let options = options.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]);
    Run::cargo()
        .args(["run", "--release", "--package", "hapax-testkit", "--bin", "sim", "--"])
        .args(options)
        .show()
}

fn torture(kills: u64, images: u64, seed: u64) -> Outcome {
    let seed = seed.to_string();
    if kills > 0 {
        Run::cargo().args(["build", "--release", "--package", "hapax-cli"]).show()?;
        Run::cargo()
            .args(["run", "--release", "--package", "hapax-torture", "--"])
            .args(["--kills", &kills.to_string(), "--seed", &seed])
            .show()?;
    }
    if images > 0 {
        let test = ["test", "--release", "--package", "hapax-file", "--test", "it", "images"];
        // A filter that matches no test would succeed.
        let listed = Run::cargo().args(test).args(["--", "--list"]).read()?;
        if !names_a_test(&listed) {
            return Err(Failure::new(
                "hapax-file has no test named `images` in its test binary `it`",
            ));
        }
        Run::cargo()
            .args(test)
            .args(["--", "--nocapture"])
            .env("HAPAX_IMAGES", images.to_string())
            .env("HAPAX_SEED", seed)
            .show()?;
    }
    Ok(())
}

/// Returns whether the output of `--list` names a test.
pub(crate) fn names_a_test(listed: &str) -> bool {
    listed.lines().any(|line| line.ends_with(": test"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_test_is_told_from_one() {
        assert!(names_a_test("images::they_survive: test\n\n1 test, 0 benchmarks\n"));
        assert!(!names_a_test("0 tests, 0 benchmarks\n"));
    }
}

//! Runs that find more the longer they last.

use crate::sh::{Failure, Outcome, Run};

/// Simulates `seeds` schedules, beginning with `from`.
pub(crate) fn sim(seeds: u64, from: u64) -> Outcome {
    simulate(&[("--seeds", seeds), ("--from", from)])
}

pub(crate) fn simulate(options: &[(&str, u64)]) -> Outcome {
    let options = options.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]);
    Run::cargo()
        .args(["run", "--release", "--package", "hapax-testkit", "--bin", "sim", "--"])
        .args(options)
        .show()
}

/// Runs gateways that are killed, opens images of files after power failures, runs consumers that are
/// killed and frozen, and clients that are killed with their servers.
pub(crate) fn torture(kills: u64, images: u64, messages: u64, calls: u64, seed: u64) -> Outcome {
    let seed = seed.to_string();
    if kills > 0 || calls > 0 {
        Run::cargo().args(["build", "--release", "--package", "hapax-cli"]).show()?;
    }
    if kills > 0 {
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
            .env("HAPAX_SEED", &seed)
            .show()?;
    }
    if messages > 0 {
        Run::cargo()
            .args(["run", "--release", "--package", "hapax-consumers", "--features", "kafka", "--"])
            .args(["run", "--broker", "nats", "--broker", "rabbitmq", "--broker", "kafka"])
            .args(["--messages", &messages.to_string(), "--seed", &seed])
            .show()?;
    }
    if calls > 0 {
        for store in ["file", "postgres"] {
            for kind in ["hapax", "stripe"] {
                Run::cargo()
                    .args(["run", "--release", "--package", "hapax-callers", "--", "run"])
                    .args(["--kind", kind, "--records", store, "--journal", store])
                    .args(["--operations", &calls.to_string(), "--seed", &seed])
                    .show()?;
            }
            Run::cargo()
                .args(["run", "--release", "--package", "hapax-callers", "--", "jobs"])
                .args(["--journal", store, "--seed", &seed])
                .show()?;
        }
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

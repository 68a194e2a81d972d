//! Long runs of tests that find more the longer they last.

use std::path::PathBuf;

use crate::long::names_a_test;
use crate::sh::{Failure, Outcome, Run};
use crate::test::target;

/// A test, and the variable that sets its length.
struct Soak {
    name: &'static str,
    package: &'static str,
    filter: &'static str,
    variable: &'static str,
    amount: &'static str,
}

const fn soak_of(
    name: &'static str,
    package: &'static str,
    filter: &'static str,
    variable: &'static str,
    amount: &'static str,
) -> Soak {
    Soak { name, package, filter, variable, amount }
}

const SOAKS: [Soak; 13] = [
    soak_of("copies", "hapax-gateway", "copies::", "HAPAX_COPIED_KEYS", "200"),
    soak_of("bank", "hapax-bank", "kills::the", "HAPAX_KILLS", "3000"),
    soak_of("sagas", "hapax-saga", "ledger::ledger_and", "HAPAX_SAGA_KILLS", "3000"),
    soak_of("stalls", "hapax-kafka", "group::the_lag", "HAPAX_STALL_ROUNDS", "120"),
    soak_of(BROKERS, "hapax-kafka", "brokers::", "HAPAX_BROKER_KILLS", "100"),
    soak_of("standbys", "hapax-postgres", "standbys::", "HAPAX_DRILLS", "100"),
    soak_of("histories", "hapax-postgres", "histories", "HAPAX_OPERATIONS", "100000"),
    soak_of("histories", "hapax-redis", "histories", "HAPAX_OPERATIONS", "100000"),
    soak_of("flips", "hapax-file", "flips::", "HAPAX_FLIPS", "500"),
    soak_of("emptied", "hapax-file", "emptied::", "HAPAX_EMPTIED_ROUNDS", "100"),
    soak_of("emptied", "hapax-redis", "emptied::", "HAPAX_EMPTIED_ROUNDS", "100"),
    soak_of("emptied", "hapax-postgres", "emptied::", "HAPAX_EMPTIED_ROUNDS", "100"),
    soak_of("properties", "hapax-core", "", "PROPTEST_CASES", "10000"),
];

/// The soak that needs a Kafka broker which can be killed.
const BROKERS: &str = "brokers";

/// Returns the path of that broker. Installs it with cargo into the target folder if it is missing, which takes
/// some minutes.
fn tansu() -> Result<PathBuf, Failure> {
    let folder = target()?.join("tansu");
    let program = folder.join("bin/tansu");
    if !program.is_file() {
        let install = ["install", "tansu@0.6.0", "--locked", "--features", "libsql", "--root"];
        Run::cargo().args(install).args([&folder]).show()?;
    }
    Ok(program)
}

/// Runs the tests named `only`, or all of them.
pub(crate) fn soak(only: Option<&str>, seed: u64) -> Outcome {
    let chosen: Vec<&Soak> =
        SOAKS.iter().filter(|soak| only.is_none_or(|only| only == soak.name)).collect();
    if chosen.is_empty() {
        return Err(Failure::new("--only: expected a name of the list in `--help`"));
    }
    let mut failed = Vec::new();
    for Soak { name, package, filter, variable, amount } in chosen {
        let test =
            ["test", "--release", "--all-features", "--tests", "--package", package, "--", filter];
        // A filter without a match would succeed.
        if !names_a_test(&Run::cargo().args(test).args(["--list"]).read()?) {
            return Err(Failure::new(format!("{package} has no test named {filter:?}")));
        }
        // cargo's own harness: nextest would end a long test.
        let run = Run::cargo().args(test).args(["--nocapture", "--test-threads=1"]);
        let mut run = run.env(variable, *amount).env("HAPAX_SEED", seed.to_string());
        if *name == BROKERS {
            run = run.env("TANSU", tansu()?);
        }
        if run.show().is_err() {
            failed.push(format!("{name} ({package})"));
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("failed: {}", failed.join(", "))))
}

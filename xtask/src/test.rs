//! The command that runs all tests.

use std::path::PathBuf;

use serde_json::Value;

use std::num::NonZero;

use crate::setup::{self, Skip};
use crate::sh::{Failure, Outcome, Run};

const EVERYTHING: [&str; 2] = ["--workspace", "--all-features"];

/// The package whose tests run alone: they start many processes under load, and measure. For
/// nextest, .config/nextest.toml has the same rule.
const ALONE: &str = "hapax-cli";

/// Numbers of tests by result.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Count {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// Result of the tests outside of the documentation.
struct Tested {
    count: Count,
    /// Names of the tests that failed, and passed when they were repeated.
    flaky: Vec<String>,
    outcome: Outcome,
}

/// Variables that name servers which the set-up does not install, and the tests that need them.
const OPTIONAL: [(&str, &str); 2] = [
    ("KAFKA_BOOTSTRAP", "Kafka on a real cluster"),
    ("TANSU", "restarts and TLS of a Kafka broker"),
];

/// Runs every test, except those of the servers in `skip`.
pub(crate) fn run(skip: &Skip) -> Outcome {
    setup::run(skip)?;
    let Tested { count: programs, flaky, outcome: tested } = programs(skip)?;
    // Also after a failed test: one run shows everything that is broken.
    let (said, documented) =
        Run::cargo().args(["test", "--doc", "--no-fail-fast"]).args(EVERYTHING).tee();
    let outcome = tested.and(documented);
    let unset: Vec<_> =
        OPTIONAL.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    let verdict = verdict(skip, &unset, outcome.is_ok(), programs, Count::told(&said));
    let verdict = verdict + &repeated(&flaky);
    match outcome {
        Ok(()) => println!("\n{verdict}"),
        Err(failure) => return Err(Failure::new(format!("{failure}\n{verdict}"))),
    }
    Ok(())
}

/// Returns one thread more than there are cores: tests spend half of their time waiting for servers
/// and timers.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get) + 1
}

/// Runs all tests except those in the documentation.
fn programs(skip: &Skip) -> Result<Tested, Failure> {
    if Run::cargo().args(["nextest", "--version"]).succeeds() {
        // Nextest writes below the workspace, wherever cargo builds.
        let report = folder("workspace_root")?.join("target/nextest/default/junit.xml");
        // A report of an earlier run must not count.
        let _ = std::fs::remove_file(&report);
        let threads = format!("--test-threads={}", threads());
        let nextest =
            Run::cargo().args(["nextest", "run", "--tests"]).args(EVERYTHING).args([&threads]);
        // Incremental files cost a first build more time than they save a later one.
        let nextest = nextest.env("CARGO_INCREMENTAL", "0");
        let outcome = nextest.args(["--"]).args(skip.filter()).show();
        let text = std::fs::read_to_string(&report).unwrap_or_default();
        let count = Count::reported(&text);
        if outcome.is_ok() && count == Count::default() {
            let report = report.display();
            return Err(Failure::new(format!("nextest succeeded, but {report} has no tests")));
        }
        return Ok(Tested { count, flaky: flaky(&text), outcome });
    }
    let mut count = Count::default();
    for (which, threads) in [
        (["--workspace", "--exclude", ALONE].as_slice(), &[][..]),
        (&["--package", ALONE], &["--test-threads=1"]),
    ] {
        // Includes unit tests of libraries and programs. `--lib` would fail in a package without a
        // library.
        let test = Run::cargo().args(["test", "--tests", "--all-features"]);
        let (said, outcome) = test.args(which).args(["--"]).args(threads).args(skip.filter()).tee();
        count = count.and(Count::told(&said));
        if outcome.is_err() {
            return Ok(Tested { count, flaky: Vec::new(), outcome });
        }
    }
    Ok(Tested { count, flaky: Vec::new(), outcome: Ok(()) })
}

/// Returns the folder into which cargo builds.
pub(crate) fn target() -> Result<PathBuf, Failure> {
    folder("target_directory")
}

fn folder(name: &str) -> Result<PathBuf, Failure> {
    let metadata = Run::cargo().args(["metadata", "--format-version=1", "--no-deps"]).read()?;
    let metadata: Value = serde_json::from_str(&metadata)
        .map_err(|error| Failure::new(format!("cargo metadata is not JSON: {error}")))?;
    let missing = || Failure::new(format!("cargo metadata has no `{name}`"));
    metadata[name].as_str().map(PathBuf::from).ok_or_else(missing)
}

impl Count {
    fn and(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            ignored: self.ignored + other.ignored,
        }
    }

    /// Reads the output of `cargo test`: `test result: ok. 5 passed; 0 failed; 1 ignored; …`.
    fn told(said: &str) -> Self {
        let results = said.lines().filter_map(|line| line.strip_prefix("test result: "));
        results.fold(Self::default(), |count, result| {
            let words: Vec<_> = result.split([' ', ';', '.']).filter(|it| !it.is_empty()).collect();
            let before = |name: &str| {
                let at = words.iter().position(|word| *word == name).unwrap_or_default();
                words.get(at.wrapping_sub(1)).and_then(|word| word.parse().ok()).unwrap_or(0)
            };
            count.and(Self {
                passed: before("passed"),
                failed: before("failed"),
                ignored: before("ignored"),
            })
        })
    }

    /// Reads nextest's report, whose root element has all sums.
    fn reported(report: &str) -> Self {
        let root = report.split_once("<testsuites ").map_or("", |(_, rest)| rest);
        let root = root.split_once('>').map_or("", |(root, _)| root);
        let number = |name: &str| -> u64 {
            let value = root.split_once(&format!("{name}=\"")).map_or("", |(_, rest)| rest);
            value.split('"').next().and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        let (tests, failed) = (number("tests"), number("failures") + number("errors"));
        Self { passed: tests.saturating_sub(failed), failed, ignored: 0 }
    }
}

/// Returns the names of the tests that nextest reports as flaky.
fn flaky(report: &str) -> Vec<String> {
    let cases = report.split("<testcase ").skip(1);
    let flaky = cases
        .filter(|case| case.split("</testcase>").next().is_some_and(|it| it.contains("<flaky")));
    flaky
        .filter_map(|case| Some(case.split_once("name=\"")?.1.split('"').next()?.to_owned()))
        .collect()
}

/// Returns the part of the verdict about tests that passed only when they were repeated.
fn repeated(flaky: &[String]) -> String {
    match flaky {
        [] => String::new(),
        names => format!("; passed only when repeated: {}", names.join(", ")),
    }
}

/// Returns one line: which tests ran, how many passed, which were left out and why.
fn verdict(
    skip: &Skip,
    unset: &[(&str, &str)],
    succeeded: bool,
    programs: Count,
    documentation: Count,
) -> String {
    let all = programs.and(documentation);
    let word = if succeeded { "ok" } else { "FAILED" };
    let examples = format!("{} documentation examples", documentation.passed);
    let mut out = Vec::new();
    if !skip.is_empty() {
        out.push(format!("all tests of {}, because --skip said so", skip.joined()));
    }
    out.extend(unset.iter().map(|(name, what)| format!("{what}, because {name} is not set")));
    if all.ignored > 0 {
        out.push(format!("{} marked as ignored", all.ignored));
    }
    let out = if out.is_empty() { "nothing".to_owned() } else { out.join(", and ") };
    format!(
        "test {word}: {} tests passed, {} failed; {examples}; left out: {out}",
        programs.passed, all.failed
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_added_up() {
        let said = "running 7 tests\n\
            test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out\n\
            test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 4 filtered out\n";
        assert_eq!(Count::told(said), Count { passed: 6, failed: 3, ignored: 2 });
        assert_eq!(Count::told("nothing"), Count::default());
    }

    #[test]
    fn a_report_is_read() {
        let report = "<?xml version=\"1.0\"?>\n<testsuites name=\"nextest-run\" tests=\"47\" \
            failures=\"2\" errors=\"1\" time=\"1.5\">\n<testsuite tests=\"9\">";
        assert_eq!(Count::reported(report), Count { passed: 44, failed: 3, ignored: 0 });
        assert_eq!(Count::reported(""), Count::default());
    }

    #[test]
    fn flaky_tests_are_named() {
        let report = "<testsuite name=\"a\">\
            <testcase name=\"x::one\" classname=\"a\" time=\"0.1\"></testcase>\
            <testcase name=\"x::two\" classname=\"a\" time=\"0.1\">\
            <flakyFailure type=\"test failure\">name=\"no\"</flakyFailure></testcase>\
            <testcase name=\"x::three\" classname=\"a\" time=\"0.1\"></testcase></testsuite>";
        assert_eq!(flaky(report), ["x::two"]);
        assert_eq!(repeated(&flaky(report)), "; passed only when repeated: x::two");
        assert_eq!(repeated(&flaky("")), "");
    }

    #[test]
    fn the_verdict_says_all_of_it() {
        let count = |passed, failed| Count { passed, failed, ignored: 0 };
        assert_eq!(
            verdict(&Skip::default(), &[], true, count(5, 0), count(2, 0)),
            "test ok: 5 tests passed, 0 failed; 2 documentation examples; left out: nothing"
        );
        assert_eq!(
            verdict(&Skip::redis(), &OPTIONAL[1..], false, count(5, 1), count(2, 0)),
            "test FAILED: 5 tests passed, 1 failed; 2 documentation examples; left out: all \
             tests of redis, because --skip said so, and restarts and TLS of a Kafka broker, because \
             TANSU is not set"
        );
    }
}

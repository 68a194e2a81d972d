//! All tests.

use crate::Command;
use crate::setup::{self, Skip};
use crate::sh::{Outcome, Run};

pub(crate) const COMMAND: Command = Command {
    name: "test",
    summary: "run every test: libraries, programs, documentation",
    help: "Runs `setup` first. Uses cargo-nextest where it is installed, else `cargo test`.
A server that is missing fails its tests, unless it is skipped by name; then the last
lines of the output say so.

  --skip NAME,…   do without: redis, postgres",
    run: |args| {
        let skip = Skip::parse(args)?;
        args.finish()?;
        run(&skip)
    },
};

const EVERYTHING: [&str; 2] = ["--workspace", "--all-features"];

/// Its tests start many processes under load, and measure: nothing else runs beside them. For
/// nextest, its own configuration says so.
const ALONE: &str = "hapax-cli";

/// Runs every test but those of the servers in `skip`.
pub(crate) fn run(skip: &Skip) -> Outcome {
    setup::run(skip)?;
    let nextest = Run::cargo().args(["nextest", "--version"]).succeeds();
    if nextest {
        cargo(skip).args(["nextest", "run"]).args(EVERYTHING).show()?;
    } else {
        let test = || cargo(skip).args(["test", "--lib", "--bins", "--tests", "--all-features"]);
        test().args(["--workspace", "--exclude", ALONE]).show()?;
        test().args(["--package", ALONE, "--", "--test-threads=1"]).show()?;
    }
    cargo(skip).args(["test", "--doc"]).args(EVERYTHING).show()?;
    if !skip.is_empty() {
        println!("\nSKIPPED, because --skip said so: {}", skip.joined());
        println!("Nothing above says anything about them.");
    }
    Ok(())
}

fn cargo(skip: &Skip) -> Run {
    Run::cargo().env("HAPAX_SKIP", skip.joined())
}

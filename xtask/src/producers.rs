//! The frameworks of others that publish messages.

use crate::setup;
use crate::sh::{Outcome, Run};
use crate::test::target;

/// Runs the producers of tests/producers, or those named `only`. Installs their packages first.
pub(crate) fn run(messages: u32, only: &[String]) -> Outcome {
    setup::producers()?;
    // One build: the features of two packages differ from those of each alone.
    Run::cargo()
        .args(["build", "--package", "hapax-cli", "--package", "hapax-producers"])
        .args(["--features", "hapax-cli/kafka"])
        .show()?;
    let run = Run::new(target()?.join("debug/hapax-producers"));
    let run = run.args(["--messages", &messages.to_string()]);
    if only.is_empty() { run.show() } else { run.args(["--only", &only.join(",")]).show() }
}

//! Checks that do not run the product.

use crate::deps;
use crate::sh::{Failure, Outcome, Run};
use crate::sources;
use crate::words;

/// Length limit of a file, in lines.
const MAX_LINES: usize = 600;

/// Runs all checks, the quick ones first.
pub(crate) fn run() -> Outcome {
    words::run()?;
    lengths()?;
    Run::cargo().args(["fmt", "--all", "--check"]).show()?;
    Run::cargo().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]).show()?;
    deps::run()?;
    Run::cargo()
        .args(["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])
        .show()?;
    Run::cargo()
        .args(["doc", "--workspace", "--no-deps", "--all-features"])
        .env("RUSTDOCFLAGS", "-D warnings")
        .show()
}

fn lengths() -> Outcome {
    let long: Vec<String> = sources::all()?
        .iter()
        .map(|source| (source.text.lines().count(), source.path.display()))
        .filter(|(lines, _)| *lines > MAX_LINES)
        .map(|(lines, path)| format!("\n  {path}: {lines} lines"))
        .collect();
    if long.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("files of more than {MAX_LINES} lines:{}", long.concat())))
}

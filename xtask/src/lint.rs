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
    locks()?;
    deps::run()?;
    Run::cargo()
        .args(["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])
        .show()?;
    Run::cargo()
        .args(["doc", "--workspace", "--no-deps", "--all-features"])
        .env("RUSTDOCFLAGS", "-D warnings")
        .show()
}

/// Compares the lock files of the workspaces beside this one with their manifests, by which they
/// depend on its crates. Nothing is downloaded but the index.
fn locks() -> Outcome {
    let benches = ["census", "claims", "client", "cost", "engines", "flood", "sagas", "slow"]
        .map(|name| format!("bench/{name}"));
    for folder in benches.into_iter().chain(["fuzz".to_owned()]) {
        let manifest = format!("{folder}/Cargo.toml");
        let update = ["update", "--quiet", "--workspace", "--locked", "--manifest-path"];
        Run::cargo().args(update).args([&manifest]).show().map_err(|failure| {
            let mend = format!("cargo update --workspace --manifest-path {manifest}");
            Failure::new(format!("{failure}\n{folder}/Cargo.lock is out of date: run `{mend}`"))
        })?;
    }
    Ok(())
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

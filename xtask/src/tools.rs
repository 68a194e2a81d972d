//! Tools that are not part of Rust, each built once, into `target/tools`.

use std::fs;
use std::path::PathBuf;

use crate::setup::on_path;
use crate::sh::{Failure, Outcome, Run, root};

/// Checks the licences, sources and bans of all dependencies, and the direction of ours.
pub(crate) fn deny() -> Outcome {
    let deny = tool("cargo-deny", "0.20.2")?;
    Run::new(&deny).args(["check", "licenses", "sources", "bans"]).show()?;
    // Tests may depend on any of our crates.
    let directions = ["--config", "xtask/directions.toml", "--exclude-dev", "check", "bans"];
    Run::new(&deny).args(directions).show()
}

/// Runs fuzz targets for `seconds` each: all of them, or only `only`.
pub(crate) fn fuzz(seconds: u32, only: Option<&str>) -> Outcome {
    if !on_path("c++") {
        return Err(Failure::new("fuzzing needs a C++ compiler: apt-get install -y g++"));
    }
    if !Run::new("rustup").args(["run", "nightly", "rustc", "--version"]).succeeds() {
        Run::new("rustup")
            .args(["toolchain", "install", "nightly", "--profile", "minimal"])
            .show()?;
    }
    let fuzz = tool("cargo-fuzz", "0.13.2")?;
    // `rustup run` replaces the toolchain of this process, which the environment would pass on.
    let cargo_fuzz = |args: &[&str]| {
        let fuzz = fuzz.to_string_lossy().into_owned();
        Run::new("rustup").args(["run", "nightly", fuzz.as_str()]).args(args)
    };
    let targets = cargo_fuzz(&["list"]).read()?;
    let targets: Vec<&str> =
        targets.lines().filter(|name| only.is_none_or(|only| only == *name)).collect();
    if targets.is_empty() {
        return Err(Failure::new("there is no such fuzz target"));
    }
    let limit = format!("-max_total_time={seconds}");
    for target in targets {
        let corpus = format!("fuzz/corpus/{target}");
        let seeds = format!("fuzz/seeds/{target}");
        fs::create_dir_all(root().join(&corpus))
            .map_err(|error| Failure::new(format!("cannot create {corpus}: {error}")))?;
        cargo_fuzz(&[
            "run",
            target,
            &corpus,
            &seeds,
            "--",
            &limit,
            "-timeout=10",
            "-verbosity=0",
            "-print_final_stats=1",
        ])
        .show()?;
    }
    Ok(())
}

/// Returns the program `name` in this version: the installed one, or one that is built now.
fn tool(name: &str, version: &str) -> Result<PathBuf, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Some(found) =
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file())
    {
        return Ok(found);
    }
    let tools = root().join("target/tools");
    let built = tools.join("bin").join(name);
    if !built.is_file() {
        // A target folder of its own survives an interrupted build. Optimising it takes longer than what it then does.
        Run::cargo()
            .args(["install", "--locked", "--root", "target/tools", "--version", version, name])
            .env("CARGO_TARGET_DIR", tools.join("build"))
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .show()?;
    }
    Ok(built)
}

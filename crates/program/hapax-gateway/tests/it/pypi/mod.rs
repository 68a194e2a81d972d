//! The gateway seen by clients that others wrote, from PyPI.

mod grpc;
mod stripe;

use std::path::Path;
use std::process::Command;

/// What runs `script` of `tests/pypi`.
fn python(script: &str) -> Command {
    let python = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("pypi/bin/python");
    assert!(
        python.exists(),
        "the clients from PyPI are missing: `cargo xtask setup` installs them, `cargo xtask test \
         --skip pypi` does without"
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pypi").join(script);
    let mut run = Command::new(python);
    run.arg("-I").arg(script).env_clear();
    run
}

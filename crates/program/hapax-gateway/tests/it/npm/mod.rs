//! The gateway seen by clients that others wrote, from npm.

mod stripe;

use std::path::Path;
use std::process::Command;

/// A command that runs `script` of `tests/npm`.
fn node(script: &str) -> Command {
    let clients = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("npm/node_modules");
    assert!(
        clients.join("stripe").exists(),
        "the clients from npm are missing: `cargo xtask setup` installs them, `cargo xtask test \
         --skip npm` leaves their tests out"
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/npm").join(script);
    let mut run = Command::new("node");
    // The scripts are beside the tests, the packages in the target folder.
    run.arg(script).env("NODE_PATH", clients).env_remove("NODE_OPTIONS");
    for proxy in ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"] {
        run.env_remove(proxy);
    }
    run
}

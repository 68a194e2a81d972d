//! The recipes of `docs/clients.md`: each is a process that pays through a gateway on a file.

mod faults;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use faults::pays_once_under_each_fault;
use serde_json::Value;

use crate::world::installed;

mod npm {
    use super::*;

    #[test]
    fn fetch_pays_once_under_each_fault() {
        pays_once_under_each_fault(|| node("pay_fetch.js"));
    }

    #[test]
    fn axios_pays_once_under_each_fault() {
        pays_once_under_each_fault(|| node("pay_axios.js"));
    }

    #[test]
    fn stripes_sdk_for_node_pays_once_under_each_fault() {
        pays_once_under_each_fault(|| node("pay_stripe.js"));
    }
}

mod pypi {
    use super::*;

    #[test]
    fn httpx_with_tenacity_pays_once_under_each_fault() {
        pays_once_under_each_fault(|| python("pay_httpx.py"));
    }

    #[test]
    fn stripes_sdk_for_python_pays_once_under_each_fault() {
        pays_once_under_each_fault(|| python("pay_stripe.py"));
    }
}

mod go {
    use super::*;

    #[test]
    fn net_http_pays_once_under_each_fault() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("pay");
        build(&program);
        pays_once_under_each_fault(move || clean(&program));
    }
}

/// Each block of code that follows the name of a recipe in a comment is a part of that recipe.
#[test]
fn the_page_shows_parts_of_the_recipes() {
    let page = std::fs::read_to_string(repository().join("docs/clients.md")).unwrap();
    let mut shown = page.split("<!-- examples/clients/").skip(1).map(|rest| {
        let (name, rest) = rest.split_once(" -->\n```").unwrap();
        let (_, block) = rest.split_once('\n').unwrap();
        (name, block.split_once("\n```").unwrap().0)
    });
    let mut names: Vec<_> = Vec::new();
    shown.by_ref().for_each(|(name, block)| {
        let recipe = std::fs::read_to_string(recipes().join(name)).unwrap();
        assert!(recipe.contains(block), "{name} has no such part:\n{block}");
        names.push(name);
    });
    for entry in recipes().read_dir().unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.starts_with("pay") || names.contains(&&*name), "{name} is not shown");
    }
}

fn node(recipe: &str) -> Command {
    let mut node = clean(Path::new("node"));
    // The recipes are in the examples, the packages in the target folder.
    node.env("NODE_PATH", installed("npm").join("node_modules")).arg(recipes().join(recipe));
    node
}

fn python(recipe: &str) -> Command {
    let mut python = clean(&installed("pypi").join("bin/python"));
    python.arg("-B").arg(recipes().join(recipe));
    python
}

/// Builds the recipe for Go, without modules.
fn build(program: &Path) {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("go");
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(program).args(["pay.go", "operation.go"]);
    go.current_dir(recipes()).env("GO111MODULE", "off").env("GOPATH", &cache);
    go.env("GOCACHE", cache.join("cache")).env_remove("GOFLAGS");
    let built = go.output().expect(
        "Go is missing: `cargo xtask setup` installs it, `cargo xtask test --skip go` does without",
    );
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// A command without anything from outside, such as a proxy.
fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

fn recipes() -> PathBuf {
    repository().join("examples/clients")
}

/// A running recipe; killed when it is dropped.
struct Client(Option<Child>);

impl Client {
    fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    fn is_running(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    fn ended(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Returns the status and the body that it printed.
    fn printed(self) -> (u16, Value) {
        let Output { status, stdout, stderr } = self.ended();
        let (stdout, stderr) = [stdout, stderr].map(|it| String::from_utf8(it).unwrap()).into();
        assert!(status.success() && stderr.is_empty(), "{stdout}\n{stderr}");
        let (status, body) = stdout.split_once(' ').unwrap();
        (status.parse().unwrap(), serde_json::from_str(body).unwrap())
    }

    /// Returns the error that it printed.
    fn failed(self) -> String {
        let Output { status, stdout, stderr } = self.ended();
        assert!(!status.success(), "{}", String::from_utf8_lossy(&stdout));
        String::from_utf8(stderr).unwrap()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            // Why it sent nothing, if the test waited for it.
            let output = child.wait_with_output().unwrap();
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

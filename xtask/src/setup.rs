//! Programs and clients that the tests need.

use std::path::{Path, PathBuf};

use crate::sh::{Failure, Outcome, Run, root};
use crate::test::target;

/// Servers and clients that tests can do without.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Part {
    Nats,
    Rabbitmq,
    Redis,
    Postgres,
    Pypi,
    Npm,
    Go,
    Strace,
}

/// Servers and clients that the caller leaves out.
#[derive(Default, Debug, clap::Args)]
pub(crate) struct Skip {
    /// Leave out these, and their tests
    #[arg(long = "skip", value_name = "NAME,…", value_delimiter = ',')]
    parts: Vec<Part>,
}

impl Skip {
    fn leaves_out(&self, what: &str) -> bool {
        self.names().any(|name| name == what)
    }

    fn names(&self) -> impl Iterator<Item = String> {
        self.parts.iter().map(|part| format!("{part:?}").to_lowercase())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the names as a list.
    pub(crate) fn joined(&self) -> String {
        self.names().collect::<Vec<_>>().join(", ")
    }

    /// Returns the options that make a test runner skip these tests: they are in modules of these
    /// names.
    pub(crate) fn filter(&self) -> impl Iterator<Item = String> {
        self.names().flat_map(|name| ["--skip".to_owned(), format!("{name}::")])
    }

    #[cfg(test)]
    pub(crate) fn redis() -> Self {
        Self { parts: vec![Part::Redis] }
    }
}

struct Need {
    what: &'static str,
    package: &'static str,
    is_there: fn() -> bool,
}

const NEEDS: [Need; 17] = [
    Need { what: "nats", package: "nats-server", is_there: || on_path("nats-server") },
    Need { what: "rabbitmq", package: "rabbitmq-server", is_there: || on_path("rabbitmq-server") },
    Need { what: "redis", package: "redis-server", is_there: || on_path("redis-server") },
    Need { what: "postgres", package: "postgresql", is_there: postgres_is_there },
    Need { what: "postgres", package: "pgbouncer", is_there: || on_path("pgbouncer") },
    Need { what: "python3", package: "python3", is_there: || on_path("python3") },
    Need { what: "pypi", package: "python3-venv", is_there: makes_environments },
    Need { what: "npm", package: "nodejs", is_there: || on_path("node") },
    Need { what: "npm", package: "npm", is_there: || on_path("npm") },
    // Serves in front of a gateway that has a Node service behind it.
    Need { what: "npm", package: "nginx-light", is_there: || on_path("nginx") },
    Need { what: "go", package: "golang-go", is_there: || on_path("go") },
    Need { what: "strace", package: "strace", is_there: || on_path("strace") },
    // librdkafka, and its TLS.
    Need { what: "make", package: "make", is_there: || on_path("make") },
    Need { what: "openssl", package: "pkg-config", is_there: || on_path("pkg-config") },
    Need {
        what: "openssl",
        package: "libssl-dev",
        is_there: || Path::new("/usr/include/openssl/ssl.h").exists(),
    },
    Need { what: "curl", package: "curl", is_there: || on_path("curl") },
    // The program `kill`: tests send signals with it.
    Need { what: "kill", package: "procps", is_there: || on_path("kill") },
];

/// Installs everything that is missing, except `skip`.
pub(crate) fn run(skip: &Skip) -> Outcome {
    packages(skip)?;
    if !skip.leaves_out("pypi") {
        clients_from_pypi()?;
    }
    if skip.leaves_out("npm") { Ok(()) } else { clients_from_npm() }
}

/// Installs the system packages that are missing.
fn packages(skip: &Skip) -> Outcome {
    let packages = missing(skip);
    if packages.is_empty() {
        return Ok(());
    }
    let install = format!("apt-get update && apt-get install -y {}", packages.join(" "));
    if !on_path("apt-get") {
        let packages = packages.join(", ");
        return Err(Failure::new(format!(
            "missing: {packages} (Debian's names); install them, or leave servers out with --skip"
        )));
    }
    if !is_root() {
        return Err(Failure::new(format!(
            "system packages are missing; install them, or leave servers out with --skip:\n\
             sudo sh -c '{install}'"
        )));
    }
    apt_get(&["update"])?;
    apt_get(
        &["install", "-y", "--no-install-recommends"]
            .into_iter()
            .chain(packages.iter().copied())
            .collect::<Vec<_>>(),
    )?;
    if packages.contains(&"rabbitmq-server") && on_path("systemctl") {
        // Tests start their own nodes. Its service would keep a hundred megabytes, and a port.
        Run::new("systemctl").args(["disable", "--now", "rabbitmq-server"]).succeeds();
    }
    match missing(skip).as_slice() {
        [] => Ok(()),
        rest => Err(Failure::new(format!("installed, but still not found: {}", rest.join(", ")))),
    }
}

fn missing(skip: &Skip) -> Vec<&'static str> {
    let wanted = NEEDS.iter().filter(|need| !skip.leaves_out(need.what));
    wanted.filter(|need| !(need.is_there)()).map(|need| need.package).collect()
}

/// Installs the clients from PyPI where their tests look for them, unless these versions are there.
fn clients_from_pypi() -> Outcome {
    let wanted = root().join("crates/program/hapax-gateway/tests/pypi/requirements.txt");
    from_pypi(&wanted, &target()?.join("pypi"))
        .map_err(|failure| left_out(&failure, "PyPI", "--skip pypi"))
}

/// Installs the clients from npm where their tests look for them, unless they are there.
fn clients_from_npm() -> Outcome {
    let manifests = root().join("crates/program/hapax-gateway/tests/npm");
    from_npm(&manifests, &target()?.join("npm"))
        .map_err(|failure| left_out(&failure, "npm", "--skip npm"))
}

fn left_out(failure: &Failure, registry: &str, skip: &str) -> Failure {
    Failure::new(format!("{failure}\nclients from {registry}: leave them out with {skip}"))
}

/// Installs the frameworks of the step `producers`, and everything that the tests need.
pub(crate) fn producers() -> Outcome {
    run(&Skip::default())?;
    let (manifests, folder) = (root().join("tests/producers"), target()?.join("producers"));
    from_pypi(&manifests.join("requirements.txt"), &folder.join("pypi"))?;
    from_npm(&manifests, &folder.join("npm"))
}

/// Installs the packages of a file of requirements into a virtual environment, unless it has these versions.
fn from_pypi(wanted: &Path, folder: &Path) -> Outcome {
    let unreadable = |error| Failure::new(format!("{}: {error}", wanted.display()));
    let text = std::fs::read_to_string(wanted).map_err(unreadable)?;
    // Written last: its presence means that every step before it succeeded.
    let done = folder.join("installed.txt");
    if std::fs::read_to_string(&done).is_ok_and(|installed| installed == text) {
        return Ok(());
    }
    Run::new("python3").args(["-m", "venv", "--clear"]).args([folder]).show()?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
    Run::new(folder.join("bin/python")).args(install).args([wanted]).show()?;
    std::fs::write(&done, text)
        .map_err(|error| Failure::new(format!("{}: {error}", done.display())))
}

/// Installs the packages of a lock file of npm into a folder, unless they are there.
fn from_npm(manifests: &Path, folder: &Path) -> Outcome {
    let failed = |path: &Path, error| Failure::new(format!("{}: {error}", path.display()));
    let lock = manifests.join("package-lock.json");
    let wanted = std::fs::read_to_string(&lock).map_err(|error| failed(&lock, error))?;
    // Written last: its presence means that every step before it succeeded.
    let done = folder.join("installed.json");
    if std::fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    for name in ["package.json", "package-lock.json"] {
        let (from, to) = (manifests.join(name), folder.join(name));
        std::fs::copy(&from, &to).map_err(|error| failed(&from, error))?;
    }
    let install = ["ci", "--ignore-scripts", "--omit=peer", "--no-audit", "--no-fund", "--prefix"];
    Run::new("npm").args(install).args([folder]).show()?;
    std::fs::write(&done, wanted).map_err(|error| failed(&done, error))
}

fn makes_environments() -> bool {
    Run::new("python3").args(["-c", "import ensurepip, venv"]).succeeds()
}

fn apt_get(args: &[&str]) -> Outcome {
    Run::new("apt-get").args(args).env("DEBIAN_FRONTEND", "noninteractive").show()
}

fn is_root() -> bool {
    Run::new("id").args(["-u"]).read().is_ok_and(|id| id.trim() == "0")
}

/// Returns whether `program` is installed.
pub(crate) fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // The paths of some users lack the folders of servers.
    let more = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(more).any(|folder| folder.join(program).is_file())
}

/// Returns whether PostgreSQL's server is installed. Debian has its programs outside the path, in a
/// folder for each version.
fn postgres_is_there() -> bool {
    let Ok(versions) = Path::new("/usr/lib/postgresql").read_dir() else {
        return on_path("postgres");
    };
    versions.flatten().any(|version| version.path().join("bin/postgres").is_file())
        || on_path("postgres")
}

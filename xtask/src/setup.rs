//! What the tests need from the system.

use std::path::{Path, PathBuf};

use crate::Command;
use crate::args::Args;
use crate::sh::{Failure, Outcome, Run};

pub(crate) const COMMAND: Command = Command {
    name: "setup",
    summary: "install the system packages that the tests need",
    help: "Looks for Redis, PostgreSQL, PgBouncer, Python 3, curl and kill. What is missing is
installed with apt-get when this runs as root; otherwise the line to run is printed, and the command
fails. Does nothing where all is there. The servers are only installed: tests start
their own, on ports of their own.

  --skip NAME,…   do without: redis, postgres",
    run: |args| {
        let skip = Skip::parse(args)?;
        args.finish()?;
        run(&skip)
    },
};

/// Servers that the caller chose to do without.
#[derive(Default)]
pub(crate) struct Skip(Vec<String>);

impl Skip {
    const SERVERS: [&str; 2] = ["redis", "postgres"];

    pub(crate) fn parse(args: &mut Args) -> Result<Self, Failure> {
        let names: String = args.value("--skip")?.unwrap_or_default();
        let names: Vec<String> =
            names.split(',').filter(|name| !name.is_empty()).map(String::from).collect();
        match names.iter().find(|name| !Self::SERVERS.contains(&name.as_str())) {
            Some(name) => Err(Failure::usage(format!(
                "--skip does not know `{name}`, only {}",
                Self::SERVERS.join(", ")
            ))),
            None => Ok(Self(names)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their names, in a list.
    pub(crate) fn joined(&self) -> String {
        self.0.join(", ")
    }

    /// What a test runner is told: their tests are in modules of their names.
    pub(crate) fn filter(&self) -> impl Iterator<Item = String> {
        self.0.iter().flat_map(|name| ["--skip".to_owned(), format!("{name}::")])
    }

    #[cfg(test)]
    pub(crate) fn of(names: &[&str]) -> Self {
        Self(names.iter().map(|name| (*name).to_owned()).collect())
    }
}

struct Need {
    what: &'static str,
    package: &'static str,
    is_there: fn() -> bool,
}

const NEEDS: [Need; 6] = [
    Need { what: "redis", package: "redis-server", is_there: || on_path("redis-server") },
    Need { what: "postgres", package: "postgresql", is_there: postgres_is_there },
    Need { what: "postgres", package: "pgbouncer", is_there: || on_path("pgbouncer") },
    Need { what: "python3", package: "python3", is_there: || on_path("python3") },
    Need { what: "curl", package: "curl", is_there: || on_path("curl") },
    // The program: tests send signals with it.
    Need { what: "kill", package: "procps", is_there: || on_path("kill") },
];

/// Makes sure that everything but `skip` is there.
pub(crate) fn run(skip: &Skip) -> Outcome {
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
            .chain(packages)
            .collect::<Vec<_>>(),
    )?;
    match missing(skip).as_slice() {
        [] => Ok(()),
        rest => Err(Failure::new(format!("installed, but still not found: {}", rest.join(", ")))),
    }
}

fn missing(skip: &Skip) -> Vec<&'static str> {
    let wanted = NEEDS.iter().filter(|need| !skip.0.iter().any(|name| name == need.what));
    wanted.filter(|need| !(need.is_there)()).map(|need| need.package).collect()
}

fn apt_get(args: &[&str]) -> Outcome {
    Run::new("apt-get").args(args).env("DEBIAN_FRONTEND", "noninteractive").show()
}

fn is_root() -> bool {
    Run::new("id").args(["-u"]).read().is_ok_and(|id| id.trim() == "0")
}

/// Whether `program` can be run.
pub(crate) fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Some users' paths leave out the folders of servers.
    let more = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(more).any(|folder| folder.join(program).is_file())
}

/// Debian keeps the server's programs off the path, in a folder for each version.
fn postgres_is_there() -> bool {
    let Ok(versions) = Path::new("/usr/lib/postgresql").read_dir() else {
        return on_path("postgres");
    };
    versions.flatten().any(|version| version.path().join("bin/postgres").is_file())
        || on_path("postgres")
}

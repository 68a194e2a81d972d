//! The machine: its cores, its load.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use hapax_bench_cost::Any;
use serde::Serialize;

/// Core of the measured process.
const SERVER_CORE: usize = 0;

/// Core of the load generator, the upstream and servers of databases.
const LOAD_CORE: usize = 1;

/// Whether processes are pinned to cores.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pinning {
    pinned: bool,
}

impl Pinning {
    /// Pins this process, and so all that it starts, if the machine has two cores and `taskset`.
    ///
    /// # Errors
    /// `taskset` fails.
    pub(crate) fn of_this_machine() -> Result<Self, Any> {
        let cores = std::thread::available_parallelism()?.get();
        if cores < 2 || !is_installed("taskset") {
            return Ok(Self { pinned: false });
        }
        let own = std::process::id().to_string();
        let status = Command::new("taskset")
            .args(["--cpu-list", "--pid", &LOAD_CORE.to_string(), &own])
            .stdout(Stdio::null())
            .status()?;
        if !status.success() {
            return Err(format!("taskset: {status}").into());
        }
        Ok(Self { pinned: true })
    }

    /// Returns a command for a process that is measured.
    pub(crate) fn server(self, program: impl AsRef<OsStr>) -> Command {
        if !self.pinned {
            return Command::new(program);
        }
        // It replaces itself by the program, which therefore has its process id.
        let mut command = Command::new("taskset");
        command.args(["--cpu-list", &SERVER_CORE.to_string()]).arg(program);
        command
    }

    /// Returns the words by which programs of this benchmark know the cores.
    pub(crate) fn words(self) -> Vec<String> {
        match self.pinned {
            true => {
                let cores = [("--core", SERVER_CORE), ("--load-core", LOAD_CORE)];
                cores.iter().flat_map(|(name, core)| [(*name).into(), core.to_string()]).collect()
            }
            false => vec![],
        }
    }

    pub(crate) const fn describe(self) -> &'static str {
        match self.pinned {
            true => {
                "pinned: the server (or the swapping process) to core 0; load generator, upstream \
                 and databases to core 1"
            }
            false => "not pinned: the machine has one core, or no taskset",
        }
    }
}

/// Returns whether `program` is on the path, or where Debian has servers.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/usr/local/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(more).any(|folder| folder.join(program).is_file())
}

/// Returns the load averages of one, five and fifteen minutes.
///
/// # Errors
/// The system is not Linux.
pub(crate) fn load_average() -> Result<String, Any> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').take(3).collect::<Vec<_>>().join(" "))
}

/// Returns the name of the processor, if the system states it.
pub(crate) fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(": ")).map(|(_, name)| name);
    name.unwrap_or("unknown").to_owned()
}

//! Further processes of a test: its own program is started again to play a role.

use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

/// The variable by which a process gets its role: the argument of the role.
const ROLE: &str = "HAPAX_CLIENT_ROLE";

/// Prefix of the lines of a role; it distinguishes them from those of the test harness.
const PREFIX: &str = "role: ";

/// Returns the argument of the role of this process; `None` if it runs the tests.
pub(crate) fn argument() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Says a line to the process that runs the test.
pub(crate) fn say(line: &str) {
    let mut out = io::stdout().lock();
    // The harness leaves its lines unfinished.
    writeln!(out, "\n{PREFIX}{line}").unwrap();
    out.flush().unwrap();
}

/// Returns the command that runs a test of this program, and nothing else, in its role.
pub(crate) fn command(program: &str, arguments: &[&str], test: &str, argument: &str) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, argument).stdout(Stdio::piped()).stdin(Stdio::piped());
    command
}

/// Returns the path of this program.
pub(crate) fn program() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// A process with a role; killed when it is dropped.
pub(crate) struct Role {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Role {
    pub(crate) fn start(test: &str, argument: &str) -> Self {
        Self::of(command(program().to_str().unwrap(), &[], test, argument))
    }

    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Self { child, said }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line of the role; `None` once the process has ended.
    pub(crate) fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.said.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.strip_prefix(PREFIX) {
                return Some(said.trim_end().to_owned());
            }
            line.clear();
        }
        None
    }

    /// Waits for the end of a process; returns what it said.
    pub(crate) fn ends_well(mut self) -> Vec<String> {
        let said = std::iter::from_fn(|| self.next()).collect();
        assert!(self.child.wait().unwrap().success());
        said
    }

    /// Kills the process (SIGKILL).
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! Runs programs from the workspace's root, without standard input.

use std::ffi::OsStr;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Result of a command.
pub(crate) type Outcome = Result<(), Failure>;

/// Reason for which a command failed, as text for the user.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the workspace's root.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// A program to run.
pub(crate) struct Run {
    command: Command,
    shown: String,
}

impl Run {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let program = program.as_ref();
        let name = Path::new(program).file_name().unwrap_or(program);
        let mut command = Command::new(program);
        command.current_dir(root()).stdin(Stdio::null());
        Self { command, shown: name.to_string_lossy().into_owned() }
    }

    /// Returns the cargo that runs this program.
    pub(crate) fn cargo() -> Self {
        Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    pub(crate) fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        for arg in args {
            self.shown.push(' ');
            self.shown.push_str(&arg.as_ref().to_string_lossy());
            self.command.arg(arg);
        }
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Prints the command line, runs it, and shows its output.
    pub(crate) fn show(mut self) -> Outcome {
        eprintln!("xtask: {}", self.shown);
        let status = self.command.status();
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Failure::new(format!("`{}` ended with {status}", self.shown))),
            Err(error) => Err(Failure::new(format!("`{}` did not start: {error}", self.shown))),
        }
    }

    /// Does the same as [`show`](Self::show), and returns what the program writes to standard
    /// output.
    pub(crate) fn tee(mut self) -> (String, Outcome) {
        eprintln!("xtask: {}", self.shown);
        let mut seen = String::new();
        let status = self.command.stdout(Stdio::piped()).spawn().and_then(|mut child| {
            if let Some(out) = child.stdout.take() {
                for line in BufReader::new(out).split(b'\n') {
                    let line = line?;
                    let mut shown = std::io::stdout().lock();
                    shown.write_all(&line)?;
                    shown.write_all(b"\n")?;
                    seen.push_str(&String::from_utf8_lossy(&line));
                    seen.push('\n');
                }
            }
            child.wait()
        });
        let outcome = match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Failure::new(format!("`{}` ended with {status}", self.shown))),
            Err(error) => Err(Failure::new(format!("`{}` did not run: {error}", self.shown))),
        };
        (seen, outcome)
    }

    /// Returns whether the program runs and succeeds; drops its output.
    pub(crate) fn succeeds(mut self) -> bool {
        self.command.stdout(Stdio::null()).stderr(Stdio::null());
        self.command.status().is_ok_and(|status| status.success())
    }

    /// Returns what the program writes to standard output.
    pub(crate) fn read(mut self) -> Result<String, Failure> {
        self.command.stderr(Stdio::inherit());
        let output = self
            .command
            .output()
            .map_err(|error| Failure::new(format!("`{}` did not start: {error}", self.shown)))?;
        if !output.status.success() {
            return Err(Failure::new(format!("`{}` ended with {}", self.shown, output.status)));
        }
        String::from_utf8(output.stdout)
            .map_err(|_| Failure::new(format!("`{}` wrote something else than text", self.shown)))
    }
}

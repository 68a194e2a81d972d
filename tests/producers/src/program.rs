//! Processes: producers, and the program `hapax`.

use std::path::PathBuf;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::broker::Outcome;

/// Returns the folder of the packages and logs, `producers` in the target folder.
pub(crate) fn folder() -> Outcome<PathBuf> {
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(2).ok_or("expected this program in a target folder")?;
    Ok(target.join("producers"))
}

/// Returns the program `hapax` beside this one.
fn hapax() -> Outcome<Command> {
    let program = std::env::current_exe()?.with_file_name("hapax");
    if !program.is_file() {
        return Err(format!("expected {}: run `cargo xtask producers`", program.display()).into());
    }
    let mut command = Command::new(program);
    command.kill_on_drop(true).stdin(Stdio::null());
    Ok(command)
}

/// Runs a producer, and returns what it printed last.
pub(crate) async fn produce(script: &str, arguments: &[&str]) -> Outcome<String> {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(script);
    let folder = folder()?;
    let mut command = match script.extension().is_some_and(|it| it == "py") {
        true => Command::new(folder.join("pypi/bin/python")),
        false => Command::new("node"),
    };
    command.arg(&script).args(arguments).env("NODE_PATH", folder.join("npm/node_modules"));
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("the producer ended with {}: {error}{said}", output.status).into());
    }
    Ok(said.lines().last().unwrap_or_default().to_owned())
}

/// Runs `hapax` with these words, and returns what it printed.
pub(crate) async fn run(words: &[&str]) -> Outcome<String> {
    let output = hapax()?.args(words).output().await?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let said: Vec<_> = said.lines().filter(|line| line.contains(" not redriven")).collect();
        return Err(
            format!("hapax ended with {}: {error}{}", output.status, said.join("\n")).into()
        );
    }
    Ok(said)
}

/// A running `hapax consume`, whose log is a file.
pub(crate) struct Consumer(Child);

impl Consumer {
    /// Starts one.
    pub(crate) async fn start(log: &str, flags: &[String]) -> Outcome<Self> {
        let logs = folder()?.join("logs");
        tokio::fs::create_dir_all(&logs).await?;
        let mut file = tokio::fs::File::create(logs.join(format!("{log}.json"))).await?;
        let fixed = ["consume", "--admin", "127.0.0.1:0", "--log-format", "json"];
        let mut command = hapax()?;
        let mut child = command.args(fixed).args(flags).stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take().ok_or("expected its log")?;
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if file.write_all(format!("{line}\n").as_bytes()).await.is_err() {
                    break;
                }
            }
        });
        Ok(Self(child))
    }

    /// Returns an error if it has ended.
    pub(crate) fn check(&mut self) -> Outcome<()> {
        match self.0.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("hapax consume ended with {status}: see its log").into()),
        }
    }

    /// Shuts it down.
    pub(crate) async fn end(mut self) -> Outcome<()> {
        let id = self.0.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        kill_process(id.ok_or("hapax consume has ended: see its log")?, Signal::TERM)?;
        let status = self.0.wait().await?;
        match status.success() {
            true => Ok(()),
            false => Err(format!("hapax consume ended with {status}: see its log").into()),
        }
    }
}

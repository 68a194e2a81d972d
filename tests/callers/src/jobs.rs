//! Jobs of a crontab: `hapax call` in eight processes at the same time, on one journal, which are killed (SIGKILL) at
//! instants that the seed selects, and whose credentials change and change back.
//!
//! Each of eight workers runs every operation until it has the response, each run with the other one of two tokens.
//! The server in Stripe's manner takes the token as a part of the key, so that a try with another token is a second
//! effect.
//!
//! 1. Each operation has one effect.
//! 2. Each worker has the response of each operation, all are equal, and are that of its effect.
//! 3. No operation is left without a response.
//! 4. All kills have happened. If the server stalls after the effect of the first operation, its first call is killed
//!    between that effect and the response, and a call with the other token is rejected before the workers begin.

use std::collections::BTreeSet;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::PostgresServer;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::effects::EffectLines;
use crate::fault::CallFault;
use crate::process::{Process, free_port};
use crate::{CallsError, CallsStore, ServerKind, failed, name};

/// Processes at the same time.
const WORKERS: u64 = 8;

/// The longest time after which a process is killed, in milliseconds.
const KILLED_WITHIN: u64 = 150;

/// Time for which a call waits for its response: less than the server stalls.
const WAIT: &str = "1s";

/// Options of a run of jobs.
#[derive(Clone, Debug)]
pub struct JobsOptions {
    /// The program of this package, which runs as the server.
    pub program: PathBuf,
    /// The program `hapax`.
    pub hapax: PathBuf,
    /// Store of the journal.
    pub journal: CallsStore,
    /// Number of operations.
    pub operations: u64,
    /// Number of kills of calls.
    pub kills: u64,
    /// Seed of the choices.
    pub seed: u64,
    /// Whether the calls declare the server as scoped by account, which it is not: a deliberate error.
    pub plant: bool,
    /// Time within which the run must end.
    pub limit: Duration,
}

/// Counts and violations of a run of jobs.
#[derive(Clone, Debug, Default)]
pub struct JobsReport {
    /// Calls that ended or were killed.
    pub runs: u64,
    /// Calls that were killed.
    pub kills: u64,
    /// Calls that were killed between the effect of their operation and its response; not counted among the others.
    pub kills_unanswered: u64,
    /// Calls that were rejected because of their token.
    pub rejected: u64,
    /// Effects.
    pub effects: u64,
    /// Seconds of the run.
    pub seconds: u64,
    /// Violations.
    pub violations: Vec<String>,
}

impl fmt::Display for JobsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in [
            ("calls", self.runs),
            ("kills of calls", self.kills),
            ("kills after an effect, unanswered", self.kills_unanswered),
            ("calls with the other token", self.rejected),
            ("effects", self.effects),
            ("seconds", self.seconds),
        ] {
            writeln!(f, "{name:<36}{count:>8}")?;
        }
        self.violations.iter().try_for_each(|violation| writeln!(f, "VIOLATION: {violation}"))
    }
}

/// Runs jobs under kills, and checks effects and responses.
///
/// # Errors
/// [`CallsError`] if a server or a process cannot be driven.
pub async fn run_jobs(options: &JobsOptions) -> Result<JobsReport, CallsError> {
    let begun = Instant::now();
    let (jobs, deadline) = (Arc::new(Jobs::start(options).await?), begun + options.limit);
    let fault = CallFault::of(ServerKind::Stripe, options.seed, &name(0));
    let stalls = fault == Some(CallFault::StallAfter);
    if stalls {
        jobs.kill_after_effect(0, "one").await?;
        while jobs.call(0, "two", None).await?.status.code() == Some(75) {}
    }
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let jobs = Arc::clone(&jobs);
        workers.spawn(async move { jobs.work(worker, deadline).await });
    }
    let mut report = JobsReport::default();
    let mut answers = vec![BTreeSet::new(); index(options.operations)];
    while let Some(done) = workers.join_next().await {
        for (number, answer) in done.map_err(failed("working"))??.into_iter().enumerate() {
            match answer {
                Answer::Response(response) => _ = answers[number].insert(response),
                Answer::None(last) => {
                    let name = name(number as u64);
                    report.violations.push(format!("{name} was not answered: {last}"));
                }
            }
        }
    }
    jobs.check(&answers, &mut report).await?;
    if stalls && !options.plant && report.rejected == 0 {
        report.violations.push("no call was rejected because of its token".to_owned());
    }
    if stalls && report.kills_unanswered == 0 {
        report.violations.push("no call was killed between effect and response".to_owned());
    }
    report.seconds = begun.elapsed().as_secs();
    Ok(report)
}

/// The response of an operation: exit code and body.
type Response = (Option<i32>, String);

/// Result of an operation at a worker.
enum Answer {
    Response(Response),
    /// The end of its last call.
    None(String),
}

struct Jobs {
    options: JobsOptions,
    folder: TempDir,
    postgres: Option<PostgresServer>,
    url: String,
    _server: Process,
    kills_left: AtomicU64,
    runs: AtomicU64,
    kills: AtomicU64,
    kills_unanswered: AtomicU64,
    rejected: AtomicU64,
}

impl Jobs {
    async fn start(options: &JobsOptions) -> Result<Self, CallsError> {
        let folder = tempfile::tempdir().map_err(failed("creating a folder"))?;
        let postgres = match options.journal {
            CallsStore::File => None,
            CallsStore::Postgres => Some(PostgresServer::start().await),
        };
        if let Some(postgres) = &postgres {
            postgres.create_database("journal").await;
            let secret = std::fs::write(folder.path().join("secret"), "5c".repeat(32));
            secret.map_err(failed("writing a secret"))?;
        }
        let (port, path) = (free_port()?, |name: &str| folder.path().join(name));
        let arguments = ["serve", "--kind", "stripe", "--port"].map(str::to_owned).into_iter();
        let arguments = arguments.chain([
            port.to_string(),
            "--effects".to_owned(),
            path("effects").display().to_string(),
            "--seed".to_owned(),
            options.seed.to_string(),
        ]);
        let server = Process::start(&options.program, arguments.collect(), path("server.log"))?;
        Ok(Self {
            options: options.clone(),
            url: format!("http://127.0.0.1:{port}/payments"),
            folder,
            postgres,
            _server: server,
            kills_left: AtomicU64::new(options.kills),
            runs: AtomicU64::new(0),
            kills: AtomicU64::new(0),
            kills_unanswered: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
        })
    }

    /// Runs every operation until it has a response, and then any until all kills have happened.
    async fn work(&self, worker: u64, deadline: Instant) -> Result<Vec<Answer>, CallsError> {
        let operations = self.options.operations;
        let dice = SeededEntropy::new(self.options.seed ^ (worker << 32));
        let mut answers: Vec<_> =
            (0..operations).map(|_| Answer::None("it was not called".to_owned())).collect();
        for number in (worker..worker + operations).map(|number| number % operations) {
            // Each run has the other token.
            for token in (worker..).map(|run| ["one", "two"][index(run % 2)]) {
                let output = self.call(number, token, Some(&dice)).await?;
                if let Some(response) = response(&output) {
                    answers[index(number)] = Answer::Response(response);
                    break;
                }
                let error = String::from_utf8_lossy(&output.stderr);
                answers[index(number)] = Answer::None(format!("{}: {error}", output.status));
                if Instant::now() > deadline {
                    break;
                }
            }
        }
        while self.kills_left.load(Ordering::Relaxed) > 0 && Instant::now() <= deadline {
            self.call(dice.below(operations), "one", Some(&dice)).await?;
        }
        Ok(answers)
    }

    /// Runs a call, and kills it at random, with `dice`, while kills are left.
    async fn call(
        &self,
        number: u64,
        token: &str,
        dice: Option<&SeededEntropy>,
    ) -> Result<Output, CallsError> {
        let mut child = self.spawn(number, token)?;
        let dice = dice.filter(|_| self.kills_left.load(Ordering::Relaxed) > 0);
        if let Some(dice) = dice.filter(|dice| dice.below(2) == 0)
            && let after = Duration::from_millis(dice.below(KILLED_WITHIN))
            && timeout(after, child.wait()).await.is_err()
        {
            child.start_kill().map_err(failed("killing a call"))?;
        }
        let output = child.wait_with_output().await.map_err(failed("waiting for a call"))?;
        if output.status.signal().is_some() {
            self.kills.fetch_add(1, Ordering::Relaxed);
            let one_less = |left: u64| Some(left.saturating_sub(1));
            let _ = self.kills_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        }
        self.rejected.fetch_add(u64::from(output.status.code() == Some(77)), Ordering::Relaxed);
        Ok(output)
    }

    /// Runs a call whose response stalls, without others at the same time, and kills it once its operation has its
    /// effect.
    async fn kill_after_effect(&self, number: u64, token: &str) -> Result<(), CallsError> {
        const LOOK: Duration = Duration::from_millis(5);
        let mut child = self.spawn(number, token)?;
        while timeout(LOOK, child.wait()).await.is_err() {
            let effects = self.lines()?.effects;
            if effects.iter().any(|effect| effect.name == name(number)) {
                child.start_kill().map_err(failed("killing a call"))?;
                break;
            }
        }
        let output = child.wait_with_output().await.map_err(failed("waiting for a call"))?;
        let killed = u64::from(output.status.signal().is_some());
        self.kills_unanswered.fetch_add(killed, Ordering::Relaxed);
        Ok(())
    }

    /// Starts a call of an operation.
    fn spawn(&self, number: u64, token: &str) -> Result<Child, CallsError> {
        let name = name(number);
        let mut command = self.hapax(&["--name", &name, "--server", "stripe", "--data", &name]);
        command.args(["--wait", WAIT, "--lease", "1s", "--header-env", "authorization=TOKEN"]);
        if self.options.plant {
            command.arg("--scoped-by-account");
        }
        command.args(["POST", &self.url]).env("TOKEN", format!("Bearer {token}"));
        let child = command.spawn().map_err(failed("starting a call"))?;
        self.runs.fetch_add(1, Ordering::Relaxed);
        Ok(child)
    }

    /// Returns the effects so far.
    fn lines(&self) -> Result<EffectLines, CallsError> {
        let lines = EffectLines::read(&self.folder.path().join("effects"));
        lines.map_err(failed("reading the effects"))
    }

    /// Returns `hapax call` on the journal, with nothing from outside.
    fn hapax(&self, arguments: &[&str]) -> Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(&self.options.hapax);
        command.arg("call").args(arguments).args(["--lock-wait", "60s"]).env_clear();
        match &self.postgres {
            None => command.env("HAPAX_JOURNAL", path("journal")),
            Some(postgres) => command
                .env("HAPAX_JOURNAL", postgres.url("journal"))
                .env("HAPAX_JOURNAL_NAMESPACE", "jobs")
                .env("HAPAX_JOURNAL_SECRET_FILE", path("secret")),
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        command
    }

    async fn check(
        &self,
        answers: &[BTreeSet<Response>],
        report: &mut JobsReport,
    ) -> Result<(), CallsError> {
        let lines = self.lines()?;
        for (number, answers) in answers.iter().enumerate() {
            let name = name(number as u64);
            let effects = lines.effects.iter().filter(|effect| effect.name == name);
            let effects: Vec<_> = effects.collect();
            let [effect] = effects[..] else {
                report.violations.push(format!("{name} has {} effects", effects.len()));
                continue;
            };
            let code = if (200..300).contains(&effect.status) { 0 } else { 22 };
            let expected = BTreeSet::from([(Some(code), effect.body())]);
            if !answers.is_empty() && *answers != expected {
                report.violations.push(format!("{name} has other answers: {answers:?}"));
            }
        }
        let list = self.hapax(&["list", "--pending"]).output().await;
        let list = list.map_err(failed("listing the journal"))?;
        let list = String::from_utf8_lossy(&list.stdout);
        if list != "no operations\n" {
            report.violations.push(format!("operations are left: {list}"));
        }
        report.runs = self.runs.load(Ordering::Relaxed);
        report.kills = self.kills.load(Ordering::Relaxed);
        report.kills_unanswered = self.kills_unanswered.load(Ordering::Relaxed);
        report.rejected = self.rejected.load(Ordering::Relaxed);
        report.effects = lines.effects.len() as u64;
        if report.kills < self.options.kills {
            report.violations.push(format!("expected {} kills", self.options.kills));
        }
        Ok(())
    }
}

/// Returns the response that a call printed; `None` without one.
fn response(output: &Output) -> Option<Response> {
    let code = output.status.code().filter(|code| [0, 22].contains(code))?;
    Some((Some(code), String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Returns a number of an operation as a position.
fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

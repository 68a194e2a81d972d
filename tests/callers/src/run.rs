//! A run: processes, kills, the second run of the clients, and the check at the end.

use std::path::PathBuf;
use std::time::Duration;

use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::PostgresServer;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::check::{Answers, check, share};
use crate::effects::EffectLines;
use crate::process::{Process, free_port};
use crate::report::CallsReport;
use crate::service::GATEWAY_WAITS;
use crate::{CallsError, CallsOptions, CallsStore, PlantedCallBug, ServerKind, failed};

/// Clients.
pub(crate) const CLIENTS: u64 = 3;

/// Interval at which processes and progress are observed.
const EVERY: Duration = Duration::from_millis(20);

/// The longest time for which a killed process is away.
const AWAY: Duration = Duration::from_millis(600);

/// Time within which an operation is tried in the first run: less than a killed gateway's lease, so that
/// some end without an answer.
const FIRST_WITHIN: Duration = Duration::from_secs(2);

/// Percentage of the effects at which the clients of the first run are killed for good.
const FIRST_ENDS: u64 = 95;

/// Lease of the gateway.
const LEASE: &str = "2s";

/// Starts that may fail in succession.
const FAILED_STARTS: u64 = 20;

/// Runs clients under faults, and checks effects and answers.
///
/// # Errors
/// [`CallsError`] if a server or a process cannot be driven.
pub async fn run(options: &CallsOptions) -> Result<CallsReport, CallsError> {
    let mut run = Run::start(options).await?;
    let begun = Instant::now();
    run.clients(0, FIRST_WITHIN)?;
    run.drive(Some(run.plan())).await?;
    run.report.seconds.0 = begun.elapsed().as_secs();
    let begun = Instant::now();
    run.clients(1, options.within)?;
    run.drive(None).await?;
    run.report.seconds.1 = begun.elapsed().as_secs();
    run.check()?;
    Ok(run.report)
}

/// A process that is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Client,
    Gateway,
    Service,
}

struct Run<'a> {
    options: &'a CallsOptions,
    folder: TempDir,
    postgres: Option<PostgresServer>,
    dice: SeededEntropy,
    /// Origin of the clients' server.
    server: String,
    service: Process,
    gateway: Option<Process>,
    clients: Vec<Process>,
    /// Clients that have sent all of their operations.
    done: Vec<bool>,
    report: CallsReport,
}

impl<'a> Run<'a> {
    async fn start(options: &'a CallsOptions) -> Result<Self, CallsError> {
        let folder = tempfile::tempdir().map_err(failed("creating a folder"))?;
        let postgres = match (options.records, options.journal) {
            (CallsStore::File, CallsStore::File) => None,
            _ => Some(PostgresServer::start().await),
        };
        if let Some(postgres) = &postgres {
            postgres.create_database("records").await;
            postgres.create_database("journal").await;
        }
        let (service_port, port) = (free_port()?, free_port()?);
        let path = |name: &str| folder.path().join(name);
        let text = |name: &str| path(name).display().to_string();
        let mut arguments = words(&["serve", "--kind", kind(options.kind)]);
        arguments.extend(["--port".to_owned(), service_port.to_string()]);
        arguments.extend(["--effects".to_owned(), text("effects")]);
        arguments.extend(["--seed".to_owned(), options.seed.to_string()]);
        arguments.extend(plant(options.plant));
        let service = Process::start(&options.program, arguments, path("service.log"))?;
        let upstream = format!("http://127.0.0.1:{service_port}");
        let (gateway, server) = match options.kind {
            ServerKind::Stripe => (None, upstream),
            ServerKind::Hapax => {
                let store = match (options.records, &postgres) {
                    (CallsStore::Postgres, Some(postgres)) => postgres.url("records"),
                    _ => format!("file:{}", text("records")),
                };
                let listen = format!("127.0.0.1:{port}");
                let hook = format!("{upstream}/outcome");
                let mut arguments =
                    words(&["gateway", "--listen", &listen, "--admin", "off", "--namespace", ""]);
                arguments.extend(words(&["--upstream", &upstream, "--store", &store]));
                arguments.extend(words(&["--on-unknown", "reconcile", "--reconcile-url", &hook]));
                arguments.extend(words(&["--lease", LEASE, "--upstream-timeout", GATEWAY_WAITS]));
                if options.records == CallsStore::Postgres {
                    let secret = "5c".repeat(32);
                    std::fs::write(path("secret"), secret).map_err(failed("writing a secret"))?;
                    arguments.extend(words(&["--secret-file", &text("secret")]));
                    arguments.extend(words(&["--audit-file", &text("audit")]));
                }
                let gateway = Process::start(&options.hapax, arguments, path("gateway.log"))?;
                (Some(gateway), format!("http://{listen}"))
            }
        };
        let report = CallsReport {
            seed: options.seed,
            operations: options.operations,
            ..CallsReport::default()
        };
        Ok(Self {
            options,
            folder,
            postgres,
            dice: SeededEntropy::new(options.seed),
            server,
            service,
            gateway,
            clients: Vec::new(),
            done: Vec::new(),
            report,
        })
    }

    /// Starts the clients of a run.
    fn clients(&mut self, run: u8, within: Duration) -> Result<(), CallsError> {
        let options = self.options;
        self.clients.clear();
        for client in 0..CLIENTS {
            let journal = match (options.journal, &self.postgres) {
                (CallsStore::Postgres, Some(postgres)) => postgres.url("journal"),
                _ => self.path(&format!("journal-{client}")).display().to_string(),
            };
            let mut arguments = words(&["call", "--kind", kind(options.kind)]);
            arguments.extend(words(&["--server", &self.server, "--journal", &journal]));
            let answers = self.answers(run, client).display().to_string();
            arguments.extend(words(&["--answers", &answers]));
            for (name, number) in [
                ("--operations", options.operations),
                ("--share", share(options)),
                ("--first", client),
                ("--seed", options.seed),
                ("--within", u64::try_from(within.as_millis()).unwrap_or(u64::MAX)),
            ] {
                arguments.extend([name.to_owned(), number.to_string()]);
            }
            arguments.extend(plant(options.plant));
            let log = self.path(&format!("client-{client}.log"));
            self.clients.push(Process::start(&options.program, arguments, log)?);
        }
        self.done = vec![false; self.clients.len()];
        Ok(())
    }

    /// Returns the kills, each with the number of effects at which it is due, the last one first.
    fn plan(&self) -> Vec<(u64, Victim)> {
        let mut plan = Vec::new();
        let victims: &[_] = match self.options.kind {
            ServerKind::Hapax => &[Victim::Client, Victim::Gateway, Victim::Service],
            ServerKind::Stripe => &[Victim::Client, Victim::Service],
        };
        for _ in 0..self.options.kills {
            for victim in victims {
                plan.push((self.dice.below(self.options.operations * 9 / 10), *victim));
            }
        }
        plan.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        plan
    }

    /// Starts what has ended, until all clients have sent their operations. With a plan, kills by it, and
    /// ends once it is carried out and the clients have most of their effects.
    async fn drive(&mut self, mut plan: Option<Vec<(u64, Victim)>>) -> Result<(), CallsError> {
        let deadline = Instant::now() + self.options.limit;
        while self.done.contains(&false) {
            self.observe()?;
            if let Some(plan) = &mut plan {
                let effects = self.effects()?.effects.len() as u64;
                match plan.last().copied() {
                    Some((at, victim)) if effects >= at => {
                        plan.pop();
                        self.kill(victim).await?;
                    }
                    None if effects * 100 >= self.options.operations * FIRST_ENDS => {
                        for client in &mut self.clients {
                            client.kill(deadline).await?;
                        }
                        break;
                    }
                    _ => {}
                }
            }
            if Instant::now() > deadline {
                let text = format!("the clients did not end: done {:?}", self.done);
                self.report.violations.push(text);
                break;
            }
            sleep(EVERY).await;
        }
        Ok(())
    }

    /// Starts processes that have ended. A client that has succeeded is done.
    fn observe(&mut self) -> Result<(), CallsError> {
        for (client, done) in self.clients.iter_mut().zip(&mut self.done) {
            if *done {
                continue;
            }
            match client.ended()? {
                Some(status) if status.success() => *done = true,
                ended => {
                    self.report.failed_starts += u64::from(ended.is_some());
                    client.restart()?;
                }
            }
        }
        for server in self.gateway.iter_mut().chain([&mut self.service]) {
            self.report.failed_starts += u64::from(server.ended()?.is_some());
            server.restart()?;
        }
        if self.report.failed_starts > FAILED_STARTS + self.options.kills {
            let mut logs = self.clients.iter().chain(&self.gateway).chain([&self.service]);
            let logs: Vec<_> = logs.by_ref().map(Process::log).collect();
            return Err(failed("starting processes")(logs.join("\n---\n")));
        }
        Ok(())
    }

    async fn kill(&mut self, victim: Victim) -> Result<(), CallsError> {
        let away = self.dice.below(u64::try_from(AWAY.as_millis()).unwrap_or(u64::MAX));
        let until = Instant::now() + Duration::from_millis(away);
        let (process, count) = match victim {
            Victim::Service => (Some(&mut self.service), &mut self.report.service_kills),
            Victim::Gateway => (self.gateway.as_mut(), &mut self.report.gateway_kills),
            Victim::Client => {
                let first = self.dice.below(CLIENTS) as usize;
                let at = (first..first + self.clients.len()).map(|at| at % self.clients.len());
                let at = at.into_iter().find(|at| !self.done[*at] && self.clients[*at].runs());
                (at.map(|at| &mut self.clients[at]), &mut self.report.client_kills)
            }
        };
        if let Some(process) = process {
            *count += u64::from(process.kill(until).await?);
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), CallsError> {
        let lines = self.effects()?;
        let mut runs = [Vec::new(), Vec::new()];
        for (run, answers) in (0..).zip(&mut runs) {
            for client in 0..CLIENTS {
                let read = Answers::read(&self.answers(run, client));
                answers.push(read.map_err(failed("reading the answers"))?);
            }
        }
        check(self.options, &lines, &runs, &mut self.report);
        Ok(())
    }

    fn effects(&self) -> Result<EffectLines, CallsError> {
        EffectLines::read(&self.path("effects")).map_err(failed("reading the effects"))
    }

    fn answers(&self, run: u8, client: u64) -> PathBuf {
        self.path(&format!("answers-{run}-{client}"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn kind(kind: ServerKind) -> &'static str {
    match kind {
        ServerKind::Hapax => "hapax",
        ServerKind::Stripe => "stripe",
    }
}

fn plant(plant: Option<PlantedCallBug>) -> Vec<String> {
    let name = match plant {
        None => return Vec::new(),
        Some(PlantedCallBug::NewKeys) => "new-keys",
        Some(PlantedCallBug::ForgetJournal) => "forget-journal",
        Some(PlantedCallBug::DenyEffects) => "deny-effects",
        Some(PlantedCallBug::ForgetKeys) => "forget-keys",
        Some(PlantedCallBug::CannotSay) => "cannot-say",
    };
    words(&["--plant", name])
}

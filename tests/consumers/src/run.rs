//! A run: servers, messages, consumers, faults, and the check at the end.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use hapax_file::{FileOptions, FileStore};
use hapax_testkit::SeededEntropy;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::servers::PostgresServer;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, NoTls};

use crate::broker::{Broker, id};
use crate::consumer::LEASE;
use crate::database::TABLES;
use crate::faults::{Fault, FaultKind, marker};
use crate::report::ConsumersReport;
use crate::{ConsumerMode, ConsumersError, ConsumersOptions, failed};

/// Interval at which processes and progress are observed.
const EVERY: Duration = Duration::from_millis(50);

/// Time for which a process freezes at least: longer than its lease and than the broker waits.
const FREEZE: Duration = LEASE.saturating_mul(2);

/// The same in batch mode, where a frozen transaction has its messages: longer than another process
/// would take to use up their attempts.
const BATCH_FREEZE: Duration = Duration::from_secs(15);

/// Time that another process has to write the effect of a frozen one.
const OVERTAKE: Duration = Duration::from_secs(60);

/// Time for which the broker is away.
const BROKER_AWAY: Duration = Duration::from_secs(2);

/// Exit status of a consumer that could not start.
pub(crate) const NOT_STARTED: i32 = 75;

/// Violations of one kind that are listed.
const LISTED: i64 = 5;

/// Runs the consumers of a mode under faults, and checks their effects.
///
/// # Errors
/// [`ConsumersError`] if a server or a consumer cannot be driven.
pub async fn run(options: &ConsumersOptions) -> Result<ConsumersReport, ConsumersError> {
    let mut run = Run::start(options).await?;
    run.publish().await?;
    run.drive().await?;
    run.end().await?;
    Ok(run.report)
}

struct Run<'a> {
    options: &'a ConsumersOptions,
    folder: TempDir,
    database: PostgresServer,
    observer: Client,
    proxy: FaultProxy,
    broker: Broker,
    dice: SeededEntropy,
    faults: Vec<Fault>,
    consumers: Vec<Option<Child>>,
    /// Freezes that happened, and the process and its time while it is frozen.
    frozen: HashMap<Fault, Option<(i32, Instant)>>,
    report: ConsumersReport,
}

impl<'a> Run<'a> {
    async fn start(options: &'a ConsumersOptions) -> Result<Self, ConsumersError> {
        let folder = tempfile::tempdir().map_err(failed("creating a folder"))?;
        std::fs::create_dir(folder.path().join("happened")).map_err(failed("creating a folder"))?;
        let (database, broker) =
            (PostgresServer::start().await, Broker::start(options.broker).await?);
        database
            .sql("postgres", &hapax_postgres_messages::message_migrations(&Default::default()))
            .await;
        database.sql("postgres", TABLES).await;
        let proxy = FaultProxy::before(database.address(), options.seed).await;
        let proxy = proxy.map_err(failed("starting the proxy"))?;
        let observer = connect(&database).await?;
        let dice = SeededEntropy::new(options.seed);
        let faults = plan(options, &dice);
        let consumers = (0..options.mode.consumers()).map(|_| None).collect();
        let (frozen, report) = (HashMap::new(), ConsumersReport::default());
        Ok(Self {
            options,
            folder,
            database,
            observer,
            proxy,
            broker,
            dice,
            faults,
            consumers,
            frozen,
            report,
        })
    }

    /// Publishes every message, and some of them a second time, anywhere later.
    async fn publish(&mut self) -> Result<(), ConsumersError> {
        let mut numbers: Vec<_> = (0..self.options.messages).collect();
        for number in 0..self.options.messages {
            if self.dice.below(100) < self.options.duplicates {
                let place = self.dice.below(numbers.len() as u64 + 1);
                numbers.insert(usize::try_from(place).unwrap_or(0), number);
            }
        }
        self.broker.publish(&numbers).await?;
        self.report.published = numbers.len() as u64;
        Ok(())
    }

    async fn drive(&mut self) -> Result<(), ConsumersError> {
        let deadline = Instant::now() + self.options.limit;
        let mut calm_since = None;
        loop {
            self.observe_processes()?;
            self.thaw().await?;
            let done = self.distinct().await? * 100 / self.options.messages;
            self.lose_replies();
            if self.report.broker_restarts == 0 && done >= 20 {
                self.broker.restart(BROKER_AWAY).await;
                self.report.broker_restarts += 1;
            }
            if self.report.outages == 0 && done >= 40 {
                self.outage().await?;
            }
            // The broker's figures lag behind, so they have to stay at zero for a time.
            if self.broker.backlog().await > 0 {
                calm_since = None;
            } else if calm_since.get_or_insert_with(Instant::now).elapsed() > LEASE {
                return Ok(());
            }
            if Instant::now() > deadline {
                let left = self.broker.backlog().await;
                self.violation(format!("the broker still has {left} messages to deliver"));
                return Ok(());
            }
            sleep(EVERY).await;
        }
    }

    /// Restarts consumers that have ended.
    fn observe_processes(&mut self) -> Result<(), ConsumersError> {
        for at in 0..self.consumers.len() {
            let ended = match &mut self.consumers[at] {
                Some(child) => match child.try_wait().map_err(failed("observing a consumer"))? {
                    Some(status) => status,
                    None => continue,
                },
                None => {
                    self.consumers[at] = Some(self.spawn()?);
                    continue;
                }
            };
            self.note_end(ended);
            self.consumers[at] = None;
        }
        Ok(())
    }

    fn note_end(&mut self, status: ExitStatus) {
        match (status.signal(), status.code()) {
            (Some(9), _) => self.report.kills += 1,
            (_, Some(NOT_STARTED)) => self.report.failed_starts += 1,
            _ => self.violation(format!("a consumer ended by itself: {status}\n{}", self.log())),
        }
    }

    fn spawn(&self) -> Result<Child, ConsumersError> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path("log"));
        let port = self.proxy.address().port();
        let mut command = Command::new(&self.options.program);
        command
            .args(["consume", "--mode", self.options.mode.name(), "--broker", &self.broker.url()])
            .arg("--database")
            .arg(
                self.database
                    .url("postgres")
                    .replace(&format!(":{}/", self.database.port()), &format!(":{port}/")),
            )
            .arg("--store")
            .arg(self.path("records"))
            .arg("--happened")
            .arg(self.path("happened"))
            .args(self.faults.iter().flat_map(|fault| ["--fault".to_owned(), fault.to_string()]))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.map_err(failed("opening the log"))?)
            .kill_on_drop(true);
        if let Some(plant) = self.options.plant {
            command.args(["--plant", plant.name()]);
        }
        command.spawn().map_err(failed("starting a consumer"))
    }

    /// Lets frozen processes continue, once another has written the effect where one can.
    async fn thaw(&mut self) -> Result<(), ConsumersError> {
        for fault in self.faults.iter().filter(|fault| fault.kind.is_freeze()) {
            if self.frozen.contains_key(fault) {
                continue;
            }
            if let Some(process) = happened(&self.path("happened"), fault) {
                self.frozen.insert(fault.clone(), Some((process, Instant::now())));
                self.report.freezes += 1;
            }
        }
        let frozen = self.frozen.iter().filter_map(|(fault, at)| Some((fault.clone(), (*at)?)));
        let frozen: Vec<_> = frozen.collect();
        let freeze = match self.options.mode {
            ConsumerMode::Batch => BATCH_FREEZE,
            _ => FREEZE,
        };
        for (fault, (process, since)) in &frozen {
            let text = "SELECT count(*) FROM effects WHERE id = $1 AND process <> $2";
            let takeovers = self.query(text, &[&fault.id, process]).await? > 0;
            let waits = can_be_overtaken(self.options.mode, fault.kind)
                && frozen.len() < self.consumers.len()
                && since.elapsed() < OVERTAKE;
            if since.elapsed() < freeze || (waits && !takeovers) {
                continue;
            }
            self.report.takeovers += u64::from(takeovers);
            if let Some(pid) = Pid::from_raw(*process) {
                // It may have been killed meanwhile.
                let _ = kill_process(pid, Signal::CONT);
            }
            self.frozen.insert(fault.clone(), None);
        }
        Ok(())
    }

    /// Drops replies of the database until the run has enough of them.
    fn lose_replies(&mut self) {
        self.report.lost_replies = self.proxy.counts().lost_replies;
        let (commits, rate) = match self.options.mode {
            ConsumerMode::ClaimsFile | ConsumerMode::ClaimsPostgres => (&b""[..], 20),
            ConsumerMode::Transaction | ConsumerMode::Batch => (&b"COMMIT"[..], 100),
        };
        let enough = self.report.lost_replies >= self.options.kills;
        self.proxy.only(commits);
        let lose_reply = if enough { 0 } else { rate };
        self.proxy.set(FaultProxyRates { lose_reply, ..FaultProxyRates::default() });
    }

    /// Takes the store away: the database is killed, or another process opens the file.
    async fn outage(&mut self) -> Result<(), ConsumersError> {
        let end = Instant::now() + self.options.outage;
        if self.options.mode == ConsumerMode::ClaimsFile {
            if let Some(mut consumer) = self.consumers[0].take() {
                consumer.kill().await.map_err(failed("killing the consumer"))?;
                self.report.kills += 1;
            }
            let store = FileStore::open(FileOptions::new(self.path("records")));
            let store = store.map_err(failed("opening the store"))?;
            while Instant::now() < end {
                self.observe_processes()?;
                sleep(EVERY * 10).await;
            }
            store.close().await;
        } else {
            self.database.kill().await;
            while Instant::now() < end {
                self.observe_processes()?;
                sleep(EVERY * 10).await;
            }
            self.database.restart().await;
            self.observer = connect(&self.database).await?;
        }
        self.report.outages += 1;
        Ok(())
    }

    async fn end(&mut self) -> Result<(), ConsumersError> {
        let mut consumers = std::mem::take(&mut self.consumers);
        for child in consumers.iter_mut().flatten() {
            let id = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
            if let Some(pid) = id {
                let _ = kill_process(pid, Signal::CONT);
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        for mut child in consumers.into_iter().flatten() {
            match timeout(Duration::from_secs(40), child.wait()).await {
                Ok(Ok(status)) if status.success() => {}
                // A fault of a message that it handled last.
                Ok(Ok(status)) if status.signal() == Some(9) => self.report.kills += 1,
                Ok(Ok(status)) => self.violation(format!("SIGTERM ended a consumer with {status}")),
                Ok(Err(error)) => return Err(failed("waiting for a consumer")(error)),
                Err(_) => {
                    self.violation("a consumer did not end within 40 s of SIGTERM".to_owned())
                }
            }
        }
        self.check().await
    }

    async fn check(&mut self) -> Result<(), ConsumersError> {
        self.report.effects = self.query("SELECT count(*) FROM effects", &[]).await?;
        let messages = i64::try_from(self.options.messages).unwrap_or(i64::MAX);
        let twice = "SELECT id FROM effects GROUP BY id HAVING count(*) > 1 LIMIT $1";
        let missing = "SELECT 'm-' || number FROM generate_series(0, $2::bigint - 1) AS number
            WHERE NOT EXISTS (SELECT FROM effects WHERE id = 'm-' || number) LIMIT $1";
        let parked =
            "SELECT reason || ': ' || coalesce(error, '') FROM hapax_dead_letters LIMIT $1";
        let rows = self.observer.query(twice, &[&LISTED]).await.map_err(failed("reading"))?;
        for row in rows {
            self.violation(format!("{} has more than one effect", row.get::<_, String>(0)));
        }
        let rows = self.observer.query(missing, &[&LISTED, &messages]).await;
        for row in rows.map_err(failed("reading"))? {
            self.violation(format!("{} has no effect", row.get::<_, String>(0)));
        }
        let rows = self.observer.query(parked, &[&LISTED]).await.map_err(failed("reading"))?;
        for row in rows {
            self.violation(format!("a dead letter: {}", row.get::<_, String>(0)));
        }
        // A fault at one message may be out of reach: if the reply to its effect was lost, the hook
        // has its outcome, and its handler does not get to the end.
        let folder = self.path("happened");
        for kind in FaultKind::ALL {
            let planned = self.faults.iter().filter(|fault| fault.kind == kind);
            if planned.filter_map(|fault| happened(&folder, fault)).next().is_none() {
                self.violation(format!("no {kind} happened"));
            }
        }
        let mut want = vec![
            ("restart of the broker", self.report.broker_restarts),
            ("outage of the store", self.report.outages),
            ("reply that was dropped", self.report.lost_replies),
        ];
        if self.options.mode != ConsumerMode::ClaimsFile {
            want.push(("frozen process that another overtook", self.report.takeovers));
        }
        for (what, count) in want {
            if count == 0 {
                self.violation(format!("the run had no {what}"));
            }
        }
        Ok(())
    }

    async fn distinct(&self) -> Result<u64, ConsumersError> {
        self.query("SELECT count(DISTINCT id) FROM effects", &[]).await
    }

    async fn query(
        &self,
        text: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<u64, ConsumersError> {
        let row = self.observer.query_one(text, parameters).await.map_err(failed("counting"))?;
        Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or(0))
    }

    fn violation(&mut self, text: String) {
        self.report.violations.push(text);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the last lines that the consumers wrote.
    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

/// Returns whether another process can write the effect of a message at which one is frozen.
fn can_be_overtaken(mode: ConsumerMode, kind: FaultKind) -> bool {
    match mode {
        ConsumerMode::ClaimsFile => false,
        ConsumerMode::ClaimsPostgres | ConsumerMode::Transaction => true,
        // In the handler, its transaction is open, and has the id.
        ConsumerMode::Batch => kind == FaultKind::FreezeReceived,
    }
}

/// Selects the messages of faults. Each has one at most.
fn plan(options: &ConsumersOptions, dice: &SeededEntropy) -> Vec<Fault> {
    let mut free: Vec<_> = (0..options.messages).collect();
    let mut faults = Vec::new();
    for kind in FaultKind::ALL {
        let times = if kind.is_freeze() { options.kills.div_ceil(2) } else { options.kills };
        for _ in 0..times.min(free.len() as u64) {
            let place = usize::try_from(dice.below(free.len() as u64)).unwrap_or(0);
            faults.push(Fault { kind, id: id(free.swap_remove(place)) });
        }
    }
    faults
}

/// Returns the id of the process in which a fault has happened.
fn happened(folder: &Path, fault: &Fault) -> Option<i32> {
    std::fs::read_to_string(marker(folder, fault)).ok()?.parse().ok()
}

async fn connect(database: &PostgresServer) -> Result<Client, ConsumersError> {
    let connected = tokio_postgres::connect(&database.url("postgres"), NoTls).await;
    let (client, connection) = connected.map_err(failed("connecting"))?;
    tokio::spawn(connection);
    Ok(client)
}

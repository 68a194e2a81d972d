//! The run of one set-up: its processes, its clients, the kills and the count.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_operators::AdminToken;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};

use super::DemoError;
use super::client::{ClientPool, PaymentEnd, PaymentOutcome};
use super::ledger;
use super::plan::{Plan, Random};
use super::process::{Listens, Process, Recipe};
use super::progress::Progress;
use super::report::{Kills, Row};
use super::times;

/// The number of clients that pay at the same time.
const CLIENTS: u32 = 8;

/// The kind of gateway between the clients and the payments service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Setup {
    /// No gateway.
    NoGateway,
    /// The gateway with this `--on-unknown`.
    Reexecute,
    /// The gateway with this `--on-unknown`.
    Block,
    /// The gateway with this `--on-unknown`, and a reconcile URL.
    Reconcile,
}

impl Setup {
    /// All set-ups, in the order of the table.
    pub(crate) const ALL: [Self; 4] =
        [Self::NoGateway, Self::Reexecute, Self::Block, Self::Reconcile];

    /// Returns the name in the table: for a gateway, its `--on-unknown`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::NoGateway => "no gateway",
            Self::Reexecute => "reexecute",
            Self::Block => "block",
            Self::Reconcile => "reconcile",
        }
    }

    /// Returns the name without spaces, for files and keys.
    const fn slug(self) -> &'static str {
        match self {
            Self::NoGateway => "none",
            other => other.name(),
        }
    }
}

/// The settings that all set-ups of a run share.
#[derive(Debug)]
pub(crate) struct DemoContext<'a> {
    /// The path of this program.
    pub(crate) program: PathBuf,
    /// The folder in which each set-up creates its own.
    pub(crate) folder: &'a Path,
    pub(crate) seed: u64,
    pub(crate) payments: u16,
    pub(crate) progress: &'a Progress,
}

/// A set-up after its run, with its processes still running.
#[derive(Debug)]
pub(crate) struct FinishedSetup {
    service: Process,
    gateway: Option<(Process, Listens)>,
    /// The file of the gateway's admin token.
    token_file: PathBuf,
}

impl FinishedSetup {
    /// Returns the file of the gateway's admin token.
    pub(crate) fn token_file(&self) -> &Path {
        &self.token_file
    }

    /// Returns the addresses of the gateway, if there is one.
    pub(crate) fn gateway(&self) -> Option<Listens> {
        self.gateway.as_ref().map(|(_, listens)| *listens)
    }

    /// Kills the processes, and waits until they have ended.
    pub(crate) async fn end(mut self) -> io::Result<()> {
        if let Some((gateway, _)) = &mut self.gateway {
            gateway.kill().await?;
        }
        self.service.kill().await
    }
}

impl DemoContext<'_> {
    /// Runs one set-up: all payments, a kill of the service, a kill of the gateway; then counts.
    ///
    /// Dropping this future kills every process that it started.
    pub(crate) async fn run(&self, setup: Setup) -> Result<(Row, FinishedSetup), DemoError> {
        let started = Instant::now();
        let mut running = RunningSetup::open(self, setup).await?;
        let (ends, sent) = running.play().await?;
        // Late charges count: the service finishes every request, even if its client gave up.
        running.service.finish().await?;
        let entries = ledger::read(&running.ledger())?;
        running.service = running.start_service(Some(running.service_address), None).await?;
        for ended in &ends {
            if let PaymentOutcome::Unexpected(answer) = &ended.end {
                self.progress.note(&format!("{}: {} got {answer}", setup.name(), ended.key));
            }
        }
        let row = Row::count(setup, &entries, &ends, sent, running.kills, started.elapsed());
        self.progress.note(&format!(
            "{}: {} payments, {} charges, {:.1} s",
            setup.name(),
            row.payments,
            row.charges,
            started.elapsed().as_secs_f64()
        ));
        let token_file = AdminToken::default_path(Some(&running.store()));
        Ok((row, FinishedSetup { service: running.service, gateway: running.gateway, token_file }))
    }
}

/// A set-up that is running.
#[derive(Debug)]
struct RunningSetup<'a> {
    context: &'a DemoContext<'a>,
    setup: Setup,
    folder: PathBuf,
    service: Process,
    service_address: SocketAddr,
    gateway: Option<(Process, Listens)>,
    kills: Kills,
}

impl<'a> RunningSetup<'a> {
    async fn open(context: &'a DemoContext<'a>, setup: Setup) -> Result<Self, DemoError> {
        let folder = context.folder.join(setup.slug());
        std::fs::create_dir(&folder)?;
        let recipe = context.service(&folder, None, Some(context.kills_service_at()));
        let (service, listens) = Process::start(&recipe).await?;
        let service_address = listens.address;
        let kills = Kills::default();
        let mut running =
            Self { context, setup, folder, service, service_address, gateway: None, kills };
        if let Some(recipe) = running.gateway_recipe(None) {
            running.gateway = Some(Process::start(&recipe).await?);
        }
        Ok(running)
    }

    /// Lets the clients pay, and kills the processes on the way. Returns the ends of all payments
    /// and the number of requests.
    async fn play(&mut self) -> Result<(Vec<PaymentEnd>, u32), DemoError> {
        let address = self.gateway.as_ref().map_or(self.service_address, |(_, at)| at.address);
        let payments = u32::from(self.context.payments);
        // Payments after the first third begin when the stalls of the first third are over, late
        // charges included.
        let plan = Plan::new(self.context.seed, self.context.payments);
        let run = self.setup.slug().to_owned();
        let pool = Arc::new(ClientPool::new(address, run, payments, plan.early(), plan.clone()));
        let mut stalls = 0;
        let mut clients = JoinSet::new();
        let mut random = Random::new(self.context.seed);
        for _ in 0..CLIENTS {
            clients.spawn(Arc::clone(&pool).client(Random::new(random.number())));
        }
        let mut ends = Vec::new();
        let mut shown = 0;
        let mut tick = interval(Duration::from_millis(100));
        let mut has_output = true;
        loop {
            tokio::select! {
                line = self.service.line(), if has_output => match line? {
                    Some(line) if line.starts_with("holding ") => {
                        pool.note_restart();
                        self.kill().await?;
                        pool.note_restart();
                        pool.open(payments);
                    }
                    Some(line) if line.starts_with("stalled ") => {
                        stalls += 1;
                        if stalls >= plan.early_stalls() {
                            // The other payments wait for the kill of the gateway, so that clients
                            // still have payments to make then.
                            pool.open(self.context.kills_gateway_at());
                        }
                    }
                    Some(_) => {}
                    None => has_output = false,
                },
                ended = clients.join_next() => match ended {
                    Some(ended) => ends.extend(ended.map_err(io::Error::other)?),
                    None => break,
                },
                _ = tick.tick() => {}
            }
            let ended = pool.ended();
            self.context.progress.advance(ended - shown);
            shown = ended;
        }
        Ok((ends, pool.sent()))
    }

    /// Kills the service the first time and the gateway the second time, and restarts it. A request
    /// is held meanwhile: its charge is in the ledger, and its reply is not sent.
    async fn kill(&mut self) -> Result<(), DemoError> {
        let started = Instant::now();
        let victim = if self.kills.service == 0 {
            self.service.kill().await?;
            self.kills.service += 1;
            let hold_from = self.gateway.is_some().then_some(self.context.kills_gateway_at());
            self.service = self.start_service(Some(self.service_address), hold_from).await?;
            "the payments service"
        } else {
            let Some((gateway, listens)) = &mut self.gateway else { return Ok(()) };
            let address = listens.address;
            gateway.kill().await?;
            self.kills.gateway += 1;
            if let Some(recipe) = self.gateway_recipe(Some(address)) {
                self.gateway = Some(Process::start(&recipe).await?);
            }
            "the gateway"
        };
        self.context.progress.note(&format!(
            "{}: killed {victim} between a charge and its reply; restarted in {} ms",
            self.setup.name(),
            started.elapsed().as_millis()
        ));
        Ok(())
    }

    fn store(&self) -> PathBuf {
        self.folder.join("keys.db")
    }

    fn ledger(&self) -> PathBuf {
        self.folder.join("ledger")
    }

    async fn start_service(
        &self,
        listen: Option<SocketAddr>,
        hold_from: Option<u32>,
    ) -> Result<Process, DemoError> {
        let recipe = self.context.service(&self.folder, listen, hold_from);
        Ok(Process::start(&recipe).await?.0)
    }

    fn gateway_recipe(&self, listen: Option<SocketAddr>) -> Option<Recipe> {
        let on_unknown = match self.setup {
            Setup::NoGateway => return None,
            Setup::Reexecute | Setup::Block | Setup::Reconcile => self.setup.name(),
        };
        let mut arguments = vec![
            "gateway".to_owned(),
            "--listen".into(),
            listen.unwrap_or(ANY_PORT).to_string(),
            "--admin".into(),
            ANY_PORT.to_string(),
            "--upstream".into(),
            format!("http://{}", self.service_address),
            "--store".into(),
            format!("file:{}", self.store().display()),
            "--on-unknown".into(),
            on_unknown.into(),
            "--lease".into(),
            milliseconds(times::LEASE),
            "--upstream-timeout".into(),
            milliseconds(times::UPSTREAM),
        ];
        if self.setup == Setup::Reconcile {
            let url = format!("http://{}/charges/by-operation", self.service_address);
            arguments.extend(["--reconcile-url".into(), url]);
        }
        Some(Recipe {
            name: "the gateway",
            program: self.context.program.clone(),
            arguments,
            log: self.folder.join("gateway.log"),
        })
    }
}

const ANY_PORT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

impl DemoContext<'_> {
    /// Returns the order from which on the first request triggers the kill of the service.
    fn kills_service_at(&self) -> u32 {
        u32::from(self.payments) / 2
    }

    /// Returns the order from which on the first request triggers the kill of the gateway.
    fn kills_gateway_at(&self) -> u32 {
        u32::from(self.payments) * 3 / 4
    }

    fn service(&self, folder: &Path, listen: Option<SocketAddr>, hold_from: Option<u32>) -> Recipe {
        let mut arguments = vec![
            "demo".to_owned(),
            super::SERVICE.into(),
            "--listen".into(),
            listen.unwrap_or(ANY_PORT).to_string(),
            "--ledger".into(),
            folder.join("ledger").display().to_string(),
            "--seed".into(),
            self.seed.to_string(),
            "--payments".into(),
            self.payments.to_string(),
        ];
        if let Some(from) = hold_from {
            arguments.extend(["--hold-from".into(), from.to_string()]);
        }
        Recipe {
            name: "the payments service",
            program: self.program.clone(),
            arguments,
            log: folder.join("service.log"),
        }
    }
}

fn milliseconds(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}

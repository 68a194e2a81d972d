//! `hapax gateway`.

mod args;
mod check;
pub(crate) mod environment;
mod file;
mod limits;
mod load;
mod settings;

use std::io::Write;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use hapax_gateway::{Config, Gateway, ReadCertificates};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::exit::CliError;
use crate::logging;
pub(crate) use args::GatewayArgs;
use load::Loaded;
pub(crate) use load::{StoreSettings, to_probe};

/// Supervisors may say it twice, to a process and to its group, and so may terminals and shells. Who
/// means it a second time says it later, or once more.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

/// Runs a gateway until a signal ends it.
pub(crate) async fn run(args: GatewayArgs) -> Result<ExitCode, CliError> {
    let loaded = args.load()?;
    let mut warnings = environment::unknown(environment::variables());
    warnings.extend(loaded.warnings());
    if let Some(about) = &args.check {
        let about = check::CheckedRequest::read(about)?;
        Gateway::check(&loaded.config).await.map_err(|error| loaded.failed(&error))?;
        let shown = match about {
            None => loaded.shown()?,
            Some(request) => loaded.shown_for(&request)?,
        };
        for warning in warnings {
            eprintln!("hapax: warning: {warning}");
        }
        // The reader may be gone.
        let _ = std::io::stdout().write_all(shown.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    logging::start(loaded.config.log.format, &loaded.config.log.level)?;
    warn(&warnings);
    // Before anything listens: a signal that comes early is not lost.
    let mut signals = Signals::new()?;
    let told = loaded.config.clone();
    limits::raise_open_files(told.limits.connections);
    // Dropped while it waits for the store, the start has listened and accepted nothing.
    let started = tokio::select! {
        started = Gateway::start(told.clone()) => started,
        signal = signals.end() => {
            tracing::info!(signal, "ended before the store was open: no connection was accepted");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let gateway = started.map_err(|error| loaded.failed(&error))?;
    let scheme = if told.transport.tls.is_some() { "https" } else { "http" };
    let mut line = format!("listening on {scheme}://{}", gateway.local_addr());
    if let Some(admin) = gateway.admin_addr() {
        line.push_str(&format!(", admin http://{admin}"));
    }
    // The reader may be gone.
    let _ = writeln!(std::io::stdout(), "{line}");
    ready(&gateway, &told);
    tell(NotifyState::Ready);
    let mut running = GatewayProcess { gateway, args, routes: paths(&told) };
    running.obey(&mut signals).await;
    tell(NotifyState::Stopping);
    let gateway = running.gateway;
    let first = Instant::now();
    tokio::select! {
        _ended = gateway.shutdown() => Ok(ExitCode::SUCCESS),
        signal = signals.another(first + ONE_SIGNAL) => {
            tracing::warn!("told to end a second time: work in hand is abandoned");
            Ok(ExitCode::from(128 + signal))
        }
    }
}

/// Notifies the service manager, if there is one (`NOTIFY_SOCKET`).
fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

fn warn(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

fn paths(config: &Config) -> Vec<String> {
    config.routes.iter().map(|route| route.path.clone()).collect()
}

/// A gateway, and its arguments.
struct GatewayProcess {
    gateway: hapax_gateway::RunningGateway,
    args: GatewayArgs,
    /// The paths of its routes.
    routes: Vec<String>,
}

impl GatewayProcess {
    /// Reloads at each signal, until a signal ends the program: at once, however long files take to
    /// be read.
    async fn obey(&mut self, signals: &mut Signals) {
        while let SignalAction::Reload = signals.next().await {
            let mut again = true;
            while std::mem::take(&mut again) {
                let mut reloading = pin!(self.reload());
                loop {
                    tokio::select! {
                        () = &mut reloading => break,
                        told = signals.next() => match told {
                            // Dropped while it reads, it has changed nothing.
                            SignalAction::End(_) => return,
                            SignalAction::Reload => {
                                // What is being read may be from before.
                                again = true;
                                tracing::warn!("SIGHUP: files are being read still, and then again");
                            }
                        },
                    }
                }
            }
        }
    }

    /// Reads the file and certificates again, and has all of them hold or none; then it says in one
    /// line why not.
    async fn reload(&mut self) {
        let reloaded = self.read().await.and_then(|(loaded, certificates)| {
            let routes = loaded.map(|loaded| self.hold(&loaded)).transpose()?;
            // This cannot fail, so that it comes last.
            let are_there = !certificates.is_empty();
            certificates.replace();
            Ok((routes, are_there))
        });
        match reloaded {
            Ok((routes, certificates)) => {
                if certificates {
                    tracing::info!("SIGHUP: certificates were read again");
                }
                match routes {
                    Some(routes) => {
                        tracing::info!(routes, "SIGHUP: reloaded, for requests from now on");
                    }
                    None if certificates => {}
                    None => tracing::info!(
                        "SIGHUP: there is no file and no certificate: nothing to reload"
                    ),
                }
            }
            Err(refused) => {
                tracing::error!(%refused, "SIGHUP: not reloaded, what held before holds on");
            }
        }
    }

    /// The file, if there is one, and certificates as they are now. Nothing of them holds yet.
    async fn read(&self) -> Result<(Option<Loaded>, ReadCertificates), CliError> {
        let loaded = match self.args.config {
            Some(_) => {
                // A pipe, or a server that files are on, may say nothing for ever.
                let args = self.args.clone();
                let loaded = tokio::task::spawn_blocking(move || args.load()).await;
                Some(loaded.map_err(CliError::unavailable)??)
            }
            None => None,
        };
        let certificates = self.gateway.read_certificates().await.map_err(CliError::usage)?;
        Ok((loaded, certificates))
    }

    /// Has what was read hold; how many routes that are.
    fn hold(&mut self, loaded: &Loaded) -> Result<usize, CliError> {
        self.gateway.reload(loaded.config.clone()).map_err(|error| loaded.refused(&error))?;
        warn(&loaded.warnings());
        let routes = paths(&loaded.config);
        // A file that was cut off may be one that can be.
        for path in self.routes.iter().filter(|path| !routes.contains(path)) {
            tracing::warn!(path, "this route is no longer in the file");
        }
        self.routes = routes;
        Ok(self.routes.len())
    }
}

/// Logs that it is ready. The policy of each route is in lines of its own, before this one.
fn ready(gateway: &hapax_gateway::RunningGateway, told: &Config) {
    // Without its query, which may be secret.
    let auth = told.auth.as_ref().map(|auth| {
        let authority = auth.url.authority().map_or("", |authority| authority.as_str());
        let scheme = auth.url.scheme_str().unwrap_or("http");
        format!("{scheme}://{authority}{}", auth.url.path())
    });
    tracing::info!(
        listen = %gateway.local_addr(),
        admin = gateway.admin_addr().map(tracing::field::display),
        upstream = %told.upstream,
        store = %told.store,
        cache = told.cache.as_ref().map(tracing::field::display),
        auth,
        routes = told.routes.len(),
        "ready"
    );
}

/// Meaning of a signal.
enum SignalAction {
    /// To end; the signal's number.
    End(u8),
    Reload,
}

/// SIGTERM and SIGINT, and SIGHUP, which would end the process without a handler.
struct Signals {
    hang_up: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, CliError> {
        let of = |kind| {
            signal(kind)
                .map_err(|error| CliError::unavailable(format!("signals cannot be heard: {error}")))
        };
        Ok(Self {
            hang_up: of(SignalKind::hangup())?,
            terminate: of(SignalKind::terminate())?,
            interrupt: of(SignalKind::interrupt())?,
        })
    }

    /// The number of the first one from `from` on that says to end.
    async fn another(&mut self, from: Instant) -> u8 {
        loop {
            // What ends has nothing to reload for.
            let SignalAction::End(signal) = self.next().await else { continue };
            if Instant::now() >= from {
                return signal;
            }
            tracing::info!(signal, "told to end twice at once: that counts as one");
        }
    }

    /// Waits for a signal that ends the program and returns its number. A SIGHUP stays to be read.
    async fn end(&mut self) -> u8 {
        tokio::select! {
            _ = self.terminate.recv() => 15,
            _ = self.interrupt.recv() => 2,
        }
    }

    /// The next one.
    async fn next(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.terminate.recv() => SignalAction::End(15),
            _ = self.interrupt.recv() => SignalAction::End(2),
            _ = self.hang_up.recv() => SignalAction::Reload,
        }
    }
}

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

/// The time in which two signals count as one. Supervisors, terminals and shells may send a signal
/// twice: to the process and to its group. A signal after this time is a second request to end.
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
    // Signal handlers come before the listener, so that an early signal is not lost.
    let mut signals = Signals::new()?;
    let config = loaded.config.clone();
    limits::raise_open_files(config.limits.connections);
    // If the start is dropped while it waits for the store, it has accepted no connection.
    let started = tokio::select! {
        started = Gateway::start(config.clone()) => started,
        signal = signals.end() => {
            tracing::info!(signal, "ended before the store was open: no connection was accepted");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let gateway = started.map_err(|error| loaded.failed(&error))?;
    let scheme = if config.transport.tls.is_some() { "https" } else { "http" };
    let mut line = format!("listening on {scheme}://{}", gateway.local_addr());
    if let Some(admin) = gateway.admin_addr() {
        line.push_str(&format!(", admin http://{admin}"));
    }
    // The reader may be gone.
    let _ = writeln!(std::io::stdout(), "{line}");
    ready(&gateway, &config);
    notify_manager(NotifyState::Ready);
    let mut running = GatewayProcess { gateway, args, routes: paths(&config) };
    running.reload_until_end(&mut signals).await;
    notify_manager(NotifyState::Stopping);
    let gateway = running.gateway;
    let first = Instant::now();
    tokio::select! {
        _ended = gateway.shutdown() => Ok(ExitCode::SUCCESS),
        signal = signals.another(first + ONE_SIGNAL) => {
            tracing::warn!("second signal to end: requests in progress are cut off");
            Ok(ExitCode::from(128 + signal))
        }
    }
}

/// Notifies the service manager, if there is one (`NOTIFY_SOCKET`).
fn notify_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot notify the service manager");
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
    /// The paths of the routes in force.
    routes: Vec<String>,
}

impl GatewayProcess {
    /// Reloads at each signal, until a signal ends the program: at once, however long files take to
    /// be read.
    async fn reload_until_end(&mut self, signals: &mut Signals) {
        while let SignalAction::Reload = signals.next().await {
            let mut again = true;
            while std::mem::take(&mut again) {
                let mut reloading = pin!(self.reload());
                loop {
                    tokio::select! {
                        () = &mut reloading => break,
                        action = signals.next() => match action {
                            // A reload that is dropped while it reads has changed nothing.
                            SignalAction::End(_) => return,
                            SignalAction::Reload => {
                                // The files that are being read may be older than this signal.
                                again = true;
                                tracing::warn!("SIGHUP: files are being read, then read again");
                            }
                        },
                    }
                }
            }
        }
    }

    /// Reads the file and certificates again, and applies all of them or none. Logs an error in one
    /// line if they cannot be applied.
    async fn reload(&mut self) {
        let reloaded = self.read().await.and_then(|(loaded, certificates)| {
            let routes = loaded.map(|loaded| self.apply(&loaded)).transpose()?;
            // Replacing certificates cannot fail: it comes last, when nothing else can fail any
            // more.
            let has_certificates = !certificates.is_empty();
            certificates.replace();
            Ok((routes, has_certificates))
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
            Err(error) => {
                tracing::error!(refused = %error, "SIGHUP: the reload was rejected; the configuration in force stays");
            }
        }
    }

    /// Reads the file, if there is one, and the certificates. Applies neither.
    async fn read(&self) -> Result<(Option<Loaded>, ReadCertificates), CliError> {
        let loaded = match self.args.config {
            Some(_) => {
                // Reading from a pipe or a file server may block for ever.
                let args = self.args.clone();
                let loaded = tokio::task::spawn_blocking(move || args.load()).await;
                Some(loaded.map_err(CliError::unavailable)??)
            }
            None => None,
        };
        let certificates = self.gateway.read_certificates().await.map_err(CliError::usage)?;
        Ok((loaded, certificates))
    }

    /// Applies a configuration and returns the number of its routes.
    fn apply(&mut self, loaded: &Loaded) -> Result<usize, CliError> {
        self.gateway.reload(loaded.config.clone()).map_err(|error| loaded.reload_failed(&error))?;
        warn(&loaded.warnings());
        let routes = paths(&loaded.config);
        // A file that was cut off may still be valid: its missing routes are logged.
        for path in self.routes.iter().filter(|path| !routes.contains(path)) {
            tracing::warn!(
                path,
                "a route was removed from the file: its requests follow the other routes or [policy]"
            );
        }
        self.routes = routes;
        Ok(self.routes.len())
    }
}

/// Logs that the gateway is ready. Earlier lines have the policy of each route.
fn ready(gateway: &hapax_gateway::RunningGateway, config: &Config) {
    // The query is left out: it may be secret.
    let auth = config.auth.as_ref().map(|auth| {
        let authority = auth.url.authority().map_or("", |authority| authority.as_str());
        let scheme = auth.url.scheme_str().unwrap_or("http");
        format!("{scheme}://{authority}{}", auth.url.path())
    });
    tracing::info!(
        listen = %gateway.local_addr(),
        admin = gateway.admin_addr().map(tracing::field::display),
        upstream = %config.upstream,
        store = config.store.absolute(),
        created = gateway.store_created().map(tracing::field::display),
        cache = config.cache.as_ref().map(tracing::field::display),
        auth,
        routes = config.routes.len(),
        "ready"
    );
}

/// Meaning of a signal.
enum SignalAction {
    /// End the program; the number is the signal's.
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
        let receiver = |kind| {
            signal(kind)
                .map_err(|error| CliError::unavailable(format!("cannot receive signals: {error}")))
        };
        Ok(Self {
            hang_up: receiver(SignalKind::hangup())?,
            terminate: receiver(SignalKind::terminate())?,
            interrupt: receiver(SignalKind::interrupt())?,
        })
    }

    /// Waits for a signal to end that comes at `from` or later, and returns its number.
    async fn another(&mut self, from: Instant) -> u8 {
        loop {
            // A gateway that ends does not reload.
            let SignalAction::End(signal) = self.next().await else { continue };
            if Instant::now() >= from {
                return signal;
            }
            tracing::info!(signal, "repeated signal to end: counts as one with the first");
        }
    }

    /// Waits for a signal to end and returns its number. A SIGHUP stays unread for a later call of
    /// [`next`](Self::next).
    async fn end(&mut self) -> u8 {
        tokio::select! {
            _ = self.terminate.recv() => 15,
            _ = self.interrupt.recv() => 2,
        }
    }

    /// Waits for the next signal.
    async fn next(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.terminate.recv() => SignalAction::End(15),
            _ = self.interrupt.recv() => SignalAction::End(2),
            _ = self.hang_up.recv() => SignalAction::Reload,
        }
    }
}

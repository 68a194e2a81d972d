//! `hapax gateway`.

mod args;
mod build;
mod effect;
mod fields;
mod file;
mod fingerprint;
mod limits;
mod load;
mod methods;
mod transport;
mod values;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use hapax::{InFlight, OnUnknown};
use hapax_gateway::{Config, Gateway, ReloadError, StartError, StoreOpenError};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::exit::Failure;
use crate::logging::{self, LogFormat};
pub(crate) use args::GatewayArgs;

/// Supervisors may say it twice, to a process and to its group, and so may terminals and shells. Who
/// means it a second time says it later, or once more.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

/// Runs a gateway until it is told to end.
pub(crate) async fn run(args: GatewayArgs) -> Result<ExitCode, Failure> {
    let loaded = args.load()?;
    if args.check {
        let shown = loaded.shown()?;
        // Whoever asked may not want to know.
        let _ = std::io::stdout().write_all(shown.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    logging::start(loaded.log_format, &loaded.log_level)?;
    // Before anything listens: a signal that comes early is not lost.
    let mut signals = Signals::new()?;
    let told = loaded.config;
    limits::raise_open_files(told.limits.connections);
    let gateway = Gateway::start(told.clone()).await.map_err(|error| failure(&error))?;
    let scheme = if told.transport.tls.is_some() { "https" } else { "http" };
    let mut line = format!("listening on {scheme}://{}", gateway.local_addr());
    if let Some(admin) = gateway.admin_addr() {
        line.push_str(&format!(", admin http://{admin}"));
    }
    // Whoever started it may not want to know.
    let _ = writeln!(std::io::stdout(), "{line}");
    ready(&gateway, &told);
    tell(NotifyState::Ready);
    let mut running = Running { gateway, args, logs: (loaded.log_format, loaded.log_level) };
    while let Told::Reload = signals.next().await {
        running.reload().await;
    }
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

/// Tells the service manager, if one wants to know (`NOTIFY_SOCKET`).
fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// A gateway, and what it was told.
struct Running {
    gateway: hapax_gateway::Running,
    args: GatewayArgs,
    /// What the log was begun with.
    logs: (LogFormat, String),
}

impl Running {
    /// Reads certificates and the file again, and has them hold, or says in one line why they do not.
    async fn reload(&mut self) {
        match self.gateway.reload_certificates().await {
            Ok(()) => tracing::info!("SIGHUP: certificates were read again"),
            Err(error) => tracing::warn!(
                %error,
                "SIGHUP: certificates cannot be used, the ones before still hold"
            ),
        }
        if self.args.config.is_none() {
            tracing::info!("SIGHUP: everything else was said by flags, there is nothing to reload");
            return;
        }
        let reloaded = self.args.load().and_then(|loaded| {
            if self.logs != (loaded.log_format, loaded.log_level.clone()) {
                let flags = vec!["--log-format or --log-level"];
                return Err(loaded.refused(&ReloadError::Restart(flags)));
            }
            let routes = loaded.config.routes.len();
            self.gateway
                .reload(loaded.config.clone())
                .map_err(|error| loaded.refused(&error))
                .map(|()| routes)
        });
        match reloaded {
            Ok(routes) => tracing::info!(routes, "SIGHUP: reloaded, for requests from now on"),
            Err(refused) => {
                tracing::error!(%refused, "SIGHUP: not reloaded, what held before holds on")
            }
        }
    }
}

/// Logs that it is ready, and what decides whether and when a retry executes.
fn ready(gateway: &hapax_gateway::Running, told: &Config) {
    let in_flight = match told.policy.in_flight {
        InFlight::Reject => "reject".to_owned(),
        InFlight::Wait(patience) => format!("wait for {patience:?}"),
    };
    let on_unknown = match told.policy.on_unknown {
        OnUnknown::Reexecute => "reexecute",
        OnUnknown::Block => "block",
        OnUnknown::Reconcile => "reconcile",
    };
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
        on_unknown,
        in_flight,
        lease = ?told.policy.lease,
        routes = told.routes.len(),
        "ready"
    );
}

/// Configuration is 64; what the gateway needs and cannot have is 69.
fn failure(error: &StartError) -> Failure {
    match error {
        StartError::Config(_)
        | StartError::Tls(_)
        | StartError::Store(StoreOpenError::Secret { .. } | StoreOpenError::Url { .. }) => {
            Failure::usage(error)
        }
        _ => Failure::unavailable(error),
    }
}

/// What a signal says.
enum Told {
    /// To end; the signal's number.
    End(u8),
    Reload,
}

/// SIGTERM and SIGINT, and SIGHUP, which would end the process if nobody heard it.
struct Signals {
    hang_up: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        let of = |kind| {
            signal(kind)
                .map_err(|error| Failure::unavailable(format!("signals cannot be heard: {error}")))
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
            let Told::End(signal) = self.next().await else { continue };
            if Instant::now() >= from {
                return signal;
            }
            tracing::info!(signal, "told to end twice at once: that counts as one");
        }
    }

    /// The next one.
    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::End(15),
            _ = self.interrupt.recv() => Told::End(2),
            _ = self.hang_up.recv() => Told::Reload,
        }
    }
}

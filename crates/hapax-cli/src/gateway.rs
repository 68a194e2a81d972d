//! `hapax gateway`.

mod args;
mod limits;
mod transport;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use hapax::{InFlight, OnUnknown};
use hapax_gateway::{Config, Gateway, Running, StartError, StoreOpenError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::exit::Failure;
use crate::logging;
pub(crate) use args::GatewayArgs;

/// Supervisors may say it twice, to a process and to its group, and so may terminals and shells. Who
/// means it a second time says it later, or once more.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

/// Runs a gateway until it is told to end.
pub(crate) async fn run(args: GatewayArgs) -> Result<ExitCode, Failure> {
    logging::start(args.log_format, &args.log_level)?;
    let config = args.config()?;
    // Before anything listens: a signal that comes early is not lost.
    let mut signals = Signals::new()?;
    limits::raise_open_files(config.limits.connections);
    let told = config.clone();
    let gateway = Gateway::start(config).await.map_err(|error| failure(&error))?;
    let scheme = if told.transport.tls.is_some() { "https" } else { "http" };
    let mut line = format!("listening on {scheme}://{}", gateway.local_addr());
    if let Some(admin) = gateway.admin_addr() {
        line.push_str(&format!(", admin http://{admin}"));
    }
    // Whoever started it may not want to know.
    let _ = writeln!(std::io::stdout(), "{line}");
    ready(&gateway, &told);
    loop {
        match signals.next().await {
            Told::End(_) => break,
            Told::Reload => reload(&gateway).await,
        }
    }
    let first = Instant::now();
    tokio::select! {
        _ended = gateway.shutdown() => Ok(ExitCode::SUCCESS),
        signal = signals.another(first + ONE_SIGNAL) => {
            tracing::warn!("told to end a second time: work in hand is abandoned");
            Ok(ExitCode::from(128 + signal))
        }
    }
}

/// Logs that it is ready, and what decides whether and when a retry executes.
fn ready(gateway: &Running, told: &Config) {
    let in_flight = match told.in_flight {
        InFlight::Reject => "reject".to_owned(),
        InFlight::Wait(patience) => format!("wait for {patience:?}"),
    };
    let on_unknown = match told.on_unknown {
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
        lease = ?told.lease,
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

/// Certificates are all that can be read again: everything else was said by flags.
async fn reload(gateway: &Running) {
    match gateway.reload_certificates().await {
        Ok(()) => tracing::info!("SIGHUP: certificates were read again"),
        Err(error) => {
            tracing::warn!(%error, "SIGHUP: certificates cannot be used, the ones before still hold");
        }
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

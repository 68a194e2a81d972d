//! `hapax gateway`.

mod args;
mod limits;

use std::io::Write;
use std::process::ExitCode;

use hapax_gateway::{Gateway, StartError, StoreOpenError};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::Failure;
use crate::logging;
pub(crate) use args::GatewayArgs;

/// Runs a gateway until it is told to end.
pub(crate) async fn run(args: GatewayArgs) -> Result<ExitCode, Failure> {
    logging::start(args.log_format, &args.log_level)?;
    let config = args.config()?;
    // Before anything listens: a signal that comes early is not lost.
    let mut signals = Signals::new()?;
    limits::raise_open_files();
    let gateway = Gateway::start(config).await.map_err(|error| failure(&error))?;
    let mut line = format!("listening on http://{}", gateway.local_addr());
    if let Some(admin) = gateway.admin_addr() {
        line.push_str(&format!(", admin http://{admin}"));
    }
    // Whoever started it may not want to know.
    let _ = writeln!(std::io::stdout(), "{line}");
    tracing::info!(
        listen = %gateway.local_addr(),
        admin = gateway.admin_addr().map(tracing::field::display),
        "ready"
    );
    signals.next().await;
    tokio::select! {
        _ended = gateway.shutdown() => Ok(ExitCode::SUCCESS),
        signal = signals.next() => {
            tracing::warn!("told to end a second time: work in hand is abandoned");
            Ok(ExitCode::from(128 + signal))
        }
    }
}

/// Configuration is 64; what the gateway needs and cannot have is 69.
fn failure(error: &StartError) -> Failure {
    match error {
        StartError::Config(_) | StartError::Store(StoreOpenError::Secret { .. }) => {
            Failure::usage(error)
        }
        _ => Failure::unavailable(error),
    }
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

    /// The number of the next one that says to end.
    async fn next(&mut self) -> u8 {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return 15,
                _ = self.interrupt.recv() => return 2,
                _ = self.hang_up.recv() => {
                    tracing::info!("SIGHUP: everything was said by flags, there is nothing to reload");
                }
            }
        }
    }
}

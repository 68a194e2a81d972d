//! The signals that end `hapax relay` and `hapax consume`.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::CliError;

/// SIGTERM and SIGINT. From its creation on they do not end the process by themselves.
#[derive(Debug)]
pub(crate) struct Shutdown {
    terminate: Signal,
    interrupt: Signal,
}

impl Shutdown {
    pub(crate) fn new() -> Result<Self, CliError> {
        let of = |kind| {
            signal(kind)
                .map_err(|error| CliError::unavailable(format!("cannot receive signals: {error}")))
        };
        Ok(Self {
            terminate: of(SignalKind::terminate())?,
            interrupt: of(SignalKind::interrupt())?,
        })
    }

    /// Waits for one of the signals. Dropping the future loses none.
    pub(crate) async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

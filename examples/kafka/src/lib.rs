//! Parts that the examples share.

/// An error that ends a program.
pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Waits for SIGTERM or Ctrl-C.
pub async fn shutdown() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Returns the argument at `place`, from 1.
///
/// # Errors
/// An error that names the argument.
pub fn argument(place: usize, name: &str) -> Result<String, AnyError> {
    std::env::args().nth(place).ok_or_else(|| format!("expected {name} as argument {place}").into())
}

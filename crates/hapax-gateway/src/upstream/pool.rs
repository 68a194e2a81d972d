//! Idle connections to one upstream.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::wire::Wire;

/// How long a connection may have been idle to be used again.
///
/// Servers drop idle connections after a time they seldom announce: 2 s (gunicorn), 5 s (Node,
/// uvicorn, Apache), 75 s (nginx). A request that crosses such a drop on its way may or may not have
/// been read, and its outcome is unknown for nothing. Under load connections are idle for
/// milliseconds; so a limit below all of these costs next to nothing.
const MAX_IDLE: Duration = Duration::from_secs(1);

/// How many are kept.
const MAX_KEPT: usize = 512;

/// Idle connections, the latest used last.
#[derive(Debug, Default)]
pub(super) struct Pool {
    idle: Mutex<Vec<(Instant, Wire)>>,
}

impl Pool {
    /// The connection that was used last, unless all have been idle for too long.
    pub(super) fn take(&self) -> Option<Wire> {
        let mut idle = self.lock();
        while let Some((since, wire)) = idle.pop() {
            if since.elapsed() > MAX_IDLE {
                // All below it are older.
                idle.clear();
                return None;
            }
            if wire.sender.is_ready() {
                return Some(wire);
            }
        }
        None
    }

    /// Keeps a connection that is ready for another request.
    pub(super) fn put(&self, wire: Wire) {
        let mut idle = self.lock();
        if idle.len() < MAX_KEPT {
            idle.push((Instant::now(), wire));
        }
    }

    /// Drops what has been idle for too long.
    pub(super) fn prune(&self) {
        self.lock().retain(|(since, wire)| since.elapsed() <= MAX_IDLE && wire.sender.is_ready());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Instant, Wire)>> {
        // Nothing here panics half way through a change.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Idle connections to one upstream.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::connection::UpstreamConnection;

/// Largest number of idle connections.
const MAX_KEPT: usize = 512;

/// Idle connections, the most recently used one last.
#[derive(Debug)]
pub(super) struct Pool {
    /// Time that a connection may have been idle and still be reused.
    most: Duration,
    idle: Mutex<Vec<(Instant, UpstreamConnection)>>,
}

impl Pool {
    pub(super) fn new(most: Duration) -> Self {
        Self { most, idle: Mutex::default() }
    }

    /// Takes the connection that was used last, unless all have been idle for too long. With
    /// `careful`, connections on which `HEAD` was answered are skipped.
    pub(super) fn take(&self, careful: bool) -> Option<UpstreamConnection> {
        let mut idle = self.lock();
        let mut index = idle.len();
        while let Some((since, connection)) = index.checked_sub(1).and_then(|last| idle.get(last)) {
            index -= 1;
            if since.elapsed() > self.most {
                // All connections below it are older.
                idle.drain(..=index);
                return None;
            }
            if careful && connection.had_head {
                continue;
            }
            let (is_ready, (_, connection)) = (connection.is_ready(), idle.remove(index));
            if is_ready {
                return Some(connection);
            }
        }
        None
    }

    /// Adds a connection that is ready for another request.
    pub(super) fn put(&self, connection: UpstreamConnection) {
        let mut idle = self.lock();
        if idle.len() < MAX_KEPT {
            idle.push((Instant::now(), connection));
        }
    }

    /// Drops connections that are closed or have been idle for too long.
    pub(super) fn prune(&self) {
        self.lock()
            .retain(|(since, connection)| since.elapsed() <= self.most && connection.is_ready());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Instant, UpstreamConnection)>> {
        // No change can panic half way.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

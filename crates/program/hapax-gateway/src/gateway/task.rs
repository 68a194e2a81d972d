//! Tasks of a gateway.

use std::time::Duration;

use hapax_operators::{caught, supervised};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::admin::EndedTask;

/// A task that is aborted when this value is dropped.
#[derive(Debug)]
pub(super) struct Task(pub(super) JoinHandle<()>);

/// Runs a task that cannot begin anew. After a panic `/readyz` is 503, so that a load balancer sends no requests here; the
/// process goes on until an operator restarts it.
pub(super) async fn reported(what: &'static str, task: impl Future<Output = ()>, ended: EndedTask) {
    if let Err(panic) = caught(task).await {
        // Of several the first one is enough.
        let _ = ended.set(what);
        tracing::error!(%panic, "{what} panicked and has ended: restart this process, and report this as a bug");
    }
}

impl Task {
    /// Spawns a task that begins anew after a panic.
    pub(super) fn supervised<F>(
        what: &'static str,
        begin: impl FnMut() -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self(tokio::spawn(supervised(what, begin)))
    }

    pub(super) async fn join(&mut self, limit: Duration) {
        if timeout(limit, &mut self.0).await.is_err() {
            self.0.abort();
            // It ends at its next await.
            (&mut self.0).await.ok();
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

//! Tasks of a gateway.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A task that is aborted when this value is dropped.
#[derive(Debug)]
pub(super) struct Task(pub(super) JoinHandle<()>);

impl Task {
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

//! Every upstream that may have requests under way.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Upstream;

/// Those of the configuration that holds, and of earlier ones whose requests are still under way.
#[derive(Debug, Default)]
pub(crate) struct Upstreams {
    all: Mutex<Vec<Upstream>>,
}

impl Upstreams {
    /// Adds one.
    pub(crate) fn add(&self, upstream: Upstream) -> Upstream {
        self.all().push(upstream.clone());
        upstream
    }

    /// Forgets those that nobody uses any more, and drops connections that have been idle for too long.
    pub(crate) fn prune(&self) {
        let mut all = self.all();
        all.retain(Upstream::is_in_use);
        all.iter().for_each(Upstream::prune);
    }

    /// Ends every request under way at any of them.
    pub(crate) fn cut(&self) {
        self.all().iter().for_each(Upstream::cut);
    }

    fn all(&self) -> MutexGuard<'_, Vec<Upstream>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

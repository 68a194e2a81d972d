//! Upstreams that may have requests in progress.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Upstream;

/// Upstreams of the configuration in force, and those of earlier ones with requests in progress.
#[derive(Debug, Default)]
pub struct Upstreams {
    all: Mutex<Vec<Upstream>>,
}

impl Upstreams {
    /// Adds an upstream.
    pub fn add(&self, upstream: Upstream) -> Upstream {
        self.all().push(upstream.clone());
        upstream
    }

    /// Removes unused upstreams, and drops connections that have been idle for too long.
    pub fn prune(&self) {
        let mut all = self.all();
        all.retain(Upstream::is_in_use);
        all.iter().for_each(Upstream::prune);
    }

    /// Ends every request in progress at all upstreams.
    pub fn cut(&self) {
        self.all().iter().for_each(Upstream::cut);
    }

    fn all(&self) -> MutexGuard<'_, Vec<Upstream>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

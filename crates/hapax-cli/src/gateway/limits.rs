//! Limits of the operating system.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Every connection is an open file. The soft limit is often 1,024 for the sake of programs that
/// use select(2); this is none.
pub(super) fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays low");
    }
}

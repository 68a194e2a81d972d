//! Limits of the operating system.

use rustix::process::{Resource, getrlimit, setrlimit};

/// The number of open files besides connections: listeners, the store, its connections.
const OTHERS: u64 = 64;

/// Raises the soft limit of open files to the hard limit, and warns if that is too little for
/// `connections` clients.
///
/// Each client connection may need two files: its own and one to the upstream. The soft limit is
/// often 1,024 to protect programs that use select(2); this program does not use it.
pub(super) fn raise_open_files(connections: usize) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let needed = (connections as u64).saturating_mul(2).saturating_add(OTHERS);
    if let Some(limit) = getrlimit(Resource::Nofile).current.filter(|limit| *limit < needed) {
        tracing::warn!(
            limit,
            needed,
            "the system allows fewer open files than --max-connections may need: connections beyond \
             that wait"
        );
    }
}

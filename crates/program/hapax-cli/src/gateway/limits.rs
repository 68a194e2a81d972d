//! Limits of the operating system.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Files that are open beside those of connections: listeners, the store, its connections.
const OTHERS: u64 = 64;

/// Every connection is an open file, and so is the one to the upstream that it may have. The soft limit
/// is often 1,024 for the sake of programs that use select(2); this is none, and takes what the hard
/// limit lets it. Warns where that is too little for so many connections of clients.
pub(super) fn raise_open_files(connections: usize) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays low");
    }
    let needed = (connections as u64).saturating_mul(2).saturating_add(OTHERS);
    if let Some(limit) = getrlimit(Resource::Nofile).current.filter(|limit| *limit < needed) {
        tracing::warn!(
            limit,
            needed,
            "the system allows fewer open files than --max-connections may take: connections beyond \
             that will wait"
        );
    }
}

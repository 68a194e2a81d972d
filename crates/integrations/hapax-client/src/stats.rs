//! Counters of a client, and a walk that counts its unfinished operations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_saga::SagaView;
use hapax_saga::StuckReason;
use hapax_saga::log::LogTime;

use crate::client::Client;
use crate::error::SendError;
use crate::resume::Pages;

/// Counters of a client since it was built.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ClientStats {
    /// The declared servers, by name.
    pub servers: Vec<ServerStats>,
    /// Operations that got a response.
    pub finished: u64,
    /// Times that an operation ended without a response because its key was too old.
    pub expired: u64,
    /// Times that an operation ended without a response for another reason: unknown, credentials, its
    /// time.
    pub stopped: u64,
}

/// Counters of the tries at a server.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ServerStats {
    /// The server: scheme, host and port.
    pub server: String,
    /// Tries with a complete response.
    pub responded: u64,
    /// Tries of which certainly nothing was sent.
    pub not_sent: u64,
    /// Tries that may have arrived and got no complete response.
    pub unknown: u64,
    /// Tries that its budget denied, for now.
    pub denied: u64,
}

/// The unfinished operations of a journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ClientCensus {
    /// Operations that are tried, or wait for their next try.
    pub in_progress: u64,
    /// Operations that ended without a response because their key was too old.
    pub expired: u64,
    /// Other operations that ended without a response and may have happened.
    pub unknown: u64,
    /// Operations that ended without a response, of which nothing may have arrived.
    pub not_sent: u64,
    /// Operations that cannot be read.
    pub unreadable: u64,
    /// Time since the first of those that can be read began.
    pub oldest: Duration,
}

/// Counters of a server.
#[derive(Debug, Default)]
pub(crate) struct HostCounters {
    pub(crate) responded: AtomicU64,
    pub(crate) not_sent: AtomicU64,
    pub(crate) unknown: AtomicU64,
    pub(crate) denied: AtomicU64,
}

/// A try that is counted by its end. One that is dropped before, by its timeout or with its lease, is
/// unknown.
#[derive(Debug)]
pub(crate) struct CountedTry<'a> {
    counters: &'a HostCounters,
    has_ended: bool,
}

impl<'a> CountedTry<'a> {
    pub(crate) const fn new(counters: &'a HostCounters) -> Self {
        Self { counters, has_ended: false }
    }

    /// Counts the end of the try.
    pub(crate) fn end(mut self, counter: fn(&HostCounters) -> &AtomicU64) {
        self.has_ended = true;
        add(counter(self.counters));
    }
}

impl Drop for CountedTry<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            add(&self.counters.unknown);
        }
    }
}

/// Counters of operations.
#[derive(Debug, Default)]
pub(crate) struct OperationCounters {
    pub(crate) finished: AtomicU64,
    pub(crate) expired: AtomicU64,
    pub(crate) stopped: AtomicU64,
}

impl OperationCounters {
    /// Counts an operation that ended without a response.
    pub(crate) fn stuck(&self, reason: &StuckReason) {
        add(match reason {
            StuckReason::KeyExpired => &self.expired,
            _ => &self.stopped,
        });
    }
}

impl Client {
    /// Returns the counters of this client.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        let state = &self.inner.state;
        let mut servers: Vec<_> = state.hosts.iter().collect();
        servers.sort_by_key(|(name, _)| *name);
        let servers = servers.into_iter().map(|(name, host)| ServerStats {
            server: name.clone(),
            responded: get(&host.counters.responded),
            not_sent: get(&host.counters.not_sent),
            unknown: get(&host.counters.unknown),
            denied: get(&host.counters.denied),
        });
        ClientStats {
            servers: servers.collect(),
            finished: get(&state.counters.finished),
            expired: get(&state.counters.expired),
            stopped: get(&state.counters.stopped),
        }
    }

    /// Counts the operations of the journal that have no response and are not acknowledged, those of other
    /// processes among them. Reads each, so it is no call for every scrape of metrics.
    ///
    /// # Errors
    /// [`SendError::Journal`].
    pub async fn census(&self) -> Result<ClientCensus, SendError> {
        let (mut census, mut pages) = (ClientCensus::default(), Pages::default());
        while let Some(page) = self.page(&mut pages).await? {
            page.sagas.iter().for_each(|(view, _)| census.count(view));
            census.unreadable += page.unreadable.len() as u64;
        }
        Ok(census)
    }
}

impl ClientCensus {
    fn count(&mut self, view: &SagaView) {
        // Before its first save it has just begun.
        let Some(log) = &view.log else { return self.in_progress += 1 };
        let arrived = log.steps.first().is_some_and(|step| step.forward.arrived);
        let counter = match &log.stuck {
            None => &mut self.in_progress,
            Some(stuck) if stuck.reason == StuckReason::KeyExpired => &mut self.expired,
            Some(_) if arrived => &mut self.unknown,
            Some(_) => &mut self.not_sent,
        };
        *counter += 1;
        self.oldest = self.oldest.max(age(view.now, log.started));
    }
}

fn age(now: Timestamp, began: LogTime) -> Duration {
    LogTime::from(now).since(began)
}

pub(crate) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

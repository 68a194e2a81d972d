//! Admission of connections, and the choice of connections to close if there are too many.
//!
//! 1. A connection takes a permit. If none is left, the oldest sheddable connection is closed, so
//!    that a new one does not wait long for an idle peer. The listener decides which connections
//!    are sheddable, and after which time: connections of clients that have sent no byte, and
//!    connections of operators without a request in progress. A connection that was just accepted is
//!    not shed: its first byte may be on its way.
//! 2. A peer has a limit of permits. At the limit, its own oldest sheddable connection is closed
//!    for a new one; without such a connection, the new one is closed. Permits that its HTTP/2
//!    connections take beyond their first count as well.
//! 3. A log line, at most once a minute, warns that there are too many.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};

use crate::log_throttle::LogThrottle;
use crate::network::IpNetwork;

/// Time in which a shed connection should release its permit before the next one is shed.
const LEAVE: Duration = Duration::from_millis(50);

/// Address that connections are counted by: an IPv4 address, or the IPv6 network of 64 bits that a
/// subscriber usually has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClientNetwork(IpAddr);

impl ClientNetwork {
    /// Returns the address that a connection from `ip` is counted by.
    #[must_use]
    pub fn of(ip: IpAddr) -> Self {
        Self(match ip.to_canonical() {
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
            ip => ip,
        })
    }
}

/// Permits for connections.
#[derive(Debug)]
pub struct ConnectionLimit {
    free: Arc<Semaphore>,
    sheddable: Arc<SheddableConnections>,
    all: usize,
    /// Time for which a connection must have been sheddable before it is shed.
    after: Duration,
    /// Kind of the peers, for the log.
    whose: &'static str,
    full: LogThrottle,
    failures: LogThrottle,
}

impl ConnectionLimit {
    /// Creates `all` permits for connections of `whose`, which are shed once they were sheddable
    /// for `after`.
    #[must_use]
    pub fn new(all: usize, whose: &'static str, after: Duration) -> Self {
        let (free, sheddable) = (Arc::new(Semaphore::new(all)), Arc::default());
        let (full, failures) = Default::default();
        Self { free, sheddable, all, after, whose, full, failures }
    }

    /// Returns the number of permits, free or taken.
    pub(crate) const fn all(&self) -> usize {
        self.all
    }

    /// Returns the number of free permits.
    pub(crate) fn free(&self) -> usize {
        self.free.available_permits()
    }

    /// Returns the connections that may be shed.
    pub const fn sheddable(&self) -> &Arc<SheddableConnections> {
        &self.sheddable
    }

    /// Accepts the next connection. If the future is dropped, none was accepted.
    pub async fn accept(&self, listener: &TcpListener) -> (TcpStream, SocketAddr) {
        loop {
            let error = match listener.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => error,
            };
            if let Some(left_out) = self.failures.due() {
                let whose = self.whose;
                tracing::warn!(whose, %error, left_out, "a connection could not be accepted");
            }
            // Most likely the process has no free descriptors: an immediate retry would fail too.
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Takes `count` permits if they are free.
    pub(crate) fn try_take(&self, count: u32) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.free).try_acquire_many_owned(count).ok()
    }

    /// Takes a permit, and sheds connections until one is free. If the future is dropped, no permit
    /// was taken.
    pub async fn take(&self) -> Option<OwnedSemaphorePermit> {
        if let Some(permit) = self.try_take(1) {
            return Some(permit);
        }
        if let Some(left_out) = self.full.due() {
            tracing::warn!(
                whose = self.whose,
                permits = self.all,
                may_be_shed = self.sheddable.count(),
                left_out,
                "the limit of connections is reached: the oldest that has sent nothing is closed for \
                 each new one; raise the limit if clients are rejected"
            );
        }
        loop {
            self.sheddable.shed_oldest(self.after);
            // Repeated, because others become old enough later. The semaphore is never closed.
            if let Ok(permit) = timeout(LEAVE, Arc::clone(&self.free).acquire_owned()).await {
                return permit.ok();
            }
        }
    }
}

/// Connections that may be closed in favour of new ones.
#[derive(Debug, Default)]
pub struct SheddableConnections(Mutex<SheddableList>);

#[derive(Debug, Default)]
struct SheddableList {
    next: u64,
    /// Connections by the order in which they were added, oldest first.
    by_age: BTreeMap<u64, Candidate>,
}

#[derive(Debug)]
struct Candidate {
    source: ClientNetwork,
    since: Instant,
    shed: Arc<Notify>,
}

impl SheddableConnections {
    /// Adds a connection until the entry is dropped; `shed` is notified when the connection must
    /// close.
    pub fn enter(self: &Arc<Self>, source: ClientNetwork, shed: Arc<Notify>) -> SheddableEntry {
        let mut entries = self.lock();
        let id = entries.next;
        entries.next += 1;
        entries.by_age.insert(id, Candidate { source, since: Instant::now(), shed });
        SheddableEntry { list: Arc::clone(self), id }
    }

    fn shed_oldest(&self, after: Duration) -> bool {
        self.shed_first(after, |_| true)
    }

    fn shed_oldest_of(&self, source: ClientNetwork, after: Duration) -> bool {
        self.shed_first(after, |of| of == source)
    }

    /// Notifies the oldest connection for which `is` returns true, if it is old enough.
    fn shed_first(&self, after: Duration, is: impl Fn(ClientNetwork) -> bool) -> bool {
        let mut entries = self.lock();
        let mut candidates = entries.by_age.iter();
        let oldest = candidates.find(|(_, candidate)| is(candidate.source));
        let Some((id, _)) = oldest.filter(|(_, oldest)| oldest.since.elapsed() >= after) else {
            return false;
        };
        let id = *id;
        entries.by_age.remove(&id).inspect(|oldest| oldest.shed.notify_one()).is_some()
    }

    fn count(&self) -> usize {
        self.lock().by_age.len()
    }

    fn lock(&self) -> MutexGuard<'_, SheddableList> {
        // Nothing here panics half way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An entry of a connection that may be shed; dropping it removes the connection.
#[derive(Debug)]
pub struct SheddableEntry {
    list: Arc<SheddableConnections>,
    id: u64,
}

impl Drop for SheddableEntry {
    fn drop(&mut self) {
        self.list.lock().by_age.remove(&self.id);
    }
}

/// Limits of permits by source.
#[derive(Debug)]
pub(crate) struct ClientLimits {
    most: usize,
    /// Proxies, whose connections serve many clients.
    unbounded: Vec<IpNetwork>,
    counts: Arc<Mutex<HashMap<ClientNetwork, usize>>>,
    full: LogThrottle,
}

impl ClientLimits {
    /// Creates a limit of `most` permits for each source, except those in `unbounded`.
    pub(crate) fn new(most: usize, unbounded: Vec<IpNetwork>) -> Self {
        Self { most, unbounded, counts: Arc::default(), full: LogThrottle::default() }
    }

    /// Counts a connection from `ip` until the result is dropped. Returns `None` if it exceeds the
    /// limit and no connection from there can be shed.
    pub(crate) fn admit(&self, ip: IpAddr, permits: &ConnectionLimit) -> Option<ClientPermit> {
        let source = ClientNetwork::of(ip);
        let counted = self.count(ip, 1, || permits.sheddable.shed_oldest_of(source, permits.after));
        if counted.is_some() {
            return counted;
        }
        if let Some(left_out) = self.full.due() {
            tracing::warn!(
                peer = %source.0,
                most = self.most,
                left_out,
                "this peer has reached max_connections_per_peer, new connections are closed: raise \
                 it, or name a reverse proxy in trust_forwarded"
            );
        }
        None
    }

    /// Counts permits that a connection from `ip` takes beyond its first; returns `None` if they
    /// exceed the limit.
    pub(crate) fn more(&self, ip: IpAddr, permits: usize) -> Option<ClientPermit> {
        self.count(ip, permits, || false)
    }

    /// Counts `permits` if they are within the limit of `ip`, or if `sheds` closes a connection for
    /// them.
    fn count(
        &self,
        ip: IpAddr,
        permits: usize,
        sheds: impl FnOnce() -> bool,
    ) -> Option<ClientPermit> {
        let source = ClientNetwork::of(ip);
        let is_proxy = self.unbounded.iter().any(|network| network.contains(ip));
        let most = if is_proxy { usize::MAX } else { self.most };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.get(&source).copied().unwrap_or_default() + permits;
        // A shed connection ends in a moment; until then the count is one too high.
        if count > most && !sheds() {
            return None;
        }
        counts.insert(source, count);
        Some(ClientPermit { source, permits, counts: Arc::clone(&self.counts) })
    }
}

/// Permits that are counted for their source.
#[derive(Debug)]
pub(crate) struct ClientPermit {
    source: ClientNetwork,
    permits: usize,
    counts: Arc<Mutex<HashMap<ClientNetwork, usize>>>,
}

impl Drop for ClientPermit {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.source) {
            *count -= self.permits;
            if *count == 0 {
                counts.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Duration = Duration::from_secs(1);

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_source_is_an_address_or_a_subscribers_network() {
        let of = |text| ClientNetwork::of(ip(text));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.2"), of("192.0.2.1"));
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:3::4"));
        assert_ne!(of("2001:db8:1:3::1"), of("2001:db8:1:2::1"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_sheddable_connection_is_closed_for_a_new_one() {
        let permits = ConnectionLimit::new(3, "a test's", OLD);
        let mut held: Vec<_> = (0..3).map(|_| permits.try_take(1)).collect();
        let shed: Vec<Arc<Notify>> = (0..3).map(|_| Arc::default()).collect();
        let source = ClientNetwork::of(ip("192.0.2.1"));
        let enter = |at: usize| permits.sheddable().enter(source, Arc::clone(&shed[at]));
        let [first, _second, _third] = [enter(0), enter(1), enter(2)];
        drop(first);
        // The first one is busy now; the second closes when it is notified.
        let leave = async {
            shed[1].notified().await;
            held[1] = None;
        };
        let begun = Instant::now();
        let (permit, ()) = tokio::join!(permits.take(), leave);
        assert!(permit.is_some() && begun.elapsed() >= OLD);
        assert_eq!(permits.sheddable().count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_shed_connection_that_does_not_close_delays_no_new_one() {
        let permits = ConnectionLimit::new(2, "a test's", OLD);
        let _stuck = permits.try_take(1);
        let mut other = permits.try_take(1);
        let shed: [Arc<Notify>; 2] = Default::default();
        let source = ClientNetwork::of(ip("192.0.2.1"));
        let entries = shed.each_ref().map(|shed| permits.sheddable().enter(source, shed.clone()));
        let leave = async {
            shed[1].notified().await;
            other = None;
        };
        let (permit, ()) = tokio::join!(permits.take(), leave);
        assert!(permit.is_some());
        drop(entries);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_has_a_limit_and_a_trusted_proxy_none() {
        let clients = ClientLimits::new(2, IpNetwork::loopback());
        let permits = ConnectionLimit::new(100, "a test's", OLD);
        let sheddable = permits.sheddable();
        let admit = |text| clients.admit(ip(text), &permits);
        let (first, second) = (admit("192.0.2.1"), admit("192.0.2.1"));
        assert!(first.is_some() && second.is_some() && admit("192.0.2.1").is_none());
        assert!(admit("192.0.2.2").is_some());
        drop(first);
        let third = admit("192.0.2.1");
        assert!(third.is_some() && admit("192.0.2.1").is_none());
        let proxied: Vec<_> = (0..9).map(|_| admit("127.0.0.1")).collect();
        assert!(proxied.iter().all(Option::is_some));
        // Only a connection of the same peer is shed for a new one.
        let other = sheddable.enter(ClientNetwork::of(ip("192.0.2.2")), Arc::default());
        tokio::time::advance(OLD).await;
        assert!(admit("192.0.2.1").is_none());
        let own = sheddable.enter(ClientNetwork::of(ip("192.0.2.1")), Arc::default());
        assert!(admit("192.0.2.1").is_none(), "its first byte may be on its way");
        tokio::time::advance(OLD).await;
        assert!(admit("192.0.2.1").is_some());
        drop((own, other, second, third));
        assert_eq!(clients.counts.lock().unwrap().len(), 1);
    }
}

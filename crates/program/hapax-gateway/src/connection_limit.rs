//! Which connections are admitted, and which are closed, when there are more than may be.
//!
//! 1. A connection takes a place. Where none is left, the oldest connection that may be shed is closed, so
//!    that a new one never waits long for a peer that does nothing. A listener says which may be shed, and
//!    after which time: of clients those that have sent no byte, of operators those without a request under
//!    way. One that has just come is not shed: its first byte may be on its way.
//! 2. A peer has no more than its share of the places. One that has all of it makes room by its own
//!    oldest connection that may be shed; without one, its new connection is closed. The places that its
//!    HTTP/2 connections take beyond their first are of its share as well.
//! 3. A warning a minute says that there are too many.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_http::log_throttle::LogThrottle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use crate::config::IpNetwork;

/// How long a connection that was shed may take to leave its place before the next one is shed.
const LEAVE: Duration = Duration::from_millis(50);

/// What connections are counted by: an IPv4 address, or the network of 64 bits that a subscriber of IPv6
/// has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ClientNetwork(IpAddr);

impl ClientNetwork {
    pub(crate) fn of(ip: IpAddr) -> Self {
        Self(match ip.to_canonical() {
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
            ip => ip,
        })
    }
}

/// Places for connections.
#[derive(Debug)]
pub(crate) struct ConnectionLimit {
    free: Arc<Semaphore>,
    sheddable: Arc<SheddableConnections>,
    all: usize,
    /// How long a connection must have been sheddable.
    after: Duration,
    /// Whose connections they are for, in the log.
    whose: &'static str,
    full: LogThrottle,
}

impl ConnectionLimit {
    /// Connections of `whose` are shed once they were sheddable for `after`.
    pub(crate) fn new(all: usize, whose: &'static str, after: Duration) -> Self {
        let (free, sheddable) = (Arc::new(Semaphore::new(all)), Arc::default());
        Self { free, sheddable, all, after, whose, full: LogThrottle::default() }
    }

    /// Places that are free or taken.
    pub(crate) const fn all(&self) -> usize {
        self.all
    }

    pub(crate) fn free(&self) -> usize {
        self.free.available_permits()
    }

    pub(crate) const fn sheddable(&self) -> &Arc<SheddableConnections> {
        &self.sheddable
    }

    /// Takes so many, if they are free.
    pub(crate) fn try_take(&self, count: u32) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.free).try_acquire_many_owned(count).ok()
    }

    /// Takes one, and sheds connections until one is free. Dropped, it has taken none.
    pub(crate) async fn take(&self) -> Option<OwnedSemaphorePermit> {
        if let Some(place) = self.try_take(1) {
            return Some(place);
        }
        if let Some(left_out) = self.full.due() {
            tracing::warn!(
                whose = self.whose,
                permits = self.all,
                may_be_shed = self.sheddable.count(),
                left_out,
                "all places for connections are taken: the oldest that has sent nothing is closed for \
                 each new one; raise the limit if clients are turned away"
            );
        }
        loop {
            self.sheddable.shed_oldest(self.after);
            // Again, because others are old enough later. The semaphore is never closed.
            if let Ok(place) = timeout(LEAVE, Arc::clone(&self.free).acquire_owned()).await {
                return place.ok();
            }
        }
    }
}

/// Connections that may be closed to make room.
#[derive(Debug, Default)]
pub(crate) struct SheddableConnections(Mutex<SheddableList>);

#[derive(Debug, Default)]
struct SheddableList {
    next: u64,
    /// Oldest first.
    by_age: BTreeMap<u64, Candidate>,
}

#[derive(Debug)]
struct Candidate {
    source: ClientNetwork,
    since: Instant,
    shed: Arc<Notify>,
}

impl SheddableConnections {
    /// Enters a connection until the entry is dropped; `shed` is notified when it is to close.
    pub(crate) fn enter(
        self: &Arc<Self>,
        source: ClientNetwork,
        shed: Arc<Notify>,
    ) -> SheddableEntry {
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

    /// Notifies the oldest one that `is` lets through, if it is old enough.
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

/// A connection that may be shed, until this is dropped.
#[derive(Debug)]
pub(crate) struct SheddableEntry {
    list: Arc<SheddableConnections>,
    id: u64,
}

impl Drop for SheddableEntry {
    fn drop(&mut self) {
        self.list.lock().by_age.remove(&self.id);
    }
}

/// How many places each source has.
#[derive(Debug)]
pub(crate) struct ClientLimits {
    most: usize,
    /// Proxies, whose connections are those of many clients.
    unbounded: Vec<IpNetwork>,
    counts: Arc<Mutex<HashMap<ClientNetwork, usize>>>,
    full: LogThrottle,
}

impl ClientLimits {
    /// Each may have `most`, but for those in `unbounded`.
    pub(crate) fn new(most: usize, unbounded: Vec<IpNetwork>) -> Self {
        Self { most, unbounded, counts: Arc::default(), full: LogThrottle::default() }
    }

    /// Counts a connection from `ip` until the result is dropped. `None` where it is one too many and none
    /// from there can be shed.
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

    /// Counts places that a connection from `ip` takes beyond its first; `None` where they are more than its
    /// share.
    pub(crate) fn more(&self, ip: IpAddr, permits: usize) -> Option<ClientPermit> {
        self.count(ip, permits, || false)
    }

    /// Counts `places`, if they are of the share of `ip` or `sheds` makes room for them.
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
        // One that is shed leaves in a moment: until then there is one more.
        if count > most && !sheds() {
            return None;
        }
        counts.insert(source, count);
        Some(ClientPermit { source, permits, counts: Arc::clone(&self.counts) })
    }
}

/// Places that count for their source.
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
    async fn the_oldest_that_may_be_shed_makes_room() {
        let permits = ConnectionLimit::new(3, "a test's", OLD);
        let mut held: Vec<_> = (0..3).map(|_| permits.try_take(1)).collect();
        let shed: Vec<Arc<Notify>> = (0..3).map(|_| Arc::default()).collect();
        let source = ClientNetwork::of(ip("192.0.2.1"));
        let enter = |at: usize| permits.sheddable().enter(source, Arc::clone(&shed[at]));
        let [first, _second, _third] = [enter(0), enter(1), enter(2)];
        drop(first);
        // The first one is busy now; the second leaves when it is told to.
        let leave = async {
            shed[1].notified().await;
            held[1] = None;
        };
        let begun = Instant::now();
        let (place, ()) = tokio::join!(permits.take(), leave);
        assert!(place.is_some() && begun.elapsed() >= OLD);
        assert_eq!(permits.sheddable().count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_does_not_leave_holds_up_nobody() {
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
        let (place, ()) = tokio::join!(permits.take(), leave);
        assert!(place.is_some());
        drop(entries);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_has_its_share_and_a_proxy_any_number() {
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
        // One of its own makes room, another peer's does not.
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

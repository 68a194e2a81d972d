use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use crate::SeededEntropy;

/// Limit of concurrent connections; more wait to be accepted.
const MOST_CONNECTIONS: usize = 256;

/// Rates of each fault, per mille of the reads from a connection. A read is about a request or a
/// reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultProxyRates {
    /// The proxy drops a request and ends the connection.
    pub lose_request: u32,
    /// The proxy ends the client's connection and passes the request on some time later.
    pub late_request: u32,
    /// The proxy drops a reply and ends the connection.
    pub lose_reply: u32,
    /// The proxy passes on half of a reply and ends the connection.
    pub tear_reply: u32,
    /// The proxy drops a request or a reply, and the connection stays open without an answer.
    pub silence: u32,
    /// The proxy passes a request or a reply on after a delay.
    pub delay: u32,
    /// Maximum delay.
    pub delay_at_most: Duration,
}

impl FaultProxyRates {
    /// Returns the same rate for every fault except `silence`.
    #[must_use]
    pub const fn all(per_mille: u32, delay_at_most: Duration) -> Self {
        Self {
            lose_request: per_mille,
            late_request: per_mille,
            lose_reply: per_mille,
            tear_reply: per_mille,
            silence: 0,
            delay: per_mille,
            delay_at_most,
        }
    }
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of what a [`FaultProxy`] did so far.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct ProxyCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        struct Counters {
            $($name: AtomicU64,)*
        }

        impl Counters {
            fn read(&self) -> ProxyCounts {
                ProxyCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Connections accepted.
    connections,
    /// Requests lost.
    lost_requests,
    /// Requests passed on after their connection had ended.
    late_requests,
    /// Replies lost.
    lost_replies,
    /// Replies torn in two.
    torn_replies,
    /// Connections that stayed open without an answer.
    silences,
    /// Requests and replies delayed.
    delays,
    /// Connections cut by [`FaultProxy::cut`].
    cuts,
}

/// A TCP proxy on the loopback interface that injects faults.
///
/// Dropping it ends it and every connection through it.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    dice: SeededEntropy,
    rates: Mutex<FaultProxyRates>,
    only: Mutex<Option<Vec<u8>>>,
    counters: Counters,
    frozen: watch::Sender<bool>,
    /// Number of calls of [`FaultProxy::cut`].
    cut: watch::Sender<u64>,
}

impl FaultProxy {
    /// Starts a proxy in front of `upstream`, without faults until [`FaultProxy::set`].
    ///
    /// # Errors
    /// Any error of listening on a free port of 127.0.0.1.
    pub async fn before(upstream: SocketAddr, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            dice: SeededEntropy::new(seed),
            rates: Mutex::default(),
            only: Mutex::default(),
            counters: Counters::default(),
            frozen: watch::Sender::new(false),
            cut: watch::Sender::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { address, shared, accepting })
    }

    /// Returns the address for clients.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the rates of faults from now on.
    pub fn set(&self, rates: FaultProxyRates) {
        *self.shared.rates.lock().unwrap_or_else(PoisonError::into_inner) = rates;
    }

    /// Limits the faults of [`FaultProxy::set`] to requests with these bytes in them, such as
    /// `COMMIT`, and their replies. The bytes are searched in one read, which is about a request.
    pub fn only(&self, requests: &[u8]) {
        let only = (!requests.is_empty()).then(|| requests.to_vec());
        *self.shared.only.lock().unwrap_or_else(PoisonError::into_inner) = only;
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.shared.cut.send_modify(|cuts| *cuts += 1);
    }

    /// Passes nothing on until [`FaultProxy::thaw`], as in a network partition.
    pub fn freeze(&self) {
        self.shared.frozen.send_replace(true);
    }

    /// Passes on what was frozen, and continues.
    pub fn thaw(&self) {
        self.shared.frozen.send_replace(false);
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> ProxyCounts {
        self.shared.counters.read()
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // The task owns the connections, which end with it.
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut connections = JoinSet::new();
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&room).acquire_owned().await {
        let Ok((client, _)) = listener.accept().await else { return };
        while connections.try_join_next().is_some() {}
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let mut cut = shared.cut.subscribe();
            count(&shared.counters.connections);
            tokio::select! {
                // First: no reply that arrives after a cut is passed on.
                biased;
                _ = cut.changed() => count(&shared.counters.cuts),
                // A failed connection ends; a proxy cannot do more.
                _ = connect(&shared, client) => {}
            }
            drop(place);
        });
    }
}

/// Passes bytes on until one side ends.
async fn connect(shared: &Arc<Shared>, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(shared.upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // True if faults apply to the last request.
    let meant = AtomicBool::new(true);
    tokio::select! {
        ended = requests(shared, &meant, from_client, to_server) => ended,
        ended = replies(shared, &meant, from_server, to_client) => ended,
    }
}

async fn requests(
    shared: &Arc<Shared>,
    meant: &AtomicBool,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        meant.store(shared.means(&buffer[..length]), Ordering::Relaxed);
        let rates = shared.rates(meant);
        if shared.hit(rates.lose_request) {
            count(&shared.counters.lost_requests);
            return Ok(());
        }
        if shared.hit(rates.late_request) {
            count(&shared.counters.late_requests);
            let pause = shared.pause(&rates);
            // Outlives this connection, as a packet on a slow path does. The server's end stays
            // open until then; otherwise the server might not read the bytes.
            tokio::spawn(async move {
                sleep(pause).await;
                let _ = to.write_all(&buffer[..length]).await;
                sleep(Duration::from_millis(20)).await;
            });
            return Ok(());
        }
        shared.hinder(&rates).await;
        to.write_all(&buffer[..length]).await?;
    }
}

async fn replies(
    shared: &Arc<Shared>,
    meant: &AtomicBool,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        let rates = shared.rates(meant);
        if shared.hit(rates.lose_reply) {
            count(&shared.counters.lost_replies);
            return Ok(());
        }
        if shared.hit(rates.tear_reply) {
            count(&shared.counters.torn_replies);
            return to.write_all(&buffer[..length / 2]).await;
        }
        shared.hinder(&rates).await;
        to.write_all(&buffer[..length]).await?;
    }
}

impl Shared {
    fn rates(&self, meant: &AtomicBool) -> FaultProxyRates {
        if !meant.load(Ordering::Relaxed) {
            return FaultProxyRates::default();
        }
        *self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn means(&self, request: &[u8]) -> bool {
        let only = self.only.lock().unwrap_or_else(PoisonError::into_inner);
        only.as_ref().is_none_or(|only| request.windows(only.len()).any(|window| window == only))
    }

    fn hit(&self, per_mille: u32) -> bool {
        per_mille > 0 && self.dice.below(1_000) < u64::from(per_mille)
    }

    fn pause(&self, rates: &FaultProxyRates) -> Duration {
        let most = u64::try_from(rates.delay_at_most.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.dice.below(most.max(1)))
    }

    /// Waits while frozen, and by the rates a while longer, or for ever.
    async fn hinder(&self, rates: &FaultProxyRates) {
        if self.hit(rates.silence) {
            count(&self.counters.silences);
            std::future::pending::<()>().await;
        }
        if self.hit(rates.delay) {
            count(&self.counters.delays);
            sleep(self.pause(rates)).await;
        }
        // The sender is `self`: it outlives the wait.
        let _ = self.frozen.subscribe().wait_for(|frozen| !frozen).await;
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

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

/// Connections at a time; more wait to be accepted.
const MOST_CONNECTIONS: usize = 256;

/// How often each fault happens: per mille of what is read from a connection at one time, which
/// is about a request or a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultProxyRates {
    /// A request is not passed on, and the connection ends.
    pub lose_request: u32,
    /// The client's connection ends; its request is passed on some time after.
    pub late_request: u32,
    /// A reply is not passed on, and the connection ends.
    pub lose_reply: u32,
    /// Half of a reply is passed on, and the connection ends.
    pub tear_reply: u32,
    /// A request or a reply is not passed on, and the connection stays open in silence.
    pub silence: u32,
    /// A request or a reply is passed on after a while.
    pub delay: u32,
    /// The longest while.
    pub delay_at_most: Duration,
}

impl FaultProxyRates {
    /// All but `silence` at the same rate.
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
        /// What a [`FaultProxy`] did so far.
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
    /// Connections that fell silent.
    silences,
    /// Requests and replies delayed.
    delays,
    /// Connections cut by [`FaultProxy::cut`].
    cuts,
}

/// A TCP proxy on the loopback interface that does harm.
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
    /// Counts the calls of [`FaultProxy::cut`].
    cut: watch::Sender<u64>,
}

impl FaultProxy {
    /// A proxy in front of `upstream` that passes everything on until it is told otherwise.
    ///
    /// # Errors
    /// Whatever hinders listening on a free port of 127.0.0.1.
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

    /// Where clients connect.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// What goes wrong from now on.
    pub fn set(&self, rates: FaultProxyRates) {
        *self.shared.rates.lock().unwrap_or_else(PoisonError::into_inner) = rates;
    }

    /// Spares all but requests with these bytes in them, such as `COMMIT`, and their replies, from
    /// what [`FaultProxy::set`] said. Of what is read at one time, which is about a request.
    pub fn only(&self, requests: &[u8]) {
        let only = (!requests.is_empty()).then(|| requests.to_vec());
        *self.shared.only.lock().unwrap_or_else(PoisonError::into_inner) = only;
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.shared.cut.send_modify(|cuts| *cuts += 1);
    }

    /// Passes nothing on, until [`FaultProxy::thaw`]: as a partition of the network does.
    pub fn freeze(&self) {
        self.shared.frozen.send_replace(true);
    }

    /// Passes on what was frozen, and goes on.
    pub fn thaw(&self) {
        self.shared.frozen.send_replace(false);
    }

    /// What it did so far.
    #[must_use]
    pub fn counts(&self) -> ProxyCounts {
        self.shared.counters.read()
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // The connections are in a set that the task owns: they end with it.
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
                // A connection that fails ends; that is all a proxy can do about it.
                _ = connect(&shared, client) => {}
                _ = cut.changed() => count(&shared.counters.cuts),
            }
            drop(place);
        });
    }
}

/// Passes on until one side ends.
async fn connect(shared: &Arc<Shared>, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(shared.upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // Whether the last request was one to do harm to.
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
            // open until then, or it might not read what comes.
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

    /// Waits while frozen, and sometimes a while longer, or for ever.
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

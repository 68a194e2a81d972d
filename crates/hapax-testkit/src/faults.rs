//! A TCP proxy that does to connections what networks do.
//!
//! 1. What arrives in one read is one piece: a request, some of them, or a part of one.
//! 2. By chance it loses a request (nothing reaches the server, the connection breaks), loses a
//!    reply (the server did it, the connection breaks), or is late with a request (the connection
//!    breaks at once, the server gets the request later all the same).
//! 3. On demand it breaks every connection, or becomes a hole: connections stay, nothing passes.
//! 4. It counts what it did, so that a test can assert that its faults happened.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a proxy that does not start fails the test"
)]

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use crate::SeededEntropy;

/// How often each fault happens, in pieces of a thousand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Faults {
    /// Requests lost.
    pub lost_requests: u64,
    /// Replies lost.
    pub lost_replies: u64,
    /// Requests that reach the server after their sender was cut off.
    pub late_requests: u64,
    /// How late those are, at most.
    pub late_by: Duration,
}

/// What a [`Proxy`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Connections that clients made.
    pub connections: u64,
    /// Requests lost.
    pub lost_requests: u64,
    /// Replies lost.
    pub lost_replies: u64,
    /// Requests that were late.
    pub late_requests: u64,
    /// Connections broken on demand.
    pub severed: u64,
}

/// A proxy in front of a server on the loopback interface; gone when dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    listener: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    upstream: u16,
    entropy: SeededEntropy,
    faults: Mutex<Faults>,
    /// Grows when every connection is to be broken.
    severed: watch::Sender<u64>,
    hole: watch::Sender<bool>,
    counts: [AtomicU64; 5],
}

#[derive(Clone, Copy)]
enum Count {
    Connections,
    LostRequests,
    LostReplies,
    LateRequests,
    Severed,
}

impl Proxy {
    /// A proxy to 127.0.0.1:`upstream` that does no harm yet; its dice depend on `seed`.
    pub async fn start(upstream: u16, seed: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::new(Shared {
            upstream,
            entropy: SeededEntropy::new(seed),
            faults: Mutex::default(),
            severed: watch::Sender::new(0),
            hole: watch::Sender::new(false),
            counts: Default::default(),
        });
        let listener = tokio::spawn(listen(listener, Arc::clone(&shared))).abort_handle();
        Self { port, shared, listener }
    }

    /// Where it listens, on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// From now on these happen.
    pub fn set(&self, faults: Faults) {
        *self.shared.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    /// Breaks every connection.
    pub fn sever(&self) {
        self.shared.severed.send_modify(|times| *times += 1);
    }

    /// Whether nothing passes, in either direction, nor any new connection.
    pub fn hole(&self, hole: bool) {
        self.shared.hole.send_replace(hole);
    }

    /// What it did so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let count = |which: Count| self.shared.counts[which as usize].load(Ordering::Relaxed);
        Counts {
            connections: count(Count::Connections),
            lost_requests: count(Count::LostRequests),
            lost_replies: count(Count::LostReplies),
            late_requests: count(Count::LateRequests),
            severed: count(Count::Severed),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The connections' tasks belong to the listener's.
        self.listener.abort();
    }
}

impl Shared {
    fn count(&self, which: Count) {
        self.counts[which as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn faults(&self) -> Faults {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn happens(&self, in_a_thousand: u64) -> bool {
        in_a_thousand > 0 && self.entropy.below(1_000) < in_a_thousand
    }

    async fn pass_hole(&self) {
        // The sender is `self`: it outlives the wait.
        let _ = self.hole.subscribe().wait_for(|hole| !hole).await;
    }
}

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                shared.count(Count::Connections);
                connections.spawn(connect(client, Arc::clone(&shared)));
            }
            // Ended ones are forgotten.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connect(client: TcpStream, shared: Arc<Shared>) {
    let mut severed = shared.severed.subscribe();
    shared.pass_hole().await;
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, shared.upstream)).await else {
        return;
    };
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = requests(from_client, to_server, &shared) => {}
        () = replies(from_server, to_client, &shared) => {}
        _ = severed.changed() => shared.count(Count::Severed),
    }
}

async fn requests(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Arc<Shared>) {
    let mut piece = vec![0; 64 << 10];
    while let Some(length) = read(&mut from, &mut piece).await {
        shared.pass_hole().await;
        let faults = shared.faults();
        if shared.happens(faults.lost_requests) {
            return shared.count(Count::LostRequests);
        }
        if shared.happens(faults.late_requests) {
            shared.count(Count::LateRequests);
            let late_by = faults.late_by.as_micros() as u64;
            let late = Duration::from_micros(shared.entropy.below(late_by + 1));
            // On a task of its own: the connection is broken now.
            tokio::spawn(async move {
                sleep(late).await;
                to.write_all(&piece[..length]).await.ok();
                // Time for the server to read it before it sees the end.
                to.shutdown().await.ok();
            });
            return;
        }
        if to.write_all(&piece[..length]).await.is_err() {
            return;
        }
    }
}

async fn replies(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Arc<Shared>) {
    let mut piece = vec![0; 64 << 10];
    while let Some(length) = read(&mut from, &mut piece).await {
        shared.pass_hole().await;
        if shared.happens(shared.faults().lost_replies) {
            return shared.count(Count::LostReplies);
        }
        if to.write_all(&piece[..length]).await.is_err() {
            return;
        }
    }
}

async fn read(from: &mut OwnedReadHalf, piece: &mut [u8]) -> Option<usize> {
    from.read(piece).await.ok().filter(|length| *length > 0)
}

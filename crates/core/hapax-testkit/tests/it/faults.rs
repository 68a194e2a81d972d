//! The faults happen, and the suite holds under those of a store.

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName};
use hapax_core::{Clock, EntryId, MemoryCapacity, MemoryStore, OperationId, Store, StoreError};
use hapax_testkit::ManualClock;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates, FaultyRates, FaultyStore};
use hapax_testkit::schedule::schedule_rules;
use hapax_testkit::steps::key;
use hapax_testkit::suite::{StoreFixture, inspect_rules, store_rules};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(60);

/// A server that answers each message of four bytes with the same.
async fn echo() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut message = [0; 4];
                while stream.read_exact(&mut message).await.is_ok() {
                    if stream.write_all(&message).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

async fn exchange(stream: &mut TcpStream, message: [u8; 4]) -> io::Result<[u8; 4]> {
    stream.write_all(&message).await?;
    let mut reply = [0; 4];
    stream.read_exact(&mut reply).await?;
    Ok(reply)
}

async fn once(proxy: &FaultProxy) -> io::Result<[u8; 4]> {
    let mut stream = TcpStream::connect(proxy.address()).await?;
    timeout(SOON, exchange(&mut stream, *b"ping")).await?
}

#[tokio::test]
async fn a_proxy_without_faults_forwards_everything() {
    let proxy = FaultProxy::before(echo().await, 1).await.unwrap();
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    for number in 0..100_u32 {
        let message = number.to_be_bytes();
        assert_eq!(exchange(&mut stream, message).await.unwrap(), message);
    }
    assert_eq!(proxy.counts().connections, 1);
}

#[tokio::test]
async fn faults_affect_only_the_selected_requests() {
    let proxy = FaultProxy::before(echo().await, 1).await.unwrap();
    proxy.set(FaultProxyRates { lose_reply: 1_000, ..Default::default() });
    proxy.only(b"oom");
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    for _ in 0..3 {
        assert_eq!(exchange(&mut stream, *b"ping").await.unwrap(), *b"ping");
    }
    timeout(SOON, exchange(&mut stream, *b"boom")).await.unwrap().unwrap_err();
    assert_eq!(proxy.counts().lost_replies, 1);
    proxy.only(b"");
    once(&proxy).await.unwrap_err();
}

#[tokio::test]
async fn each_fault_of_a_proxy_fails_its_exchange() {
    let always = |set: fn(&mut FaultProxyRates)| {
        let mut rates =
            FaultProxyRates { delay_at_most: Duration::from_millis(5), ..Default::default() };
        set(&mut rates);
        rates
    };
    let proxy = FaultProxy::before(echo().await, 1).await.unwrap();
    for rates in [
        always(|rates| rates.lose_request = 1_000),
        always(|rates| rates.late_request = 1_000),
        always(|rates| rates.lose_reply = 1_000),
        always(|rates| rates.tear_reply = 1_000),
    ] {
        proxy.set(rates);
        let error = once(&proxy).await.unwrap_err();
        assert_ne!(error.kind(), io::ErrorKind::TimedOut, "{rates:?}");
    }
    let counts = proxy.counts();
    assert_eq!((counts.lost_requests, counts.late_requests), (1, 1));
    assert_eq!((counts.lost_replies, counts.torn_replies), (1, 1));

    proxy.set(always(|rates| rates.delay = 1_000));
    assert_eq!(once(&proxy).await.unwrap(), *b"ping");
    assert_eq!(proxy.counts().delays, 2);

    proxy.set(always(|rates| rates.silence = 1_000));
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    let silent = timeout(Duration::from_millis(50), exchange(&mut stream, *b"ping"));
    assert!(silent.await.is_err(), "somebody answered");
    assert_eq!(proxy.counts().silences, 1);
}

#[tokio::test]
async fn a_frozen_proxy_forwards_later_and_a_cut_one_never() {
    let proxy = FaultProxy::before(echo().await, 1).await.unwrap();
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(exchange(&mut stream, *b"ping").await.unwrap(), *b"ping");
    proxy.freeze();
    stream.write_all(b"pong").await.unwrap();
    let mut reply = [0; 4];
    let early = timeout(Duration::from_millis(50), stream.read_exact(&mut reply)).await;
    assert!(early.is_err(), "frozen, and it answered");
    proxy.thaw();
    timeout(SOON, stream.read_exact(&mut reply)).await.unwrap().unwrap();
    assert_eq!(reply, *b"pong");

    proxy.cut();
    assert!(timeout(SOON, exchange(&mut stream, *b"ping")).await.unwrap().is_err());
    assert_eq!(once(&proxy).await.unwrap(), *b"ping", "new connections pass");
    assert_eq!(proxy.counts().cuts, 1);
}

struct Faulty(Arc<ManualClock>);

impl StoreFixture for Faulty {
    type Store = FaultyStore<MemoryStore>;

    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<Self::Store> {
        let clock: Arc<dyn Clock> = self.0.clone();
        let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
        let faulty = FaultyStore::new(memory, 1);
        faulty.set(FaultyRates {
            unavailable: 50,
            ambiguous_lost: 50,
            ambiguous_applied: 100,
            ambiguous_late: 50,
            delay: 50,
            delay_at_most: Duration::from_millis(3),
        });
        Arc::new(faulty)
    }

    async fn pass(&self, store: &Self::Store, by: Duration) {
        // Retention is longer than any delay; this clock is quicker than the delays.
        store.settled().await;
        self.0.advance(by);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_suite_holds_for_a_store_that_fails() {
    let faulty = Faulty(Arc::default());
    store_rules(&faulty).await;
    inspect_rules(&faulty).await;
    schedule_rules(&faulty).await;
}

/// Each fault of a write occurs for an insertion, and a repetition resolves it.
#[tokio::test]
async fn faults_affect_the_schedule_of_a_store() {
    let store = Faulty(Arc::default()).open().await;
    let schedule = store.capabilities().schedule.unwrap();
    let entry = |of| NewEntry {
        key: EntryKey { operation: key(of), id: EntryId::from_bytes([1; 16]) },
        queue: QueueName::new("test/1").unwrap(),
        due_in: Duration::ZERO,
        note: Bytes::new(),
    };
    let is_there = async |of| {
        let all = schedule.entries(None, NonZeroU32::MAX).await.unwrap().entries;
        all.iter().any(|(found, _)| *found == entry(of).key)
    };
    let none = FaultyRates::default();
    for (of, (rates, is_applied)) in (0..).zip([
        (FaultyRates { unavailable: 1_000, ..none }, false),
        (FaultyRates { ambiguous_lost: 1_000, ..none }, false),
        (FaultyRates { ambiguous_applied: 1_000, ..none }, true),
        (FaultyRates { ambiguous_late: 1_000, ..none }, true),
    ]) {
        store.set(rates);
        let failed = schedule.insert(entry(of)).await;
        assert_eq!(matches!(failed, Err(StoreError::Ambiguous(_))), of > 0, "{failed:?}");
        store.settled().await;
        store.set(none);
        assert_eq!(is_there(of).await, is_applied, "{rates:?}");
        schedule.insert(entry(of)).await.unwrap();
        assert!(is_there(of).await);
    }
    store.set_down(true);
    let queues = [entry(0).queue];
    assert!(schedule.due(&queues, NonZeroU32::MIN).await.is_err());
    assert!(schedule.queues().await.is_err());
    assert!(schedule.postpone(entry(0).key, None, Duration::ZERO).await.is_err());
    assert!(schedule.remove(entry(0).key).await.is_err());
}

#[tokio::test]
async fn a_faulty_store_counts_what_it_does() {
    let store = Faulty(Arc::default()).open().await;
    let key = OperationId::from_bytes([1; 32]);
    store.set(FaultyRates::default());
    store.set_down(true);
    let down = store.load(&key).await;
    assert!(matches!(down, Err(StoreError::Unavailable(_))), "{down:?}");
    store.set_down(false);
    assert_eq!(store.load(&key).await.unwrap().stored, None);
    assert_eq!(store.counts().unavailable, 1);
}

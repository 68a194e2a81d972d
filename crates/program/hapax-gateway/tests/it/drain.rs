//! How a gateway ends.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{MemoryCapacity, MemoryStore, OnUnknown, SystemClock};
use hapax_gateway::{Gateway, OpenStore, ShutdownReport};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::world::{Raw, TIMEOUT, Upstream, config, post, request, start, text, until};

type Begun = mpsc::Receiver<oneshot::Sender<u16>>;

/// An upstream that tells of each request, and answers it when, and as, it is told.
async fn patient() -> (Upstream, Begun) {
    let (begun, beginnings) = mpsc::channel(10);
    let upstream = Upstream::start(move |_| {
        let begun = begun.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            begun.send(answer).await.unwrap();
            match answered.await {
                Ok(status) => text(status, "done"),
                Err(_) => std::future::pending().await,
            }
        }
    })
    .await;
    (upstream, beginnings)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_requests_in_progress_and_rejects_new_ones() {
    let (upstream, mut begun) = patient().await;
    let gateway = start(config(upstream.url())).await;
    let address = gateway.local_addr();
    let mut busy = Raw::connect(address).await;
    busy.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    let mut plain = Raw::connect(address).await;
    plain.send(request("POST", "/plain", &[], "x")).await;
    let answers = [begun.recv().await.unwrap(), begun.recv().await.unwrap()];
    let mut kept = Raw::connect(address).await;
    kept.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    assert_eq!(kept.answer().await.code(), "in-flight");

    let ending = tokio::spawn(gateway.shutdown());
    // The listener goes first; then what is kept open hears it.
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    kept.send(request("POST", "/", &[("idempotency-key", "new")], "x")).await;
    let refused = kept.answer().await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "draining"));
    assert_eq!(refused.header("connection"), "close");
    assert_eq!(kept.rest().await, b"");

    for answer in answers {
        answer.send(201).unwrap();
    }
    for connection in [&mut busy, &mut plain] {
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.header("connection")), (201, "close"));
        assert_eq!(connection.rest().await, b"");
    }
    assert_eq!(ending.await.unwrap(), ShutdownReport::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_gateway_ends_at_once() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.drain_timeout = TIMEOUT * 2;
    let gateway = start(config).await;
    let mut idle = Raw::connect(gateway.local_addr()).await;
    idle.send(request("POST", "/", &[], "x")).await;
    idle.answer().await;
    let ended = tokio::time::timeout(TIMEOUT, gateway.shutdown()).await.unwrap();
    assert_eq!(ended, ShutdownReport::default());
    assert_eq!(idle.rest().await, b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_records_unanswered_requests_as_unknown() {
    let (upstream, mut begun) = patient().await;
    let memory = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let opened = OpenStore::new(Arc::new(memory), None);
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Block;
    config.drain_timeout = Duration::from_millis(100);
    let first = Gateway::start_on(config.clone(), opened.clone()).await.unwrap();
    let mut raw = Raw::connect(first.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "sent")], "x")).await;
    let _never = begun.recv().await.unwrap();
    // And one whose client is gone.
    let mut gone = Raw::connect(first.local_addr()).await;
    gone.send(request("POST", "/", &[("idempotency-key", "gone")], "x")).await;
    let _never_either = begun.recv().await.unwrap();
    drop(gone);

    let ended = first.shutdown().await;
    assert_eq!((ended.cut_off, ended.not_recorded), (2, 0));
    let answer = raw.answer().await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "upstream-broken"));

    let second = Gateway::start_on(config, opened).await.unwrap();
    for key in ["sent", "gone"] {
        let answer = post(second.local_addr(), "/", key, "x").await;
        assert_eq!((answer.status, answer.code().as_str()), (409, "outcome-unknown"), "{key}");
    }
    assert_eq!(upstream.seen().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_releases_requests_that_were_not_sent() {
    // A listener that lets nobody in: its queue is full, so that connecting hangs.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let full = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    while let Ok(stream) =
        tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(full)).await
    {
        queue.push(stream.unwrap());
    }
    let memory = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let opened = OpenStore::new(Arc::new(memory), None);
    let mut blocked = config(format!("http://{full}").parse().unwrap());
    blocked.policy.on_unknown = OnUnknown::Block;
    blocked.drain_timeout = Duration::from_millis(100);
    let first = Gateway::start_on(blocked, opened.clone()).await.unwrap();
    let mut raw = Raw::connect(first.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    let engine = first.engine().clone();
    until("it is claimed", || engine.stats().in_flight == 1).await;
    assert_eq!(first.shutdown().await.cut_off, 1);
    assert_eq!(raw.answer().await.code(), "upstream-unreachable");

    let upstream = Upstream::counting().await;
    let mut open = config(upstream.url());
    open.policy.on_unknown = OnUnknown::Block;
    let second = Gateway::start_on(open, opened).await.unwrap();
    assert_eq!(post(second.local_addr(), "/", "k", "x").await.status, 201);
}

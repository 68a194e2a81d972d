//! Upstreams that fail: what the client is told, and what a retry gets.

use std::net::SocketAddr;
use std::time::Duration;

use hapax_core::OnUnknown;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::world::{Raw, Upstream, config, post, request, start, text};

/// An upstream that speaks in bytes: each connection is handed over with what was read of its
/// first request, up to the end of its head.
pub(crate) struct RawUpstream {
    pub(crate) address: SocketAddr,
    connections: mpsc::Receiver<(TcpStream, String)>,
}

impl RawUpstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (out, connections) = mpsc::channel(100);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let out = out.clone();
                tokio::spawn(async move {
                    let head = read_head(&mut stream).await;
                    drop(out.send((stream, head)).await);
                });
            }
        });
        Self { address, connections }
    }

    pub(crate) async fn next(&mut self) -> (TcpStream, String) {
        tokio::time::timeout(crate::world::TIMEOUT, self.connections.recv()).await.unwrap().unwrap()
    }
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut buffer = [0; 1024];
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(count) => head.extend_from_slice(&buffer[..count]),
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

fn fence(head: &str) -> u64 {
    let line = head.lines().find_map(|line| line.strip_prefix("idempotency-fence: "));
    line.unwrap().parse().unwrap()
}

pub(crate) fn url(address: SocketAddr) -> http::Uri {
    format!("http://{address}").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_upstream_releases_the_key() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut config = config(url(address));
    config.policy.on_unknown = OnUnknown::Block;
    let gateway = start(config).await;
    let answer = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "upstream-unreachable"));
    assert_eq!(answer.header("retry-after"), "1");
    // Nothing was sent, so even `block` lets it run, with another body, too.
    let listener = TcpListener::bind(address).await.unwrap();
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        head
    });
    assert_eq!(post(gateway.local_addr(), "/", "k", "other").await.status, 201);
    assert!(served.await.unwrap().contains("idempotency-attempt: 2\r\n"));
}

/// What each of these answers before it closes.
const BROKEN: [(&str, &str); 7] = [
    ("nothing", ""),
    ("half a head", "HTTP/1.1 201 Cre"),
    ("half a body", "HTTP/1.1 201 Created\r\ncontent-length: 10\r\n\r\nhalf"),
    ("half a chunk", "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n5\r\nha"),
    (
        "a coding that nobody names",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    ),
    (
        "a coding twice",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n\
         2\r\nab\r\n0\r\n\r\n",
    ),
    ("no HTTP", "hello\r\n\r\n"),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_response_is_unknown_and_blocks() {
    for (name, bytes) in BROKEN {
        let mut upstream = RawUpstream::start().await;
        let mut config = config(url(upstream.address));
        config.policy.on_unknown = OnUnknown::Block;
        let gateway = start(config).await;
        let asked = tokio::spawn(post_owned(gateway.local_addr(), "x"));
        let (mut stream, _) = upstream.next().await;
        stream.write_all(bytes.as_bytes()).await.unwrap();
        drop(stream);
        let answer = asked.await.unwrap();
        assert_eq!((answer.status, answer.code().as_str()), (502, "upstream-broken"), "{name}");
        let again = post(gateway.local_addr(), "/", "k", "x").await;
        assert_eq!((again.status, again.code().as_str()), (409, "outcome-unknown"), "{name}");
        let other = post(gateway.local_addr(), "/", "k", "y").await;
        assert_eq!(other.code(), "key-reused", "{name}");
        assert!(upstream.connections.try_recv().is_err(), "{name}: it was sent again");
    }
}

async fn post_owned(address: SocketAddr, body: &'static str) -> crate::world::Answer {
    post(address, "/", "k", body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_broken_response_reexecute_uses_a_larger_fence() {
    let mut upstream = RawUpstream::start().await;
    let mut config = config(url(upstream.address));
    config.policy.on_unknown = OnUnknown::Reexecute;
    let gateway = start(config).await;
    let asked = tokio::spawn(post_owned(gateway.local_addr(), "x"));
    let (stream, first) = upstream.next().await;
    drop(stream);
    assert_eq!(asked.await.unwrap().status, 502);
    let asked = tokio::spawn(post_owned(gateway.local_addr(), "x"));
    let (mut stream, second) = upstream.next().await;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert_eq!(asked.await.unwrap().text(), "ok");
    assert!(fence(&second) > fence(&first));
    assert!(second.contains("idempotency-attempt: 2\r\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_does_not_answer_times_out_with_an_unknown_outcome() {
    for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"] {
        let mut upstream = RawUpstream::start().await;
        let mut config = config(url(upstream.address));
        config.policy.on_unknown = OnUnknown::Block;
        // The beginning of an answer must be there in time.
        let limit = if answer.is_empty() { 200 } else { 5_000 };
        config.policy.upstream_timeout = Duration::from_millis(limit);
        let gateway = start(config).await;
        let asked = tokio::spawn(post_owned(gateway.local_addr(), "x"));
        let (mut stream, _) = upstream.next().await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        let got = asked.await.unwrap();
        // In the middle of a body it is the answer that broke off.
        let wanted =
            if answer.is_empty() { (504, "upstream-timeout") } else { (502, "upstream-broken") };
        assert_eq!((got.status, got.code().as_str()), wanted);
        assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.code(), "outcome-unknown");
        // The connection is given up, so that a late answer reaches nobody else.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unrequested_protocol_switch_is_a_broken_response() {
    let mut upstream = RawUpstream::start().await;
    let gateway = start(config(url(upstream.address))).await;
    let asked = tokio::spawn(post_owned(gateway.local_addr(), "x"));
    let (mut stream, head) = upstream.next().await;
    assert!(!head.to_ascii_lowercase().contains("upgrade"));
    stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n").await.unwrap();
    assert_eq!(asked.await.unwrap().code(), "upstream-broken");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_connection_that_the_upstream_closed_is_not_used() {
    let mut upstream = RawUpstream::start().await;
    let mut config = config(url(upstream.address));
    config.policy.on_unknown = OnUnknown::Block;
    let gateway = start(config).await;
    for i in 0..10 {
        let key = i.to_string();
        let asked = {
            let (address, key) = (gateway.local_addr(), key.clone());
            tokio::spawn(async move { post(address, "/", &key, "x").await })
        };
        let (mut stream, _) = upstream.next().await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        assert_eq!(asked.await.unwrap().status, 200, "request {i}");
        // Closed by the upstream; and the gateway knows, as it closes its side.
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert!(
            !rest.windows(4).any(|part| part == b"POST"),
            "request {i} went to the wrong place"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_client_gets_the_outcome_by_a_retry() {
    let (begun, mut beginnings) = mpsc::channel::<tokio::sync::oneshot::Sender<()>>(1);
    let upstream = Upstream::start(move |_| {
        let begun = begun.clone();
        async move {
            let (go, gone) = tokio::sync::oneshot::channel();
            begun.send(go).await.unwrap();
            gone.await.unwrap();
            text(201, "done")
        }
    })
    .await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    let go = beginnings.recv().await.unwrap();
    drop(raw);
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.code(), "in-flight");
    go.send(()).unwrap();
    let engine = gateway.engine().clone();
    crate::world::until("the execution ends", || engine.stats().in_flight == 0).await;
    let answer = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((answer.header("idempotency-replayed"), answer.text().as_str()), ("true", "done"));
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_is_disconnected() {
    let upstream = Upstream::counting().await;
    let short = Duration::from_millis(200);
    let mut heads = config(upstream.url());
    heads.limits.head_timeout = short;
    let gateway = start(heads).await;
    let mut in_head = Raw::connect(gateway.local_addr()).await;
    in_head.send("POST / HTTP/1.1\r\nhost:").await;
    assert_eq!(in_head.rest().await, b"");

    let mut bodies = config(upstream.url());
    bodies.limits.stall = short;
    let gateway = start(bodies).await;
    let mut in_body = Raw::connect(gateway.local_addr()).await;
    in_body
        .send("POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 9\r\n\r\nab")
        .await;
    let answer = in_body.answer().await;
    assert_eq!((answer.status, answer.code().as_str()), (408, "request-timeout"));
    assert_eq!(in_body.rest().await, b"");
    assert_eq!(upstream.seen().len(), 0);
    // The key was never claimed.
    assert_eq!(post(gateway.local_addr(), "/", "k", "other").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_is_disconnected() {
    let upstream = Upstream::start(|_| async { text(200, vec![b'x'; 64 << 20]) }).await;
    let mut config = config(upstream.url());
    config.limits.stall = Duration::from_millis(200);
    let gateway = start(config).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("GET", "/", &[], "")).await;
    raw.until(b"\r\n\r\n").await;
    // Read nothing until the gateway has given up; what is left in the buffers is not all.
    let admin = gateway.admin_addr().unwrap();
    while crate::world::get(admin, "/api/stats").await.json()["now"]["requests"] != 0 {
        tokio::task::yield_now().await;
    }
    assert!(raw.rest().await.len() < 64 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ambiguous_response_is_not_forwarded_unchanged() {
    for bytes in [
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
    ] {
        for key in ["", "idempotency-key: k\r\n"] {
            let mut upstream = RawUpstream::start().await;
            let gateway = start(config(url(upstream.address))).await;
            let mut raw = Raw::connect(gateway.local_addr()).await;
            raw.send(format!("POST / HTTP/1.1\r\nhost: a\r\n{key}content-length: 1\r\n\r\nx"))
                .await;
            let (mut stream, _) = upstream.next().await;
            stream.write_all(bytes.as_bytes()).await.unwrap();
            let answer = raw.answer().await;
            let lengths =
                answer.headers.iter().filter(|(name, _)| name == "content-length").count();
            let coded = !answer.header("transfer-encoding").is_empty();
            assert!(lengths + usize::from(coded) == 1, "{answer:?}");
            assert!(answer.text() == "ab" || answer.status == 502, "{answer:?}");
        }
    }
}

//! More connections than there may be.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hapax_gateway::IpNetwork;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::two::Two;
use crate::world::{Raw, TIMEOUT, Upstream, config, get, post, request, start, text, token, until};

async fn silent(address: SocketAddr, count: usize) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for _ in 0..count {
        let stream = timeout(TIMEOUT, TcpStream::connect(address)).await.expect("it is let in");
        streams.push(stream.unwrap());
    }
    streams
}

/// A connection from this address of loopback.
async fn from(source: &str, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
    socket.connect(address).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_send_nothing_delay_no_client() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.limits.connections = 32;
    config.limits.head_timeout = TIMEOUT * 10;
    let gateway = start(config).await;
    let _silent = silent(gateway.local_addr(), 100).await;
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
    // One that has sent something keeps its place.
    let mut used = Raw::connect(gateway.local_addr()).await;
    used.send(request("POST", "/", &[], "x")).await;
    assert_eq!(used.answer().await.status, 201);
    let _more = silent(gateway.local_addr(), 64).await;
    assert_eq!(post(gateway.local_addr(), "/", "l", "x").await.status, 201);
    used.send(request("POST", "/", &[], "x")).await;
    assert_eq!(used.answer().await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_has_at_most_its_limit_of_connections() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.limits.connections_per_peer = Some(2);
    config.transport.trusted = vec!["127.0.0.1".parse::<IpNetwork>().unwrap()];
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let asked = request("GET", "/", &[], "");
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut stream = from("127.0.0.2", address).await;
        stream.write_all(asked.as_bytes()).await.unwrap();
        assert!(timeout(TIMEOUT, stream.read(&mut [0; 1])).await.unwrap().unwrap() > 0);
        busy.push(stream);
    }
    let mut third = from("127.0.0.2", address).await;
    let closed = timeout(TIMEOUT, third.read(&mut [0; 1])).await.expect("it is closed");
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    // Others are served, and a proxy has any number.
    let _others = [from("127.0.0.3", address).await, from("127.0.0.3", address).await];
    let _proxied = silent(address, 20).await;
    assert_eq!(post(address, "/", "k", "x").await.status, 201);
    // A peer makes room by its own connections that have sent nothing.
    let served = async {
        loop {
            let mut last = from("127.0.0.3", address).await;
            let _ = last.write_all(asked.as_bytes()).await;
            if last.read(&mut [0; 1]).await.is_ok_and(|count| count > 0) {
                return;
            }
            // They have just come: not yet.
            tokio::task::yield_now().await;
        }
    };
    timeout(TIMEOUT, served).await.expect("it is served");
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_requests_of_a_peer_count_against_its_limit() {
    let (begun, mut seen) = mpsc::unbounded_channel();
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let upstream = Upstream::start(move |seen| {
        let (begun, held) = (begun.clone(), Arc::clone(&held));
        async move {
            if seen.uri.path() == "/held" {
                begun.send(()).unwrap();
                held.acquire().await.unwrap().forget();
            }
            text(200, "")
        }
    })
    .await;
    let mut config = config(upstream.url());
    config.limits.connections = 6;
    config.limits.connections_per_peer = Some(4);
    config.transport.trusted = Vec::new();
    let gateway = start(config).await;
    let address = gateway.local_addr();
    // Two connections, and of eight requests one on each and two more.
    let mut asked = JoinSet::new();
    // Both before the first request: four of one connection would leave no permit for the other.
    let first = Arc::new(Two::on(from("127.0.0.2", address).await).await);
    let second = Arc::new(Two::on(from("127.0.0.2", address).await).await);
    for two in [&first, &second] {
        assert_eq!(two.ask(Two::request("GET", "/", &[]), "").await.status, 200);
    }
    for two in [first, second] {
        for _ in 0..4 {
            let two = Arc::clone(&two);
            asked.spawn(async move { two.ask(Two::request("GET", "/held", &[]), "").await });
        }
    }
    for _ in 0..4 {
        timeout(TIMEOUT, seen.recv()).await.expect("it is let through").unwrap();
    }
    // Two places are left for everybody else.
    for _ in 0..2 {
        assert_eq!(post(address, "/", "k", "x").await.status, 200);
    }
    assert!(seen.try_recv().is_err(), "a fifth request of the peer is in progress");
    gate.add_permits(8);
    assert!(asked.join_all().await.iter().all(|answer| answer.status == 200));
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_of_operators_delay_no_probe() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let admin = gateway.admin_addr().unwrap();
    // Each is closed after ten seconds, 64 at a time: all of them would take longer than a probe waits.
    let mut idle = silent(admin, 450).await;
    assert_eq!(get(admin, "/readyz").await.status, 200);
    for stream in &mut idle {
        // Half a head is no request either. The first ones are closed by now.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost:").await;
    }
    assert_eq!(get(admin, "/healthz").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_are_reserved_for_probes() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let admin = gateway.admin_addr().unwrap();
    let head = format!(
        "POST /api/keys/lookup HTTP/1.1\r\nhost: localhost\r\nauthorization: {}\r\n\
         content-type: application/json\r\ncontent-length: 9\r\n\r\n{{",
        token()
    );
    loop {
        // Their bodies never end; they are given up after ten seconds.
        let mut slow = silent(admin, 60).await;
        for stream in &mut slow {
            stream.write_all(head.as_bytes()).await.unwrap();
        }
        for path in ["/healthz", "/readyz"] {
            assert_eq!(get(admin, path).await.status, 200, "{path}");
        }
        let other = get(admin, "/api/stats").await;
        if other.status == 503 {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_during_the_drain_delay() {
    let upstream = Upstream::counting().await;
    let mut slow = config(upstream.url());
    slow.drain_delay = TIMEOUT * 10;
    let gateway = start(slow).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    assert_eq!(get(admin, "/readyz").await.status, 200);
    let ending = tokio::spawn(gateway.shutdown());
    let ready = async { while get(admin, "/readyz").await.status == 200 {} };
    timeout(TIMEOUT, ready).await.expect("it is not ready any more");
    assert_eq!(get(admin, "/healthz").await.status, 200);
    assert_eq!(post(address, "/", "k", "x").await.status, 201);
    ending.abort();

    let mut brief = config(upstream.url());
    brief.drain_delay = Duration::from_millis(1);
    let gateway = start(brief).await;
    let address = gateway.local_addr();
    timeout(TIMEOUT, gateway.shutdown()).await.expect("it ends");
    until("it is closed", || std::net::TcpStream::connect(address).is_err()).await;
}

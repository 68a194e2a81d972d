//! What is not one request and one answer: other protocols, streams, informational answers.

use std::time::Duration;

use hapax_gateway::RouteConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::world::{Raw, TIMEOUT, Upstream, config, post, request, start, text};

/// An upstream that answers each connection's first head with `says` and hands the connection over.
async fn raw_upstream(says: &'static str) -> (http::Uri, JoinHandle<(String, TcpStream)>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let task = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.windows(4).any(|part| part == b"\r\n\r\n") {
            assert!(stream.read_buf(&mut head).await.unwrap() > 0);
        }
        stream.write_all(says.as_bytes()).await.unwrap();
        (String::from_utf8(head).unwrap(), stream)
    });
    (url, task)
}

const SWITCHED: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n\
    upgrade: websocket\r\nsec-websocket-accept: yes\r\n\r\nearly";

const ASKING: &str = "GET /chat HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\n\
    upgrade: websocket\r\nsec-websocket-key: x\r\n\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn an_unprotected_request_may_switch_protocols() {
    let (url, upstream) = raw_upstream(SWITCHED).await;
    let gateway = start(config(url)).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    client.send(ASKING).await;
    let answer = client.answer_to(false).await.unwrap();
    assert_eq!(answer.status, 101);
    assert_eq!((answer.header("upgrade"), answer.header("connection")), ("websocket", "upgrade"));
    assert_eq!(answer.header("sec-websocket-accept"), "yes");
    let (head, mut stream) = upstream.await.unwrap();
    for field in ["upgrade: websocket", "connection: upgrade", "sec-websocket-key: x"] {
        assert!(head.contains(field), "{head}");
    }
    // What came with the head is not lost, and bytes that look like requests are bytes.
    client.until(b"early").await;
    client.send("GET / HTTP/1.1\r\n\r\n\n\0").await;
    let mut read = [0; 20];
    stream.read_exact(&mut read).await.unwrap();
    assert_eq!(&read, b"GET / HTTP/1.1\r\n\r\n\n\0");
    stream.write_all(b"HTTP/1.1 what").await.unwrap();
    client.until(b"what").await;
    // Each side ends by itself.
    stream.shutdown().await.unwrap();
    assert_eq!(client.rest().await, b"");
    client.send("still").await;
    drop(client);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"still");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_after_an_upgrade_request_go_to_the_new_protocol() {
    let (url, upstream) = raw_upstream(SWITCHED).await;
    let gateway = start(config(url)).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    // It looks like half a request: withheld, and not for us to judge once protocols are switched.
    client.send(format!("{ASKING}GET /half HTTP/1.1\r\nx: ")).await;
    assert_eq!(client.answer_to(false).await.unwrap().status, 101);
    let (_, mut stream) = upstream.await.unwrap();
    let mut read = [0; 23];
    stream.read_exact(&mut read).await.unwrap();
    assert_eq!(&read[..], b"GET /half HTTP/1.1\r\nx: ");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_after_an_accepted_upgrade_need_not_be_http() {
    let frames = b"\x81\x05hello\n\n\0 \r\n GET\r\n\r\n";
    let (url, upstream) = raw_upstream(SWITCHED).await;
    let gateway = start(config(url)).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    // In one segment, and in two.
    client.send([ASKING.as_bytes(), &frames[..9]].concat()).await;
    client.send(&frames[9..]).await;
    assert_eq!(client.answer_to(false).await.unwrap().status, 101);
    let (_, mut stream) = upstream.await.unwrap();
    let mut read = vec![0; frames.len()];
    timeout(TIMEOUT, stream.read_exact(&mut read)).await.unwrap().unwrap();
    assert_eq!(read, frames);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_after_a_rejected_upgrade_are_checked_as_requests() {
    let upstream =
        Upstream::start(|seen| async move { text(200, seen.uri.path().to_owned()) }).await;
    let gateway = start(config(upstream.url())).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    let first = "GET /first HTTP/1.1\r\nhost: a\r\n\r\n";
    let next = "GET /next HTTP/1.1\r\nhost: a\r\n\r\n";
    client.send(format!("{first}{ASKING}{next}{ASKING}GET /two HTTP/1.1\r\nhost: a\n\r\n")).await;
    for path in ["/first", "/chat", "/next", "/chat"] {
        assert_eq!(client.answer().await.text(), path);
    }
    assert_eq!(client.answer().await.code(), "malformed-request");
    assert_eq!(upstream.seen().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_protected_request_cannot_switch_protocols() {
    let (url, upstream) = raw_upstream(SWITCHED).await;
    let gateway = start(config(url)).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    client
        .send(
            "POST /chat HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
               idempotency-key: k\r\ncontent-length: 0\r\n\r\n",
        )
        .await;
    // The upstream was not asked; that it switches all the same is not understood.
    assert_eq!(client.answer().await.code(), "upstream-broken");
    let (head, _) = upstream.await.unwrap();
    assert!(!head.contains("upgrade"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_rejects_an_upgrade_is_forwarded() {
    let upstream = Upstream::start(|seen| async move {
        assert_eq!(
            seen.header("upgrade"),
            if seen.uri.path() == "/chat" { "websocket" } else { "" }
        );
        text(426, "no")
    })
    .await;
    let gateway = start(config(upstream.url())).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    client.send(ASKING).await;
    assert_eq!(client.answer().await.status, 426);
    client.send(request("GET", "/next", &[], "")).await;
    assert_eq!(client.answer().await.status, 426);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_tunnel_is_closed() {
    let (url, upstream) = raw_upstream(SWITCHED).await;
    let mut config = config(url);
    // That of its route.
    let mut short = config.policy.clone();
    short.upstream_timeout = Duration::from_millis(300);
    config.routes = vec![RouteConfig::new("/{*rest}", short)];
    config.policy.upstream_timeout = TIMEOUT * 2;
    let gateway = start(config).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    client.send(ASKING).await;
    client.until(b"early").await;
    let (_, mut stream) = upstream.await.unwrap();
    assert_eq!(client.rest().await, b"");
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut rest)).await;
    assert!(ended.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_for_tunnels() {
    let (url, upstream) = raw_upstream(SWITCHED).await;
    let gateway = start(config(url)).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    client.send(ASKING).await;
    client.until(b"early").await;
    let _stream = upstream.await.unwrap();
    tokio::time::timeout(TIMEOUT, gateway.shutdown()).await.unwrap();
    assert_eq!(client.rest().await, b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_22_informational_responses_are_neither_forwarded_nor_stored() {
    let (url, upstream) = raw_upstream(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n\
         HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\ndone",
    )
    .await;
    let gateway = start(config(url)).await;
    let first = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((first.status, first.text().as_str(), first.header("link")), (201, "done", ""));
    let again = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((again.status, again.text().as_str()), (201, "done"));
    assert_eq!(again.header("idempotency-replayed"), "true");
    drop(upstream.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_19_event_streams_are_forwarded_as_they_arrive_and_not_stored() {
    let (url, upstream) = raw_upstream(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    )
    .await;
    let gateway = start(config(url)).await;
    let (told, go) = oneshot::channel::<()>();
    let events = tokio::spawn(async move {
        let (_, mut stream) = upstream.await.unwrap();
        stream.write_all(b"9\r\ndata: 1\n\n\r\n").await.unwrap();
        // The second one only after the first has arrived.
        go.await.unwrap();
        stream.write_all(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n").await.unwrap();
        stream
    });
    let mut client = Raw::connect(gateway.local_addr()).await;
    client.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    client.until(b"data: 1\n\n").await;
    // The key is final already.
    let again = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((again.status, again.code().as_str()), (409, "response-not-retained"));
    told.send(()).unwrap();
    client.until(b"data: 2\n\n").await;
    client.until(b"0\r\n\r\n").await;
    drop(events.await.unwrap());
}

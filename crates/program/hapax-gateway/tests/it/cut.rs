//! What is cut short on its way, on each of the four sides, and what comes unasked.

use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use hapax_core::OnUnknown;
use hapax_gateway::{Config, UpstreamProtocol};
use http::HeaderValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::failures::{RawUpstream, url};
use crate::two::{Two, fields, frame};
use crate::world::{Raw, TIMEOUT, Upstream, config, get, post, request, start, text};

/// In front of an upstream that speaks HTTP/2.
fn config_two(listener: &TcpListener) -> Config {
    let mut config = config(url(listener.local_addr().unwrap()));
    config.transport.upstream_protocol = UpstreamProtocol::Http2;
    config.policy.on_unknown = OnUnknown::Block;
    config
}

/// A connection of HTTP/2 whose first request has come, up to its head.
async fn accept_two(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = timeout(TIMEOUT, listener.accept()).await.unwrap().unwrap();
    stream.write_all(&frame(4, 0, 0, &[])).await.unwrap();
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).await.unwrap();
    loop {
        let mut head = [0; 9];
        timeout(TIMEOUT, stream.read_exact(&mut head)).await.unwrap().unwrap();
        let length = usize::from(head[1]) << 8 | usize::from(head[2]);
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        if head[3] == 1 {
            return stream;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_response_without_end_flag_is_broken() {
    let head = |more: &[(&str, &str)]| {
        frame(1, 4, 1, &fields(&[&[(":status", "200")][..], more].concat()))
    };
    let (part, reset) = (frame(0, 0, 1, b"par"), frame(3, 0, 1, &[0; 4]));
    let cases = [
        ("a part of what was declared", [&head(&[("content-length", "10")])[..], &part, &reset]),
        ("a part of what was not", [&head(&[])[..], &part, &reset]),
        ("a head", [&head(&[])[..], &[], &reset]),
        ("a head without its body", [&head(&[("content-length", "3")])[..], &[], &reset]),
        ("all of it, and no end", [&head(&[("content-length", "3")])[..], &part, &reset]),
    ];
    for (name, answer) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gateway = start(config_two(&listener)).await;
        let address = gateway.local_addr();
        let asked = tokio::spawn(async move { post(address, "/", "k", "x").await });
        let mut stream = accept_two(&listener).await;
        stream.write_all(&answer.concat()).await.unwrap();
        let got = asked.await.unwrap();
        assert_eq!((got.status, got.code().as_str()), (502, "upstream-broken"), "{name}");
        assert_eq!(post(address, "/", "k", "x").await.code(), "outcome-unknown", "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_http2_response_is_valid_although_the_request_is_reset() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = start(config_two(&listener)).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nab").await;
    let mut stream = accept_two(&listener).await;
    // RFC 9113 8.1: an early answer, and no more of the request is wanted.
    let head = frame(1, 4, 1, &fields(&[(":status", "413"), ("content-length", "3")]));
    let answer = [head, frame(0, 1, 1, b"all"), frame(3, 0, 1, &[0; 4])].concat();
    stream.write_all(&answer).await.unwrap();
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.text().as_str()), (413, "all"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_response_without_a_body_is_complete_at_its_end_flag() {
    for (method, status) in [("HEAD", "200"), ("GET", "304"), ("DELETE", "204")] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gateway = start(config_two(&listener)).await;
        let mut client = Raw::connect(gateway.local_addr()).await;
        client.send(request(method, "/", &[], "")).await;
        let mut stream = accept_two(&listener).await;
        let length = if status == "204" { "0" } else { "10" };
        let head = fields(&[(":status", status), ("content-length", length)]);
        stream.write_all(&frame(1, 5, 1, &head)).await.unwrap();
        let answer = client.answer_to(true).await.unwrap();
        assert_eq!(answer.status.to_string(), status, "{method}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_request_without_end_flag_is_not_completed() {
    for protocol in [UpstreamProtocol::Http1, UpstreamProtocol::Http2] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut config = config_two(&listener);
        config.transport.upstream_protocol = protocol;
        let gateway = start(config).await;
        let two = Two::connect(gateway.local_addr()).await;
        let (_response, mut sending) =
            two.begin(Two::request("POST", "/", &[]), false).await.unwrap();
        sending.send_data(Bytes::from_static(b"partial"), false).unwrap();
        let mut stream = match protocol {
            UpstreamProtocol::Http2 => accept_two(&listener).await,
            _ => listener.accept().await.unwrap().0,
        };
        let mut came = Vec::new();
        while !came.windows(7).any(|part| part == b"partial") {
            assert!(timeout(TIMEOUT, stream.read_buf(&mut came)).await.unwrap().unwrap() > 0);
        }
        sending.send_reset(Reason::NO_ERROR);
        if protocol == UpstreamProtocol::Http2 {
            // The stream is reset, or its connection ends; on no frame of its body is an end.
            while came.windows(5).all(|part| part != [0, 0, 4, 3, 0]) {
                if timeout(TIMEOUT, stream.read_buf(&mut came)).await.unwrap().unwrap() == 0 {
                    break;
                }
            }
            assert!(came.windows(9).all(|part| part != [0, 0, 0, 0, 1, 0, 0, 0, 1]));
        } else {
            timeout(TIMEOUT, stream.read_to_end(&mut came)).await.unwrap().unwrap();
            assert!(!came.ends_with(b"0\r\n\r\n"), "{}", String::from_utf8_lossy(&came));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pings_of_an_upstream_do_not_extend_its_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = config_two(&listener);
    config.policy.upstream_timeout = Duration::from_millis(400);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let asked = tokio::spawn(async move { post(address, "/", "k", "x").await });
    let stream = accept_two(&listener).await;
    let (mut read, mut write) = stream.into_split();
    let pinging = tokio::spawn(async move {
        // What it gets for it are acknowledgements.
        for kind in [frame(6, 0, 0, &[0; 8]), frame(4, 0, 0, &[])].iter().cycle() {
            if write.write_all(kind).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    });
    let reading = tokio::spawn(async move {
        let mut sink = Vec::new();
        let _ = read.read_to_end(&mut sink).await;
    });
    let got = timeout(TIMEOUT / 2, asked).await.expect("no time-out").unwrap();
    assert_eq!((got.status, got.code().as_str()), (504, "upstream-timeout"));
    timeout(TIMEOUT, reading).await.unwrap().unwrap();
    pinging.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_upload_is_distinguished_from_a_failed_upstream() {
    for (name, sent, wanted) in [
        ("too slow", "content-length: 9\r\n\r\nab", (408, "request-timeout")),
        (
            "no chunk",
            "transfer-encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n",
            (400, "malformed-request"),
        ),
    ] {
        for protocol in [UpstreamProtocol::Http1, UpstreamProtocol::Http2] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut config = config_two(&listener);
            config.transport.upstream_protocol = protocol;
            config.limits.stall = Duration::from_millis(300);
            let gateway = start(config).await;
            let serving = tokio::spawn(async move {
                let mut stream = match protocol {
                    UpstreamProtocol::Http2 => accept_two(&listener).await,
                    _ => listener.accept().await.unwrap().0,
                };
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
            let mut client = Raw::connect(gateway.local_addr()).await;
            client.send(format!("POST / HTTP/1.1\r\nhost: a\r\n{sent}")).await;
            let answer = client.answer().await;
            let code = answer.code();
            assert_eq!((answer.status, &*code), wanted, "{name} {protocol:?}");
            let metrics = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
            let broken = metrics.lines().find(|line| line.contains("upstream-broken")).unwrap();
            assert!(broken.ends_with(" 0"), "{broken}");
            serving.abort();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_1_0_client_gets_a_reset_if_the_response_breaks_off() {
    let mut upstream = RawUpstream::start().await;
    let gateway = start(config(url(upstream.address))).await;
    let mut client = TcpStream::connect(gateway.local_addr()).await.unwrap();
    client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    let (mut stream, _) = upstream.next().await;
    let answer = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    stream.write_all(answer.as_bytes()).await.unwrap();
    let mut came = Vec::new();
    while !came.ends_with(b"half") {
        assert!(timeout(TIMEOUT, client.read_buf(&mut came)).await.unwrap().unwrap() > 0);
    }
    drop(stream);
    let ended = timeout(TIMEOUT, client.read_to_end(&mut came)).await.unwrap();
    assert!(ended.is_err(), "it looks whole: {}", String::from_utf8_lossy(&came));
}

/// What a request would be answered by, if it were taken for an answer.
const SURPLUS: &[u8] = b"HTTP/1.1 201 Created\r\ncontent-length: 7\r\n\r\nsurplus";
const ANSWER: &[u8] = b"HTTP/1.1 201 Created\r\ncontent-length: 6\r\n\r\nanswer";

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_bytes_are_not_taken_for_a_response() {
    for round in 0..20 {
        let mut upstream = RawUpstream::start().await;
        let gateway = start(config(url(upstream.address))).await;
        let address = gateway.local_addr();
        let mut client = Raw::connect(address).await;
        client.send(request("GET", "/", &[], "")).await;
        let (mut first, _) = upstream.next().await;
        first.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        assert_eq!(client.answer().await.text(), "ok");
        first.write_all(SURPLUS).await.unwrap();
        let asked = tokio::spawn(async move { post(address, "/", "k", "x").await });
        let (mut second, _) = upstream.next().await;
        second.write_all(ANSWER).await.unwrap();
        assert_eq!(asked.await.unwrap().text(), "answer", "round {round}");
    }
}

/// A second response to one request meets the next one where the connection is used again.
#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_connection_has_no_late_response_to_an_earlier_request() {
    let mut upstream = RawUpstream::start().await;
    let mut config = config(url(upstream.address));
    config.transport.fresh_connections = true;
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let mut streams = Vec::new();
    for key in ["k", "l"] {
        let asked = tokio::spawn(async move { post(address, "/", key, "x").await });
        // Each comes on a connection of its own, although the one before is whole.
        let (mut stream, _) = upstream.next().await;
        stream.write_all(ANSWER).await.unwrap();
        assert_eq!(asked.await.unwrap().text(), "answer", "{key}");
        streams.push(stream);
    }
    // Without a key a connection is used again, and never by a request with one.
    let mut client = Raw::connect(address).await;
    client.send(request("GET", "/", &[], "")).await;
    let (mut first, _) = upstream.next().await;
    first.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert_eq!(client.answer().await.text(), "ok");
    let asked = tokio::spawn(async move { post(address, "/", "m", "x").await });
    let (mut stream, _) = upstream.next().await;
    stream.write_all(ANSWER).await.unwrap();
    assert_eq!(asked.await.unwrap().text(), "answer");
}

#[tokio::test]
async fn a_connection_is_reused_after_a_response_without_a_body() {
    let upstream = Upstream::start(|_| async { text(204, "") }).await;
    let gateway = start(config(upstream.url())).await;
    let mut client = Raw::connect(gateway.local_addr()).await;
    for number in 0..8 {
        let key = format!("k-{number}");
        client.send(request("POST", "/", &[("idempotency-key", &key)], "x")).await;
        assert_eq!(client.answer().await.status, 204);
    }
    let connections = upstream.connections.load(std::sync::atomic::Ordering::SeqCst);
    // A client may be quicker than the connection's way back.
    assert!(connections < 8, "{connections}");
}

#[tokio::test]
async fn the_transfer_coding_identity_is_ignored() {
    let mut upstream = RawUpstream::start().await;
    let gateway = start(config(url(upstream.address))).await;
    let address = gateway.local_addr();
    let asked = tokio::spawn(async move { post(address, "/", "k", "x").await });
    let (mut stream, _) = upstream.next().await;
    let answer =
        b"HTTP/1.1 201 Created\r\ntransfer-encoding: identity\r\nconnection: close\r\n\r\nmade";
    stream.write_all(answer).await.unwrap();
    drop(stream);
    let answer = asked.await.unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (201, "made"));
    assert_eq!(post(address, "/", "k", "x").await.header("idempotency-replayed"), "true");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_served_head_is_not_reused_for_stored_responses() {
    let (method, answer) = ("HEAD", "HTTP/1.1 200 OK\r\ncontent-length: 47\r\n\r\n");
    let mut upstream = RawUpstream::start().await;
    let gateway = start(config(url(upstream.address))).await;
    let address = gateway.local_addr();
    let mut client = Raw::connect(address).await;
    client.send(request(method, "/", &[], "")).await;
    let (mut first, _) = upstream.next().await;
    first.write_all(answer.as_bytes()).await.unwrap();
    client.answer_to(true).await.unwrap();
    // What counts for nobody else may have the same connection, and shows that it is kept.
    let mut again = 0;
    while again < 3 {
        client.send(request(method, "/", &[], "")).await;
        let mut head = Vec::new();
        let mut other = None;
        tokio::select! {
            _ = first.read_buf(&mut head) => first.write_all(answer.as_bytes()).await.unwrap(),
            next = upstream.next() => other = Some(next.0),
        }
        if let Some(mut other) = other {
            // The client was quicker than the connection's way back.
            other.write_all(answer.as_bytes()).await.unwrap();
            first = other;
        } else {
            again += 1;
        }
        client.answer_to(true).await.unwrap();
    }
    let asked = tokio::spawn(async move { post(address, "/", "k", "x").await });
    let (mut second, _) = upstream.next().await;
    // Later than any look could see.
    let _ = first.write_all(SURPLUS).await;
    second.write_all(ANSWER).await.unwrap();
    assert_eq!(asked.await.unwrap().text(), "answer");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_forwarded_with_any_method() {
    for protocol in [UpstreamProtocol::Http1, UpstreamProtocol::Http2] {
        let upstream = Upstream::start(|_| async { text(204, "") }).await;
        let mut config = config(upstream.url());
        config.transport.upstream_protocol = protocol;
        let gateway = start(config).await;
        let two = Two::connect(gateway.local_addr()).await;
        for method in ["GET", "HEAD", "OPTIONS", "DELETE", "POST"] {
            let mut raw = Raw::connect(gateway.local_addr()).await;
            let head = format!("{method} / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n");
            raw.send(format!("{head}\r\n3\r\none\r\n0\r\n\r\n")).await;
            raw.answer_to(method == "HEAD").await.unwrap();
            two.ask(Two::request(method, "/", &[]), "two").await;
            let seen = upstream.seen();
            let bodies: Vec<_> = seen.iter().rev().take(2).map(|it| it.body.clone()).collect();
            assert_eq!(bodies, ["two", "one"], "{method} {protocol:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_header_fields_is_the_same_in_both_versions() {
    let mut upstream = RawUpstream::start().await;
    let gateway = start(config(url(upstream.address))).await;
    let ask = async |count: usize| {
        let mut fields = vec![("idempotency-key", "k")];
        fields.extend((0..count).map(|_| ("x", "y")));
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(request("POST", "/", &fields, "")).await;
        let one = raw.answer().await;
        let two = Two::connect(gateway.local_addr()).await;
        (one, two.ask(Two::request("POST", "/", &fields), "").await)
    };
    let serving = tokio::spawn(async move {
        let (mut stream, head) = upstream.next().await;
        let answer =
            format!("HTTP/1.1 201 Created\r\ncontent-length: 0\r\n{}\r\n", LINE.repeat(250));
        stream.write_all(answer.as_bytes()).await.unwrap();
        (head.matches("x: y").count(), upstream)
    });
    // Of each request there are two or three more.
    let (one, two) = ask(250).await;
    assert_eq!((one.status, one.header("idempotency-replayed")), (201, "false"));
    assert_eq!((two.status, two.header("idempotency-replayed")), (201, "true"));
    assert_eq!(two.headers.get_all("x").iter().count(), 250);
    assert_eq!(serving.await.unwrap().0, 250);
    let (one, two) = ask(256).await;
    assert_eq!((one.status, one.code().as_str()), (400, "malformed-request"));
    assert_eq!((two.status, two.code().as_str()), (400, "malformed-request"));
}

const LINE: &str = "x: y\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_response_with_too_many_header_fields_is_broken_in_both_versions() {
    for protocol in [UpstreamProtocol::Http1, UpstreamProtocol::Http2] {
        let upstream = Upstream::start(|seen| async move {
            let mut response = text(200, "done");
            // With its length and date, one too many.
            let more = if seen.uri.path() == "/more" { 255 } else { 254 };
            for _ in 0..more {
                response.headers_mut().append("x", HeaderValue::from_static("y"));
            }
            response
        })
        .await;
        let mut config = config(upstream.url());
        config.transport.upstream_protocol = protocol;
        let gateway = start(config).await;
        assert_eq!(post(gateway.local_addr(), "/", "k", "").await.text(), "done");
        let broken = post(gateway.local_addr(), "/more", "l", "").await;
        assert_eq!(broken.code(), "upstream-broken", "{protocol:?}");
    }
}

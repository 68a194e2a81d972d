//! What passes through, and how.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::Body;
use http::{HeaderValue, Response};
use http_body::Frame;
use tokio::sync::mpsc;

use crate::world::{Raw, Upstream, config, post, post_with, request, start, text};

#[tokio::test(flavor = "multi_thread")]
async fn paths_and_queries_are_forwarded_unchanged() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    let paths = ["/a/../b//c/%2e%2E/%70ay?x=%zz&&y", "/?", "//x", "/a%00b", "/{}|\"", "*"];
    for path in paths {
        let method = if path == "*" { "OPTIONS" } else { "POST" };
        raw.send(request(method, path, &[], "x")).await;
        assert_eq!(raw.answer().await.status, 201, "{path}");
    }
    raw.send(request("POST", "http://other.example/abs?q", &[], "x")).await;
    assert_eq!(raw.answer().await.status, 201);
    assert_eq!(upstream.seen().last().unwrap().header("host"), "other.example");
    let seen: Vec<String> = upstream.seen().iter().map(|seen| seen.uri.to_string()).collect();
    let mut wanted = paths.map(str::to_owned).to_vec();
    wanted.push("/abs?q".into());
    assert_eq!(seen, wanted);
}

#[tokio::test(flavor = "multi_thread")]
async fn hop_by_hop_and_reserved_headers_are_not_forwarded() {
    let upstream = Upstream::start(|_| async {
        let mut response = text(200, "ok");
        let headers = response.headers_mut();
        headers.insert("connection", HeaderValue::from_static("x-hop"));
        headers.insert("x-hop", HeaderValue::from_static("1"));
        headers.insert("keep-alive", HeaderValue::from_static("timeout=5"));
        headers.insert("idempotency-outcome", HeaderValue::from_static("retryable"));
        headers.insert("idempotency-made-up", HeaderValue::from_static("1"));
        headers.append("set-cookie", HeaderValue::from_static("a=1"));
        headers.append("set-cookie", HeaderValue::from_static("b=2"));
        response
    })
    .await;
    let gateway = start(config(upstream.url())).await;
    let fields = [
        ("connection", "x-mine, keep-alive"),
        ("x-mine", "1"),
        ("x-other", "2"),
        ("idempotency-fence", "99"),
        ("idempotency-attempt", "7"),
        ("x-forwarded-for", "198.51.100.1"),
    ];
    for key in [None, Some(("idempotency-key", "\"k\""))] {
        let all: Vec<_> = fields.into_iter().chain(key).collect();
        let answer = post_with(gateway.local_addr(), "/", &all, "x").await;
        for name in ["x-hop", "keep-alive", "idempotency-outcome", "idempotency-made-up"] {
            assert_eq!(answer.header(name), "", "{name}");
        }
        let cookies = answer.headers.iter().filter(|(name, _)| name == "set-cookie").count();
        assert_eq!(cookies, 2);
    }
    let seen = upstream.seen();
    for (seen, protected) in seen.iter().zip([false, true]) {
        assert_eq!(seen.header("x-mine"), "");
        assert_eq!(seen.header("x-other"), "2");
        assert_eq!(seen.header("host"), "shop.example");
        assert_eq!(seen.header("x-forwarded-for"), "198.51.100.1, 127.0.0.1");
        assert_eq!(seen.header("x-forwarded-host"), "shop.example");
        assert_eq!(seen.header("x-forwarded-proto"), "http");
        assert_eq!(seen.header("via"), "1.1 hapax");
        assert_eq!(seen.header("idempotency-key"), if protected { "\"k\"" } else { "" });
        assert_eq!(seen.header("idempotency-attempt"), if protected { "1" } else { "" });
        let fence = seen.header("idempotency-fence");
        if protected {
            assert!(fence.parse::<u64>().unwrap() > 1_000_000);
        } else {
            assert_eq!(fence, "");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_key_bodies_stream_both_ways() {
    let (upstream, mut chunks) = streaming().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n").await;
    raw.send("1\r\nc\r\n0\r\n\r\n").await;
    let sender = chunks.recv().await.unwrap();
    // The first piece arrives while the answer is not yet over.
    sender.send(Bytes::from_static(b"first")).await.unwrap();
    let head = raw.until(b"first").await;
    assert!(head.starts_with(b"HTTP/1.1 200"));
    sender.send(Bytes::from_static(b"second")).await.unwrap();
    drop(sender);
    raw.until(b"0\r\n\r\n").await;
    assert_eq!(upstream.seen()[0].body, "abc");
}

/// An upstream whose answers consist of what is sent on the senders that it hands out.
async fn streaming() -> (Upstream, mpsc::Receiver<mpsc::Sender<Bytes>>) {
    let (out, senders) = mpsc::channel(1);
    let upstream = Upstream::start(move |_| {
        let out = out.clone();
        async move {
            let (sender, chunks) = mpsc::channel(1);
            out.send(sender).await.unwrap();
            Response::new(Body::new(Received(chunks)))
        }
    })
    .await;
    (upstream, senders)
}

/// A body of what is received.
struct Received(mpsc::Receiver<Bytes>);

impl http_body::Body for Received {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_without_a_key_ends_the_upstream_request() {
    let (upstream, mut chunks) = streaming().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("GET", "/", &[], "")).await;
    let sender = chunks.recv().await.unwrap();
    sender.send(Bytes::from_static(b"x")).await.unwrap();
    raw.until(b"x").await;
    drop(raw);
    let gone = async { while sender.send(Bytes::from(vec![0; 64 * 1024])).await.is_ok() {} };
    tokio::time::timeout(crate::world::TIMEOUT, gone).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_without_a_body_are_replayed_unchanged() {
    let upstream = Upstream::start(|seen| async move {
        let mut response = text(seen.uri.path()[1..].parse().unwrap(), "");
        response.headers_mut().insert("x-kept", HeaderValue::from_static("yes"));
        response
    })
    .await;
    let gateway = start(config(upstream.url())).await;
    for status in [200, 201, 204, 303, 304, 400, 404] {
        let path = format!("/{status}");
        let first = post(gateway.local_addr(), &path, &path[1..], "x").await;
        let again = post(gateway.local_addr(), &path, &path[1..], "x").await;
        assert_eq!((first.status, first.header("idempotency-replayed")), (status, "false"));
        assert_eq!((again.status, again.header("idempotency-replayed")), (status, "true"));
        assert_eq!((&first.body, again.header("x-kept")), (&again.body, "yes"));
    }
    assert_eq!(upstream.seen().len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn chunked_and_sized_bodies_are_the_same_request() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let first = post(gateway.local_addr(), "/", "k", "hello").await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(
        "POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n\
         2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx-trailer: 1\r\n\r\n",
    )
    .await;
    let again = raw.answer().await;
    assert_eq!((again.header("idempotency-replayed"), &again.body), ("true", &first.body));
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_reach_the_upstream() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for key in ["", "idempotency-key: k\r\n"] {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(format!(
            "POST / HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n\
             1\r\na\r\n0\r\nx-sum: 1\r\n\r\n"
        ))
        .await;
        assert_eq!(raw.answer().await.status, 201);
    }
    for seen in upstream.seen() {
        assert_eq!(seen.body, "a");
        assert_eq!(seen.trailers.unwrap()["x-sum"], "1");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expect_continue_gets_100_or_a_rejection_at_once() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n";
    raw.send(format!("{head}idempotency-key: k\r\n\r\n")).await;
    assert_eq!(raw.answer().await.status, 100);
    raw.send("ab").await;
    assert_eq!(raw.answer().await.status, 201);
    assert_eq!(upstream.seen()[0].header("expect"), "");
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(format!("{head}idempotency-key: bad key\r\n\r\n")).await;
    assert_eq!(raw.answer().await.code(), "invalid-key");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_1_0_client_is_served_and_disconnected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send("POST /old HTTP/1.0\r\ncontent-length: 1\r\nidempotency-key: k\r\n\r\nx").await;
    assert_eq!(raw.answer().await.text(), "1");
    assert_eq!(raw.rest().await, b"");
    assert_eq!(upstream.seen()[0].header("host"), upstream.address.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_the_upstream_are_reused() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    for i in 0..20 {
        let key = i.to_string();
        raw.send(request("POST", "/", &[("idempotency-key", &key)], "x")).await;
        assert_eq!(raw.answer().await.status, 201);
        // The connection is put back on a task of its own.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let opened = upstream.connections.load(std::sync::atomic::Ordering::SeqCst);
    assert!(opened <= 5, "20 requests took {opened} connections");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_response_passes_whole_and_is_not_retained() {
    let large = Bytes::from(vec![b'x'; 3 << 20]);
    let upstream = Upstream::start(move |_| {
        let large = large.clone();
        async move { text(200, large) }
    })
    .await;
    let gateway = start(config(upstream.url())).await;
    let first = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((first.status, first.body.len()), (200, 3 << 20));
    let again = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((again.status, again.code().as_str()), (409, "response-not-retained"));
    assert_eq!(again.json()["original_status"], 200);
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_to_head_keeps_its_content_length() {
    let upstream = Upstream::start(|_| async { text(200, "12345") }).await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    for _ in 0..2 {
        raw.send(request("HEAD", "/", &[], "")).await;
        let answer = raw.answer_to(true).await.unwrap();
        assert_eq!((answer.status, answer.header("content-length")), (200, "5"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_to_h2c_is_ignored_and_the_connection_continues() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    let fields = [
        ("connection", "Upgrade, HTTP2-Settings"),
        ("upgrade", "h2c"),
        ("http2-settings", "AAMAAABkAAQAAP__"),
    ];
    for number in 1..=3 {
        raw.send(request("POST", "/", &fields, "x")).await;
        assert_eq!(raw.answer().await.text(), number.to_string());
    }
    for seen in upstream.seen() {
        assert_eq!((seen.header("upgrade"), seen.header("http2-settings")), ("", ""));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connect_is_not_served() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send("CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n").await;
    assert_eq!(raw.answer().await.code(), "malformed-request");
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_body_has_a_length() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for key in [None, Some(("idempotency-key", "k"))] {
        let fields: Vec<_> = key.into_iter().collect();
        assert_eq!(post_with(gateway.local_addr(), "/", &fields, "").await.status, 201);
    }
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send("PUT / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!((raw.answer().await.status, raw.answer().await.status), (201, 201));
    let lengths: Vec<_> =
        upstream.seen().iter().map(|seen| seen.header("content-length").to_owned()).collect();
    assert_eq!(lengths, ["0", "0", "0", ""]);
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_headers_of_a_client_are_dropped() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for key in ["", "idempotency-key: k\r\n"] {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(format!(
            "POST / HTTP/1.1\r\nhost: a\r\n{key}idempotency_fence: 7\r\nIdempotency_Attempt: 7\r\n\
             x_forwarded_for: 10.0.0.1\r\ntransfer-encoding: chunked\r\n\
             trailer: x-sum, idempotency-fence, idempotency_key\r\n\r\n\
             1\r\na\r\n0\r\nx-sum: 1\r\nidempotency-fence: 7\r\nidempotency_key: 7\r\n\r\n"
        ))
        .await;
        assert_eq!(raw.answer().await.status, 201);
    }
    for seen in upstream.seen() {
        let names: Vec<&str> = seen.headers.keys().map(http::HeaderName::as_str).collect();
        assert!(!names.iter().any(|name| name.contains('_')), "{names:?}");
        assert_ne!(seen.header("idempotency-fence"), "7");
        let trailers = seen.trailers.unwrap();
        assert_eq!((trailers.len(), &trailers["x-sum"]), (1, &HeaderValue::from_static("1")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_header_cannot_remove_host_or_content_type() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let fields = [("connection", "host, content-type"), ("content-type", "text/plain")];
    assert_eq!(post_with(gateway.local_addr(), "/", &fields, "x").await.status, 201);
    let seen = upstream.seen();
    assert_eq!(seen[0].header("host"), "shop.example");
    assert_eq!(seen[0].header("content-type"), "text/plain");
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_peers_are_configurable() {
    let upstream = Upstream::counting().await;
    let fields = [
        ("x-forwarded-for", "198.51.100.1"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "shop.example.com"),
        ("forwarded", "for=198.51.100.1"),
    ];
    for (trusted, seen) in [
        (
            &["127.0.0.0/8"][..],
            ["198.51.100.1, 127.0.0.1", "https", "shop.example.com", "for=198.51.100.1"],
        ),
        (&["10.0.0.0/8"], ["127.0.0.1", "http", "shop.example", ""]),
        (&[], ["127.0.0.1", "http", "shop.example", ""]),
    ] {
        let mut config = config(upstream.url());
        config.transport.trusted = trusted.iter().map(|it| it.parse().unwrap()).collect();
        let gateway = start(config).await;
        assert_eq!(post_with(gateway.local_addr(), "/", &fields, "x").await.status, 201);
        let last = upstream.seen().pop().unwrap();
        assert_eq!(fields.map(|(name, _)| last.header(name).to_owned()), seen, "{trusted:?}");
    }
}

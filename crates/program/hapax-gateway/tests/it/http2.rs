//! HTTP/2 on both sides.

use std::time::Duration;

use bytes::Bytes;
use hapax_gateway::{Cors, Origins, UpstreamProtocol};
use hapax_http::Body;
use http::{HeaderMap, HeaderValue, Version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::two::{Two, fields, frame, is_refused, read};
use crate::world::{Raw, TIMEOUT, Upstream, config, post, start, text, until};

#[tokio::test(flavor = "multi_thread")]
async fn wire_22_the_same_request_in_http_1_and_2() {
    for protocol in [UpstreamProtocol::Auto, UpstreamProtocol::Http2] {
        let upstream = Upstream::counting().await;
        let mut config = config(upstream.url());
        config.transport.upstream_protocol = protocol;
        let gateway = start(config).await;
        let two = Two::connect(gateway.local_addr()).await;
        let first = post(gateway.local_addr(), "/a?b=%20", "k", "body").await;
        let again = two.post("/a?b=%20", "\"k\"", "body").await;
        assert_eq!((first.status, first.text().as_str()), (201, "1"));
        assert_eq!((again.status, again.text().as_str()), (201, "1"));
        assert_eq!(again.header("idempotency-replayed"), "true");
        // And the other way round.
        assert_eq!(two.post("/c", "l", "body").await.header("idempotency-replayed"), "false");
        let again = post(gateway.local_addr(), "/c", "l", "body").await;
        assert_eq!((again.header("idempotency-replayed"), again.text().as_str()), ("true", "2"));
        assert_eq!(two.post("/c", "l", "other").await.code(), "key-reused");
        let seen = upstream.seen();
        assert_eq!(seen.len(), 2);
        let spoken =
            if protocol == UpstreamProtocol::Auto { Version::HTTP_11 } else { Version::HTTP_2 };
        for (seen, via) in seen.iter().zip(["1.1 hapax", "2 hapax"]) {
            assert_eq!((seen.version, seen.header("via")), (spoken, via));
            assert_eq!(
                seen.uri.path_and_query().unwrap(),
                ["/a?b=%20", "/c"][usize::from(via != "1.1 hapax")]
            );
            let host = match seen.uri.authority() {
                Some(authority) => authority.as_str(),
                None => seen.header("host"),
            };
            assert_eq!((host, seen.body.as_ref()), ("shop.example", &b"body"[..]));
            assert_eq!(seen.header("x-forwarded-host"), "shop.example");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_22_trailers_are_stored_and_replayed_in_both_versions() {
    for protocol in [UpstreamProtocol::Http1, UpstreamProtocol::Http2] {
        let upstream = Upstream::start(|_| async {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", HeaderValue::from_static("7"));
            trailers.insert("idempotency-outcome", HeaderValue::from_static("retryable"));
            let body = Body::whole(Bytes::from_static(b"abc"), Some(trailers));
            let mut response = http::Response::new(body);
            response.headers_mut().insert("trailer", HeaderValue::from_static("x-sum"));
            response
        })
        .await;
        let mut config = config(upstream.url());
        config.transport.upstream_protocol = protocol;
        let gateway = start(config).await;
        let two = Two::connect(gateway.local_addr()).await;
        for replayed in ["false", "true"] {
            let request =
                Two::request("POST", "/", &[("idempotency-key", "k"), ("te", "trailers")]);
            let answer = two.ask(request, "x").await;
            assert_eq!(
                (answer.header("idempotency-replayed"), answer.text()),
                (replayed, "abc".into())
            );
            let trailers = answer.trailers.unwrap();
            assert_eq!((trailers.len(), &trailers["x-sum"]), (1, &HeaderValue::from_static("7")));
        }
        let mut one = crate::world::Raw::connect(gateway.local_addr()).await;
        one.send("POST / HTTP/1.1\r\nhost: a\r\nte: trailers\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\nx").await;
        let answer = one.until(b"\r\n0\r\nx-sum: 7\r\n\r\n").await;
        assert!(answer.windows(7).any(|part| part == b"\r\nabc\r\n"));
        assert_eq!(upstream.seen().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cookies_in_several_fields_are_joined() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let two = Two::connect(gateway.local_addr()).await;
    let fields = [("cookie", "a=1"), ("cookie", "b=2"), ("x-two", "1"), ("x-two", "2")];
    assert_eq!(two.ask(Two::request("GET", "/", &fields), "").await.status, 201);
    let seen = upstream.seen();
    assert_eq!(seen[0].headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    assert_eq!(seen[0].headers.get_all("x-two").iter().count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_request_that_is_ambiguous_in_http1_is_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let sound = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/")];
    let body = frame(0, 1, 1, b"x");
    let with = |more: &[(&'static str, &'static str)]| [&sound[..], more].concat();
    let but = |name: &str, value: &'static str| {
        sound.map(|(it, was)| (it, if it == name { value } else { was })).to_vec()
    };
    let cases = [
        ("a length twice", with(&[("content-length", "1"), ("content-length", "1")])),
        ("another length", with(&[("content-length", "2")])),
        ("a list of lengths", with(&[("content-length", "1, 1")])),
        ("a coding", with(&[("transfer-encoding", "chunked")])),
        ("a connection", with(&[("connection", "close")])),
        ("an upgrade", with(&[("upgrade", "websocket")])),
        ("a kept connection", with(&[("keep-alive", "timeout=5")])),
        ("te for more than trailers", with(&[("te", "gzip")])),
        ("another host", with(&[("host", "b")])),
        ("two hosts", with(&[("host", "a"), ("host", "a")])),
        ("a line in a value", with(&[("x", "a\r\nb: c")])),
        ("a null in a value", with(&[("x", "a\0b")])),
        ("a line in a name", with(&[("x\r\ny", "a")])),
        ("a space in a name", with(&[("x y", "a")])),
        ("a colon in a name", with(&[("x:y", "a")])),
        ("an upper-case name", with(&[("X", "a")])),
        ("a pseudo-field behind a field", with(&[("x", "y"), (":path", "/b")])),
        ("a pseudo-field twice", with(&[(":path", "/b")])),
        ("an unknown pseudo-field", with(&[(":sesame", "open")])),
        ("a status", with(&[(":status", "200")])),
        ("a path with a line in it", but(":path", "/ HTTP/1.1\r\nhost: b\r\n\r\nGET /")),
        ("a path with a space", but(":path", "/a b")),
        ("a path that is none", but(":path", "a")),
        ("an empty path", but(":path", "")),
        ("a star", but(":path", "*")),
        ("a method with a line in it", but(":method", "POST / HTTP/1.1\r\n")),
        ("a method with a space", but(":method", "PO ST")),
        ("a connect", but(":method", "CONNECT")),
        ("a foreign scheme", but(":scheme", "ftp")),
        ("a user", but(":authority", "u@a")),
        ("an authority with a path", but(":authority", "a/b")),
        ("an authority with a line in it", but(":authority", "a\r\nx: y")),
        ("no authority and no host", but(":authority", "")),
    ];
    for (name, fields) in cases {
        assert!(is_refused(gateway.local_addr(), &fields, &body).await, "{name}");
        assert_eq!(upstream.seen().len(), 0, "{name}");
    }
    let fields = with(&[("content-length", "1")]);
    assert!(!is_refused(gateway.local_addr(), &fields, &body).await);
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_connection_may_open_as_many_streams_as_it_has_permits() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.limits.connections = 40;
    let gateway = start(config).await;
    let allowed = async || {
        let two = Two::connect(gateway.local_addr()).await;
        // Settings have come with the first answer.
        assert_eq!(two.ask(Two::request("GET", "/", &[]), "").await.status, 201);
        (two.send.current_max_send_streams(), two)
    };
    // Each of these takes 15 places of the 40.
    let (first, _one) = allowed().await;
    let (second, _two) = allowed().await;
    let (third, three) = allowed().await;
    assert_eq!([first, second, third], [100, 100, 4]);
    // More than its streams, and than the places that are left, wait and are answered.
    let asked = (0..30).map(|_| three.try_ask(Two::request("GET", "/", &[]), ""));
    for answer in futures_join(asked).await {
        assert_eq!(answer.unwrap().status, 201);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_permit_in_time_gets_503_with_the_routes_cors() {
    let (upstream, mut begun) = patient().await;
    let mut config = config(upstream.url());
    // The connection takes it.
    config.limits.connections = 1;
    config.limits.head_timeout = Duration::from_secs(3);
    let origin = "https://shop.example";
    config.policy.cors = Some(Cors::new(Origins::List(vec![origin.to_owned()])));
    let gateway = start(config).await;
    let two = Two::connect(gateway.local_addr()).await;
    let (response, _) = two.begin(Two::request("GET", "/", &[]), true).await.unwrap();
    let answer = begun.recv().await.unwrap();
    let refused = two.ask(Two::request("POST", "/", &[("origin", origin)]), "").await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "overloaded"));
    assert_eq!(refused.header("access-control-allow-origin"), origin);
    let grpc = Two::request("POST", "/", &[("content-type", "application/grpc")]);
    let refused = two.ask(grpc, "").await;
    assert_eq!((refused.status, refused.header("grpc-status")), (200, "14"));
    answer.send(200).unwrap();
    assert_eq!(read(response.await.unwrap()).await.unwrap().status, 200);
    assert_eq!(upstream.seen().len(), 1);
}

async fn futures_join<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.map(Box::pin).collect();
    let mut outputs = Vec::new();
    std::future::poll_fn(|cx| {
        futures.retain_mut(|future| match future.as_mut().poll(cx) {
            std::task::Poll::Ready(output) => {
                outputs.push(output);
                false
            }
            std::task::Poll::Pending => true,
        });
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    outputs
}

type Begun = mpsc::Receiver<oneshot::Sender<u16>>;

/// An upstream that tells of each request, and answers it when, and as, it is told.
async fn patient() -> (Upstream, Begun) {
    let (begun, beginnings) = mpsc::channel(300);
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
async fn a_drain_finishes_open_streams_and_accepts_no_new_ones() {
    let (upstream, mut begun) = patient().await;
    let gateway = start(config(upstream.url())).await;
    let address = gateway.local_addr();
    let busy = Two::connect(address).await;
    let request = Two::request("POST", "/", &[("idempotency-key", "k")]);
    let (response, mut sending) = busy.begin(request, false).await.unwrap();
    sending.send_data(Bytes::from_static(b"x"), true).unwrap();
    let answer = begun.recv().await.unwrap();
    let idle = Two::connect(address).await;
    assert_eq!(idle.post("/", "k", "x").await.code(), "in-flight");
    let ending = tokio::spawn(gateway.shutdown());
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    // A connection without a request in progress ends after GOAWAY.
    let Two { send: _kept, driver } = idle;
    tokio::time::timeout(TIMEOUT, driver).await.unwrap().unwrap().unwrap();
    // Who has something hears the same, and its answer comes.
    while busy.try_ask(Two::request("GET", "/new", &[]), "").await.is_ok_and(|answer| {
        assert_eq!((answer.status, answer.code().as_str()), (503, "draining"));
        true
    }) {}
    answer.send(201).unwrap();
    let answer = read(response.await.unwrap()).await.unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (201, "done"));
    busy.ended().await.unwrap();
    assert_eq!(ending.await.unwrap(), hapax_gateway::ShutdownReport::default());
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_http2_connection_gets_a_goaway() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.limits.head_timeout = Duration::from_millis(300);
    let gateway = start(config).await;
    let Two { send: _kept, driver } = Two::connect(gateway.local_addr()).await;
    tokio::time::timeout(TIMEOUT, driver).await.unwrap().unwrap().unwrap();
    // Nor are those waited for who have not said what they speak.
    for begun in ["", "PRI * HTTP/2.0\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = TcpStream::connect(gateway.local_addr()).await.unwrap();
        stream.write_all(begun.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "{begun:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_of_a_response_is_disconnected() {
    let large = Bytes::from(vec![b'x'; 3 << 20]);
    let upstream = Upstream::start(move |_| {
        let large = large.clone();
        async move { text(200, large) }
    })
    .await;
    let mut config = config(upstream.url());
    config.limits.stall = Duration::from_secs(3);
    let gateway = start(config).await;
    let slow = Two::connect(gateway.local_addr()).await;
    let (response, _sending) = slow.begin(Two::request("GET", "/", &[]), true).await.unwrap();
    // Its head is taken, and of its body only what the window lets through.
    let _body = response.await.unwrap().into_body();
    drop(slow.ended().await);
    // Who takes it gets it whole.
    let quick = Two::connect(gateway.local_addr()).await;
    assert_eq!(quick.ask(Two::request("GET", "/", &[]), "").await.body.len(), 3 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_resets_most_requests_is_disconnected() {
    let (upstream, mut begun) = patient().await;
    let gateway = start(config(upstream.url())).await;
    let hasty = Two::connect(gateway.local_addr()).await;
    let mut taken_back = 0;
    loop {
        let Ok((response, mut sending)) = hasty.begin(Two::request("GET", "/", &[]), true).await
        else {
            break;
        };
        // Once it is in progress.
        let begun = tokio::time::timeout(Duration::from_secs(10), begun.recv()).await;
        if begun.is_err() {
            break;
        }
        sending.send_reset(h2::Reason::CANCEL);
        drop(response);
        taken_back += 1;
        assert!(taken_back < 300, "it may go on");
    }
    assert!(taken_back > 50, "{taken_back} are not many");
    drop(hasty.ended().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_10_the_outcome_of_a_reset_request_is_recorded() {
    let (upstream, mut begun) = patient().await;
    let gateway = start(config(upstream.url())).await;
    let two = Two::connect(gateway.local_addr()).await;
    let request = Two::request("POST", "/", &[("idempotency-key", "k")]);
    let (response, mut sending) = two.begin(request, false).await.unwrap();
    sending.send_data(Bytes::from_static(b"x"), true).unwrap();
    let answer = begun.recv().await.unwrap();
    sending.send_reset(h2::Reason::CANCEL);
    drop(response);
    assert_eq!(two.post("/", "k", "x").await.code(), "in-flight");
    answer.send(201).unwrap();
    let engine = gateway.engine().clone();
    until("it is recorded", || engine.stats().in_flight == 0).await;
    let again = two.post("/", "k", "x").await;
    assert_eq!((again.status, again.header("idempotency-replayed")), (201, "true"));
    assert_eq!(upstream.seen().len(), 1);
}

/// The library takes both off before anything else sees them, so that they can evade nothing.
#[tokio::test(flavor = "multi_thread")]
async fn fragments_and_pseudo_fields_in_trailers_have_no_effect() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let head = fields(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/pay#/other"),
        ("authorization", "Bearer a"),
        ("idempotency-key", "k"),
        ("trailer", "x-end"),
    ]);
    let trailers = fields(&[(":path", "/other"), ("x-end", "1")]);
    let sent = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &head),
        frame(0, 0, 1, b"x"),
        frame(1, 5, 1, &trailers),
    ];
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(sent.concat()).await;
    until("it is forwarded", || !upstream.seen().is_empty()).await;
    let seen = upstream.seen();
    assert_eq!(seen[0].uri, "/pay");
    let trailers = seen[0].trailers.clone().unwrap_or_default();
    let names: Vec<_> = trailers.keys().map(http::HeaderName::as_str).collect();
    assert_eq!(names, ["x-end"]);
    // Another fragment makes no other request.
    let again = Two::connect(gateway.local_addr()).await;
    let fields = [("authorization", "Bearer a"), ("idempotency-key", "k")];
    let replayed = async {
        loop {
            let copy = again.ask(Two::request("POST", "/pay", &fields), "x").await;
            // The first one may still be in flight.
            if copy.status != 409 {
                return copy;
            }
        }
    };
    let copy = tokio::time::timeout(TIMEOUT, replayed).await.unwrap();
    assert_eq!((copy.status, copy.header("idempotency-replayed")), (201, "true"));
}

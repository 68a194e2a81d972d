//! The sink, with real HTTP servers.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::IntoResponse;
use hapax_core::Timestamp;
use hapax_messages::{MessageId, MessageSink, OutgoingMessage, PublishError};
use hapax_testkit::ManualClock;
use hapax_webhooks::{ConnectProxy, RejectedStatuses, WebhookLayer, WebhookSink, WebhookSinkError};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use crate::world::{NOW, World, standard_secret, standard_signature};

const SECRET: &[u8] = &[7; 24];

/// A request as the endpoint got it.
#[derive(Clone, Debug)]
struct Received {
    peer: SocketAddr,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

type Script = VecDeque<(StatusCode, Vec<(&'static str, String)>)>;

/// An endpoint that records requests, and answers by a script; at its end with 204.
#[derive(Clone, Default)]
struct Endpoint {
    received: Arc<Mutex<Vec<Received>>>,
    script: Arc<Mutex<Script>>,
}

impl Endpoint {
    async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let this = self.clone();
        let handle = move |ConnectInfo(peer): ConnectInfo<SocketAddr>,
                           method: Method,
                           uri: Uri,
                           headers: HeaderMap,
                           body: Bytes| async move {
            this.received.lock().unwrap().push(Received { peer, method, uri, headers, body });
            let answer = this.script.lock().unwrap().pop_front();
            let (status, fields) = answer.unwrap_or((StatusCode::NO_CONTENT, Vec::new()));
            let mut response = (status, "the reason").into_response();
            for (name, value) in fields {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        };
        let router = Router::new().fallback(handle);
        let service = router.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, service).await });
        address
    }

    fn answer(&self, status: u16, fields: &[(&'static str, &str)]) {
        let fields = fields.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.script.lock().unwrap().push_back((StatusCode::from_u16(status).unwrap(), fields));
    }

    fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at(Timestamp::from_micros(NOW * 1_000_000)))
}

async fn sink(address: SocketAddr) -> WebhookSink {
    let builder = WebhookSink::builder(format!("http://{address}/hooks?to=shop"));
    builder.secret(standard_secret(SECRET)).clock(clock()).build().await.unwrap()
}

fn message(id: &str) -> OutgoingMessage {
    OutgoingMessage::new("orders.created", MessageId::new(id).unwrap(), r#"{"order": 17}"#)
}

#[track_caller]
fn later(result: Result<(), PublishError>) -> Option<Duration> {
    match result {
        Err(PublishError::NotAcknowledged { retry_after, .. }) => retry_after,
        other => panic!("expected that the message is published again, found {other:?}"),
    }
}

#[tokio::test]
async fn a_message_arrives_byte_for_byte_with_its_headers() {
    let endpoint = Endpoint::default();
    let sink = sink(endpoint.start().await).await;
    let mut sent = message("m-1");
    sent.payload = Bytes::from_static(&[0, 255, 13, 10, 0]);
    sent.key = Some("customer 3%ä\n".to_owned());
    sent.headers = [
        ("Content-Type", "application/json"),
        ("trace", "ä b: c"),
        ("Webhook-Id", "of another"),
        ("idempotency-key", "of another"),
        ("message-order-key", "of another"),
        ("host", "of.another"),
        ("content-length", "1"),
        ("transfer-encoding", "chunked"),
    ]
    .map(|(name, value)| (name.to_owned(), Bytes::from(value)))
    .to_vec();
    sink.publish(&sent).await.unwrap();
    let received = endpoint.received();
    let [Received { method, uri, headers, body, .. }] = &received[..] else {
        panic!("{received:?}")
    };
    assert_eq!((method, uri.to_string()), (&Method::POST, "/hooks?to=shop".to_owned()));
    assert_eq!(body, &sent.payload);
    for (name, value) in [
        ("webhook-id", "m-1"),
        ("idempotency-key", "\"m-1\""),
        ("webhook-timestamp", &NOW.to_string()),
        ("message-id", "m-1"),
        ("message-destination", "orders.created"),
        ("message-order-key", "customer%203%25%C3%A4%0A"),
        ("content-type", "application/json"),
        ("content-length", "5"),
        ("trace", "ä b: c"),
        ("user-agent", concat!("hapax/", env!("CARGO_PKG_VERSION"))),
    ] {
        let found: Vec<_> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
        assert_eq!(found, [value.as_bytes()], "{name}");
    }
    assert!(!headers.contains_key("transfer-encoding"));
    assert!(headers["host"].to_str().unwrap().starts_with("127.0.0.1:"));
}

#[tokio::test]
async fn an_endpoint_with_a_proxy_is_reached_through_its_tunnel_only() {
    let endpoint = Endpoint::default();
    let address = endpoint.start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string().parse().unwrap();
    let proxy = ConnectProxy::new(authority, None);
    let sink = WebhookSink::builder(format!("http://{address}/hooks")).proxy(proxy);
    let sink = sink.build().await.unwrap();
    let tunnel = async |answer: &str| {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with(&format!("CONNECT {address} HTTP/1.1\r\n")), "{head}");
        client.write_all(answer.as_bytes()).await.unwrap();
        client
    };
    let message = message("m-1");
    let (published, _) =
        tokio::join!(sink.publish(&message), tunnel("HTTP/1.1 403 Forbidden\r\n\r\n"));
    assert_eq!(later(published), None);
    assert!(endpoint.received().is_empty(), "nothing is sent without a tunnel");
    let opened = async {
        let mut client = tunnel("HTTP/1.1 200 OK\r\n\r\n").await;
        let mut server = TcpStream::connect(address).await.unwrap();
        let _ = copy_bidirectional(&mut client, &mut server).await;
    };
    tokio::select! {
        published = sink.publish(&message) => published.unwrap(),
        () = opened => panic!("the tunnel ended before the message was published"),
    }
    assert_eq!(endpoint.received().len(), 1);
}

#[tokio::test]
async fn a_message_without_a_content_type_gets_that_of_its_payload() {
    let endpoint = Endpoint::default();
    let sink = sink(endpoint.start().await).await;
    let (json, mut other, mut own) = (message("m-1"), message("m-2"), message("m-3"));
    other.payload = Bytes::from_static(b"17");
    own.headers.push(("Content-Type".to_owned(), "text/plain".into()));
    for sent in [json, other, own] {
        sink.publish(&sent).await.unwrap();
    }
    let received = endpoint.received();
    let types: Vec<_> = received.iter().map(|it| it.headers["content-type"].to_str()).collect();
    let types: Vec<_> = types.into_iter().map(Result::unwrap).collect();
    assert_eq!(types, ["application/json", "application/octet-stream", "text/plain"]);
}

#[tokio::test]
async fn our_layer_verifies_the_signature_and_executes_a_repeated_message_once() {
    let world = World::new();
    let layer = world.layer(WebhookLayer::standard("relay").secret(standard_secret(SECRET)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let receiver = world.receiver(layer);
    tokio::spawn(async move { axum::serve(listener, receiver).await });
    let sink = sink(address).await;
    let ids = ["m-1", "orders.17", " ä ", &"x".repeat(300)];
    for id in ids {
        sink.publish(&message(id)).await.unwrap();
        sink.publish(&message(id)).await.unwrap();
    }
    let handled = world.handled();
    assert_eq!(handled.len(), ids.len());
    assert_eq!((&*handled[0].key, &handled[0].body[..]), ("m-1", &br#"{"order": 17}"#[..]));
    // Another payload under the id is `key-reused`, which no further attempt changes.
    let mut other = message("m-1");
    other.payload = Bytes::from_static(b"other");
    let error = sink.publish(&other).await.unwrap_err();
    assert!(matches!(&error, PublishError::Rejected(_)), "{error}");
    assert!(error.to_string().contains("found 422"), "{error}");
}

#[tokio::test]
async fn an_endpoint_whose_layers_are_in_the_wrong_order_gets_the_message_again() {
    let world = World::new();
    let layer = world.layer(WebhookLayer::standard("relay").secret(standard_secret(SECRET)));
    let idempotency = world.idempotency(layer.route_options());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let receiver = world.bare().layer(layer).layer(idempotency);
    tokio::spawn(async move { axum::serve(listener, receiver).await });
    let error = sink(address).await.publish(&message("m-1")).await.unwrap_err();
    assert!(error.to_string().contains("found 400"), "{error}");
    later(Err(error));
    world.assert_untouched();
}

#[tokio::test]
async fn each_secret_signs() {
    let endpoint = Endpoint::default();
    let address = endpoint.start().await;
    let keys: [&[u8]; 2] = [&[1; 24], &[2; 32]];
    let builder = WebhookSink::builder(format!("http://{address}")).clock(clock());
    let builder = keys.iter().fold(builder, |it, key| it.secret(standard_secret(key)));
    builder.build().await.unwrap().publish(&message("m-1")).await.unwrap();
    let unsigned = WebhookSink::builder(format!("http://{address}")).build().await.unwrap();
    let mut with_header = message("m-1");
    with_header.headers.push(("webhook-signature".to_owned(), "v1,of another".into()));
    unsigned.publish(&with_header).await.unwrap();
    let received = endpoint.received();
    let expected = keys.map(|key| standard_signature(key, b"m-1", NOW, r#"{"order": 17}"#));
    assert_eq!(received[0].headers["webhook-signature"], expected.join(" "));
    assert_eq!(received[0].uri, "/");
    assert!(!received[1].headers.contains_key("webhook-signature"));
}

#[tokio::test]
async fn the_status_decides_about_the_message() {
    let endpoint = Endpoint::default();
    let sink = sink(endpoint.start().await).await;
    for status in [200, 201, 202, 204, 299] {
        endpoint.answer(status, &[]);
        sink.publish(&message("m-1")).await.unwrap();
    }
    for status in [413, 422, 431] {
        endpoint.answer(status, &[("retry-after", "1")]);
        let error = sink.publish(&message("m-1")).await.unwrap_err();
        assert!(matches!(&error, PublishError::Rejected(_)), "{status}: {error}");
        assert!(error.to_string().contains(&status.to_string()), "{error}");
    }
    // About the endpoint: redirects, a wrong URL or secret, a content type that all messages share, a
    // gateway.
    for status in
        [301, 307, 400, 401, 403, 404, 405, 410, 408, 409, 415, 425, 429, 500, 502, 503, 599]
    {
        endpoint.answer(status, &[("location", "/elsewhere")]);
        assert_eq!(later(sink.publish(&message("m-1")).await), None, "{status}");
        endpoint.answer(status, &[("retry-after", "120")]);
        let pause = later(sink.publish(&message("m-1")).await);
        assert_eq!(pause, Some(Duration::from_secs(120)), "{status}");
    }
    // NOW is Mon, 21 Sep 2026 14:13:20 GMT.
    endpoint.answer(503, &[("retry-after", "Mon, 21 Sep 2026 14:14:00 GMT")]);
    assert_eq!(later(sink.publish(&message("m-1")).await), Some(Duration::from_secs(40)));
    let received = endpoint.received();
    assert!(received.iter().all(|it| it.uri == "/hooks?to=shop"), "a redirect was followed");
    // The connection was reused.
    assert!(received.iter().filter(|it| it.peer == received[0].peer).count() > 20);
}

#[tokio::test]
async fn a_sink_that_rejects_client_errors_repeats_the_beginning_of_the_response() {
    let endpoint = Endpoint::default();
    let url = format!("http://{}/", endpoint.start().await);
    let builder = WebhookSink::builder(url).rejected(RejectedStatuses::ClientErrors);
    let sink = builder.max_response(4).build().await.unwrap();
    for status in [400, 401, 404, 410, 413, 415, 422, 499] {
        endpoint.answer(status, &[("retry-after", "120")]);
        let error = sink.publish(&message("m-1")).await.unwrap_err();
        assert!(matches!(&error, PublishError::Rejected(_)), "{status}: {error}");
        let text = error.to_string();
        assert!(text.contains(&status.to_string()) && !text.contains("reason"), "{text}");
    }
    for status in [302, 408, 409, 425, 429, 500, 503] {
        endpoint.answer(status, &[("retry-after", "120")]);
        let pause = later(sink.publish(&message("m-1")).await);
        assert_eq!(pause, Some(Duration::from_secs(120)), "{status}");
    }
}

/// Reads requests, and answers each with `answer` on a connection of its own.
async fn raw(answer: &'static [u8], ends: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !request.ends_with(b"17}") && stream.read_buf(&mut request).await.unwrap() > 0
                {
                }
                let _ = stream.write_all(answer).await;
                if ends {
                    return;
                }
                // Without an end.
                while stream.write_all(&[b'x'; 1024]).await.is_ok() {}
            });
        }
    });
    address
}

#[tokio::test]
async fn after_a_broken_response_the_message_is_published_again() {
    for answer in [
        &b""[..],
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"no HTTP\r\n\r\n",
    ] {
        let sink = sink(raw(answer, true).await).await;
        let text = String::from_utf8_lossy(answer);
        assert_eq!(later(sink.publish(&message("m-1")).await), None, "{text:?}");
    }
}

#[tokio::test]
async fn only_the_beginning_of_a_long_response_is_read() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n";
    sink(raw(head, false).await).await.publish(&message("m-1")).await.unwrap();
    let head = b"HTTP/1.1 422 Unprocessable Entity\r\ncontent-length: 1000000000\r\n\r\n";
    let error = sink(raw(head, false).await).await.publish(&message("m-1")).await.unwrap_err();
    assert!(matches!(&error, PublishError::Rejected(_)) && error.to_string().len() < 400);
}

#[tokio::test]
async fn without_a_response_the_message_is_published_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let builder = WebhookSink::builder(format!("http://{address}"));
    let short_timeout = builder.timeout(Duration::from_millis(50)).build().await.unwrap();
    // The kernel accepts the connection, and nothing answers.
    later(short_timeout.publish(&message("m-1")).await);
    // It rejects connections until it listens.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let sink = sink(socket.local_addr().unwrap()).await;
    later(sink.publish(&message("m-1")).await);
    let listener = socket.listen(1024).unwrap();
    let router = Router::new().fallback(|| async {});
    tokio::spawn(async move { axum::serve(listener, router).await });
    sink.publish(&message("m-1")).await.unwrap();
}

#[tokio::test]
async fn a_server_with_a_trusted_certificate_is_reached_over_tls_and_no_other() {
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der());
    let chain: Vec<CertificateDer<'static>> = vec![signed.cert.der().clone()];
    let config = ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(chain, key.into()).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut request = Vec::new();
                while !request.ends_with(b"17}") && stream.read_buf(&mut request).await.unwrap() > 0
                {
                }
                answer(&mut stream).await;
            });
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("roots.pem");
    std::fs::write(&file, signed.cert.pem()).unwrap();
    let builder = || WebhookSink::builder(format!("https://localhost:{port}/hooks"));
    builder().roots(&file).build().await.unwrap().publish(&message("m-1")).await.unwrap();
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&file, other.cert.pem()).unwrap();
    later(builder().roots(&file).build().await.unwrap().publish(&message("m-1")).await);
    let error = builder().roots(folder.path().join("none")).build().await.unwrap_err();
    assert!(matches!(error, WebhookSinkError::Roots(_)), "{error}");
}

async fn answer(stream: &mut (impl AsyncWrite + Unpin)) {
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
    stream.flush().await.unwrap();
}

#[tokio::test]
async fn settings_that_are_not_valid_are_rejected_without_their_contents() {
    let error = async |url: &str, secret: &str| {
        let builder = WebhookSink::builder(url).secret(secret);
        let text = format!("{builder:?}");
        let error = builder.build().await.unwrap_err();
        for text in [text, error.to_string(), format!("{error:?}")] {
            assert!(!text.contains("hidden"), "{text}");
        }
        error
    };
    let valid = standard_secret(SECRET);
    let url = "https://u:hidden@a/";
    assert!(matches!(error(url, &valid).await, WebhookSinkError::Credentials));
    assert!(matches!(error("https://a/#hidden", &valid).await, WebhookSinkError::Fragment));
    assert!(matches!(error("nats://hidden", &valid).await, WebhookSinkError::Url));
    let fault = error("http://a", "hidden").await.to_string();
    assert!(fault.contains("signing secret 1: expected a secret that begins with"), "{fault}");
    let roots = WebhookSink::builder("http://a").roots("roots.pem").build().await;
    assert!(matches!(roots, Err(WebhookSinkError::RootsWithoutTls)));
    let timeout = WebhookSink::builder("http://a").timeout(Duration::ZERO).build().await;
    assert!(matches!(timeout, Err(WebhookSinkError::Timeout)));
    let many = (0..9).fold(WebhookSink::builder("http://a"), |it, _| it.secret(&valid));
    assert!(matches!(many.build().await, Err(WebhookSinkError::TooManySecrets { found: 9 })));
    let sink = WebhookSink::builder("http://a/hidden?hidden").secret(&valid).build().await;
    let shown = format!("{:?}", sink.unwrap());
    assert!(!shown.contains("hidden"), "{shown}");
}

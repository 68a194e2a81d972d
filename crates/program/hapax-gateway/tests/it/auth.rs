//! Asking whether a request is allowed: what is asked, and what the answer decides.

mod callers;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_gateway::{Config, ForwardAuth, RunningGateway};
use hapax_http::Body;
use http::header::{HeaderName, HeaderValue};
use http::{Method, Response};
use tokio::sync::{mpsc, oneshot, watch};

use crate::world::{
    Answer, Raw, Upstream, config, get, post, post_with, request, send, start, text, until,
};

const USER: HeaderName = HeaderName::from_static("x-user");

/// In front of `upstream`, asking `auth`.
fn asking(upstream: &Upstream, auth: &Upstream) -> Config {
    let mut config = config(upstream.url());
    let url = format!("http://{}/check?realm=shop", auth.address);
    config.auth = Some(ForwardAuth::new(url.parse().unwrap()));
    config
}

fn auth(config: &mut Config) -> &mut ForwardAuth {
    config.auth.as_mut().unwrap()
}

/// Has these headers of the auth answer name the caller.
fn named_by(config: &mut Config, names: &[HeaderName]) {
    auth(config).scope = names.to_vec();
    config.policy.scope_missing = None;
}

fn with(mut response: Response<Body>, fields: &[(&'static str, &'static str)]) -> Response<Body> {
    for (name, value) in fields {
        response.headers_mut().append(*name, HeaderValue::from_static(value));
    }
    response
}

/// Allows whoever is on the list, and says who it is: what comes after the `-` in the token.
async fn list(allowed: &Arc<Mutex<Vec<&'static str>>>) -> Upstream {
    let allowed = Arc::clone(allowed);
    Upstream::start(move |seen| {
        let token = seen.header("authorization").to_owned();
        let allowed = allowed.lock().unwrap().iter().any(|it| *it == token);
        async move {
            if !allowed {
                return with(text(401, "who?"), &[("www-authenticate", "Bearer realm=shop")]);
            }
            let user = token.rsplit('-').next().unwrap_or_default().to_owned();
            let mut response = text(200, "");
            response.headers_mut().insert(USER, user.parse().unwrap());
            response
        }
    })
    .await
}

/// Gives the same answer to everyone.
async fn saying(says: impl Fn() -> Response<Body> + Send + Sync + 'static) -> Upstream {
    Upstream::start(move |_| {
        let answer = says();
        async move { answer }
    })
    .await
}

async fn pay(gateway: &RunningGateway, key: &str, token: &str) -> Answer {
    let fields = [("idempotency-key", key), ("authorization", token)];
    post_with(gateway.local_addr(), "/pay", &fields, "x").await
}

async fn metric(gateway: &RunningGateway, line: &str) -> bool {
    let metrics = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
    metrics.lines().any(|it| it == line)
}

/// 503, and nothing of it anywhere.
fn refused(answer: &Answer, upstream: &Upstream, why: &str) {
    assert_eq!((answer.status, answer.code().as_str()), (503, "auth-unavailable"), "{why}");
    assert_eq!(answer.header("retry-after"), "1", "{why}");
    assert_eq!(upstream.seen().len(), 0, "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_credentials_get_no_replay() {
    let upstream = Upstream::counting().await;
    let allowed = Arc::new(Mutex::new(vec!["Bearer a"]));
    let auth = list(&allowed).await;
    let gateway = start(asking(&upstream, &auth)).await;
    let first = pay(&gateway, "k", "Bearer a").await;
    assert_eq!((first.status, first.header("idempotency-replayed")), (201, "false"));
    assert_eq!(pay(&gateway, "k", "Bearer a").await.header("idempotency-replayed"), "true");

    allowed.lock().unwrap().clear();
    for key in ["k", "new"] {
        let denied = pay(&gateway, key, "Bearer a").await;
        assert_eq!((denied.status, denied.text().as_str()), (401, "who?"), "{key}");
        assert_eq!(denied.header("www-authenticate"), "Bearer realm=shop");
        assert_eq!(denied.header("idempotency-replayed"), "");
    }
    // Not even that there is something under this key.
    let fields = [("idempotency-key", "k"), ("authorization", "Bearer a")];
    let other = post_with(gateway.local_addr(), "/pay", &fields, "another body").await;
    assert_eq!(other.status, 401);

    allowed.lock().unwrap().push("Bearer a");
    let again = pay(&gateway, "k", "Bearer a").await;
    assert_eq!((again.text(), again.header("idempotency-replayed")), (first.text(), "true"));
    assert_eq!(upstream.seen().len(), 1);
    for (outcome, count) in [("allowed", 3), ("denied", 3), ("unavailable", 0)] {
        let line = format!("hapax_auth_questions_total{{outcome=\"{outcome}\"}} {count}");
        assert!(metric(&gateway, &line).await, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auth_request_has_the_requests_headers_and_describes_the_request() {
    let upstream = Upstream::counting().await;
    let auth = saying(|| text(204, "")).await;
    let gateway = start(asking(&upstream, &auth)).await;
    let fields = [
        ("idempotency-key", "\"k\""),
        ("idempotency-fence", "9"),
        ("authorization", "Bearer a"),
        ("cookie", "session=1"),
        ("accept", "text/html"),
        ("content-type", "application/json"),
        ("if-none-match", "\"e\""),
        ("range", "bytes=0-1"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("x-forwarded-for", "198.51.100.1"),
        ("x-forwarded-method", "GET"),
        ("x-forwarded-uri", "/public"),
        ("x_forwarded_uri", "/public"),
        ("x-original-url", "/public"),
    ];
    let path = "/pay%2Fnow/..?to=b&to=c";
    assert_eq!(post_with(gateway.local_addr(), path, &fields, "{}").await.status, 201);

    let questions = auth.seen();
    let [question] = &questions[..] else { panic!("{questions:?}") };
    assert_eq!(
        (&question.method, question.uri.to_string().as_str()),
        (&Method::GET, "/check?realm=shop")
    );
    assert_eq!(question.body, "");
    for (name, value) in [
        ("host", auth.address.to_string().as_str()),
        ("x-forwarded-method", "POST"),
        ("x-forwarded-uri", path),
        ("x-forwarded-host", "shop.example"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-for", "198.51.100.1, 127.0.0.1"),
        ("authorization", "Bearer a"),
        ("cookie", "session=1"),
        ("accept", "text/html"),
        ("idempotency-key", "\"k\""),
        ("via", "1.1 hapax"),
    ] {
        let values: Vec<_> = question.headers.get_all(name).iter().collect();
        assert_eq!(values, [value], "{name}");
    }
    for name in [
        "idempotency-fence",
        "content-type",
        "content-length",
        "transfer-encoding",
        "if-none-match",
        "range",
        "x-hop",
        "x_forwarded_uri",
        "x-original-url",
    ] {
        assert!(!question.headers.contains_key(name), "{name}");
    }
    // What is left out of the question still reaches the service.
    assert_eq!(upstream.seen()[0].header("content-type"), "application/json");
    assert_eq!(upstream.seen()[0].header("if-none-match"), "\"e\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unprotected_request_sends_no_auth_request() {
    let upstream = Upstream::counting().await;
    let auth = saying(|| text(403, "")).await;
    let gateway = start(asking(&upstream, &auth)).await;
    let address = gateway.local_addr();
    assert_eq!(post_with(address, "/", &[], "x").await.status, 201);
    assert_eq!(send(address, "PUT", "/", &[("idempotency-key", "k")], "x").await.status, 201);
    assert_eq!(auth.seen().len(), 0);
    assert_eq!(post(address, "/", "k", "x").await.status, 403);
    assert_eq!((auth.seen().len(), upstream.seen().len()), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_3xx_or_4xx_auth_response_is_forwarded_to_the_client() {
    let upstream = Upstream::counting().await;
    let says = Arc::new(AtomicUsize::new(0));
    let auth = {
        let says = Arc::clone(&says);
        saying(move || match says.load(Ordering::SeqCst) {
            0 => with(
                text(302, "<a>log in</a>"),
                &[
                    ("location", "https://login.example/?next=/"),
                    ("set-cookie", "a=1"),
                    ("set-cookie", "b=2"),
                    ("content-type", "text/html"),
                    ("idempotency-replayed", "true"),
                    ("connection", "x-hop"),
                    ("x-hop", "1"),
                ],
            ),
            1 => with(text(403, "not you"), &[("content-type", "text/plain")]),
            2 => text(429, vec![b'x'; 64 << 10]),
            _ => text(404, ""),
        })
        .await
    };
    let gateway = start(asking(&upstream, &auth)).await;
    let mut answers = Vec::new();
    for index in 0..4 {
        says.store(index, Ordering::SeqCst);
        answers.push(post(gateway.local_addr(), "/", "k", "x").await);
    }
    assert_eq!((answers[0].status, answers[0].text().as_str()), (302, "<a>log in</a>"));
    assert_eq!(answers[0].header("location"), "https://login.example/?next=/");
    assert_eq!(answers[0].header("content-type"), "text/html");
    let cookies = answers[0].headers.iter().filter(|(name, _)| name == "set-cookie");
    assert_eq!(cookies.map(|(_, value)| value.as_str()).collect::<Vec<_>>(), ["a=1", "b=2"]);
    assert_eq!((answers[0].header("idempotency-replayed"), answers[0].header("x-hop")), ("", ""));
    assert_eq!((answers[1].status, answers[1].text().as_str()), (403, "not you"));
    assert_eq!((answers[2].status, answers[2].body.len()), (429, 64 << 10));
    assert_eq!((answers[3].status, answers[3].text().as_str()), (404, ""));
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_auth_response_rejects_the_request() {
    let upstream = Upstream::counting().await;
    let says = Arc::new(Mutex::new((500, 0)));
    let auth = {
        let says = Arc::clone(&says);
        saying(move || {
            let (status, size) = *says.lock().unwrap();
            text(status, vec![b'x'; size])
        })
        .await
    };
    let gateway = start(asking(&upstream, &auth)).await;
    for said in [(500, 4), (503, 0), (200, 1 << 20), (403, 1 << 20), (200, (64 << 10) + 1)] {
        *says.lock().unwrap() = said;
        refused(&post(gateway.local_addr(), "/", "k", "x").await, &upstream, &format!("{said:?}"));
    }
    let admin = gateway.admin_addr().unwrap();
    let ready = get(admin, "/readyz").await;
    assert_eq!((ready.status, ready.text().contains("auth URL")), (200, true));
    assert!(metric(&gateway, "hapax_auth_up 0").await);
    assert!(metric(&gateway, "hapax_refusals_total{code=\"auth-unavailable\"} 5").await);

    *says.lock().unwrap() = (200, 64 << 10);
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
    assert_eq!(get(admin, "/readyz").await.text(), "ready\n");
    assert!(metric(&gateway, "hapax_auth_up 1").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_auth_server_rejects_the_request() {
    let upstream = Upstream::counting().await;
    let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut config = config(upstream.url());
    config.auth = Some(ForwardAuth::new(format!("http://{gone}").parse().unwrap()));
    let gateway = start(config).await;
    refused(&post(gateway.local_addr(), "/", "k", "x").await, &upstream, "nobody listens");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auth_response_that_is_incomplete_at_the_timeout_is_unusable() {
    let upstream = Upstream::counting().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        for count in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                let _ = stream.read(&mut buffer).await;
                if count % 2 == 1 {
                    // Never silent for long, and never done.
                    let _ =
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n").await;
                    while stream.write_all(b"x").await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
                // Says nothing until the gateway hangs up.
                let _ = stream.read(&mut buffer).await;
            });
        }
    });
    let mut config = config(upstream.url());
    let mut forward = ForwardAuth::new(format!("http://{address}/").parse().unwrap());
    forward.timeout = Duration::from_millis(300);
    config.auth = Some(forward);
    let gateway = start(config).await;
    for why in ["silent", "dribbling"] {
        refused(&post(gateway.local_addr(), "/", "k", "x").await, &upstream, why);
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auth_request_on_a_closing_connection_is_sent_again() {
    let upstream = Upstream::counting().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let met = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&met);
    let server = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let count = Arc::clone(&count);
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                assert!(stream.read(&mut buffer).await.unwrap() > 0);
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                // The next question on it is read, and not answered.
                if stream.read(&mut buffer).await.unwrap() > 0 {
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    let mut config = config(upstream.url());
    config.auth = Some(ForwardAuth::new(format!("http://{address}/").parse().unwrap()));
    let gateway = start(config).await;
    while met.load(Ordering::SeqCst) == 0 {
        assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
    }
    server.abort();
}

/// Tells of each question; a question is allowed when it is said so.
async fn patient() -> (Upstream, mpsc::Receiver<oneshot::Sender<()>>) {
    let (begun, beginnings) = mpsc::channel(10);
    let endpoint = Upstream::start(move |_| {
        let begun = begun.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            begun.send(answer).await.unwrap();
            match answered.await {
                Ok(()) => text(200, ""),
                Err(_) => std::future::pending().await,
            }
        }
    })
    .await;
    (endpoint, beginnings)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_body_is_not_read_before_the_auth_response() {
    let upstream = Upstream::counting().await;
    let endpoint = saying(|| text(401, "no")).await;
    let gateway = start(asking(&upstream, &endpoint)).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(
        "POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\nexpect: 100-continue\r\n\
         content-length: 1000\r\n\r\n",
    )
    .await;
    // Not 100.
    assert_eq!(raw.answer().await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_cancels_its_auth_request() {
    let upstream = Upstream::counting().await;
    let (endpoint, mut begun) = patient().await;
    let mut config = asking(&upstream, &endpoint);
    auth(&mut config).timeout = Duration::from_secs(600);
    let gateway = start(config).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "k")], "")).await;
    let mut question = begun.recv().await.unwrap();
    drop(raw);
    question.closed().await;
    assert_eq!((gateway.engine().stats().in_flight, upstream.seen().len()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_auth_requests_in_progress() {
    let upstream = Upstream::counting().await;
    let (endpoint, mut begun) = patient().await;
    let mut config = asking(&upstream, &endpoint);
    auth(&mut config).timeout = Duration::from_secs(600);
    config.drain_timeout = Duration::from_secs(600);
    let gateway = start(config.clone()).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    let question = begun.recv().await.unwrap();
    let address = gateway.local_addr();
    let ending = tokio::spawn(gateway.shutdown());
    while tokio::net::TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    question.send(()).unwrap();
    assert_eq!(raw.answer().await.status, 201);
    assert_eq!(ending.await.unwrap().cut_off, 0);

    config.drain_timeout = Duration::from_millis(100);
    let gateway = start(config).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    let _never = begun.recv().await.unwrap();
    assert_eq!(gateway.shutdown().await.cut_off, 1);
    let answer = raw.answer().await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "draining"));
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn auth_requests_beyond_the_limit_wait_for_a_permit() {
    const BOUND: usize = 256;
    let upstream = Upstream::counting().await;
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (open, opened) = watch::channel(false);
    let endpoint = {
        let (now, most) = (Arc::clone(&now), Arc::clone(&most));
        Upstream::start(move |_| {
            let (now, most, mut opened) = (Arc::clone(&now), Arc::clone(&most), opened.clone());
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                opened.wait_for(|open| *open).await.unwrap();
                now.fetch_sub(1, Ordering::SeqCst);
                text(200, "")
            }
        })
        .await
    };
    let mut config = asking(&upstream, &endpoint);
    auth(&mut config).timeout = Duration::from_secs(600);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..BOUND + 50 {
        clients.spawn(async move { post(address, "/", &format!("k{index}"), "x").await.status });
    }
    until("all places are taken", || now.load(Ordering::SeqCst) == BOUND).await;
    let waiting = format!("hapax_requests {}", BOUND + 50);
    while !metric(&gateway, &waiting).await {
        tokio::task::yield_now().await;
    }
    open.send_replace(true);
    while let Some(status) = clients.join_next().await {
        assert_eq!(status.unwrap(), 201);
    }
    assert_eq!(most.load(Ordering::SeqCst), BOUND);
}

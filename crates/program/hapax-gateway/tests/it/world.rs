//! An upstream, a gateway, and clients that send bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Namespace;
use hapax_core::store::BoxFuture;
use hapax_gateway::{Config, Gateway, RunningGateway, StoreUrl};
use hapax_http::Body;
use hapax_http::server::MissingScope;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// Longer than anything here takes; a test that needs it fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A request as the upstream got it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) version: Version,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// What shows the token.
pub(crate) fn token() -> String {
    let token = std::fs::read_to_string(token_file()).unwrap_or_default();
    format!("Bearer {}", token.trim())
}

/// Anything that bytes go over.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Wire for S {}

/// A service that hyper serves, in HTTP/1 or HTTP/2.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    pub(crate) connections: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<Seen>>>,
    probes: Arc<Mutex<Vec<Seen>>>,
    task: JoinHandle<()>,
}

/// One type for all upstreams, so that their server is compiled once.
type AnswerFn = dyn Fn(Seen) -> BoxFuture<'static, Response<Body>> + Send + Sync;
type ProbeFn = dyn Fn(&Seen) -> Response<Body> + Send + Sync;

impl Upstream {
    /// Answers each request, once it is read, with what `answer` makes of it.
    pub(crate) async fn start<F, A>(answer: F) -> Self
    where
        F: Fn(Seen) -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        Self::start_with(None, answer).await
    }

    /// Behind TLS, where there is any. Probes of a reconcile URL, which have fence 0, get the right
    /// answer.
    pub(crate) async fn start_with<F, A>(tls: Option<Arc<ServerConfig>>, answer: F) -> Self
    where
        F: Fn(Seen) -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        let answer: Arc<AnswerFn> = Arc::new(move |seen| Box::pin(answer(seen)));
        Self::listen(tls, answer, Arc::new(|_: &Seen| did_not_happen())).await
    }

    /// Answers probes of a reconcile URL like this, and nothing else.
    pub(crate) async fn probed(
        probe: impl Fn(&Seen) -> Response<Body> + Send + Sync + 'static,
    ) -> Self {
        let answer: Arc<AnswerFn> = Arc::new(|_| Box::pin(async { text(500, "") }));
        Self::listen(None, answer, Arc::new(probe)).await
    }

    async fn listen(
        tls: Option<Arc<ServerConfig>>,
        answer: Arc<AnswerFn>,
        probe: Arc<ProbeFn>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(AtomicUsize::new(0));
        let probes = Arc::new(Mutex::new(Vec::new()));
        let (all, count, probed) =
            (Arc::clone(&seen), Arc::clone(&connections), Arc::clone(&probes));
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let (answer, all) = (Arc::clone(&answer), Arc::clone(&all));
                let (probe, probed) = (Arc::clone(&probe), Arc::clone(&probed));
                let service = service_fn(move |request: Request<Incoming>| {
                    let (answer, all) = (Arc::clone(&answer), Arc::clone(&all));
                    let (probe, probed) = (Arc::clone(&probe), Arc::clone(&probed));
                    async move {
                        let (parts, body) = request.into_parts();
                        // A client that went away in the middle is not asked anything.
                        let Ok(body) = body.collect().await else {
                            return Ok::<_, Infallible>(Response::new(Body::empty()));
                        };
                        let trailers = body.trailers().cloned();
                        let seen = Seen {
                            method: parts.method,
                            uri: parts.uri,
                            version: parts.version,
                            headers: parts.headers,
                            body: body.to_bytes(),
                            trailers,
                        };
                        if seen.header("idempotency-fence") == "0" {
                            probed.lock().unwrap().push(seen.clone());
                            return Ok(probe(&seen));
                        }
                        all.lock().unwrap().push(seen.clone());
                        Ok(answer(seen).await)
                    }
                });
                let tls = tls.clone();
                tokio::spawn(async move {
                    let stream: Box<dyn Wire> = match tls {
                        None => Box::new(stream),
                        Some(config) => match TlsAcceptor::from(config).accept(stream).await {
                            Ok(stream) => Box::new(stream),
                            Err(_) => return,
                        },
                    };
                    let server = auto::Builder::new(TokioExecutor::new());
                    drop(server.serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        Self { address, connections, seen, probes, task }
    }

    /// One that numbers its answers.
    pub(crate) async fn counting() -> Self {
        let count = AtomicUsize::new(0);
        Self::start(move |_| {
            let number = count.fetch_add(1, Ordering::SeqCst) + 1;
            async move { text(201, number.to_string()) }
        })
        .await
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Probes of a reconcile URL; they are not among what was [seen](Self::seen).
    pub(crate) fn probes(&self) -> Vec<Seen> {
        self.probes.lock().unwrap().clone()
    }

    pub(crate) fn url(&self) -> Uri {
        format!("http://{}", self.address).parse().unwrap()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a service answers about an operation that did not happen.
pub(crate) fn did_not_happen() -> Response<Body> {
    let mut response = text(404, "");
    let marker = HeaderValue::from_static("did-not-happen");
    response.headers_mut().insert("idempotency-outcome", marker);
    response
}

pub(crate) fn text(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// A gateway in front of `upstream`, on free ports and in memory. Requests without `Authorization`
/// share a scope: most tests have one caller.
pub(crate) fn config(upstream: Uri) -> Config {
    let mut config = Config::new(upstream);
    config.policy.scope_missing = Some(MissingScope::Shared);
    config.listen = "127.0.0.1:0".parse().unwrap();
    config.admin = Some("127.0.0.1:0".parse().unwrap());
    config.store = StoreUrl::Memory;
    config.namespace = Some(Namespace::default());
    config.admin_token_file = Some(token_file());
    config.audit_file = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("audit.jsonl"));
    config
}

/// The token of all gateways of tests; the first one makes it.
fn token_file() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("admin-token")
}

pub(crate) async fn start(config: Config) -> RunningGateway {
    Gateway::start(config).await.unwrap()
}

/// An answer, as it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(it, _)| it == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The code of a problem.
    pub(crate) fn code(&self) -> String {
        let json = self.json();
        // Of a problem; the API's errors have none.
        if let Some(detail) = json["detail"].as_str() {
            assert!(detail.starts_with(char::is_uppercase) && detail.ends_with('.'), "{detail:?}");
        }
        json["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// A connection that sends what it is told, byte for byte.
pub(crate) struct Raw {
    stream: Box<dyn Wire>,
    read: VecDeque<u8>,
}

impl Raw {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::on(TcpStream::connect(address).await.unwrap())
    }

    /// On a connection that is there already.
    pub(crate) fn on(stream: impl Wire + 'static) -> Self {
        Self { stream: Box::new(stream), read: VecDeque::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Like `send`, for a peer that may have closed already.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// The next answer. `head`: to a request that gets no body.
    pub(crate) async fn answer_to(&mut self, head: bool) -> Option<Answer> {
        let read = async {
            let first = self.line().await?;
            let status = first.split(' ').nth(1)?.parse().ok()?;
            let mut headers = Vec::new();
            loop {
                let line = self.line().await?;
                if line.is_empty() {
                    break;
                }
                let (name, value) = line.split_once(':')?;
                headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
            let mut answer = Answer { status, headers, body: Vec::new() };
            let bodiless = head || status == 204 || status == 304 || status < 200;
            if bodiless {
                return Some(answer);
            }
            if answer.header("transfer-encoding") == "chunked" {
                loop {
                    let size = usize::from_str_radix(&self.line().await?, 16).ok()?;
                    if size == 0 {
                        while !self.line().await?.is_empty() {}
                        return Some(answer);
                    }
                    answer.body.extend(self.take(size).await?);
                    self.line().await?;
                }
            }
            answer.body = match answer.header("content-length").parse() {
                Ok(length) => self.take(length).await?,
                Err(_) => self.rest().await,
            };
            Some(answer)
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("no answer in time")
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        self.answer_to(false).await.expect("the connection ended without an answer")
    }

    /// Whatever comes until the other side closes.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while self.fill().await {}
        self.read.drain(..).collect()
    }

    /// What comes, up to and with `wanted`.
    pub(crate) async fn until(&mut self, wanted: &[u8]) -> Vec<u8> {
        loop {
            let read = self.read.make_contiguous();
            if let Some(at) = read.windows(wanted.len()).position(|part| part == wanted) {
                return self.read.drain(..at + wanted.len()).collect();
            }
            assert!(self.fill().await, "the connection ended before {wanted:?}");
        }
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.read.len() < count {
            if !self.fill().await {
                return None;
            }
        }
        Some(self.read.drain(..count).collect())
    }

    /// Whether anything came.
    async fn fill(&mut self) -> bool {
        let mut buffer = vec![0; 16 * 1024];
        match tokio::time::timeout(TIMEOUT, self.stream.read(&mut buffer)).await {
            Ok(Ok(count)) => {
                self.read.extend(&buffer[..count]);
                count > 0
            }
            Ok(Err(_)) => false,
            Err(_) => panic!("nothing came in time"),
        }
    }
}

/// A request with a body, as text.
pub(crate) fn request(method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: shop.example\r\n");
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    text
}

/// A `POST` of `body` under `key`, on a connection of its own.
pub(crate) async fn post(address: SocketAddr, path: &str, key: &str, body: &str) -> Answer {
    post_with(address, path, &[("idempotency-key", key)], body).await
}

pub(crate) async fn post_with(
    address: SocketAddr,
    path: &str,
    fields: &[(&str, &str)],
    body: &str,
) -> Answer {
    let mut raw = Raw::connect(address).await;
    raw.send(request("POST", path, fields, body)).await;
    raw.answer().await
}

/// `GET` from an admin listener.
pub(crate) async fn get(admin: SocketAddr, path: &str) -> Answer {
    send(admin, "GET", path, &[], "").await
}

/// A request to an admin listener, with the token unless the fields name another.
pub(crate) async fn send(
    admin: SocketAddr,
    method: &str,
    path: &str,
    fields: &[(&str, &str)],
    body: &str,
) -> Answer {
    let mut raw = Raw::connect(admin).await;
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: {admin}\r\n");
    if !fields.iter().any(|(name, _)| *name == "authorization") {
        text.push_str(&format!("authorization: {}\r\n", token()));
    }
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    raw.send(format!("{text}content-length: {}\r\n\r\n{body}", body.len())).await;
    raw.answer().await
}

/// Waits until `true`, looking often.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

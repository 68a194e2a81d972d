//! Clients, whole responses, and what is read from them.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use hapax_http::Body;
use http::header::HOST;
use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Timeout that is longer than any step of a scenario; to exceed it is a failure.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Protocol of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 in the clear, with prior knowledge.
    Http2,
}

impl Protocol {
    /// Both protocols.
    pub const ALL: [Self; 2] = [Self::Http1, Self::Http2];
}

/// Factory of connections.
#[derive(Clone, Copy, Debug)]
pub struct TestClient {
    /// Address to connect to.
    pub address: SocketAddr,
    /// Protocol of its connections.
    pub protocol: Protocol,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    sender: Sender,
    address: SocketAddr,
    task: JoinHandle<()>,
}

#[derive(Debug)]
enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl TestClient {
    /// Opens a connection.
    pub async fn connect(&self) -> Connection {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let io = TokioIo::new(stream);
        let (sender, task) = match self.protocol {
            Protocol::Http1 => {
                let (sender, connection) = http1::handshake(io).await.unwrap();
                (Sender::Http1(sender), tokio::spawn(async move { drop(connection.await) }))
            }
            Protocol::Http2 => {
                let made = http2::handshake(TokioExecutor::new(), io).await;
                let (sender, connection) = made.unwrap();
                (Sender::Http2(sender), tokio::spawn(async move { drop(connection.await) }))
            }
        };
        Connection { sender, address: self.address, task }
    }

    /// Sends a request on a separate connection; returns the whole response.
    pub async fn send(&self, request: Request<Body>) -> TestResponse {
        self.connect().await.send(request).await
    }

    /// Sends a request on a separate task. Aborting the task closes the connection.
    #[must_use]
    pub fn begin(&self, request: Request<Body>) -> JoinHandle<TestResponse> {
        let this = *self;
        tokio::spawn(async move { this.send(request).await })
    }
}

impl Connection {
    /// Sends a request; returns the whole response.
    pub async fn send(&mut self, request: Request<Body>) -> TestResponse {
        let answer = async { TestResponse::read(self.ask(request).await).await };
        let answer = tokio::time::timeout(TIMEOUT, answer).await;
        answer.expect("no whole answer in time")
    }

    /// Sends a request; returns the whole response, or the error of a connection that takes no more
    /// requests.
    ///
    /// # Errors
    /// The error of the HTTP library.
    pub async fn try_send(&mut self, request: Request<Body>) -> Result<TestResponse, hyper::Error> {
        let answer = async { Ok(TestResponse::read(self.try_ask(request).await?).await) };
        tokio::time::timeout(TIMEOUT, answer).await.expect("no whole answer in time")
    }

    /// Sends a request; returns the response once its head is there, with its body to come.
    pub async fn ask(&mut self, request: Request<Body>) -> Response<Incoming> {
        self.try_ask(request).await.expect("the connection broke")
    }

    async fn try_ask(
        &mut self,
        mut request: Request<Body>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        let authority = Authority::try_from(self.address.to_string()).unwrap();
        let host = HeaderValue::from_str(authority.as_str()).unwrap();
        let answer = async {
            match &mut self.sender {
                Sender::Http1(sender) => {
                    request.headers_mut().insert(HOST, host);
                    sender.ready().await?;
                    sender.send_request(request).await
                }
                Sender::Http2(sender) => {
                    let mut uri = std::mem::take(request.uri_mut()).into_parts();
                    (uri.scheme, uri.authority) = (Some(Scheme::HTTP), Some(authority));
                    *request.uri_mut() = Uri::from_parts(uri).unwrap();
                    sender.ready().await?;
                    sender.send_request(request).await
                }
            }
        };
        let answer = tokio::time::timeout(TIMEOUT, answer).await;
        answer.expect("no answer in time")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Cancels the request in progress: the client closes the connection.
        self.task.abort();
    }
}

/// A whole response.
#[derive(Clone, PartialEq, Debug)]
pub struct TestResponse {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// Its trailers.
    pub trailers: Option<HeaderMap>,
}

impl TestResponse {
    /// Reads a response to its end.
    pub async fn read(response: Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("the answer broke off");
        let trailers = body.trailers().cloned();
        Self { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
    }

    /// Returns a header; empty if it is absent, the first line if there are several.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Returns the body as text.
    #[must_use]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// Returns the body as a problem document.
    #[must_use]
    pub fn problem(&self) -> serde_json::Value {
        assert_eq!(self.header("content-type"), "application/problem+json", "{self:?}");
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(problem["status"], self.status.as_u16());
        for member in ["type", "title", "detail", "code"] {
            assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
        }
        let error = &problem["error"];
        assert_eq!((&error["code"], &error["message"]), (&problem["code"], &problem["detail"]));
        assert!(error["type"].as_str().is_some_and(|kind| kind.ends_with("_error")), "{problem}");
        problem
    }

    /// Returns the status and, for a problem, its code: most scenarios check no more of a
    /// rejection.
    #[must_use]
    pub fn rejection(&self) -> (u16, String) {
        let code = self.problem()["code"].as_str().unwrap_or_default().to_owned();
        (self.status.as_u16(), code)
    }

    /// Asserts that this is the rejection with this status and code.
    #[track_caller]
    pub fn is_rejected(&self, status: u16, code: &str) {
        assert_eq!(self.rejection(), (status, code.to_owned()), "{self:?}");
        // A gateway marks a problem that replaces its upstream's response as not replayed.
        assert_ne!(self.header("idempotency-replayed"), "true", "{self:?}");
    }

    /// Asserts that this is the first response, with this status and body.
    #[track_caller]
    pub fn is_first(&self, status: u16, body: &str) {
        self.is(status, body, "false");
    }

    /// Asserts that this is a replay, with this status and body.
    #[track_caller]
    pub fn is_replay(&self, status: u16, body: &str) {
        self.is(status, body, "true");
    }

    /// Asserts that the response has no headers of the contract.
    #[track_caller]
    pub fn is_unmarked(&self, status: u16, body: &str) {
        let ours = self.headers.keys().filter(|name| name.as_str().starts_with("idempotency-"));
        assert_eq!(ours.count(), 0, "{self:?}");
        self.is(status, body, "");
    }

    #[track_caller]
    fn is(&self, status: u16, body: &str, replayed: &str) {
        let body_is = String::from_utf8_lossy(&self.body);
        let found = (self.status.as_u16(), &*body_is, self.header("idempotency-replayed"));
        assert_eq!(found, (status, body, replayed), "{:?}", self.headers);
    }
}

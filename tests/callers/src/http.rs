//! HTTP of the services: answers, and connections that break off.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::time::{Sleep, sleep};

use crate::{CallsError, failed};

/// Time after which a body breaks off: the bytes before it have left.
const CUT_AFTER: Duration = Duration::from_millis(20);

/// A request with its body.
pub(crate) struct ServiceRequest {
    pub(crate) method: Method,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl ServiceRequest {
    /// Returns the value of a header, without quotes.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        Some(self.headers.get(name)?.to_str().ok()?.trim_matches('"'))
    }
}

/// The answer to a request, or its loss.
pub(crate) enum Reply {
    /// An answer.
    Answer(Response<String>),
    /// An answer whose body breaks off.
    Cut(Response<String>),
    /// The connection is closed.
    Drop,
}

impl Reply {
    pub(crate) fn of(status: StatusCode, headers: &[(&'static str, &str)], body: &str) -> Self {
        Self::Answer(response(status, headers, body))
    }
}

pub(crate) fn response(
    status: StatusCode,
    headers: &[(&'static str, &str)],
    body: &str,
) -> Response<String> {
    let mut response = Response::new(body.to_owned());
    *response.status_mut() = status;
    for (name, value) in headers {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(*name, value);
        }
    }
    response
}

/// Serves until the process is killed. A handler continues when its connection is lost.
pub(crate) async fn serve<H, F>(port: u16, handler: H) -> Result<(), CallsError>
where
    H: Fn(ServiceRequest) -> F + Clone + Send + 'static,
    F: Future<Output = Reply> + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", port)).await.map_err(failed("listening"))?;
    loop {
        let (stream, _) = listener.accept().await.map_err(failed("accepting"))?;
        let _ = stream.set_nodelay(true);
        let handler = handler.clone();
        let service = service_fn(move |request| exchange(handler.clone(), request));
        tokio::spawn(async move {
            // Connections that break off end with an error, as they should.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn exchange<H, F>(handler: H, request: Request<Incoming>) -> Result<Response<ReplyBody>, Lost>
where
    H: Fn(ServiceRequest) -> F,
    F: Future<Output = Reply> + Send + 'static,
{
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Lost)?.to_bytes();
    let body = String::from_utf8_lossy(&body).into_owned();
    let request = ServiceRequest { method: head.method, headers: head.headers, body };
    let reply = tokio::spawn(handler(request)).await.map_err(|_| Lost)?;
    let (response, is_cut) = match reply {
        Reply::Answer(response) => (response, false),
        Reply::Cut(response) => (response, true),
        Reply::Drop => return Err(Lost),
    };
    let (mut head, body) = response.into_parts();
    head.headers.insert("content-length", body.len().into());
    let bytes = Bytes::from(body);
    let body = if is_cut {
        let half = bytes.len() / 2;
        ReplyBody { bytes: Some(bytes.slice(..half)), cut: Some(Box::pin(sleep(CUT_AFTER))) }
    } else {
        ReplyBody { bytes: Some(bytes), cut: None }
    };
    Ok(Response::from_parts(head, body))
}

/// The error of a connection that is to be closed.
#[derive(Debug)]
pub(crate) struct Lost;

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the connection is closed on purpose")
    }
}

impl std::error::Error for Lost {}

impl From<Infallible> for Lost {
    fn from(error: Infallible) -> Self {
        match error {}
    }
}

struct ReplyBody {
    bytes: Option<Bytes>,
    cut: Option<Pin<Box<Sleep>>>,
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Lost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Lost>>> {
        if let Some(bytes) = self.bytes.take() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        match &mut self.cut {
            Some(cut) => {
                ready!(cut.as_mut().poll(context));
                Poll::Ready(Some(Err(Lost)))
            }
            None => Poll::Ready(None),
        }
    }
}

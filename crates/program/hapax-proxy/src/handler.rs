//! Handler of the requests that a listener receives.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;

use crate::BodyError;
use crate::guard::HeadError;
use crate::tunnel::Switch;

/// The peer that sent a request, and its connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The peer's address.
    pub addr: SocketAddr,
    /// True if the connection uses TLS.
    pub secure: bool,
    /// True if the peer is a trusted proxy: its `Forwarded` and `X-Forwarded-*` headers are used.
    pub trusted: bool,
    /// True if the connection uses HTTP/2.
    pub http2: bool,
}

impl Peer {
    /// Returns the peer of a request that did not come through a listener.
    #[must_use]
    pub fn unknown() -> Self {
        let addr = (std::net::Ipv4Addr::UNSPECIFIED, 0).into();
        Self { addr, secure: false, trusted: false, http2: false }
    }

    /// Marks the last response of a connection. HTTP/2 uses a frame for this, and a connection that
    /// leaves HTTP has no further responses.
    pub fn close<B>(&self, response: &mut Response<B>) {
        if self.http2 || response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

/// A request of a client.
#[derive(Debug)]
pub struct ClientRequest {
    /// The request; without a rejection, in the form of HTTP/1.1.
    pub request: Request<Incoming>,
    /// The reason to reject the request: it can be read in two ways, and is not reliable.
    pub rejection: Option<HeadError>,
    /// The peer that sent it.
    pub peer: Peer,
    /// The switch to another protocol, if the connection allows it.
    pub switch: Option<Switch>,
}

/// Answers the requests that a listener receives.
pub trait ProxyHandler: Send + Sync + 'static {
    /// The body of a response.
    type Body: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Send + Unpin + 'static;

    /// Answers a request. The future is dropped if the client resets the request or disconnects.
    fn answer(
        self: Arc<Self>,
        request: ClientRequest,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// Answers a request of `peer` for which there was no permit in time. The request has the form
    /// of HTTP/2, and is not checked by the guard.
    fn overloaded(
        self: Arc<Self>,
        peer: Peer,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;
}

//! An HTTP proxy without idempotency: the listener and the upstream of the gateway.
//!
//! A [`ProxyHandler`] decides what happens to each request of a client. The proxy adds to HTTP libraries:
//!
//! 1. A [`guard`] rejects requests that can be read in two ways.
//! 2. An [`Upstream`] reports of a failed request whether anything of it was sent.
//! 3. A [`listener`] limits connections and their memory, and sheds idle ones.
//! 4. Both sides use HTTP/1.1 and HTTP/2, with TLS or without; [certificates](tls) can be replaced
//!    while the proxy runs.
//! 5. A [`Shutdown`] finishes requests in progress first.
//!
//! ```
//! # use std::{error::Error, sync::Arc, time::Duration};
//! # use http::{Request, Response, StatusCode};
//! # use hyper::body::Incoming;
//! # use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! # use tokio::net::{TcpListener, TcpStream};
//! use hapax_proxy::{BoxedBody, ClientRequest, ForwardedRequest, ProxyHandler, Peer, Upstream};
//! # use hapax_proxy::{ConnectOptions, ListenerConfig, Origin, Shutdown, ShutdownPhase, listener};
//!
//! struct Forward(Upstream);
//!
//! impl ProxyHandler for Forward {
//!     type Body = BoxedBody;
//!
//!     async fn answer(self: Arc<Self>, request: ClientRequest) -> Response<BoxedBody> {
//!         let ClientRequest { request, rejection, peer, switch } = request;
//!         if rejection.is_some() {
//!             return status(StatusCode::BAD_REQUEST);
//!         }
//!         let forwarded = ForwardedRequest::new(request, peer, switch.as_ref(), &self.0);
//!         match forwarded.pass(&self.0).await {
//!             Ok(response) => response.map(BoxedBody::new),
//!             Err(_) => status(StatusCode::BAD_GATEWAY),
//!         }
//!     }
//!
//!     async fn overloaded(self: Arc<Self>, _: Peer, _: Request<Incoming>) -> Response<BoxedBody> {
//!         status(StatusCode::SERVICE_UNAVAILABLE)
//!     }
//! }
//!
//! # fn status(status: StatusCode) -> Response<BoxedBody> {
//! #     let mut response = Response::new(BoxedBody::default());
//! #     *response.status_mut() = status;
//! #     response
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn Error>> {
//! # let server = TcpListener::bind("127.0.0.1:0").await?;
//! # let origin = format!("http://{}", server.local_addr()?).parse()?;
//! # let origin = Origin::of(&origin).ok_or("no server")?;
//! # let served = tokio::spawn(async move {
//! #     let (mut stream, _) = server.accept().await?;
//! #     let read = stream.read(&mut [0; 1024]).await?;
//! #     stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await?;
//! #     std::io::Result::Ok(read)
//! # });
//! let upstream = Upstream::new(origin, Duration::from_secs(30), 100, ConnectOptions::default());
//! let (clients, shutdown) = (TcpListener::bind("127.0.0.1:0").await?, Shutdown::default());
//! # let address = clients.local_addr()?;
//! let handler = Arc::new(Forward(upstream));
//! let serving = listener::serve(clients, handler, ListenerConfig::default(), shutdown.clone());
//! # let serving = tokio::spawn(serving);
//! # let mut client = TcpStream::connect(address).await?;
//! # client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await?;
//! # let mut answer = String::new();
//! # client.read_to_string(&mut answer).await?;
//! # assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("ok"), "{answer}");
//! # assert!(served.await?? > 0);
//! # shutdown.enter(ShutdownPhase::Draining);
//! # serving.await?;
//! # Ok(())
//! # }
//! ```

mod body;
mod connection_limit;
mod forward;
pub mod guard;
mod handler;
pub mod headers;
pub mod listener;
mod log_throttle;
mod network;
mod shutdown;
pub mod tls;
mod tunnel;
mod units;
mod upstream;

use std::error::Error;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

pub use body::{GuardedBody, InspectedBody, PacedBody};
pub use connection_limit::{ClientNetwork, ConnectionLimit, SheddableConnections, SheddableEntry};
pub use forward::ForwardedRequest;
pub use handler::{ClientRequest, Peer, ProxyHandler};
pub use listener::ListenerConfig;
pub use network::{IpNetwork, NetworkError};
pub use shutdown::{Shutdown, ShutdownPhase};
pub use tunnel::Switch;
pub use units::{ByteSize, UnitError, parse_duration};
pub use upstream::{
    ConnectOptions, ConnectProxy, Origin, ReceivedBody, UploadError, Upstream, UpstreamError,
    UpstreamProtocol, Upstreams,
};

/// An error of a body.
pub type BodyError = Box<dyn Error + Send + Sync>;

/// A body of any type, in a box.
pub type BoxedBody = UnsyncBoxBody<Bytes, BodyError>;

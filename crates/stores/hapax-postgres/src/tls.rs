//! How a connection is made: in the clear, or by TLS.

#[cfg(feature = "tls")]
pub(crate) mod rustls;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use hapax_core::store::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, NoTls, Socket};

/// A connection's other half, which does the reading and writing. Its stream ends with it.
pub(crate) type Driver = Pin<Box<dyn Messages>>;

/// Makes connections. Implemented for TLS by [`MakeTls`], and by `Rustls` (feature `tls`).
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// Connects as `config` says.
    ///
    /// # Errors
    /// Whatever keeps it from connecting.
    #[doc(hidden)]
    fn connect<'a>(&'a self, config: &'a Config) -> BoxFuture<'a, Result<Connected, Error>>;
}

/// A new connection.
#[doc(hidden)]
#[allow(missing_debug_implementations, reason = "it is passed on, never looked at")]
pub struct Connected {
    pub(crate) client: Client,
    pub(crate) driver: Driver,
}

/// What drives a connection and hears what the server says by itself.
pub(crate) trait Messages: Send {
    fn poll_message(
        self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<AsyncMessage, Error>>>;
}

impl<S, T> Messages for Connection<S, T>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send,
{
    fn poll_message(
        self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<AsyncMessage, Error>>> {
        // The connection is `Unpin`: it holds streams that are.
        Connection::poll_message(self.get_mut(), context)
    }
}

/// In the clear.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

impl Connector for Plain {
    fn connect<'a>(&'a self, config: &'a Config) -> BoxFuture<'a, Result<Connected, Error>> {
        Box::pin(connect(config, NoTls))
    }
}

/// By TLS, as any connector for tokio-postgres makes it.
#[derive(Clone)]
pub struct MakeTls<T>(T);

impl<T> MakeTls<T> {
    /// By TLS as `make` has it.
    #[must_use]
    pub const fn new(make: T) -> Self {
        Self(make)
    }
}

impl<T> fmt::Debug for MakeTls<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(..)")
    }
}

impl<T> Connector for MakeTls<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::Stream: Send + 'static,
    T::TlsConnect: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn connect<'a>(&'a self, config: &'a Config) -> BoxFuture<'a, Result<Connected, Error>> {
        Box::pin(connect(config, self.0.clone()))
    }
}

async fn connect<T>(config: &Config, tls: T) -> Result<Connected, Error>
where
    T: MakeTlsConnect<Socket> + Send,
    T::Stream: Send + 'static,
    T::TlsConnect: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let (client, connection) = config.connect(tls).await?;
    Ok(Connected { client, driver: Box::pin(connection) })
}

/// Drives a connection to its end, and calls `hear` with every notification.
pub(crate) fn drive(
    mut driver: Driver,
    mut hear: impl FnMut(tokio_postgres::Notification) + Send,
) -> impl Future<Output = ()> + Send {
    std::future::poll_fn(move |context| {
        loop {
            match std::task::ready!(driver.as_mut().poll_message(context)) {
                Some(Ok(AsyncMessage::Notification(notification))) => hear(notification),
                // Notices say nothing that a program could act on.
                Some(Ok(_)) => {}
                // Its requests are told by their replies, which end here.
                Some(Err(_)) | None => return std::task::Poll::Ready(()),
            }
        }
    })
}

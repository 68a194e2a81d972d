//! Making connections, encrypted or not.

pub(crate) mod certificates;
#[cfg(feature = "tls")]
pub(crate) mod rustls;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use hapax_core::store::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, NoTls, Socket};

/// The half of a connection that reads and writes. Dropping it closes the stream.
pub(crate) type Driver = Pin<Box<dyn Messages>>;

/// Makes connections. Implemented for TLS by [`MakeTls`], and by `Rustls` (feature `tls`).
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// Connects with the parameters of `config`.
    ///
    /// # Errors
    /// Any error of connecting.
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

/// Drives a connection and receives messages that the server sends unrequested.
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
        // The connection is `Unpin`, because its streams are.
        Connection::poll_message(self.get_mut(), context)
    }
}

/// Connections without encryption.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

impl Connector for Plain {
    fn connect<'a>(&'a self, config: &'a Config) -> BoxFuture<'a, Result<Connected, Error>> {
        Box::pin(connect(config, NoTls))
    }
}

/// TLS connections by any connector for tokio-postgres.
#[derive(Clone)]
pub struct MakeTls<T>(T);

impl<T> MakeTls<T> {
    /// Creates a connector that uses `make`.
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

/// The routine of the server that warns that the wait of a COMMIT for synchronous standbys was cancelled.
const STANDBY_WAIT: &str = "SyncRepWaitForLSN";

/// Drives a connection to its end, and calls `notify` with every notification. It ends too when an operator cancels
/// the wait of its COMMIT for a synchronous standby: the server would answer that the transaction is
/// committed.
pub(crate) fn drive(
    mut driver: Driver,
    mut notify: impl FnMut(tokio_postgres::Notification) + Send,
) -> impl Future<Output = ()> + Send {
    std::future::poll_fn(move |context| {
        loop {
            match std::task::ready!(driver.as_mut().poll_message(context)) {
                Some(Ok(AsyncMessage::Notification(notification))) => notify(notification),
                Some(Ok(AsyncMessage::Notice(notice)))
                    if notice.routine() == Some(STANDBY_WAIT) =>
                {
                    tracing::warn!(
                        "the wait of a COMMIT for a synchronous standby was cancelled: its connection is \
                         closed, and what it wrote or read is not used before a standby has it"
                    );
                    return std::task::Poll::Ready(());
                }
                // No program can act on other notices.
                Some(Ok(_)) => {}
                // Failures reach the requests through their replies, which end here.
                Some(Err(_)) | None => return std::task::Poll::Ready(()),
            }
        }
    })
}

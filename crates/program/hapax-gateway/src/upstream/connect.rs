//! Connections to servers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connection::UpstreamConnection;
use super::socket::Socket;
use crate::config::UpstreamProtocol;
use crate::tls::ClientTls;
use hapax_http::BoxError;

/// Address of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    /// True for `https`.
    pub(crate) secure: bool,
    /// Host, and port unless it is the default one.
    pub(crate) authority: Authority,
}

impl Origin {
    /// Returns the host without the brackets around an IPv6 address.
    pub(crate) fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    pub(crate) fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(if self.secure { 443 } else { 80 })
    }
}

/// Settings of connections.
#[derive(Clone, Debug)]
pub(crate) struct ConnectOptions {
    pub(crate) protocol: UpstreamProtocol,
    /// Set if any server is reached over TLS.
    pub(crate) tls: Option<Arc<ClientTls>>,
    /// Timeout of connecting.
    pub(crate) timeout: Duration,
    /// Time that a connection may be idle and still be reused.
    pub(crate) idle: Duration,
    /// Whether requests whose responses are stored or decide about other requests use new
    /// connections.
    pub(crate) fresh: bool,
}

impl ConnectOptions {
    /// Returns these settings for HTTP/1.1, regardless of the configured protocol.
    pub(crate) fn http1(&self) -> Self {
        Self { protocol: UpstreamProtocol::Http1, ..self.clone() }
    }

    /// Opens a connection that is ready for a request. No part of a request is sent.
    pub(super) async fn dial(
        &self,
        to: &Origin,
        at_most: Duration,
    ) -> Result<UpstreamConnection, BoxError> {
        let dial = async {
            let stream = TcpStream::connect((to.host(), to.port())).await?;
            stream.set_nodelay(true)?;
            let stream = Socket::new(stream);
            if to.secure { self.secured(to, stream).await } else { self.plain(to, stream).await }
        };
        let late = |_| Err(io::Error::from(io::ErrorKind::TimedOut).into());
        timeout(self.timeout.min(at_most), dial).await.unwrap_or_else(late)
    }

    async fn plain(&self, to: &Origin, stream: Socket) -> Result<UpstreamConnection, BoxError> {
        Ok(match self.protocol {
            UpstreamProtocol::Http2 => UpstreamConnection::http2(stream, to).await?,
            UpstreamProtocol::Auto | UpstreamProtocol::Http1 => {
                let probe = stream.probe();
                UpstreamConnection::http1(stream, Some(probe)).await?
            }
        })
    }

    async fn secured(&self, to: &Origin, stream: Socket) -> Result<UpstreamConnection, BoxError> {
        let tls = self.tls.as_ref().ok_or("no root certificates were loaded")?;
        let mut config = (*tls.now()).clone();
        let offered: &[&[u8]] = match self.protocol {
            UpstreamProtocol::Auto => &[b"h2", b"http/1.1"],
            UpstreamProtocol::Http1 => &[b"http/1.1"],
            UpstreamProtocol::Http2 => &[b"h2"],
        };
        config.alpn_protocols = offered.iter().map(|name| name.to_vec()).collect();
        let name = ServerName::try_from(to.host().to_owned())?;
        let probe = stream.probe();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let chosen = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok(match self.protocol {
            UpstreamProtocol::Http2 if !chosen => return Err("it does not offer HTTP/2".into()),
            _ if chosen => UpstreamConnection::http2(stream, to).await?,
            _ => UpstreamConnection::http1(stream, Some(probe)).await?,
        })
    }
}

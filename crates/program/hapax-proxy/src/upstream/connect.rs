//! Connections to servers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::uri::{Authority, Scheme, Uri};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connect_proxy::ConnectProxy;
use super::connection::UpstreamConnection;
use super::socket::Socket;
use crate::BodyError;
use crate::tls::ClientTls;

/// Address of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    /// True for `https`.
    pub secure: bool,
    /// Host, and port unless it is the default one.
    pub authority: Authority,
}

impl Origin {
    /// Returns the server of a URL; `None` if it is no `http` or `https` URL of a server, or contains
    /// credentials.
    #[must_use]
    pub fn of(uri: &Uri) -> Option<Self> {
        let secure = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            _ => return None,
        };
        let authority = uri.authority()?;
        // `user@host` would send credentials to a server that does not expect them.
        let named = !authority.host().is_empty() && !authority.as_str().contains('@');
        // An invalid port must not become the default port.
        let port = match authority.as_str().strip_prefix(authority.host())? {
            "" => true,
            port => port.strip_prefix(':').is_some_and(is_port),
        };
        let origin = Self { secure, authority: authority.clone() };
        // A certificate is for a name or an address.
        let certain = !secure || ServerName::try_from(origin.host()).is_ok();
        (named && port && certain).then_some(origin)
    }

    /// Returns the host without the brackets around an IPv6 address.
    pub fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// Returns the port; without one, the default of the scheme.
    pub fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(if self.secure { 443 } else { 80 })
    }
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|it| it > 0)
}

/// Protocol towards an upstream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UpstreamProtocol {
    /// HTTP/2 or HTTP/1.1 with `https`, as the server chooses (ALPN); otherwise HTTP/1.1.
    #[default]
    Auto,
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 without negotiation; with `https` the server must choose it.
    Http2,
}

/// Settings of connections.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Protocol towards servers.
    pub protocol: UpstreamProtocol,
    /// Set if any server is reached over TLS.
    pub tls: Option<Arc<ClientTls>>,
    /// Timeout of connecting.
    pub timeout: Duration,
    /// Time that a connection may be idle and still be reused.
    pub idle: Duration,
    /// Whether requests whose responses are stored or decide about other requests use new
    /// connections.
    pub fresh: bool,
    /// Proxy through which servers are reached; `None` for a direct connection.
    pub proxy: Option<ConnectProxy>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            protocol: UpstreamProtocol::Auto,
            tls: None,
            timeout: Duration::from_secs(5),
            idle: Duration::from_secs(1),
            fresh: false,
            proxy: None,
        }
    }
}

impl ConnectOptions {
    /// Returns these settings for HTTP/1.1, regardless of the configured protocol.
    #[must_use]
    pub fn http1(&self) -> Self {
        Self { protocol: UpstreamProtocol::Http1, ..self.clone() }
    }

    /// Opens a connection that is ready for a request. No part of a request is sent.
    pub(super) async fn dial(
        &self,
        to: &Origin,
        at_most: Duration,
    ) -> Result<UpstreamConnection, BodyError> {
        let dial = async {
            let stream = match &self.proxy {
                Some(proxy) => proxy.open(to).await?,
                None => TcpStream::connect((to.host(), to.port())).await?,
            };
            stream.set_nodelay(true)?;
            let stream = Socket::new(stream);
            if to.secure { self.secured(to, stream).await } else { self.plain(to, stream).await }
        };
        let late = |_| Err(io::Error::from(io::ErrorKind::TimedOut).into());
        timeout(self.timeout.min(at_most), dial).await.unwrap_or_else(late)
    }

    async fn plain(&self, to: &Origin, stream: Socket) -> Result<UpstreamConnection, BodyError> {
        Ok(match self.protocol {
            UpstreamProtocol::Http2 => UpstreamConnection::http2(stream, to).await?,
            UpstreamProtocol::Auto | UpstreamProtocol::Http1 => {
                let probe = stream.probe();
                UpstreamConnection::http1(stream, Some(probe)).await?
            }
        })
    }

    async fn secured(&self, to: &Origin, stream: Socket) -> Result<UpstreamConnection, BodyError> {
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

//! Configuration of the connections with clients and with the upstream.

use std::path::PathBuf;
use std::time::Duration;

use hapax_proxy::tls::{ListenTls, UpstreamTls};
use hapax_proxy::{IpNetwork, UpstreamProtocol};

use super::ConfigError;

/// TLS, versions of HTTP, and trusted peers. [`Transport::default`] has the defaults.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transport {
    /// Certificate of the listener; `None` (the default) for a listener without TLS.
    pub tls: Option<ListenTls>,
    /// Requests that one HTTP/2 connection of a client may have open, at least 1. Default 100.
    ///
    /// A connection gets this number while at least half of
    /// [`ServerLimits::connections`](crate::ServerLimits) are free; otherwise it gets four, for
    /// which one connection's memory is enough.
    pub streams: u32,
    /// Peers whose `Forwarded` and `X-Forwarded-*` headers are trusted. Default: loopback.
    pub trusted: Vec<IpNetwork>,
    /// Protocol towards the upstream. Default: [`UpstreamProtocol::Auto`].
    pub upstream_protocol: UpstreamProtocol,
    /// Trusted roots and the client certificate for servers behind `https` URLs.
    pub upstream_tls: UpstreamTls,
    /// Time that a connection to the upstream, with its handshakes, may take to open. No request is
    /// sent before. Default 5 s.
    pub connect_timeout: Duration,
    /// Time that a connection to the upstream may have been idle and still be reused. Default 1 s.
    ///
    /// Servers close idle connections after a time that they seldom announce: 2 s (gunicorn), 5 s
    /// (Node, uvicorn, Apache), 75 s (nginx). If a request is sent while the server closes the
    /// connection, it is ambiguous whether the server read it, and its outcome becomes unknown. So
    /// this time must be shorter than the upstream's. Under load, connections are idle for
    /// milliseconds, and a short time costs nothing.
    pub upstream_idle: Duration,
    /// Whether each request with a key, and each auth or reconcile request, uses a new connection
    /// to its server. Default `false`: connections are reused.
    ///
    /// A server that answers one request twice sends the second response when no request waits for
    /// it. On a reused connection that response can coincide with the next request, and is then
    /// stored as that request's response.
    pub fresh_connections: bool,
}

impl Default for Transport {
    fn default() -> Self {
        Self {
            tls: None,
            streams: 100,
            trusted: IpNetwork::loopback(),
            upstream_protocol: UpstreamProtocol::Auto,
            upstream_tls: UpstreamTls::default(),
            connect_timeout: Duration::from_secs(5),
            upstream_idle: Duration::from_secs(1),
            fresh_connections: false,
        }
    }
}

impl Transport {
    /// Checks the transport.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.streams == 0 {
            return Err(ConfigError::NoStreams);
        }
        if self.connect_timeout.is_zero() {
            return Err(ConfigError::Zero { field: "connect_timeout" });
        }
        let has_no_key = |key: &PathBuf| key.as_os_str().is_empty();
        if self.tls.as_ref().is_some_and(|tls| has_no_key(&tls.key)) {
            return Err(ConfigError::NoKey { certificate: "tls_cert", key: "tls_key" });
        }
        if self.upstream_tls.client.as_ref().is_some_and(|(_, key)| has_no_key(key)) {
            return Err(ConfigError::NoKey { certificate: "upstream_cert", key: "upstream_key" });
        }
        Ok(())
    }
}

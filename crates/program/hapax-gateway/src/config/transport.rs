//! Configuration of the connections with clients and with the upstream.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;

use super::ConfigError;

/// TLS, versions of HTTP, and who is believed. [`Transport::default`] has the defaults.
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
    /// Refuses what cannot be.
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

/// Files of the listener's certificate, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListenTls {
    /// The certificate, followed by the intermediate certificates up to its root.
    pub certificate: PathBuf,
    /// Private key of the certificate: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
    /// Issuers of clients' certificates: with these, clients without a certificate are not served.
    /// `None`: clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

/// Files for TLS connections to servers, in PEM.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UpstreamTls {
    /// Trusted roots; `None` for the system's.
    pub ca: Option<PathBuf>,
    /// Certificate of the gateway and its key, for servers that require one.
    pub client: Option<(PathBuf, PathBuf)>,
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

/// Addresses of a network: `10.0.0.0/8`, `fd00::/8`, or a single `192.0.2.1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpNetwork(IpNet);

impl IpNetwork {
    /// Returns the loopback networks.
    #[must_use]
    pub fn loopback() -> Vec<Self> {
        let of = |ip: IpAddr, bits| IpNet::new(ip, bits).ok().map(Self);
        let all = [of([127, 0, 0, 0].into(), 8), of(std::net::Ipv6Addr::LOCALHOST.into(), 128)];
        all.into_iter().flatten().collect()
    }

    /// Returns whether the network contains `ip`. An IPv4 address that is mapped into IPv6 counts
    /// as IPv4.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.0.contains(&ip.to_canonical())
    }
}

impl fmt::Display for IpNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for IpNetwork {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let single = || text.parse().map(|ip: IpAddr| IpNet::from(ip.to_canonical()));
        let network = text.parse().or_else(|_| single()).map_err(|_| NetworkError)?;
        Ok(Self(network))
    }
}

/// Error of parsing an address or a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected an IP address or a network like 10.0.0.0/8")]
pub struct NetworkError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_hold_what_they_say() {
        let holds = |network: &str, ip: &str| {
            network.parse::<IpNetwork>().unwrap().contains(ip.parse().unwrap())
        };
        assert!(holds("10.0.0.0/8", "10.255.0.1") && holds("10.0.0.0/8", "::ffff:10.1.2.3"));
        assert!(holds("192.0.2.1", "192.0.2.1") && holds("fd00::/8", "fd12::1"));
        assert!(!holds("10.0.0.0/8", "11.0.0.1") && !holds("192.0.2.1", "192.0.2.2"));
        for text in ["", "10.0.0.0/33", "example.com", "10.0.0", "::/129"] {
            assert_eq!(text.parse::<IpNetwork>(), Err(NetworkError), "{text}");
        }
        let loopback = IpNetwork::loopback();
        for ip in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(loopback.iter().any(|network| network.contains(ip.parse().unwrap())), "{ip}");
        }
        assert!(!loopback.iter().any(|network| network.contains([10, 0, 0, 1].into())));
    }
}

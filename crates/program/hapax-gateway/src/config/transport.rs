//! How a gateway speaks with clients and with the upstream, as it is configured.

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
    /// The listener's certificate; `None` (the default) for a listener without TLS.
    pub tls: Option<ListenTls>,
    /// Requests that one HTTP/2 connection of a client may have open, at least 1. Default 100.
    ///
    /// A connection gets as many while at least half of [`ServerLimits::connections`](crate::ServerLimits) are
    /// free; beyond that it gets four, which is what one connection's memory is enough for.
    pub streams: u32,
    /// Whose `Forwarded` and `X-Forwarded-*` headers are believed. Default: loopback.
    pub trusted: Vec<IpNetwork>,
    /// What the upstream is spoken to in. Default: [`UpstreamProtocol::Auto`].
    pub upstream_protocol: UpstreamProtocol,
    /// What is believed of servers behind `https` URLs, and shown to them.
    pub upstream_tls: UpstreamTls,
    /// How long a connection to the upstream, with its handshakes, may take to be made. Nothing is
    /// sent before. Default 5 s.
    pub connect_timeout: Duration,
    /// How long a connection to the upstream may have been idle to be used again. Default 1 s.
    ///
    /// Servers drop idle connections after a time that they seldom announce: 2 s (gunicorn), 5 s
    /// (Node, uvicorn, Apache), 75 s (nginx). A request that crosses such a drop on its way may or may
    /// not have been read, and its outcome is unknown for nothing. So it must be less than the
    /// upstream's; under load connections are idle for milliseconds, and a short time costs nothing.
    pub upstream_idle: Duration,
    /// Whether each request with a key, and each question about one, has a connection to its server
    /// of its own. Default `false`: connections are used again.
    ///
    /// A server that answers a request twice sends the second response when nothing waits for it. On a
    /// connection that is used again it can meet the next request, and is taken and kept for its
    /// response.
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
    /// The certificate, and what it takes to get from it to its root.
    pub certificate: PathBuf,
    /// Its private key: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
    /// Who signs clients' certificates: then a client without one is not served. `None`: clients are
    /// not asked for one.
    pub client_ca: Option<PathBuf>,
}

/// Files for speaking TLS to servers, in PEM.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UpstreamTls {
    /// The roots that are believed; `None` for the system's.
    pub ca: Option<PathBuf>,
    /// The gateway's own certificate and its key, for servers that ask for one.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// What an upstream is spoken to in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UpstreamProtocol {
    /// Behind `https` whichever of HTTP/2 and HTTP/1.1 it chooses (ALPN); else HTTP/1.1.
    #[default]
    Auto,
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, without asking; behind `https` it must choose it.
    Http2,
}

/// Addresses of a network: `10.0.0.0/8`, `fd00::/8`, or a single `192.0.2.1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpNetwork(IpNet);

impl IpNetwork {
    /// The addresses of the machine itself.
    #[must_use]
    pub fn loopback() -> Vec<Self> {
        let of = |ip: IpAddr, bits| IpNet::new(ip, bits).ok().map(Self);
        let all = [of([127, 0, 0, 0].into(), 8), of(std::net::Ipv6Addr::LOCALHOST.into(), 128)];
        all.into_iter().flatten().collect()
    }

    /// Whether `ip` is one of them. An IPv4 address that is mapped into IPv6 counts as itself.
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

/// No address, and no network either.
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

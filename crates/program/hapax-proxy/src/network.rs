//! IP networks.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

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
    fn networks_contain_their_addresses() {
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

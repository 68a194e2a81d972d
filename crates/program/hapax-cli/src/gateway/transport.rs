//! What is said of connections.

use std::fmt::{self, Display};
use std::str::FromStr;

use clap::ValueEnum;
use hapax_gateway::{IpNetwork, ListenTls, NetworkError, Transport, UpstreamProtocol, UpstreamTls};
use serde::{Deserialize, Serialize};

use super::build::set;
use super::fields::GatewayFields;
use super::value_args::DurationArg;

impl GatewayFields {
    /// What they say of connections.
    pub(super) fn transport(&self) -> Result<Transport, String> {
        let tls = match (self.tls_cert.clone(), self.tls_key.clone()) {
            (Some(certificate), Some(key)) => {
                Some(ListenTls { certificate, key, client_ca: self.tls_client_ca.clone() })
            }
            (None, None) if self.tls_client_ca.is_none() => None,
            _ => return Err("--tls-cert and --tls-key go together".into()),
        };
        let client = match (self.upstream_cert.clone(), self.upstream_key.clone()) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err("--upstream-cert and --upstream-key go together".into()),
        };
        let upstream_tls = UpstreamTls { ca: self.upstream_ca.clone(), client };
        let mut transport = Transport { tls, upstream_tls, ..Transport::default() };
        set(&mut transport.streams, self.max_streams);
        set(&mut transport.trusted, self.trust_forwarded.as_deref().map(networks).transpose()?);
        let protocol = self.upstream_protocol.map(|protocol| match protocol {
            ProtocolArg::Auto => UpstreamProtocol::Auto,
            ProtocolArg::Http1 => UpstreamProtocol::Http1,
            ProtocolArg::Http2 => UpstreamProtocol::Http2,
        });
        set(&mut transport.upstream_protocol, protocol);
        set(&mut transport.connect_timeout, self.connect_timeout.map(|time| time.0));
        set(&mut transport.upstream_idle, self.upstream_idle.map(|time| time.0));
        set(&mut transport.fresh_connections, self.fresh_connections);
        Ok(transport)
    }

    /// What would have to be said for them; and nothing else.
    pub(super) fn of_transport(transport: &Transport) -> Self {
        let (tls, client) = (transport.tls.as_ref(), transport.upstream_tls.client.as_ref());
        let trusted = match &transport.trusted[..] {
            [] => vec![TrustedArg::None],
            all if all == IpNetwork::loopback() => vec![TrustedArg::Loopback],
            all => all.iter().copied().map(TrustedArg::Network).collect(),
        };
        Self {
            tls_cert: tls.map(|tls| tls.certificate.clone()),
            tls_key: tls.map(|tls| tls.key.clone()),
            tls_client_ca: tls.and_then(|tls| tls.client_ca.clone()),
            max_streams: Some(transport.streams),
            trust_forwarded: Some(trusted),
            upstream_protocol: Some(match transport.upstream_protocol {
                UpstreamProtocol::Auto => ProtocolArg::Auto,
                UpstreamProtocol::Http1 => ProtocolArg::Http1,
                UpstreamProtocol::Http2 => ProtocolArg::Http2,
            }),
            upstream_ca: transport.upstream_tls.ca.clone(),
            upstream_cert: client.map(|(certificate, _)| certificate.clone()),
            upstream_key: client.map(|(_, key)| key.clone()),
            connect_timeout: Some(DurationArg(transport.connect_timeout)),
            upstream_idle: Some(DurationArg(transport.upstream_idle)),
            fresh_connections: Some(transport.fresh_connections),
            ..Self::default()
        }
    }
}

/// What an upstream is spoken to in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ProtocolArg {
    Auto,
    Http1,
    Http2,
}

/// Who is believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TrustedArg {
    None,
    Loopback,
    Network(IpNetwork),
}

impl FromStr for TrustedArg {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        match text.trim() {
            "none" => Ok(Self::None),
            "loopback" => Ok(Self::Loopback),
            network => network.parse().map(Self::Network),
        }
    }
}

impl Display for TrustedArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Loopback => f.write_str("loopback"),
            Self::Network(network) => network.fmt(f),
        }
    }
}

/// `none` alone is nobody.
fn networks(trusted: &[TrustedArg]) -> Result<Vec<IpNetwork>, String> {
    if trusted.len() > 1 && trusted.contains(&TrustedArg::None) {
        return Err("--trust-forwarded: `none` stands alone".into());
    }
    let networks = trusted.iter().flat_map(|one| match one {
        TrustedArg::None => Vec::new(),
        TrustedArg::Loopback => IpNetwork::loopback(),
        TrustedArg::Network(network) => vec![*network],
    });
    Ok(networks.collect())
}

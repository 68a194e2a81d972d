//! The flags about connections of `hapax gateway`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use hapax_gateway::{
    ListenTls, Network, NotANetwork, Protocol, Transport, UpstreamTls, parse_duration,
};

use crate::exit::Failure;

/// TLS, versions of HTTP, and who is believed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connections")]
pub(super) struct TransportArgs {
    /// The listener's certificate, with its chain, in PEM; read again when it changes, and on SIGHUP
    /// [default: no TLS]
    #[arg(long, env = "HAPAX_TLS_CERT", value_name = "PATH")]
    tls_cert: Option<PathBuf>,

    /// Its private key, in PEM
    #[arg(long, env = "HAPAX_TLS_KEY", value_name = "PATH")]
    tls_key: Option<PathBuf>,

    /// Who signs clients' certificates, in PEM: then clients without one are not served
    #[arg(long, env = "HAPAX_TLS_CLIENT_CA", value_name = "PATH")]
    tls_client_ca: Option<PathBuf>,

    /// Requests that one HTTP/2 connection may have open, as long as half of --max-connections are free
    #[arg(
        long, env = "HAPAX_MAX_STREAMS", value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=10_000)
    )]
    max_streams: u32,

    /// Whose Forwarded and X-Forwarded-* headers are believed and added to, rather than replaced:
    /// networks and addresses, `loopback`, or `none`
    #[arg(
        long, env = "HAPAX_TRUST_FORWARDED", value_name = "NET,…", value_delimiter = ',',
        default_value = "loopback", value_parser = trusted
    )]
    trust_forwarded: Vec<Trusted>,

    /// What --upstream is spoken to in; `auto` is what it chooses behind https, else HTTP/1.1
    #[arg(long, env = "HAPAX_UPSTREAM_PROTOCOL", value_enum, default_value_t = Spoken::Auto)]
    upstream_protocol: Spoken,

    /// The root certificates believed behind https URLs, in PEM [default: the system's]
    #[arg(long, env = "HAPAX_UPSTREAM_CA", value_name = "PATH")]
    upstream_ca: Option<PathBuf>,

    /// The certificate shown to servers behind https URLs that ask for one, in PEM
    #[arg(long, env = "HAPAX_UPSTREAM_CERT", value_name = "PATH")]
    upstream_cert: Option<PathBuf>,

    /// Its private key, in PEM
    #[arg(long, env = "HAPAX_UPSTREAM_KEY", value_name = "PATH")]
    upstream_key: Option<PathBuf>,

    /// How long a connection to the upstream may take to be made; nothing is sent before
    #[arg(
        long, env = "HAPAX_CONNECT_TIMEOUT", value_name = "DUR", default_value = "5s",
        value_parser = parse_duration
    )]
    connect_timeout: Duration,

    /// How long a connection to the upstream may be idle and be used again: less than after which the
    /// upstream drops it
    #[arg(
        long, env = "HAPAX_UPSTREAM_IDLE", value_name = "DUR", default_value = "1s",
        value_parser = parse_duration
    )]
    upstream_idle: Duration,
}

impl TransportArgs {
    /// What they say.
    pub(super) fn transport(self) -> Result<Transport, Failure> {
        let tls = match (self.tls_cert, self.tls_key) {
            (Some(certificate), Some(key)) => {
                Some(ListenTls { certificate, key, client_ca: self.tls_client_ca })
            }
            (None, None) if self.tls_client_ca.is_none() => None,
            _ => return Err(Failure::usage("--tls-cert and --tls-key go together")),
        };
        let client = match (self.upstream_cert, self.upstream_key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(Failure::usage("--upstream-cert and --upstream-key go together")),
        };
        Ok(Transport {
            tls,
            streams: self.max_streams,
            trusted: networks(self.trust_forwarded)?,
            upstream_protocol: match self.upstream_protocol {
                Spoken::Auto => Protocol::Auto,
                Spoken::Http1 => Protocol::Http1,
                Spoken::Http2 => Protocol::Http2,
            },
            upstream_tls: UpstreamTls { ca: self.upstream_ca, client },
            connect_timeout: self.connect_timeout,
            upstream_idle: self.upstream_idle,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Spoken {
    Auto,
    Http1,
    Http2,
}

/// Who is believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trusted {
    Nobody,
    Loopback,
    Network(Network),
}

fn trusted(text: &str) -> Result<Trusted, NotANetwork> {
    match text {
        "none" => Ok(Trusted::Nobody),
        "loopback" => Ok(Trusted::Loopback),
        network => network.parse().map(Trusted::Network),
    }
}

/// `none` alone is nobody.
fn networks(trusted: Vec<Trusted>) -> Result<Vec<Network>, Failure> {
    if trusted.len() > 1 && trusted.contains(&Trusted::Nobody) {
        return Err(Failure::usage("--trust-forwarded: `none` stands alone"));
    }
    let networks = trusted.into_iter().flat_map(|one| match one {
        Trusted::Nobody => Vec::new(),
        Trusted::Loopback => Network::loopback(),
        Trusted::Network(network) => vec![network],
    });
    Ok(networks.collect())
}

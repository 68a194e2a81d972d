//! Parsing of URLs: the servers, and how to connect to them.

use std::fmt;
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2};
use redis::{ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::certificates::CertificatePaths;
use crate::error::RedisConnectError;
use crate::options::RedisOptions;

/// Time after which the operating system probes an idle connection, so that a lost peer is detected
/// before the connection is needed.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// The servers to connect to.
#[derive(Clone)]
pub(crate) struct RedisUrl {
    /// One server, or some nodes of a cluster, or sentinels.
    pub(crate) nodes: Vec<ConnectionInfo>,
    /// The name of the master at the sentinels.
    pub(crate) master: Option<String>,
    /// Files of certificates.
    #[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "TLS is rejected"))]
    pub(crate) certificates: CertificatePaths,
}

/// Writes the addresses, without users and passwords.
impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<_> = self.nodes.iter().map(|node| node.addr().to_string()).collect();
        f.write_str(&addresses.join(","))
    }
}

impl RedisUrl {
    pub(crate) fn parse(options: &RedisOptions) -> Result<Self, RedisConnectError> {
        let bad = |why: &str| RedisConnectError::Url(why.into());
        let (url, certificates) = CertificatePaths::of(&options.url);
        let (scheme, rest) =
            url.split_once("://").ok_or_else(|| bad("no scheme, as in redis://HOST"))?;
        if certificates.are_given() && !scheme.starts_with("rediss") {
            return Err(bad("sslrootcert, sslcert and sslkey need rediss://"));
        }
        if !certificates.are_complete() {
            return Err(bad("expected sslcert and sslkey together, found one of them"));
        }
        if let Some(tls) = match scheme {
            "redis+sentinel" => Some(false),
            "rediss+sentinel" => Some(true),
            _ => None,
        } {
            if cfg!(not(feature = "sentinel")) {
                return Err(bad("sentinels need the feature `sentinel`"));
            }
            let scheme = if tls { "rediss" } else { "redis" };
            let parsed = Self::sentinels(scheme, rest, options.timeout)?;
            return Ok(Self { certificates, ..parsed });
        }
        if scheme == "rediss" && cfg!(not(feature = "tls")) {
            return Err(bad("rediss:// needs the feature `tls`"));
        }
        if scheme.ends_with("unix") {
            let nodes = vec![info(&url, options.timeout)?];
            return Ok(Self { nodes, master: None, certificates });
        }
        let Authority { user, hosts, tail } = Authority::split(rest);
        let nodes = hosts
            .split(',')
            .map(|host| info(&format!("{scheme}://{user}{host}{tail}"), options.timeout));
        let nodes: Vec<_> = nodes.collect::<Result<_, _>>()?;
        if nodes.len() > 1 && cfg!(not(feature = "cluster")) {
            return Err(bad("several hosts need the feature `cluster`"));
        }
        Ok(Self { nodes, master: None, certificates })
    }

    fn sentinels(scheme: &str, rest: &str, limit: Duration) -> Result<Self, RedisConnectError> {
        let Authority { user, hosts, tail } = Authority::split(rest);
        let path = tail.trim_start_matches('/');
        let (master, database) = path.split_once('/').unwrap_or((path, ""));
        if master.is_empty() {
            return Err(RedisConnectError::Url(
                "no master's name, as in redis+sentinel://HOST/MASTER".into(),
            ));
        }
        let nodes = hosts.split(',').map(|host| {
            let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
            let port = if has_port { "" } else { ":26379" };
            info(&format!("{scheme}://{user}{host}{port}/{database}"), limit)
        });
        let nodes = nodes.collect::<Result<_, _>>()?;
        let certificates = CertificatePaths::default();
        Ok(Self { nodes, master: Some(master.into()), certificates })
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.nodes.iter().map(|node| node.addr().to_string()).collect();
        write!(f, "{}", nodes.join(","))?;
        self.master.iter().try_for_each(|master| write!(f, "/{master}"))
    }
}

/// The part of a URL between scheme and path, and the rest.
struct Authority<'a> {
    /// The user with its `@`.
    user: &'a str,
    hosts: &'a str,
    tail: &'a str,
}

impl<'a> Authority<'a> {
    fn split(rest: &'a str) -> Self {
        let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Self { user, hosts, tail }
    }
}

fn info(url: &str, limit: Duration) -> Result<ConnectionInfo, RedisConnectError> {
    let info =
        url.into_connection_info().map_err(|error| RedisConnectError::Url(error.to_string()))?;
    // RESP3, in which a connection that serves requests also receives notifications.
    let redis = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let redis = redis.set_lib_name("hapax", env!("CARGO_PKG_VERSION"));
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE);
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    // Data that an unreachable host does not acknowledge breaks the connection after `limit`.
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(limit);
    Ok(info.set_redis_settings(redis).set_tcp_settings(tcp))
}

//! Clusters: one connection to each node, and who serves what.

use std::sync::Arc;

use redis::aio::SendError;
use redis::cluster::ClusterClientBuilder;
use redis::{ConnectionAddr, PushInfo, PushKind, Value};
use tokio::time::timeout;

use crate::connection::{self, Connection, Heard, Node, Pushed};
use crate::error::ConnectError;
use crate::options::Options;
use crate::target::Target;

pub(crate) async fn open(
    target: &Target,
    options: &Options,
    pushed: &Pushed,
) -> Result<Connection, ConnectError> {
    /// Redirections followed, and nodes tried, before the caller hears of them.
    const RETRIES: u32 = 6;
    /// Pauses in between, in milliseconds: the caller's whole time is not much more than a second.
    const PAUSES: (u64, u64) = (5, 100);
    let pushed = Pushed::clone(pushed);
    let tcp = target.nodes.first().map(|node| node.tcp_settings().clone()).unwrap_or_default();
    let builder = ClusterClientBuilder::new(target.nodes.iter().cloned())
        .use_protocol(redis::ProtocolVersion::RESP3)
        .tcp_settings(tcp)
        // While it learns who serves what, everybody waits, also for a node that is off: less than
        // callers do.
        .connection_timeout(options.timeout / 4)
        .response_timeout(options.timeout / 2)
        .overall_response_timeout(None)
        // Copies of a request that the client sends by itself are copies of the same swap.
        .retries(RETRIES)
        .min_retry_wait(PAUSES.0)
        .max_retry_wait(PAUSES.1)
        .push_sender(move |push: PushInfo| {
            pushed(match push.kind {
                PushKind::Disconnection => Heard::NodeLost,
                _ => Heard::Said(push),
            });
            Ok::<(), SendError>(())
        });
    #[cfg(feature = "tls")]
    let builder = match connection::certificates(options) {
        Some(certificates) => builder.certs(certificates),
        None => builder,
    };
    let client = builder.build().map_err(ConnectError::Unreachable)?;
    let connection = client.get_async_connection().await;
    Ok(Connection::Cluster(connection.map_err(ConnectError::Unreachable)?))
}

/// Looks at those who serve a cluster's slots, each on a connection of its own: `false` if not all
/// of them said what they are.
pub(crate) async fn vet(
    connection: &mut Connection,
    target: &Target,
    options: &Options,
) -> Result<bool, ConnectError> {
    let Some(seed) = target.nodes.first().filter(|_| !connection.is_one()) else {
        return Ok(true);
    };
    let patience = options.timeout / 4;
    let Ok(Ok(Some(masters))) = timeout(patience, connection.masters()).await else {
        tracing::warn!("the cluster does not say who serves all of its slots");
        return Ok(false);
    };
    let ignored: Pushed = Arc::new(|_| {});
    let mut seen = true;
    for node in masters.into_iter().flatten() {
        let address = seed.clone().set_addr(beside(seed.addr(), &node));
        let reaching = connection::reach_node(&address, target, options, &ignored);
        match timeout(patience, reaching).await {
            // One that follows another by now, others will be said to serve soon.
            Ok(Ok((_, facts))) if !facts.is_replica() => facts.check(options.allow_eviction)?,
            _ => {
                let Node { host, port } = node;
                tracing::warn!(host, port, "it is unknown whether this node of the cluster evicts");
                seen = false;
            }
        }
    }
    Ok(seen)
}

/// Another node's address, reached as the first is.
fn beside(seed: &ConnectionAddr, node: &Node) -> ConnectionAddr {
    let (host, port) = (node.host.clone(), node.port);
    match seed.clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host, port),
    }
}

/// The server that an address names.
pub(crate) fn name(node: &Value) -> Option<Node> {
    let text = match node {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
        Value::SimpleString(text) => text,
        _ => return None,
    };
    let (host, port) = text.rsplit_once(':')?;
    Some(Node { host: host.into(), port: port.parse().ok()? })
}

/// The owners of all slots, from what `CLUSTER SLOTS` says: ranges, each with its first and last
/// slot and its servers, the owner first.
pub(crate) fn owners(slots: Value) -> Option<Vec<Option<Node>>> {
    const SLOTS: i64 = 16_384;
    let Value::Array(ranges) = slots else { return None };
    let mut owners = Vec::new();
    let mut covered = 0;
    for range in ranges {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(owner), ..] = range.as_slice()
        else {
            return None;
        };
        let [Value::BulkString(host), Value::Int(port), ..] = owner.as_slice() else { return None };
        let host = String::from_utf8(host.clone()).ok()?;
        let owner = Node { host, port: u16::try_from(*port).ok()? };
        covered += last - first + 1;
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }
    (covered == SLOTS).then(|| owners.into_iter().map(Some).collect())
}

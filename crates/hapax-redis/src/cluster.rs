//! Clusters: one connection to each node, and who serves what.

use redis::aio::SendError;
use redis::cluster::ClusterClientBuilder;
use redis::{PushInfo, PushKind, Value};

use crate::connection::{self, Connection, Node, Pushed};
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
    let builder = ClusterClientBuilder::new(target.nodes.iter().cloned())
        .use_protocol(redis::ProtocolVersion::RESP3)
        .connection_timeout(options.timeout)
        .response_timeout(options.timeout)
        // Copies of a request that the client sends by itself are copies of the same swap.
        .retries(RETRIES)
        .min_retry_wait(PAUSES.0)
        .max_retry_wait(PAUSES.1)
        .push_sender(move |push: PushInfo| {
            // One node's connection is not the cluster's: the client makes it anew by itself.
            if push.kind != PushKind::Disconnection {
                pushed(push);
            }
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

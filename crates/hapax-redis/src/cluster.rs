//! Clusters: one connection to each node, and who serves what.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::SendError;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{
    Cmd, ConnectionAddr, ErrorKind, PushInfo, PushKind, RedisError, RedisResult, ServerErrorKind,
    Value,
};
use tokio::time::{sleep, timeout};

use crate::connection::{self, Connection, Heard, Node, Pushed};
use crate::error::ConnectError;
use crate::options::Options;
use crate::target::Target;

/// How often one that is sent elsewhere, or asked to come again, follows.
const FOLLOWED: u32 = 8;

/// The pause before it does so for the second time; then twice as long each time.
const PAUSE: Duration = Duration::from_millis(5);

/// One connection to each node, and how to reach those that it has none to.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: ClusterConnection,
    place: Arc<(Target, Options)>,
}

pub(crate) async fn open(
    target: &Target,
    options: &Options,
    pushed: &Pushed,
) -> Result<Connection, ConnectError> {
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
        // It would send again after a lost reply as well, and pass off the second answer as the
        // only one: "conflict", where the first attempt was written and is history by now.
        .retries(0)
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
    let client = client.get_async_connection().await.map_err(ConnectError::Unreachable)?;
    let place = Arc::new((target.clone(), options.clone()));
    Ok(Connection::Cluster(Cluster { client, place }))
}

impl Cluster {
    /// Sends a command to who serves its key.
    ///
    /// It is carried out once at most: it is sent again only where a node said that it did not even
    /// look at it.
    pub(crate) async fn query(&mut self, command: &Cmd) -> RedisResult<Value> {
        let mut pause = PAUSE;
        for _ in 1..FOLLOWED {
            let mut answer = command.query_async(&mut self.client).await;
            if let Err(error) = &answer
                && error.kind() == ErrorKind::Server(ServerErrorKind::Ask)
                && let Some(node) = error.redirect_node().and_then(|(node, _)| named(node))
            {
                answer = self.ask(&node, command).await;
            }
            match answer {
                Err(error) if was_not_looked_at(&error) => {}
                answer => return answer,
            }
            sleep(pause).await;
            pause *= 2;
        }
        command.query_async(&mut self.client).await
    }

    /// Sends a command to who is about to serve its key, on a connection of its own: what opens
    /// that node's door opens it to the next command, whosever it is.
    async fn ask(&self, node: &Node, command: &Cmd) -> RedisResult<Value> {
        let (target, options) = &*self.place;
        let unreached = || RedisError::from((ErrorKind::ClusterConnectionNotFound, "not reached"));
        let address = target.nodes.first().ok_or_else(unreached)?;
        let address = address.clone().set_addr(beside(address.addr(), node));
        let ignored: Pushed = Arc::new(|_| {});
        let reaching = connection::reach_node(&address, target, options, &ignored);
        let Ok((Connection::Single(mut there), _)) = reaching.await else {
            return Err(unreached());
        };
        redis::cmd("ASKING").query_async::<Value>(&mut there).await?;
        command.query_async(&mut there).await
    }
}

/// Whether a node said so, of this very request: nothing that the client does by itself is ever
/// answered with one of these.
pub(crate) fn was_not_looked_at(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, Moved, TryAgain};
    matches!(error.kind(), ErrorKind::Server(Moved | Ask | TryAgain))
}

/// Looks at those who serve a cluster's slots, each on a connection of its own: `false` if not all
/// of them said what they are.
pub(crate) async fn vet(
    connection: &mut Connection,
    target: &Target,
    options: &Options,
) -> Result<bool, ConnectError> {
    let Some(seed) = target.nodes.first() else { return Ok(true) };
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
    match node {
        Value::BulkString(bytes) => named(std::str::from_utf8(bytes).ok()?),
        Value::SimpleString(text) => named(text),
        _ => None,
    }
}

fn named(text: &str) -> Option<Node> {
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

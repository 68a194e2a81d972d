//! Clusters: one connection to each node, and the owners of slots.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::{MultiplexedConnection, SendError};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{
    Cmd, ConnectionAddr, ErrorKind, PushInfo, PushKind, RedisError, RedisResult, ServerErrorKind,
    Value,
};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::connection::{self, Connection, Node, PushEvent, PushHandler};
use crate::error::{RedisConnectError, breaks};
use crate::options::RedisOptions;
use crate::url::RedisUrl;

/// Limit of attempts for a request that is redirected, or answered with `TRYAGAIN`.
const MAX_REDIRECTS: u32 = 8;

/// Pause before the second attempt; it doubles with each further one.
const PAUSE: Duration = Duration::from_millis(5);

/// One connection to each node, and the options with which to connect to further nodes.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: ClusterConnection,
    place: Arc<(RedisUrl, RedisOptions)>,
    news: Arc<ClusterSubscriptions>,
}

/// The connection for notifications, to any one node: all nodes forward what is published.
///
/// It is never the client's own connection, on which requests are answered. When the client learns
/// the slot owners anew, it subscribes again, takes the confirmations for answers to as many
/// requests, and then gives each later request the answer of another.
struct ClusterSubscriptions {
    connection: Mutex<Option<MultiplexedConnection>>,
    on_push: PushHandler,
}

pub(crate) async fn open(
    url: &RedisUrl,
    options: &RedisOptions,
    on_push: &PushHandler,
) -> Result<Connection, RedisConnectError> {
    let news =
        ClusterSubscriptions { connection: Mutex::default(), on_push: PushHandler::clone(on_push) };
    let on_push = PushHandler::clone(on_push);
    let tcp = url.nodes.first().map(|node| node.tcp_settings().clone()).unwrap_or_default();
    let builder = ClusterClientBuilder::new(url.nodes.iter().cloned())
        .use_protocol(redis::ProtocolVersion::RESP3)
        .tcp_settings(tcp)
        // While the client learns the slot owners, every request waits, also for an unreachable
        // node. So this is shorter than the callers' timeout.
        .connection_timeout(options.timeout / 4)
        .response_timeout(options.timeout / 2)
        .overall_response_timeout(None)
        // Retries of the client would also follow a lost reply and return the second answer as the
        // only one: "conflict" for a write whose first attempt was applied and has been superseded
        // since.
        .retries(0)
        .push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                on_push(PushEvent::NodeLost);
            }
            Ok::<(), SendError>(())
        });
    #[cfg(feature = "tls")]
    let builder = match connection::certificates(url, options)? {
        Some(certificates) => builder.certs(certificates),
        None => builder,
    };
    let client = builder.build().map_err(RedisConnectError::Unreachable)?;
    let client = client.get_async_connection().await.map_err(RedisConnectError::Unreachable)?;
    let place = Arc::new((url.clone(), options.clone()));
    Ok(Connection::Cluster(Cluster { client, place, news: Arc::new(news) }))
}

impl Cluster {
    /// Sends a command to the owner of its key's slot.
    ///
    /// The command is executed at most once: it is sent again only where a node answered that it
    /// did not process it.
    pub(crate) async fn query(&mut self, command: &Cmd) -> RedisResult<Value> {
        let (mut pause, mut sent) = (PAUSE, 0);
        loop {
            sent += 1;
            let mut answer = command.query_async(&mut self.client).await;
            if let Err(error) = &answer
                && let Some(node) = error.redirect_node().and_then(|(node, _)| named(node))
            {
                let is_asked = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
                // The client learns the slot owners itself, unless the node that it queries does
                // not know them either.
                if (is_asked || sent > 2)
                    && let Some(mut there) = self.reach(&node).await
                {
                    if is_asked {
                        redis::cmd("ASKING").query_async::<Value>(&mut there).await?;
                    }
                    answer = command.query_async(&mut there).await;
                }
            }
            match &answer {
                Err(error) if sent < MAX_REDIRECTS && was_not_processed(error) => {}
                _ => return answer,
            }
            sleep(pause).await;
            pause *= 2;
        }
    }

    /// Opens a connection to one node for one request. `ASKING` applies to the next command on a
    /// connection, whichever caller sends it, so the shared connection cannot be used.
    async fn reach(&self, node: &Node) -> Option<MultiplexedConnection> {
        let (url, options) = &*self.place;
        let seed = url.nodes.first()?;
        let address = seed.clone().set_addr(beside(seed.addr(), node));
        let ignored: PushHandler = Arc::new(|_| {});
        let reached = connection::reach_node(&address, url, options, &ignored).await;
        match reached {
            Ok((Connection::Single(there), server_info)) => {
                // A new node owns no slot yet, so it has not been checked.
                let fit = server_info.check(options.allow_eviction);
                fit.inspect_err(|error| tracing::error!(%error, "a node is unfit for a store"))
                    .ok()
                    .map(|()| there)
            }
            _ => None,
        }
    }

    pub(crate) async fn subscribe(&self, channels: &[String]) -> RedisResult<()> {
        let mut news = self.news.connection.lock().await;
        let mut connection = match news.take() {
            Some(connection) => connection,
            None => self.hear().await?,
        };
        let subscribed = connection.subscribe(channels).await;
        // Put back only now: an unresponsive or broken connection is not used again.
        if !subscribed.as_ref().is_err_and(is_lost) {
            *news = Some(connection);
        }
        subscribed
    }

    pub(crate) async fn unsubscribe(&self, channels: &[String]) -> RedisResult<()> {
        let mut news = self.news.connection.lock().await;
        let Some(mut connection) = news.take() else { return Ok(()) };
        let unsubscribed = connection.unsubscribe(channels).await;
        if !unsubscribed.as_ref().is_err_and(is_lost) {
            *news = Some(connection);
        }
        unsubscribed
    }

    async fn hear(&self) -> RedisResult<MultiplexedConnection> {
        let (url, options) = &*self.place;
        let on_push = PushHandler::clone(&self.news.on_push);
        let on_push: PushHandler = Arc::new(move |heard| {
            on_push(match heard {
                PushEvent::Ended => PushEvent::SubscriptionsLost,
                heard => heard,
            });
        });
        match connection::reach(url, options, &on_push).await {
            Ok((Connection::Single(connection), _)) => Ok(connection),
            _ => Err((ErrorKind::ClusterConnectionNotFound, "no node was reached").into()),
        }
    }
}

/// Returns whether the connection for notifications was lost, or could not be made.
pub(crate) fn is_lost(error: &RedisError) -> bool {
    breaks(error) || error.kind() == ErrorKind::ClusterConnectionNotFound
}

/// Returns whether a node answered this very request so: no action of the client itself ends with
/// one of these errors.
pub(crate) fn was_not_processed(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, Moved, TryAgain};
    matches!(error.kind(), ErrorKind::Server(Moved | Ask | TryAgain))
}

/// Checks the owners of a cluster's slots, each on a separate connection. Returns `false` if not
/// all of them could be checked.
pub(crate) async fn vet(
    connection: &mut Connection,
    url: &RedisUrl,
    options: &RedisOptions,
) -> Result<bool, RedisConnectError> {
    let Some(seed) = url.nodes.first() else { return Ok(true) };
    // The limit covers all nodes at once, so it does not grow with their number.
    let limit = options.timeout / 4;
    let Ok(Ok(Some(masters))) = timeout(limit, connection.masters()).await else {
        tracing::warn!("the cluster did not return the owners of all of its slots");
        return Ok(false);
    };
    let mut looks: JoinSet<_> = masters
        .into_iter()
        .flatten()
        .map(|node| {
            let address = seed.clone().set_addr(beside(seed.addr(), &node));
            let (url, options) = (url.clone(), options.clone());
            async move {
                let ignored: PushHandler = Arc::new(|_| {});
                let reaching = connection::reach_node(&address, &url, &options, &ignored);
                (timeout(limit, reaching).await, node)
            }
        })
        .collect();
    let mut seen = true;
    // Dropping the set, also after an error, ends all checks.
    while let Some(looked) = looks.join_next().await {
        match looked {
            // If the node is a replica by now, the cluster will soon report other owners.
            Ok((Ok(Ok((_, server_info))), _)) if !server_info.is_replica() => {
                server_info.check(options.allow_eviction)?;
            }
            Ok((_, Node { host, port })) => {
                tracing::warn!(host, port, "it is unknown whether this node of the cluster evicts");
                seen = false;
            }
            Err(_) => seen = false,
        }
    }
    Ok(seen)
}

/// Returns the address of another node, to be reached like the first one.
fn beside(seed: &ConnectionAddr, node: &Node) -> ConnectionAddr {
    let (host, port) = (node.host.clone(), node.port);
    match seed.clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host, port),
    }
}

/// Parses the address of a node.
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

/// Returns the owners of all slots from the answer to `CLUSTER SLOTS`: ranges, each with its first
/// and last slot and its servers, the owner first. `None` if a slot has no owner.
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

//! Connections: opening one, and the operations of every kind.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::{MultiplexedConnection, SendError};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, PushInfo, PushKind, RedisError,
    RedisResult, Value,
};
use tokio::time::timeout;

#[cfg(feature = "cluster")]
use crate::cluster::Cluster;
#[cfg(feature = "cluster")]
pub(crate) use crate::cluster::open as cluster;
use crate::error::{RedisConnectError, RequestFailure};
use crate::options::RedisOptions;
use crate::server_info::{ServerInfo, UnfitServer};
use crate::url::RedisUrl;

/// Length of the client's queue of requests to be written; further callers wait to enter it.
const WRITE_QUEUE: usize = 256;

/// Handler of pushed events. It must not block.
pub(crate) type PushHandler = Arc<dyn Fn(PushEvent) + Send + Sync>;

/// An event that is not the answer to a request.
pub(crate) enum PushEvent {
    Message(PushInfo),
    /// The connection has ended.
    Ended,
    /// The connection to one node of a cluster was lost: its client replaces it.
    #[cfg(feature = "cluster")]
    NodeLost,
    /// The cluster's connection for notifications was lost.
    #[cfg(feature = "cluster")]
    SubscriptionsLost,
}

/// One pipelined connection that all callers share; for a cluster, one to each node.
#[derive(Clone)]
pub(crate) enum Connection {
    Single(MultiplexedConnection),
    #[cfg(feature = "cluster")]
    Cluster(Cluster),
}

/// Opens a connection, unless the server is unfit for a store. The nodes of a cluster are checked
/// by [`vet`]. `on_push` receives pushed events.
pub(crate) async fn open(
    url: &RedisUrl,
    options: &RedisOptions,
    on_push: &PushHandler,
) -> Result<Connection, RedisConnectError> {
    let limit = options.timeout;
    let opening = async {
        let (connection, server_info) = reach(url, options, on_push).await?;
        if server_info.is_cluster() {
            drop(connection);
            return cluster(url, options, on_push).await;
        }
        server_info.check(options.allow_eviction)?;
        Ok(connection)
    };
    timeout(limit, opening).await.unwrap_or(Err(RedisConnectError::TimedOut(limit)))
}

/// Opens a connection to any server, fit for a store or not, for diagnosis. A node of a cluster
/// counts as a single server.
pub(crate) async fn reach(
    url: &RedisUrl,
    options: &RedisOptions,
    on_push: &PushHandler,
) -> Result<(Connection, ServerInfo), RedisConnectError> {
    let mut last = RedisConnectError::Url("it names no host".into());
    // An unreachable host must leave time for the others and for the following steps. The last host
    // may use all that is left.
    let limit = options.timeout / (2 * u32::try_from(url.nodes.len()).unwrap_or(u32::MAX));
    for (at, node) in url.nodes.iter().enumerate() {
        let reaching = reach_node(node, url, options, on_push);
        let reached = if at + 1 == url.nodes.len() {
            reaching.await
        } else {
            timeout(limit, reaching).await.unwrap_or(Err(RedisConnectError::TimedOut(limit)))
        };
        match reached {
            Ok(reached) => return Ok(reached),
            Err(error) => last = error,
        }
    }
    Err(last)
}

pub(crate) async fn reach_node(
    node: &ConnectionInfo,
    url: &RedisUrl,
    options: &RedisOptions,
    on_push: &PushHandler,
) -> Result<(Connection, ServerInfo), RedisConnectError> {
    // Boxed: with sentinels its type is deep, and so would be that of every future around it.
    let client = Box::pin(client(node, url, options)).await?;
    let on_push = Arc::clone(on_push);
    // The callers have timeouts: one for opening, one for each request.
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(WRITE_QUEUE)
        .set_push_sender(move |push: PushInfo| {
            on_push(match push.kind {
                PushKind::Disconnection => PushEvent::Ended,
                _ => PushEvent::Message(push),
            });
            Ok::<(), SendError>(())
        });
    let connection = client.get_multiplexed_async_connection_with_config(&config).await;
    let mut connection = Connection::Single(connection.map_err(RedisConnectError::Unreachable)?);
    let server_info = connection
        .server_info()
        .await?
        .pop()
        .map(|(_, server_info)| server_info)
        .unwrap_or_default();
    Ok((connection, server_info))
}

#[cfg(not(feature = "sentinel"))]
async fn client(
    node: &ConnectionInfo,
    url: &RedisUrl,
    options: &RedisOptions,
) -> Result<Client, RedisConnectError> {
    with_certificates(node.clone(), url, options)
}

/// Queries the sentinels anew each time, so that a store finds the next master.
#[cfg(feature = "sentinel")]
async fn client(
    node: &ConnectionInfo,
    url: &RedisUrl,
    options: &RedisOptions,
) -> Result<Client, RedisConnectError> {
    use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
    use redis::{ConnectionAddr, TlsMode};

    let Some(master) = &url.master else { return with_certificates(node.clone(), url, options) };
    let failed = RedisConnectError::Unreachable;
    // User and database in the URL are meant for the servers, not for the sentinels.
    let (tcp, redis) = (node.tcp_settings(), node.redis_settings());
    let sentinels = vec![node.addr().clone()];
    let builder = SentinelClientBuilder::new(sentinels, master, SentinelServerType::Master);
    let mut builder = builder
        .map_err(failed)?
        .set_client_to_sentinel_tcp_settings(tcp.clone())
        .set_client_to_redis_tcp_settings(tcp.clone())
        .set_client_to_redis_protocol(redis.protocol())
        .set_client_to_redis_db(redis.db());
    if let Some(user) = redis.username() {
        builder = builder.set_client_to_redis_username(user);
    }
    if let Some(password) = redis.password() {
        builder = builder.set_client_to_redis_password(password);
    }
    if matches!(node.addr(), ConnectionAddr::TcpTls { .. }) {
        builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
        // Both sides: the client asks the server that a sentinel names whether it is the master.
        #[cfg(feature = "tls")]
        if let Some(certificates) = certificates(url, options)? {
            builder = builder
                .set_client_to_sentinel_certificates(certificates.clone())
                .set_client_to_redis_certificates(certificates);
        }
    }
    let mut sentinels = builder.build().map_err(failed)?;
    let client = sentinels.async_get_client().await.map_err(failed)?;
    let found = client.get_connection_info().clone().set_redis_settings(redis.clone());
    with_certificates(found, url, options)
}

#[cfg(not(feature = "tls"))]
fn with_certificates(
    node: ConnectionInfo,
    _url: &RedisUrl,
    _options: &RedisOptions,
) -> Result<Client, RedisConnectError> {
    Client::open(node).map_err(RedisConnectError::Unreachable)
}

#[cfg(feature = "tls")]
fn with_certificates(
    node: ConnectionInfo,
    url: &RedisUrl,
    options: &RedisOptions,
) -> Result<Client, RedisConnectError> {
    let client = match certificates(url, options)? {
        Some(certificates) => Client::build_with_tls(node, certificates),
        None => Client::open(node),
    };
    client.map_err(RedisConnectError::Unreachable)
}

/// Returns the configured certificates; `None` if the system's suffice.
#[cfg(feature = "tls")]
pub(crate) fn certificates(
    url: &RedisUrl,
    options: &RedisOptions,
) -> Result<Option<redis::TlsCertificates>, RedisConnectError> {
    // If the process has installed a provider already, that one is used.
    rustls::crypto::ring::default_provider().install_default().ok();
    let files = url.certificates.read(&options.tls)?;
    let client_tls = files
        .client
        .map(|(client_cert, client_key)| redis::ClientTlsConfig { client_cert, client_key });
    let root_cert = files.roots;
    let are_given = client_tls.is_some() || root_cert.is_some();
    Ok(are_given.then_some(redis::TlsCertificates { client_tls, root_cert }))
}

#[cfg(not(feature = "cluster"))]
pub(crate) async fn cluster(
    _target: &RedisUrl,
    _options: &RedisOptions,
    _pushed: &PushHandler,
) -> Result<Connection, RedisConnectError> {
    Err(UnfitServer::Cluster.into())
}

/// Checks whether the servers behind the connection are fit for a store. Returns `false` if not all
/// of them could be checked.
pub(crate) async fn vet(
    connection: &mut Connection,
    url: &RedisUrl,
    options: &RedisOptions,
) -> Result<bool, RedisConnectError> {
    #[cfg(feature = "cluster")]
    if !connection.is_one() {
        return crate::cluster::vet(connection, url, options).await;
    }
    #[cfg(not(feature = "cluster"))]
    let _ = url;
    for (_, server_info) in connection.server_info().await? {
        server_info.check(options.allow_eviction)?;
    }
    Ok(true)
}

/// A node of a cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Node {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Connection {
    /// Returns the `INFO` of each server; a single server has no name.
    pub(crate) async fn server_info(
        &mut self,
    ) -> Result<Vec<(Option<Node>, ServerInfo)>, RedisConnectError> {
        let info = redis::cmd("INFO");
        let denied = |source| RedisConnectError::of("INFO", source);
        match self {
            Self::Single(connection) => {
                let said = info.query_async::<Value>(connection).await.map_err(denied)?;
                Ok(vec![(None, server_info(&said))])
            }
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => {
                use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo};
                let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllNodes, None));
                let said = cluster.client.route_command(info, all).await.map_err(denied)?;
                let Value::Map(said) = said else {
                    return Err(UnfitServer::MissingField { field: "INFO" }.into());
                };
                Ok(said
                    .iter()
                    .map(|(node, said)| (crate::cluster::name(node), server_info(said)))
                    .collect())
            }
        }
    }

    /// Returns every server that has keys: for a cluster the owners of its slots, also unreachable
    /// ones. `None` if a slot has no owner.
    pub(crate) async fn masters(&mut self) -> RedisResult<Option<Vec<Option<Node>>>> {
        match self {
            Self::Single(_) => Ok(Some(vec![None])),
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => {
                let mut slots = redis::cmd("CLUSTER");
                slots.arg("SLOTS");
                Ok(crate::cluster::owners(self.query(&slots).await?))
            }
        }
    }

    /// Sends a command without a key to one server.
    pub(crate) async fn query_on(
        &mut self,
        node: Option<&Node>,
        command: &Cmd,
    ) -> RedisResult<Value> {
        match (self, node) {
            #[cfg(feature = "cluster")]
            (Self::Cluster(cluster), Some(Node { host, port })) => {
                use redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
                let node = SingleNodeRoutingInfo::ByAddress { host: host.clone(), port: *port };
                let routing = RoutingInfo::SingleNode(node);
                cluster.client.route_command(command.clone(), routing).await?.extract_error()
            }
            (connection, _) => connection.query(command).await,
        }
    }

    pub(crate) async fn query(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Single(connection) => command.query_async(connection).await,
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.query(command).await,
        }
    }

    pub(crate) async fn subscribe(&mut self, channels: &[String]) -> RedisResult<()> {
        match self {
            Self::Single(connection) => connection.subscribe(channels).await,
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.subscribe(channels).await,
        }
    }

    pub(crate) async fn unsubscribe(&mut self, channels: &[String]) -> RedisResult<()> {
        match self {
            Self::Single(connection) => connection.unsubscribe(channels).await,
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.unsubscribe(channels).await,
        }
    }

    /// Classifies an error of this connection by its meaning for the request.
    pub(crate) fn classify(&self, error: RedisError) -> RequestFailure {
        match self {
            Self::Single(_) => crate::error::classify(error),
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => crate::error::classify_of_cluster(error),
        }
    }

    /// Returns whether this is a connection to a single server.
    pub(crate) const fn is_one(&self) -> bool {
        matches!(self, Self::Single(_))
    }

    /// Returns whether the server answers within `limit`. Always true for a cluster, whose client
    /// checks the connections to its nodes itself.
    pub(crate) async fn answers(&mut self, limit: Duration) -> bool {
        match self {
            Self::Single(connection) => {
                let ping = redis::cmd("PING");
                // An error is an answer too.
                let answer = timeout(limit, ping.query_async::<Value>(connection)).await;
                answer.is_ok_and(|answer| !answer.is_err_and(|error| crate::error::breaks(&error)))
            }
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => true,
        }
    }
}

fn server_info(said: &Value) -> ServerInfo {
    match said {
        Value::BulkString(bytes) => ServerInfo::parse(&String::from_utf8_lossy(bytes)),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => ServerInfo::parse(text),
        _ => ServerInfo::default(),
    }
}

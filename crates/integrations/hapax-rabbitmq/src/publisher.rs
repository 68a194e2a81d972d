//! Channels that publish, with confirms and `mandatory`.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_messages::PublishError;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ErrorKind};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

use crate::connection::{Address, RequestError, answered};
use crate::frames;

/// Time for the server to confirm a message. A server that is short of memory or disk confirms none.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(15);

/// Code of a request that the server rejects for its contents: for instance, a message is too large.
const PRECONDITION_FAILED: u16 = 406;

/// Channels of one connection, each of which has at most one message in progress. The connection does nothing
/// but publish: a server that is short of memory or disk reads nothing more from it.
pub(crate) struct PublisherPool {
    address: Address,
    /// Name of the connection, for operators.
    name: String,
    channels: NonZeroUsize,
    /// One permit for each channel.
    permits: Semaphore,
    idle: Mutex<Vec<Publisher>>,
    connection: tokio::sync::Mutex<PublishingConnection>,
}

#[derive(Default)]
struct PublishingConnection {
    connection: Option<Arc<Connection>>,
    /// Time and message of the last error.
    failed: Option<(Instant, String)>,
}

/// A channel with its permit.
pub(crate) struct PooledPublisher<'a> {
    pub(crate) publisher: Publisher,
    publishers: &'a PublisherPool,
    _permit: SemaphorePermit<'a>,
}

impl PooledPublisher<'_> {
    /// Makes the channel available to the next message. Drop it instead if it may have a message in progress.
    pub(crate) fn put_back(self) {
        let Self { publisher, publishers, _permit } = self;
        publishers.idle.lock().unwrap_or_else(PoisonError::into_inner).push(publisher);
    }
}

impl PublisherPool {
    /// Creates a pool without a connection.
    pub(crate) fn new(address: Address, name: impl Into<String>, channels: NonZeroUsize) -> Self {
        Self {
            address,
            name: name.into(),
            channels,
            permits: Semaphore::new(channels.get().min(Semaphore::MAX_PERMITS)),
            idle: Mutex::default(),
            connection: tokio::sync::Mutex::default(),
        }
    }

    /// Connects, and checks that a channel can publish.
    pub(crate) async fn connect(&self) -> Result<(), PublishError> {
        let most = self.connection().await?.configuration().channel_max();
        if self.channels.get() > usize::from(most) {
            return Err(PublishError::rejected(format!(
                "expected at most {most} channels, found {}: set fewer, or raise `channel_max` of the \
                 server",
                self.channels
            )));
        }
        self.acquire().await?.put_back();
        Ok(())
    }

    /// Waits for a channel: an idle one, or one that it opens.
    pub(crate) async fn acquire(&self) -> Result<PooledPublisher<'_>, PublishError> {
        let Ok(permit) = self.permits.acquire().await else {
            return Err(PublishError::not_acknowledged("the channels are closed"));
        };
        let connection = self.connection().await?;
        if connection.status().blocked() {
            return Err(PublishError::not_acknowledged(
                "expected a server that accepts messages, found that it has blocked the connection: it is \
                 short of memory or disk space",
            ));
        }
        let publisher = loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(publisher) if publisher.channel.status().connected() => break publisher,
                Some(_) => {}
                None => break Publisher::open(&connection).await?,
            }
        };
        Ok(PooledPublisher { publisher, publishers: self, _permit: permit })
    }

    /// Returns the connection, or opens one.
    async fn connection(&self) -> Result<Arc<Connection>, PublishError> {
        let begun = Instant::now();
        let mut state = self.connection.lock().await;
        match &state.connection {
            Some(connection) if connection.status().connected() => {
                return Ok(Arc::clone(connection));
            }
            _ => state.connection = None,
        }
        // Those that waited for this attempt have its result.
        if let Some((at, error)) = &state.failed
            && *at >= begun
        {
            return Err(PublishError::not_acknowledged(error.clone()));
        }
        match self.address.connect(&self.name).await {
            Ok(connection) => Ok(Arc::clone(state.connection.insert(Arc::new(connection)))),
            Err(error) => {
                state.failed = Some((Instant::now(), error.to_string()));
                Err(PublishError::not_acknowledged(error))
            }
        }
    }
}

/// Answer of the server to a publication.
pub(crate) enum Published {
    Confirmed,
    /// The message is routed to no queue. The string is the message of the error.
    Returned(String),
}

/// A channel with confirms, which has at most one message in progress.
pub(crate) struct Publisher {
    channel: Channel,
    /// Largest frame of properties, in bytes: the server ends the connection at a larger one.
    frame_max: usize,
}

impl Publisher {
    async fn open(connection: &Connection) -> Result<Self, PublishError> {
        let open = async {
            let channel = answered(connection.create_channel()).await?;
            answered(channel.confirm_select(ConfirmSelectOptions::default())).await?;
            Ok(channel)
        };
        let channel =
            open.await.map_err(|error: RequestError| PublishError::not_acknowledged(error))?;
        let frame_max = connection.configuration().frame_max();
        Ok(Self { channel, frame_max: frames::lower_limit(usize::MAX, frame_max) })
    }

    pub(crate) const fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Publishes a message, and waits for its confirmation. After an error the channel may have a message
    /// in progress: drop it. The frame of its properties has `reserve` bytes left for headers that the server adds: of
    /// properties that do not fit into a frame, the consumer would get no header.
    pub(crate) async fn publish(
        &self,
        exchange: &ShortString,
        routing_key: &ShortString,
        properties: BasicProperties,
        payload: &[u8],
        reserve: usize,
    ) -> Result<Published, PublishError> {
        let found = frames::content_header_bytes(&properties);
        let expected = self.frame_max.saturating_sub(reserve);
        if found > expected {
            return Err(PublishError::rejected(format!(
                "expected headers of at most {expected} bytes with those of their frame, found {found}: make them \
                 smaller, or raise `frame_max` of server and URL"
            )));
        }
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirmed = async {
            let publication = self.channel.basic_publish(
                exchange.clone(),
                routing_key.clone(),
                options,
                payload,
                properties,
            );
            publication.await?.await
        };
        match timeout(CONFIRM_TIMEOUT, confirmed).await {
            Ok(Ok(Confirmation::Ack(None))) => Ok(Published::Confirmed),
            Ok(Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)))) => {
                Ok(Published::Returned(format!(
                    "expected a queue for the routing key {:?} at the exchange {:?}, \
                     found none ({} {}): bind a queue, or change the destination",
                    routing_key.as_str(),
                    exchange.as_str(),
                    returned.reply_code,
                    returned.reply_text
                )))
            }
            Ok(Ok(Confirmation::Nack(None))) => Err(PublishError::not_acknowledged(
                "expected a confirmation, found that a queue rejects the message: it is full, or has no \
                 leader",
            )),
            Ok(Ok(Confirmation::NotRequested)) => {
                Err(PublishError::not_acknowledged("expected a channel with confirms, found none"))
            }
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(PublishError::not_acknowledged(format!(
                "expected a confirmation within {CONFIRM_TIMEOUT:?}, found none: check that the server \
                 runs, and has memory and disk space"
            ))),
        }
    }
}

/// Returns the error of a publication. The channel had no other one in progress, to which a rejection could
/// belong.
fn failed(error: lapin::Error) -> PublishError {
    match error.kind() {
        ErrorKind::ProtocolError(protocol) if protocol.get_id() == PRECONDITION_FAILED => {
            PublishError::rejected(error)
        }
        _ => PublishError::not_acknowledged(error),
    }
}

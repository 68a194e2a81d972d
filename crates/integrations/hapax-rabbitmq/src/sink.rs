//! The sink: messages are published with confirms and `mandatory`.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Clock, SystemClock};
use hapax_messages::{MessageSink, OutgoingMessage, PublishError};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ErrorKind};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::link::{Address, RabbitUrlError, answered, short};
use crate::properties;

/// Time for the server to confirm a message. A server that is short of memory or disk confirms none.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(15);

/// Default of the messages that are published at a time.
const DEFAULT_CHANNELS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(15);

/// Code of a request that the server rejects for its contents: for instance, a message is too large.
const PRECONDITION_FAILED: u16 = 406;

/// Default of the time after which a message for no queue is rejected.
const DEFAULT_UNROUTABLE_FOR: Duration = Duration::from_secs(30);

/// Destinations without a queue whose first time is known. A message for a further one is a temporary
/// error.
const MAX_UNROUTABLE: usize = 1024;

/// Bytes of a frame that are not headers.
const FRAME_OVERHEAD: usize = 4096;

/// Builder of a [`RabbitSink`].
#[derive(Clone, Debug)]
#[must_use]
pub struct RabbitSinkBuilder {
    address: Address,
    exchange: String,
    channels: NonZeroUsize,
    unroutable_for: Duration,
}

/// Publishes messages to an exchange; the destination of a message is its routing key. With the default
/// exchange, which has no name, that is the name of a queue.
///
/// - A message is persistent, and has the property `message-id`, and the header `message-order-key` if it
///   has an order key. An id over 255 bytes is sent in the header `message-id`. The property `timestamp`
///   is the time of publication.
/// - Headers that the broker sets (`x-death`, `x-delivery-count`, …) or takes as commands (`CC`, `BCC`) are
///   not published.
/// - A message that is routed to no queue is returned by the server, which confirms it all the same. It is
///   a temporary error, since the server also returns it while the node of the queue is down. Once the
///   destination has had no queue for 30 s ([`RabbitSinkBuilder::unroutable_for`]), it is permanently
///   rejected.
/// - A message that a queue rejects, because it is full and has `x-overflow: reject-publish`, is a
///   temporary error, as is an exchange that does not exist.
/// - The client gives a returned message to whichever confirmation comes next. So each channel has one
///   message under way, and the sink has several channels.
#[derive(Clone)]
pub struct RabbitSink {
    shared: Arc<SinkState>,
}

struct SinkState {
    address: Address,
    exchange: ShortString,
    /// One permit for each channel.
    permits: Semaphore,
    idle: Mutex<Vec<Publisher>>,
    unroutable_for: Duration,
    /// Time at which the first message for a destination was returned; none has been confirmed since.
    unroutable: Mutex<HashMap<ShortString, Instant>>,
    connection: tokio::sync::Mutex<SinkConnection>,
    clock: SystemClock,
}

#[derive(Default)]
struct SinkConnection {
    connection: Option<Connection>,
    /// Time and text of the last error.
    failed: Option<(Instant, String)>,
}

impl fmt::Debug for RabbitSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitSink")
            .field("exchange", &self.shared.exchange.as_str())
            .finish_non_exhaustive()
    }
}

impl RabbitSinkBuilder {
    /// Sets the exchange. Default: the one without a name, of which each queue is a destination.
    pub fn exchange(mut self, name: impl Into<String>) -> Self {
        self.exchange = name.into();
        self
    }

    /// Sets the number of messages that are published at a time, each by a channel of its own.
    /// Default 16.
    pub const fn channels(mut self, count: NonZeroUsize) -> Self {
        self.channels = count;
        self
    }

    /// Sets how long a destination has no queue until a message for it is rejected; before, it is a
    /// temporary error. Default 30 s.
    pub const fn unroutable_for(mut self, time: Duration) -> Self {
        self.unroutable_for = time;
        self
    }

    /// Connects. The sink connects again after the connection was lost.
    ///
    /// # Errors
    /// [`PublishError`]: the name of the exchange has more than 255 bytes, or the server cannot be reached.
    pub async fn connect(self) -> Result<RabbitSink, PublishError> {
        let Some(exchange) = short(&self.exchange) else {
            return Err(PublishError::rejected(format!(
                "expected the name of an exchange of at most 255 bytes, found {}: choose another one",
                self.exchange.len()
            )));
        };
        let channels = self.channels.get().min(Semaphore::MAX_PERMITS);
        let shared = SinkState {
            address: self.address,
            exchange,
            permits: Semaphore::new(channels),
            idle: Mutex::default(),
            unroutable_for: self.unroutable_for,
            unroutable: Mutex::default(),
            connection: tokio::sync::Mutex::default(),
            clock: SystemClock,
        };
        let publisher = shared.publisher().await?;
        shared.put_back(publisher);
        Ok(RabbitSink { shared: Arc::new(shared) })
    }
}

impl RabbitSink {
    /// Returns a builder of a sink.
    ///
    /// # Errors
    /// [`RabbitUrlError`].
    pub fn builder(url: &str) -> Result<RabbitSinkBuilder, RabbitUrlError> {
        Ok(RabbitSinkBuilder {
            address: Address::parse(url)?,
            exchange: String::new(),
            channels: DEFAULT_CHANNELS,
            unroutable_for: DEFAULT_UNROUTABLE_FOR,
        })
    }
}

impl SinkState {
    async fn send(&self, message: &OutgoingMessage) -> Result<(), PublishError> {
        let Some(routing_key) = short(&message.destination) else {
            return Err(PublishError::rejected(format!(
                "expected a destination of at most 255 bytes, found {}: change it",
                message.destination.len()
            )));
        };
        let properties = properties::outgoing(message, self.clock.now())?;
        let Ok(_permit) = self.permits.acquire().await else {
            return Err(PublishError::not_acknowledged("the sink is closed"));
        };
        let publisher = self.publisher().await?;
        // A future that is dropped, and any error, drops the channel with the publication.
        let published =
            publisher.publish(&self.exchange, &routing_key, properties, &message.payload).await?;
        self.put_back(publisher);
        match published {
            Published::Confirmed => {
                self.unroutable().remove(&routing_key);
                Ok(())
            }
            Published::Returned(error) if self.is_rejected(routing_key) => {
                Err(PublishError::rejected(error))
            }
            Published::Returned(error) => Err(PublishError::not_acknowledged(error)),
        }
    }

    /// Returns whether a destination has had no queue for so long that its messages are rejected.
    fn is_rejected(&self, destination: ShortString) -> bool {
        let now = Instant::now();
        let mut unroutable = self.unroutable();
        if unroutable.len() >= MAX_UNROUTABLE && !unroutable.contains_key(&destination) {
            return false;
        }
        let first = *unroutable.entry(destination).or_insert(now);
        now.duration_since(first) >= self.unroutable_for
    }

    fn unroutable(&self) -> MutexGuard<'_, HashMap<ShortString, Instant>> {
        self.unroutable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an idle channel, or opens one.
    async fn publisher(&self) -> Result<Publisher, PublishError> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some(publisher) if publisher.channel.status().connected() => return Ok(publisher),
                Some(_) => {}
                None => break,
            }
        }
        let begun = Instant::now();
        let mut state = self.connection.lock().await;
        if !state.connection.as_ref().is_some_and(|it| it.status().connected()) {
            state.connection = None;
            // Those that waited for this attempt have its result.
            if let Some((at, error)) = &state.failed
                && *at >= begun
            {
                return Err(PublishError::not_acknowledged(error.clone()));
            }
        }
        let connection = match &state.connection {
            Some(connection) => connection,
            None => match self.address.connect("hapax sink").await {
                Ok(connection) => state.connection.insert(connection),
                Err(error) => {
                    state.failed = Some((Instant::now(), error.to_string()));
                    return Err(PublishError::not_acknowledged(error));
                }
            },
        };
        Publisher::open(connection).await
    }

    fn put_back(&self, publisher: Publisher) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(publisher);
    }
}

/// Answer of the server to a publication.
pub(crate) enum Published {
    Confirmed,
    /// The message is routed to no queue. Its text is that of an error.
    Returned(String),
}

/// A channel with confirms, which has at most one message under way.
pub(crate) struct Publisher {
    channel: Channel,
    max_headers: usize,
}

impl Publisher {
    pub(crate) async fn open(connection: &Connection) -> Result<Self, PublishError> {
        let open = async {
            let channel = answered(connection.create_channel()).await?;
            answered(channel.confirm_select(ConfirmSelectOptions::default())).await?;
            Ok(channel)
        };
        let channel = open
            .await
            .map_err(|error: hapax_messages::SourceError| PublishError::not_acknowledged(error))?;
        let frame = usize::try_from(connection.configuration().frame_max()).unwrap_or(usize::MAX);
        // A larger frame ends the connection.
        let max_headers =
            if frame == 0 { usize::MAX } else { frame.saturating_sub(FRAME_OVERHEAD) };
        Ok(Self { channel, max_headers })
    }

    pub(crate) const fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Publishes a message, and waits for its confirmation. After an error the channel may have a message
    /// under way: drop it.
    pub(crate) async fn publish(
        &self,
        exchange: &ShortString,
        routing_key: &ShortString,
        properties: BasicProperties,
        payload: &[u8],
    ) -> Result<Published, PublishError> {
        let found = properties::bytes(&properties);
        if found > self.max_headers {
            return Err(PublishError::rejected(format!(
                "expected headers of at most {} bytes, found {found}: make them smaller, or raise \
                 `frame_max` of server and URL",
                self.max_headers
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

/// Returns the error of a publication. The channel had no other one under way, to which a rejection could
/// belong.
fn failed(error: lapin::Error) -> PublishError {
    match error.kind() {
        ErrorKind::ProtocolError(protocol) if protocol.get_id() == PRECONDITION_FAILED => {
            PublishError::rejected(error)
        }
        _ => PublishError::not_acknowledged(error),
    }
}

impl MessageSink for RabbitSink {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(self.shared.send(message))
    }
}

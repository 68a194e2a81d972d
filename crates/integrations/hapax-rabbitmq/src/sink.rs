//! The sink: messages are published with confirms and `mandatory`.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Clock, SystemClock};
use hapax_messages::{MessageSink, OutgoingMessage, PublishError};
use lapin::types::ShortString;
use tokio::time::Instant;

use crate::connection::{Address, RabbitUrlError, short};
use crate::login::RabbitLogin;
use crate::properties;
use crate::publisher::{Published, PublisherPool};

/// Default of the messages that are published at a time.
const DEFAULT_CHANNELS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(15);

/// Default of the time after which a message for no queue is rejected.
const DEFAULT_UNROUTABLE_FOR: Duration = Duration::from_secs(30);

/// Most destinations without a queue that are remembered. A further one replaces the oldest.
const MAX_UNROUTABLE: usize = 1024;

/// Bytes that a queue adds to the headers of a message that it delivers: `x-delivery-count` and `x-acquired-count`.
const OF_DELIVERY: usize = 128;

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
/// - Headers that the broker sets (`x-death`, `x-delivery-count`, …) or interprets (`CC`, `BCC`) are
///   not published.
/// - A message that is routed to no queue is returned by the server, which confirms it all the same. It is
///   a temporary error, since the server also returns it while the node of the queue is down. Once the
///   destination has had no queue for 30 s ([`RabbitSinkBuilder::unroutable_for`]), it is permanently
///   rejected.
/// - A destination over 255 bytes is permanently rejected, and with the default exchange one that begins with
///   `amq.`: these queues are the server's and of single connections.
/// - A message that a queue rejects, because it is full and has `x-overflow: reject-publish`, is a
///   temporary error, as is an exchange that does not exist.
/// - The client gives a returned message to whichever confirmation comes next. So each channel has one
///   message in progress, and the sink has several channels.
#[derive(Clone)]
pub struct RabbitSink {
    shared: Arc<SinkState>,
}

struct SinkState {
    publishers: PublisherPool,
    exchange: ShortString,
    unroutable_for: Duration,
    /// Time at which the first message for a destination was returned; none has been confirmed since.
    unroutable: Mutex<HashMap<ShortString, Instant>>,
    clock: SystemClock,
}

impl fmt::Debug for RabbitSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitSink")
            .field("exchange", &self.shared.exchange.as_str())
            .finish_non_exhaustive()
    }
}

impl RabbitSinkBuilder {
    /// Sets how to log in, and the certificates, instead of what the URL says.
    ///
    /// # Errors
    /// [`RabbitUrlError`]: certificates need `amqps://`.
    pub fn login(mut self, login: RabbitLogin) -> Result<Self, RabbitUrlError> {
        self.address = self.address.login(login)?;
        Ok(self)
    }

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

    /// Sets the time without a queue after which messages for a destination are rejected; until then they are
    /// temporary errors. Default 30 s.
    pub const fn unroutable_for(mut self, time: Duration) -> Self {
        self.unroutable_for = time;
        self
    }

    /// Connects. The sink connects again after the connection was lost.
    ///
    /// # Errors
    /// [`PublishError`]: the name of the exchange has more than 255 bytes or begins with `amq.rabbitmq.`, the
    /// server accepts fewer channels, or it cannot be reached.
    pub async fn connect(self) -> Result<RabbitSink, PublishError> {
        let Some(exchange) = short(&self.exchange) else {
            return Err(PublishError::rejected(format!(
                "expected the name of an exchange of at most 255 bytes, found {}: choose another one",
                self.exchange.len()
            )));
        };
        if self.exchange.starts_with("amq.rabbitmq.") {
            return Err(PublishError::rejected(format!(
                "expected an exchange of the application, found {:?}, which is RabbitMQ's own: choose another one",
                self.exchange
            )));
        }
        let publishers = PublisherPool::new(self.address, "hapax sink", self.channels);
        publishers.connect().await?;
        let shared = SinkState {
            publishers,
            exchange,
            unroutable_for: self.unroutable_for,
            unroutable: Mutex::default(),
            clock: SystemClock,
        };
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
        // At the default exchange the destination is a queue, and these are the server's: those of other
        // connections, and the addresses of their replies.
        if self.exchange.as_str().is_empty() && message.destination.starts_with("amq.") {
            return Err(PublishError::rejected(format!(
                "expected a queue, found {:?}: RabbitMQ reserves names that begin with amq. for its own \
                 queues; change the destination",
                message.destination
            )));
        }
        let Some(routing_key) = short(&message.destination) else {
            return Err(PublishError::rejected(format!(
                "expected a destination of at most 255 bytes, found {}: change it",
                message.destination.len()
            )));
        };
        let properties = properties::outgoing(message, self.clock.now())?;
        let pooled = self.publishers.acquire().await?;
        let publisher = &pooled.publisher;
        // A future that is dropped, and any error, drops the channel with the publication.
        let published = publisher
            .publish(&self.exchange, &routing_key, properties, &message.payload, OF_DELIVERY)
            .await?;
        pooled.put_back();
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
            let oldest = unroutable.iter().min_by_key(|(_, first)| **first);
            if let Some(oldest) = oldest.map(|(destination, _)| destination.clone()) {
                unroutable.remove(&oldest);
            }
        }
        let first = *unroutable.entry(destination).or_insert(now);
        now.duration_since(first) >= self.unroutable_for
    }

    fn unroutable(&self) -> MutexGuard<'_, HashMap<ShortString, Instant>> {
        self.unroutable.lock().unwrap_or_else(PoisonError::into_inner)
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

//! The source: a durable consumer of a stream, from which messages are pulled.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, Config, PullConsumer, pull};
use async_nats::jetstream::context::ConsumerInfoErrorKind;
use async_nats::jetstream::{AckKind, Context, Message as NatsMessage};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use hapax_core::Timestamp;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, LogPosition, Message, MessageSource, SourceError, SourceLimits};
use tokio::time::timeout;

use crate::pending::{Deletion, Pending};

/// Time for the server to answer a request.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Time for which the server waits with its answer to a request for what is there, if it has messages which it may not deliver.
const FETCH_WAIT: Duration = Duration::from_secs(1);

/// Time for which the server waits for a message before it answers that there is none.
const WAIT: Duration = Duration::from_secs(10);

/// Shortest pause for which the server gets a message back.
const DELAYS_FROM: Duration = Duration::from_secs(1);

/// Header of a message with a time after which its stream deletes it.
const TTL: &str = "Nats-TTL";

/// Rule that finds the order key of a message.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum NatsOrderKey {
    /// Messages have no order.
    #[default]
    None,
    /// The subject of the message.
    Subject,
    /// A header; a message without it has no order. The sink sends order keys in the header
    /// `message-order-key`.
    Header(String),
}

/// Errors of starting a source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NatsStartError {
    /// The consumer limits deliveries.
    #[error(
        "the consumer {consumer}: expected unlimited deliveries, found max_deliver {found}: a crash \
         counts as a delivery of every message that was pulled, and the server drops messages after \
         the limit; set max_deliver to -1"
    )]
    MaxDeliver {
        /// Name of the consumer.
        consumer: String,
        /// The limit of deliveries.
        found: i64,
    },
    /// The consumer does not wait for acknowledgements of each message.
    #[error(
        "the consumer {consumer}: expected the ack policy `explicit`, found `{found}`, which \
         acknowledges messages that were not handled: create another consumer"
    )]
    AckPolicy {
        /// Name of the consumer.
        consumer: String,
        /// The acknowledgement policy.
        found: String,
    },
    /// The consumer has no limit of unacknowledged messages.
    #[error(
        "the consumer {consumer}: expected max_ack_pending of at least 1, found {found}: set a limit, \
         since without one a crash delivers every message again"
    )]
    MaxAckPending {
        /// Name of the consumer.
        consumer: String,
        /// The limit of unacknowledged messages.
        found: i64,
    },
    /// The messages have order keys, and the consumer may have several of them in progress.
    #[error(
        "the consumer {consumer}: expected max_ack_pending 1 for messages with order keys, found \
         {found}: after a restart the server delivers those behind before those in progress; set it to \
         1, or use no order key and number the messages"
    )]
    Order {
        /// Name of the consumer.
        consumer: String,
        /// The limit of unacknowledged messages.
        found: i64,
    },
    /// The consumer leaves out payloads.
    #[error(
        "the consumer {consumer}: expected messages with payloads, found headers_only: unset it"
    )]
    HeadersOnly {
        /// Name of the consumer.
        consumer: String,
    },
    /// The consumer has a list of pauses between deliveries.
    #[error(
        "the consumer {consumer}: expected no backoff, found {found} steps, which replace \
         ack_wait: remove them"
    )]
    Backoff {
        /// Name of the consumer.
        consumer: String,
        /// Number of its steps.
        found: usize,
    },
    /// The consumer pushes messages.
    #[error(
        "the consumer {consumer}: expected a pull consumer, found one with a deliver_subject: \
         create one without it"
    )]
    Push {
        /// Name of the consumer.
        consumer: String,
    },
    /// The time to wait for an acknowledgement is too short to hold messages.
    #[error(
        "the consumer {consumer}: expected an ack_wait of at least 1 s, found {found:?}: set a \
         longer one"
    )]
    AckWait {
        /// Name of the consumer.
        consumer: String,
        /// The time to wait for an acknowledgement.
        found: Duration,
    },
    /// The server did not answer, or rejected a request.
    #[error(
        "expected the stream {stream} and its consumer, found an error: {source}: create the \
         stream, and check the connection"
    )]
    Server {
        /// Name of the stream.
        stream: String,
        /// The cause.
        #[source]
        source: async_nats::Error,
    },
}

/// Builder of a [`NatsSource`].
#[derive(Clone, Debug)]
#[must_use]
pub struct NatsSourceBuilder {
    context: Context,
    stream: String,
    durable: String,
    filter_subjects: Vec<String>,
    ack_wait: Duration,
    max_ack_pending: Option<u32>,
    order_key: NatsOrderKey,
}

impl NatsSourceBuilder {
    /// Receives only messages of these subjects, which may have wildcards. Only for a consumer that
    /// is created here.
    pub fn filter_subjects(mut self, subjects: impl IntoIterator<Item = String>) -> Self {
        self.filter_subjects = subjects.into_iter().collect();
        self
    }

    /// Sets the time after which a message that nothing holds is delivered again. Only for a
    /// consumer that is created here. Default 30 s; at least 1 s.
    pub const fn ack_wait(mut self, time: Duration) -> Self {
        self.ack_wait = time;
        self
    }

    /// Sets the number of unacknowledged messages of all processes together, including those that the server has and
    /// that wait for their next attempts: while so many fail, no other message is delivered. Only for a consumer
    /// that is created here. Default 10,000; 1 with an order key.
    pub const fn max_ack_pending(mut self, max: u32) -> Self {
        self.max_ack_pending = Some(max);
        self
    }

    /// Sets the origin of order keys, for an ordered inbox. The consumer then delivers one message
    /// at a time, of all keys and to all processes (`max_ack_pending` 1). With several in progress, the
    /// messages of a process that ends are delivered again after `ack_wait`, and so behind later ones of
    /// their keys. For an order at a higher rate use one consumer for each part of the
    /// subjects, or number the messages (sequences).
    pub fn order_key(mut self, order_key: NatsOrderKey) -> Self {
        self.order_key = order_key;
        self
    }

    /// Creates the consumer, or checks the existing one.
    ///
    /// # Errors
    /// [`NatsStartError`].
    pub async fn start(self) -> Result<NatsSource, NatsStartError> {
        let failed = |source: async_nats::Error| NatsStartError::Server {
            stream: self.stream.clone(),
            source,
        };
        let stream = self.context.get_stream(&self.stream).await;
        let stream = stream.map_err(|error| failed(error.into()))?;
        let is_ordered = self.order_key != NatsOrderKey::None;
        let default_pending = if is_ordered { 1 } else { 10_000 };
        let config = pull::Config {
            durable_name: Some(self.durable.clone()),
            ack_policy: AckPolicy::Explicit,
            ack_wait: self.ack_wait,
            max_deliver: -1,
            max_ack_pending: self.max_ack_pending.map_or(default_pending, i64::from),
            // A single filter has its own field, which older servers know.
            filter_subject: match self.filter_subjects.as_slice() {
                [one] => one.clone(),
                _ => String::new(),
            },
            filter_subjects: match self.filter_subjects.len() {
                0 | 1 => Vec::new(),
                _ => self.filter_subjects.clone(),
            },
            ..pull::Config::default()
        };
        let consumer: PullConsumer = match stream.consumer_info(&self.durable).await {
            Ok(info) => {
                check(&self.durable, &info.config, is_ordered)?;
                stream.get_consumer(&self.durable).await.map_err(&failed)?
            }
            // After another error there may be a consumer, whose settings this would replace.
            Err(error) if matches!(error.kind(), ConsumerInfoErrorKind::NotFound) => {
                let created = stream.create_consumer(config).await;
                created.map_err(|error| failed(error.into()))?
            }
            Err(error) => return Err(failed(error.into())),
        };
        let config = &consumer.cached_info().config;
        check(&self.durable, config, is_ordered)?;
        let mut limits = SourceLimits::default().hold_every(config.ack_wait / 3);
        if let Some(max) = usize::try_from(config.max_ack_pending).ok().and_then(NonZeroUsize::new)
        {
            limits = limits.max_unacknowledged(max);
        }
        let max_age = stream.cached_info().config.max_age;
        if !max_age.is_zero() {
            limits = limits.redelivers_for(max_age);
        }
        if is_ordered {
            // Its one message stays unacknowledged in any case.
            limits = limits.with_order_keys();
        } else if let Some(limit) = Deletion::of(&stream.cached_info().config).by_new_ones {
            tracing::warn!(
                stream = self.stream,
                limit,
                "the stream deletes old messages at a limit, handled or not: those that wait for their next attempts stay \
                 with this process and take places; remove the limit, or set discard to new"
            );
        } else {
            limits = limits.delays_from(DELAYS_FROM);
        }
        let pending = Arc::new(Pending::new(consumer.clone(), stream.clone()));
        Ok(NatsSource { consumer, limits, order_key: self.order_key, pending })
    }
}

/// Checks the settings of a consumer.
fn check(consumer: &str, config: &Config, is_ordered: bool) -> Result<(), NatsStartError> {
    let consumer = consumer.to_owned();
    if config.deliver_subject.is_some() {
        return Err(NatsStartError::Push { consumer });
    }
    // The server writes unlimited as -1.
    if config.max_deliver > 0 {
        return Err(NatsStartError::MaxDeliver { consumer, found: config.max_deliver });
    }
    if config.ack_policy != AckPolicy::Explicit {
        let found = format!("{:?}", config.ack_policy).to_lowercase();
        return Err(NatsStartError::AckPolicy { consumer, found });
    }
    if config.max_ack_pending < 1 {
        return Err(NatsStartError::MaxAckPending { consumer, found: config.max_ack_pending });
    }
    if is_ordered && config.max_ack_pending != 1 {
        return Err(NatsStartError::Order { consumer, found: config.max_ack_pending });
    }
    if config.headers_only {
        return Err(NatsStartError::HeadersOnly { consumer });
    }
    if !config.backoff.is_empty() {
        return Err(NatsStartError::Backoff { consumer, found: config.backoff.len() });
    }
    if config.ack_wait < Duration::from_secs(1) {
        return Err(NatsStartError::AckWait { consumer, found: config.ack_wait });
    }
    Ok(())
}

/// A durable consumer of a stream. Several processes may pull from one.
#[derive(Clone)]
pub struct NatsSource {
    consumer: PullConsumer,
    limits: SourceLimits,
    order_key: NatsOrderKey,
    pending: Arc<Pending>,
}

impl fmt::Debug for NatsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.consumer.cached_info();
        f.debug_struct("NatsSource")
            .field("stream", &info.stream_name)
            .field("consumer", &info.name)
            .finish_non_exhaustive()
    }
}

impl NatsSource {
    /// Returns a builder of a source: the consumer `durable` of `stream`.
    pub fn builder(
        context: Context,
        stream: impl Into<String>,
        durable: impl Into<String>,
    ) -> NatsSourceBuilder {
        NatsSourceBuilder {
            context,
            stream: stream.into(),
            durable: durable.into(),
            filter_subjects: Vec::new(),
            ack_wait: Duration::from_secs(30),
            max_ack_pending: None,
            order_key: NatsOrderKey::None,
        }
    }

    /// Pulls what is there, up to `max`. If that is nothing, waits for one message.
    async fn pull(&self, max: NonZeroUsize) -> Result<Vec<NatsMessage>, SourceError> {
        let present = async {
            let batch = self.consumer.fetch().max_messages(max.get()).expires(FETCH_WAIT);
            collect(batch.messages().await.map_err(SourceError::new)?).await
        };
        let present = timeout(TIMEOUT * 2, present).await.map_err(|_| no_reply(TIMEOUT * 2))??;
        if !present.is_empty() {
            return Ok(present);
        }
        let next = async {
            let batch = self.consumer.batch().max_messages(1).expires(WAIT);
            collect(batch.messages().await.map_err(SourceError::new)?).await
        };
        timeout(WAIT + TIMEOUT, next).await.map_err(|_| no_reply(WAIT + TIMEOUT))?
    }

    fn delivery(&self, message: NatsMessage) -> Result<NatsDelivery, SourceError> {
        let info = message.info().map_err(SourceError::new)?;
        let micros = u64::try_from(info.published.unix_timestamp_nanos() / 1000).unwrap_or(0);
        let stored_at = Timestamp::from_micros(micros);
        let (stream, is_redelivery) = (info.stream, info.delivered > 1);
        let offset = info.stream_sequence;
        let origin = format!("nats://{stream}/{}", message.subject);
        let position = LogPosition { topic: stream.into(), partition: 0, offset, stored_at };
        let mut received = Message::new(origin, message.payload.clone())
            .with_position(position)
            .published_at(stored_at);
        for (name, values) in message.headers.iter().flat_map(|headers| headers.iter()) {
            for value in values {
                let value = Bytes::copy_from_slice(value.as_str().as_bytes());
                received.headers.push((name.to_string(), value));
            }
        }
        let key = match &self.order_key {
            NatsOrderKey::None => None,
            NatsOrderKey::Subject => Some(message.subject.to_string()),
            NatsOrderKey::Header(name) => received
                .header(name)
                .and_then(|value| std::str::from_utf8(value).ok())
                // A database would not store a zero byte.
                .map(|key| key.replace('\0', "\u{fffd}")),
        };
        if let Some(key) = key {
            received = received.with_key(key);
        }
        Ok(NatsDelivery {
            message,
            received,
            stored_at,
            is_redelivery,
            is_delayed: AtomicBool::new(false),
            ack_wait: self.consumer.cached_info().config.ack_wait,
            pending: Arc::clone(&self.pending),
        })
    }
}

pub(crate) fn no_reply(within: Duration) -> SourceError {
    SourceError::new(format!(
        "expected a reply of the NATS server within {within:?}, found none: check that it runs and can \
         be reached"
    ))
}

/// Collects the messages of a request that was answered.
async fn collect<E: Into<async_nats::Error>>(
    mut batch: impl Stream<Item = Result<NatsMessage, E>> + Unpin,
) -> Result<Vec<NatsMessage>, SourceError> {
    let mut messages = Vec::new();
    while let Some(message) = batch.next().await {
        match message {
            Ok(message) => messages.push(message),
            // Those that arrived are handled; the error comes again if it lasts.
            Err(_) if !messages.is_empty() => break,
            Err(error) => return Err(SourceError::new(error.into())),
        }
    }
    Ok(messages)
}

impl MessageSource for NatsSource {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        // A request for more than the server delivers is answered only once it expires.
        let max = self.limits.max_unacknowledged.map_or(max, |most| max.min(most));
        Box::pin(async move {
            loop {
                // Also if each pull has messages: all of them may be redeliveries.
                self.pending.read_if_due();
                let mut deliveries: Vec<Arc<dyn Delivery>> = Vec::new();
                for message in self.pull(max).await? {
                    deliveries.push(Arc::new(self.delivery(message)?));
                }
                if deliveries.iter().any(|delivery| !delivery.is_redelivery()) {
                    self.pending.note_first_delivery();
                }
                if !deliveries.is_empty() {
                    return Ok(deliveries);
                }
                // A pull that the server does not answer ends like one without messages: check the
                // server.
                self.pending.read().await?;
            }
        })
    }

    fn limits(&self) -> SourceLimits {
        self.limits
    }

    fn full_limit(&self) -> Option<String> {
        self.pending.full_limit()
    }
}

#[derive(Debug)]
struct NatsDelivery {
    message: NatsMessage,
    received: Message,
    stored_at: Timestamp,
    is_redelivery: bool,
    /// Whether the server has the message back. A hold would replace the pause.
    is_delayed: AtomicBool,
    ack_wait: Duration,
    pending: Arc<Pending>,
}

impl Delivery for NatsDelivery {
    fn message(&self) -> &Message {
        &self.received
    }

    fn is_redelivery(&self) -> bool {
        self.is_redelivery
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            // With a confirmation by the server.
            let acknowledged = timeout(TIMEOUT, self.message.double_ack()).await;
            acknowledged.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)
        })
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        // A negative acknowledgement would deliver it again.
        Box::pin(async move {
            if self.is_delayed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let held = timeout(TIMEOUT, self.message.ack_with(AckKind::Progress)).await;
            held.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)
        })
    }

    /// Returns the message to the server, by a negative acknowledgement with a delay. It stays unacknowledged at the server
    /// meanwhile: if the negative acknowledgement is lost, the message is delivered again after `ack_wait`. The server counts
    /// it as a delivery, of which the consumer had no limit when that was last read. A message that the stream may delete
    /// before its next attempt stays.
    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        Box::pin(async move {
            let has_ttl = self.message.headers.as_ref().is_some_and(|it| it.get(TTL).is_some());
            let time = pause.saturating_add(self.ack_wait);
            if pause < DELAYS_FROM || has_ttl || !self.pending.may_delay(self.stored_at, time) {
                return Ok(false);
            }
            self.pending.note_delay(pause);
            let nak = self.message.ack_with(AckKind::Nak(Some(pause)));
            let given = timeout(TIMEOUT, nak).await;
            given.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)?;
            self.is_delayed.store(true, Ordering::Relaxed);
            Ok(true)
        })
    }
}

//! The source: a durable consumer of a stream, from which messages are pulled.

use std::fmt;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::pull::BatchConfig;
use async_nats::jetstream::consumer::{AckPolicy, Config, PullConsumer, pull};
use async_nats::jetstream::context::ConsumerInfoErrorKind;
use async_nats::jetstream::{Context, Message as NatsMessage};
use async_nats::{StatusCode, Subject};
use futures_util::StreamExt as _;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, MessageSource, SourceError, SourceLimits};
use tokio::time::{sleep, timeout};

use crate::connection::{Connected, Link, TIMEOUT, no_reply};
use crate::connector::NatsConnector;
use crate::delivery::NatsDelivery;
use crate::inspection::Inspection;
use crate::pending::{Deletion, Pending};

/// Time for which the server waits with its answer to a request for what is there, if it has messages which it may not deliver.
const FETCH_WAIT: Duration = Duration::from_secs(1);

/// Time after the end of a request for which messages of it are awaited, if the server has not ended it. Those that come
/// later are delivered again after `ack_wait`.
const LATE: Duration = Duration::from_secs(1);

/// Time for which the server waits for a message before it answers that there is none.
const WAIT: Duration = Duration::from_secs(10);

/// Shortest pause for which the server gets a message back.
pub(crate) const DELAYS_FROM: Duration = Duration::from_secs(1);

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
    connector: Option<NatsConnector>,
    stream: String,
    durable: String,
    filter_subjects: Vec<String>,
    ack_wait: Duration,
    max_ack_pending: Option<u32>,
    order_key: NatsOrderKey,
}

impl NatsSourceBuilder {
    /// Sets how to connect again after the client itself has ended, as async-nats 0.51 does at a header with a
    /// carriage return. Without it the source only returns errors from then on. A context with a domain needs a connector
    /// with the same one: the source rejects a stream that was created at another time, and a consumer that
    /// [`start`](Self::start) would reject.
    pub fn connector(mut self, connector: NatsConnector) -> Self {
        self.connector = Some(connector);
        self
    }

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
        let inspection = Inspection::new(config.ack_wait);
        let pending = Arc::new(Pending::new(&stream.cached_info().config));
        let connected = Connected::new(self.context, stream, consumer);
        let link = Link::new(connected, self.connector, is_ordered);
        let shared = Shared { link, inspection, pending, limits, order_key: self.order_key };
        Ok(NatsSource { shared: Arc::new(shared) })
    }
}

/// Checks the settings of a consumer.
pub(crate) fn check(
    consumer: &str,
    config: &Config,
    is_ordered: bool,
) -> Result<(), NatsStartError> {
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
    shared: Arc<Shared>,
}

/// State of a source.
pub(crate) struct Shared {
    pub(crate) link: Link,
    pub(crate) inspection: Inspection,
    limits: SourceLimits,
    pub(crate) pending: Arc<Pending>,
    pub(crate) order_key: NatsOrderKey,
}

/// Counters of a [`NatsSource`] since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct NatsSourceStats {
    /// Times that the connection to the server has ended.
    pub connection_ends: u64,
    /// Messages that the client library cannot read, which become dead letters.
    pub unreadable: u64,
    /// Whether the connection ends again and again without a known cause. The log has an error.
    pub ends_often: bool,
}

impl fmt::Debug for NatsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connected = self.shared.link.current();
        let info = connected.consumer.cached_info();
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
            connector: None,
            stream: stream.into(),
            durable: durable.into(),
            filter_subjects: Vec::new(),
            ack_wait: Duration::from_secs(30),
            max_ack_pending: None,
            order_key: NatsOrderKey::None,
        }
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> NatsSourceStats {
        let Shared { link, inspection, .. } = &*self.shared;
        NatsSourceStats {
            connection_ends: link.ends(),
            unreadable: inspection.unreadable(),
            ends_often: inspection.ends_often(),
        }
    }
}

impl Shared {
    async fn receive(
        self: &Arc<Self>,
        max: NonZeroUsize,
    ) -> Result<Vec<Arc<dyn Delivery>>, SourceError> {
        let mut has_ended = false;
        loop {
            let connected = self.link.connected().await?;
            // Also if each pull has messages: all of them may be redeliveries.
            self.pending.read_if_due(&connected);
            let found = self.inspection.find(self, &connected, max).await;
            if !found.is_empty() {
                return Ok(found);
            }
            if has_ended {
                return Err(SourceError::new(
                    "expected messages of the NATS server, found that the connection has ended: check the server's log",
                ));
            }
            let ends = self.link.ends();
            let received = self.pull(&connected, ends, max).await?;
            if !received.is_empty() {
                let mut deliveries: Vec<Arc<dyn Delivery>> = Vec::with_capacity(received.len());
                for message in received {
                    deliveries.push(Arc::new(NatsDelivery::received(self, message)?));
                }
                if deliveries.iter().any(|delivery| !delivery.is_redelivery()) {
                    self.pending.note_first_delivery();
                }
                return Ok(deliveries);
            }
            has_ended = connected.is_dead() || self.link.ends() != ends;
            if !has_ended {
                // A pull that the server does not answer ends like one without messages: check the server.
                self.pending.read(&connected).await?;
            }
        }
    }

    /// Pulls what is there, up to `max`. If that is nothing, waits for one message, unless the connection has ended or
    /// a search goes on.
    async fn pull(
        &self,
        connected: &Connected,
        ends: u64,
        max: NonZeroUsize,
    ) -> Result<Vec<NatsMessage>, SourceError> {
        let present = BatchConfig {
            batch: max.get(),
            expires: Some(FETCH_WAIT),
            no_wait: true,
            ..BatchConfig::default()
        };
        let (received, is_ended) = self.request(connected, ends, present).await?;
        if !received.is_empty() || !is_ended || self.inspection.is_unfinished() {
            return Ok(received);
        }
        let next = BatchConfig { batch: 1, expires: Some(WAIT), ..BatchConfig::default() };
        Ok(self.request(connected, ends, next).await?.0)
    }

    /// Requests messages, and collects them until the server ends the request, the connection ends, or the request is over.
    /// Returns whether the server has ended it. It does not end each one: 2.9 drops a request without an answer if a message is
    /// due when it expires.
    async fn request(
        &self,
        connected: &Connected,
        ends: u64,
        request: BatchConfig,
    ) -> Result<(Vec<NatsMessage>, bool), SourceError> {
        let (most, client) = (request.batch, connected.context.client());
        let answered_within = request.expires.unwrap_or_default() + LATE;
        let requesting = async {
            let inbox = Subject::from(client.new_inbox());
            let replies = client.subscribe(inbox.clone()).await.map_err(SourceError::new)?;
            let requested = connected.consumer.request_batch(request, inbox).await;
            requested.map(|()| replies).map_err(SourceError::new)
        };
        let mut replies = timeout(TIMEOUT, requesting).await.map_err(|_| no_reply(TIMEOUT))??;
        let mut over = pin!(async {
            tokio::select! {
                () = sleep(answered_within) => {}
                () = self.link.until_ended(ends) => {}
            }
        });
        let mut received = Vec::new();
        while received.len() < most {
            let reply = tokio::select! {
                biased;
                reply = replies.next() => reply,
                () = &mut over => None,
            };
            let Some(message) = reply else { return Ok((received, false)) };
            if message.reply.is_some() {
                // Of a producer, whatever status its headers have.
                received.push(NatsMessage { message, context: connected.context.clone() });
                continue;
            }
            match message.status {
                None | Some(StatusCode::IDLE_HEARTBEAT) => {}
                Some(StatusCode::NOT_FOUND | StatusCode::TIMEOUT) => break,
                // Those that arrived are handled; the error comes again if it lasts.
                Some(_) if !received.is_empty() => break,
                Some(status) => {
                    let text = message.description.unwrap_or_default();
                    return Err(SourceError::new(format!(
                        "expected messages of the consumer, found the status {status} {text}: check that the consumer \
                         exists"
                    )));
                }
            }
        }
        Ok((received, true))
    }
}

impl MessageSource for NatsSource {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        // A request for more than the server delivers is answered only once it expires.
        let max = self.shared.limits.max_unacknowledged.map_or(max, |most| max.min(most));
        Box::pin(self.shared.receive(max))
    }

    fn limits(&self) -> SourceLimits {
        self.shared.limits
    }

    fn full_limit(&self) -> Option<String> {
        let Shared { link, pending, .. } = &*self.shared;
        let max = pending.full_limit()?;
        let connected = link.current();
        let name = &connected.consumer.cached_info().name;
        Some(format!("max_ack_pending of the consumer {name}, {max}"))
    }
}

//! The source: a consumer of a queue.
//!
//! A delivery tag belongs to its channel. After a channel or connection was lost, its deliveries cannot
//! be acknowledged any more: that is an error, and the server delivers the messages again.

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _};
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, Message, MessageSource, SourceError, SourceLimits};
use lapin::message::Delivery as LapinDelivery;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::connection::{
    Address, ConsumerChannel, RabbitUrlError, Reconnects, RequestError, TIMEOUT,
};
use crate::delay::{self, DelayQueues};
use crate::delivery::RabbitDelivery;
use crate::login::RabbitLogin;
use crate::native::NativeProperties;
use crate::properties;
use crate::publisher::PublisherPool;
use crate::settings::{RabbitOrderKey, RabbitStartError, Settings};
use crate::wrapped;

/// Longest name of a queue: the names of its delay queues have some bytes more.
const MAX_QUEUE_NAME: usize = 220;

/// Delivery limit of a quorum queue without settings, from RabbitMQ 4.0 on.
const DEFAULT_DELIVERY_LIMIT: NonZeroU32 = NonZeroU32::MIN.saturating_add(19);

/// Most messages that are published to delay queues at the same time.
const MAX_CONCURRENT_DELAYS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(15);

/// Builder of a [`RabbitSource`].
#[derive(Clone, Debug)]
#[must_use]
pub struct RabbitSourceBuilder {
    address: Result<Address, RabbitUrlError>,
    settings: Settings,
}

impl RabbitSourceBuilder {
    /// Sets how to log in, and the certificates, instead of what the URL says.
    pub fn login(mut self, login: RabbitLogin) -> Self {
        self.address = self.address.and_then(|address| address.login(login));
        self
    }

    /// Sets the number of messages that the server delivers to this source and that are not
    /// acknowledged. Default 256. A crash delivers all of them again. They are in memory: the server has no
    /// limit of their bytes.
    pub const fn prefetch(mut self, count: NonZeroU16) -> Self {
        self.settings.prefetch = count;
        self
    }

    /// Sets the origin of order keys, for an ordered inbox. The queue must have the argument
    /// `x-single-active-consumer`, which cannot be read over AMQP: otherwise two processes handle
    /// messages with one key at the same time.
    pub fn order_key(mut self, order_key: RabbitOrderKey) -> Self {
        self.settings.order_key = order_key;
        self
    }

    /// States the time for which the server waits for an acknowledgement, which cannot be read over
    /// AMQP: `consumer_timeout` in its configuration, by a policy or as an argument of the queue.
    /// Default 30 min, as the server's; `None` if it is disabled.
    pub const fn consumer_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.settings.consumer_timeout = timeout;
        self
    }

    /// States the longest time that a handler takes. Default 5 min; it must be shorter than
    /// `consumer_timeout`, which counts from the delivery: the time that a message waits for a handler is
    /// part of it.
    pub const fn longest_handler(mut self, time: Duration) -> Self {
        self.settings.longest_handler = time;
        self
    }

    /// States the delivery limit of the queue, which cannot be read over AMQP: `None` for a classic queue,
    /// and for a quorum queue without a limit. Default 20: what a quorum queue has on RabbitMQ 4.0 and
    /// later if neither its arguments nor a policy set another one. Before 4.0 the default is no limit.
    pub const fn delivery_limit(mut self, limit: Option<NonZeroU32>) -> Self {
        self.settings.delivery_limit = limit;
        self
    }

    /// Sets the pause from which on a message goes through a delay queue instead of staying
    /// unacknowledged; one that has waited for half of `consumer_timeout` does too, and while more than three quarters
    /// of the consumer's messages were tried before, shorter pauses are lengthened to this one. Default 30 s; `None` for
    /// never. For the names that begin with that of the queue and
    /// `.delay-`, the user needs the permissions to configure and to read; and for `amq.default`, to write.
    pub const fn delay_from(mut self, pause: Option<Duration>) -> Self {
        self.settings.delay_from = pause;
        self
    }

    /// Connects, and checks that the queue exists.
    ///
    /// # Errors
    /// [`RabbitStartError`].
    pub async fn start(self) -> Result<RabbitSource, RabbitStartError> {
        let (address, settings) = (self.address?, self.settings);
        let length = settings.queue.len();
        if !(1..=MAX_QUEUE_NAME).contains(&length) {
            return Err(RabbitStartError::QueueName { max: MAX_QUEUE_NAME, found: length });
        }
        if let Some(timeout) = settings.consumer_timeout
            && settings.longest_handler >= timeout
        {
            let found = settings.longest_handler;
            return Err(RabbitStartError::ConsumerTimeout { timeout, found });
        }
        let failed = |source| RabbitStartError::Server { queue: settings.queue.clone(), source };
        let current = ConsumerChannel::open(&address, &settings, 1).await.map_err(failed)?;
        let name = format!("hapax {} delays", settings.queue);
        let state = State { current: Some(current), channel_number: 1, ..State::default() };
        let shared = Shared {
            publishers: PublisherPool::new(address.clone(), name, MAX_CONCURRENT_DELAYS),
            delay_queues: DelayQueues::default(),
            delays_fail: AtomicBool::new(false),
            address,
            settings,
            state: tokio::sync::Mutex::new(state),
            dropped: Mutex::default(),
            changed: Notify::new(),
        };
        Ok(RabbitSource { shared: Arc::new(shared) })
    }
}

/// A consumer of a queue. Several processes may consume one queue; for messages with order keys it must
/// have a single active consumer.
#[derive(Clone)]
pub struct RabbitSource {
    shared: Arc<Shared>,
}

impl fmt::Debug for RabbitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitSource")
            .field("queue", &self.shared.settings.queue)
            .finish_non_exhaustive()
    }
}

impl RabbitSource {
    /// Returns a builder of a source of an existing queue.
    pub fn builder(url: impl AsRef<str>, queue: impl Into<String>) -> RabbitSourceBuilder {
        RabbitSourceBuilder {
            address: Address::parse(url.as_ref()),
            settings: Settings {
                queue: queue.into(),
                prefetch: NonZeroU16::MIN.saturating_add(255),
                order_key: RabbitOrderKey::None,
                consumer_timeout: Some(Duration::from_secs(30 * 60)),
                longest_handler: Duration::from_secs(5 * 60),
                delivery_limit: Some(DEFAULT_DELIVERY_LIMIT),
                delay_from: Some(Duration::from_secs(30)),
            },
        }
    }
}

impl MessageSource for RabbitSource {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(self.shared.receive(max))
    }

    fn limits(&self) -> SourceLimits {
        let settings = &self.shared.settings;
        let mut limits =
            SourceLimits::default().max_unacknowledged(NonZeroUsize::from(settings.prefetch));
        if let Some(limit) = settings.delivery_limit {
            limits = limits.delivery_limit(limit);
        }
        match (&settings.order_key, settings.delay_from) {
            (RabbitOrderKey::None, Some(pause)) => limits.delays_from(pause),
            (RabbitOrderKey::None, None) => limits,
            // A delay queue would change their order.
            (RabbitOrderKey::RoutingKey | RabbitOrderKey::Header(_), _) => limits.with_order_keys(),
        }
    }
}

/// State of a source. Its deliveries refer to it weakly, so that the connection ends with the source.
pub(crate) struct Shared {
    address: Address,
    pub(crate) settings: Settings,
    /// Channels of delay queues, with a connection of their own. On the consumer's, a publication to a server
    /// that is short of memory would stop the acknowledgements, which free memory.
    publishers: PublisherPool,
    delay_queues: DelayQueues,
    /// Whether the last publication to a delay queue failed.
    delays_fail: AtomicBool,
    state: tokio::sync::Mutex<State>,
    /// Messages that were dropped without an acknowledgement, by channel and delivery tag. The source
    /// delivers them again before later messages. The server counts no delivery.
    dropped: Mutex<BTreeMap<(u64, u64), ReceivedMessage>>,
    changed: Notify,
}

/// A message that was received, and may be dropped.
pub(crate) struct ReceivedMessage {
    pub(crate) delivery: LapinDelivery,
    /// Its properties as they were received.
    pub(crate) encoded: Bytes,
    pub(crate) message: Message,
    pub(crate) received_at: Instant,
    /// Whether it comes from a delay queue.
    pub(crate) was_delayed: bool,
}

#[derive(Default)]
struct State {
    current: Option<ConsumerChannel>,
    /// A channel that is being opened. A future of `receive` that is dropped leaves it to the next one.
    opening: Option<JoinHandle<Result<ConsumerChannel, SourceError>>>,
    reconnects: Reconnects,
    /// Number of the last channel that was opened, or whose opening failed.
    channel_number: u64,
}

impl Shared {
    async fn receive(
        self: &Arc<Self>,
        max: NonZeroUsize,
    ) -> Result<Vec<Arc<dyn Delivery>>, SourceError> {
        let mut state = self.state.lock().await;
        self.connect(&mut state).await?;
        loop {
            let changed = self.changed.notified();
            let Some(current) = &mut state.current else {
                return Err(SourceError::new("expected a connection, found none"));
            };
            let mut received = self.take_dropped(current, max);
            // There is no await between the removal of a message from the consumer and the return: a future
            // that is dropped loses no message.
            let mut ended = None;
            while received.len() < max.get() {
                match current.consumer.next().now_or_never() {
                    None => break,
                    Some(Some(Ok(delivery))) => received.push(self.delivery(current, delivery)),
                    Some(Some(Err(error))) => {
                        ended = Some(SourceError::new(error));
                        break;
                    }
                    Some(None) => {
                        ended = Some(cancelled());
                        break;
                    }
                }
            }
            if let Some(error) = ended {
                state.current = None;
                if received.is_empty() {
                    return Err(error);
                }
            }
            if !received.is_empty() {
                return Ok(received);
            }
            let Some(current) = &mut state.current else { return Err(cancelled()) };
            let next = tokio::select! {
                () = changed => continue,
                next = current.consumer.next() => next,
            };
            match next {
                Some(Ok(delivery)) => return Ok(vec![self.delivery(current, delivery)]),
                Some(Err(error)) => {
                    state.current = None;
                    return Err(SourceError::new(error));
                }
                None => {
                    state.current = None;
                    return Err(cancelled());
                }
            }
        }
    }

    /// Opens a channel unless there is one.
    async fn connect(self: &Arc<Self>, state: &mut State) -> Result<(), SourceError> {
        if state.current.as_ref().is_some_and(|current| current.channel.status().connected()) {
            return Ok(());
        }
        state.current = None;
        if let Some(not_before) = state.reconnects.not_before() {
            sleep_until(not_before).await;
        }
        let opening = state.opening.get_or_insert_with(|| {
            state.channel_number += 1;
            let (address, settings) = (self.address.clone(), self.settings.clone());
            let channel_number = state.channel_number;
            tokio::spawn(
                async move { ConsumerChannel::open(&address, &settings, channel_number).await },
            )
        });
        let opened = opening.await;
        state.opening = None;
        match opened.map_err(SourceError::new).flatten() {
            Ok(current) => {
                state.reconnects.succeeded();
                self.delay_queues.clear();
                // Those of earlier channels are delivered again by the server.
                self.lock_dropped()
                    .retain(|(channel_number, _), _| *channel_number == current.channel_number);
                state.current = Some(current);
                Ok(())
            }
            Err(error) => {
                state.reconnects.failed();
                Err(error)
            }
        }
    }

    fn take_dropped(
        self: &Arc<Self>,
        current: &ConsumerChannel,
        max: NonZeroUsize,
    ) -> Vec<Arc<dyn Delivery>> {
        let mut messages: Vec<Arc<dyn Delivery>> = Vec::new();
        let mut dropped = self.lock_dropped();
        while messages.len() < max.get()
            && let Some(((channel_number, _), received)) = dropped.pop_first()
        {
            if channel_number == current.channel_number {
                let delivery = RabbitDelivery::new(self, channel_number, received, true);
                messages.push(Arc::new(delivery));
            }
        }
        messages
    }

    fn delivery(
        self: &Arc<Self>,
        current: &ConsumerChannel,
        mut delivery: LapinDelivery,
    ) -> Arc<dyn Delivery> {
        let payload = std::mem::take(&mut delivery.data);
        let encoded;
        (encoded, delivery.properties) =
            wrapped::received(std::mem::take(&mut delivery.properties));
        let mut message = properties::incoming(
            &self.settings.queue,
            delivery.routing_key.as_str(),
            &delivery.properties,
            payload,
        );
        let key = match &self.settings.order_key {
            RabbitOrderKey::None => None,
            RabbitOrderKey::RoutingKey => Some(properties::original_routing_key(
                delivery.routing_key.as_str(),
                &delivery.properties,
            )),
            // Two keys that are not UTF-8 may become equal, which orders more than is necessary.
            RabbitOrderKey::Header(name) => {
                message.header(name).map(|value| String::from_utf8_lossy(value).into_owned())
            }
        };
        if let Some(key) = key {
            // A database would not store a zero byte.
            message = message.with_key(key.replace('\0', "\u{fffd}"));
        }
        let delay_queues = delay::name_start(&self.settings.queue);
        let was_delayed = properties::was_delayed(&delivery.properties, &delay_queues);
        let is_redelivery = delivery.redelivered || was_delayed;
        let received_at = Instant::now();
        let received = ReceivedMessage { delivery, encoded, message, received_at, was_delayed };
        Arc::new(RabbitDelivery::new(self, current.channel_number, received, is_redelivery))
    }

    /// Publishes a message to the delay queue of a pause. Logs a warning at the first of several failures.
    pub(crate) async fn delay(
        &self,
        properties: NativeProperties,
        message: &Message,
        pause: Duration,
    ) -> Result<(), SourceError> {
        let queue = &self.settings.queue;
        let (publishers, queues) = (&self.publishers, &self.delay_queues);
        let publishing = delay::publish(publishers, queues, queue, properties, message, pause);
        // The server is not awaited while a new queue settles.
        let published = timeout(delay::SETTLES_FOR + TIMEOUT, publishing)
            .await
            .unwrap_or_else(|_| Err(RequestError::Unanswered.into()));
        let error = published.as_ref().err();
        let failed_before = self.delays_fail.swap(error.is_some(), Ordering::Relaxed);
        if let Some(error) = error
            && !failed_before
        {
            tracing::warn!(
                queue,
                %error,
                "messages stay unacknowledged instead of going to a delay queue: after `consumer_timeout` \
                 the server closes their channel; check the permissions of the user, and that no queue \
                 of that name has other arguments"
            );
        }
        published
    }

    /// Keeps a message that was dropped without an acknowledgement, to deliver it again.
    pub(crate) fn keep_dropped(&self, channel_number: u64, dropped: ReceivedMessage) {
        let tag = dropped.delivery.delivery_tag;
        self.lock_dropped().insert((channel_number, tag), dropped);
        self.changed.notify_one();
    }

    fn lock_dropped(&self) -> MutexGuard<'_, BTreeMap<(u64, u64), ReceivedMessage>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cancelled() -> SourceError {
    SourceError::new(
        "expected a consumer of the queue, found that the server has cancelled it: check that the queue \
         exists and has a leader",
    )
}

//! Broken adapters to the broker in memory.

use std::collections::{HashMap, HashSet};
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{
    Delivery, Message, MessageId, MessageSink, MessageSource, OutgoingMessage, PublishError,
    SourceError, SourceLimits,
};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::messages::suite::BrokerFixture;
use tokio::time::sleep;

/// What an adapter does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Bug {
    None,
    IgnoresMax,
    AcknowledgesOnReceipt,
    MarksNothing,
    LosesOnCut,
    IgnoresAcknowledgements,
    HoldsByNak,
    CountsHolds,
    AcknowledgesByPlace,
    LosesDelayed,
    CutsDelays,
    KeepsDelayed,
    PassesDelayed,
    DeliversFollowers,
    LosesOnDrop,
    ReversesOrder,
    DropsKeys,
    HangsWhenDown,
    DropsHeaders,
    KeepsFirstValue,
    SendsText,
    TrimsHeaders,
    SwallowsRejections,
    RetriesRejections,
    ConfirmsFirst,
    MakesIds,
    IgnoresBrokerIds,
    RejectsWhenDown,
}

/// The broker in memory with an adapter that has the bug of this number.
pub(super) struct Broken<const BUG: u8>(Arc<Adapter<BUG>>);

#[derive(Debug, Default)]
struct Adapter<const BUG: u8> {
    broker: MemoryBroker,
    /// Deliveries of the connection, by their place in it.
    places: Mutex<HashMap<u64, Weak<dyn Delivery>>>,
    connections: AtomicU64,
    published: Mutex<HashSet<MessageId>>,
}

impl<const BUG: u8> Adapter<BUG> {
    fn has(&self, bug: Bug) -> bool {
        bug as u8 == BUG
    }

    fn lose_connection(&self) {
        self.connections.fetch_add(1, Ordering::SeqCst);
        let places = std::mem::take(&mut *self.places.lock().unwrap());
        if self.has(Bug::LosesOnCut) {
            for delivery in places.values().filter_map(Weak::upgrade) {
                // The broker in memory never waits.
                let mut acknowledged = delivery.acknowledge();
                let polled = acknowledged.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_ready());
            }
        }
        self.broker.redeliver();
    }
}

impl<const BUG: u8> BrokerFixture for Broken<BUG> {
    type Source = BrokenSource<BUG>;
    type Sink = BrokenSink<BUG>;

    const ACK_TIMEOUT: Option<Duration> = None;
    const LARGE: usize = MemoryBroker::MAX_PAYLOAD;
    const TOO_LARGE: &'static [usize] = &[MemoryBroker::MAX_PAYLOAD + 1];
    const KEEPS_ORDER: bool = true;
    const MARKS_REDELIVERIES: bool = true;

    async fn start() -> Self {
        let adapter = Adapter::default();
        adapter.broker.set_delays_from(Duration::ZERO);
        if !adapter.has(Bug::PassesDelayed) {
            adapter.broker.set_delays_in_order();
        }
        Self(Arc::new(adapter))
    }

    async fn source(&self) -> BrokenSource<BUG> {
        BrokenSource(Arc::clone(&self.0))
    }

    async fn sink(&self) -> BrokenSink<BUG> {
        BrokenSink(Arc::clone(&self.0))
    }

    fn destination(&self) -> String {
        "orders".to_owned()
    }

    async fn unacknowledged(&self) -> u64 {
        self.0.broker.backlog() as u64
    }

    async fn deliveries(&self) -> Option<u64> {
        let holds = if self.0.has(Bug::CountsHolds) { self.0.broker.holds() } else { 0 };
        Some(self.0.broker.deliveries() + holds)
    }

    fn cut(&self) {
        self.0.lose_connection();
    }

    fn freeze(&self) {
        self.0.broker.set_down(true);
    }

    fn thaw(&self) {
        self.0.broker.set_down(false);
    }

    async fn kill(&mut self) {
        self.0.lose_connection();
        self.0.broker.set_down(true);
        self.0.broker.redeliver();
    }

    async fn restart(&mut self) {
        self.0.broker.set_down(false);
    }
}

#[derive(Debug)]
pub(super) struct BrokenSource<const BUG: u8>(Arc<Adapter<BUG>>);

impl<const BUG: u8> BrokenSource<BUG> {
    fn delivery(&self, delivery: Arc<dyn Delivery>) -> Arc<dyn Delivery> {
        let adapter = Arc::clone(&self.0);
        let mut message = delivery.message().clone();
        if adapter.has(Bug::DropsKeys) {
            message.key = None;
        }
        if adapter.has(Bug::TrimsHeaders) {
            for (_, value) in &mut message.headers {
                *value = value.trim_ascii().to_vec().into();
            }
        }
        let mut places = adapter.places.lock().unwrap();
        let place = places.len() as u64;
        places.insert(place, Arc::downgrade(&delivery));
        drop(places);
        Arc::new(BrokenDelivery { adapter, delivery, message, place })
    }
}

impl<const BUG: u8> MessageSource for BrokenSource<BUG> {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            let max = if self.0.has(Bug::IgnoresMax) { max.saturating_add(1) } else { max };
            let received = match self.0.broker.receive(max).await {
                Err(_) if self.0.has(Bug::HangsWhenDown) => std::future::pending().await,
                received => received?,
            };
            let mut received = ManuallyDrop::new(received);
            if self.0.has(Bug::LosesOnDrop) {
                sleep(Duration::from_millis(1)).await;
            }
            if self.0.has(Bug::AcknowledgesOnReceipt) {
                for delivery in &**received {
                    delivery.acknowledge().await?;
                }
            }
            if self.0.has(Bug::ReversesOrder) {
                received.reverse();
            }
            let received = ManuallyDrop::into_inner(received);
            Ok(received.into_iter().map(|delivery| self.delivery(delivery)).collect())
        })
    }

    fn limits(&self) -> SourceLimits {
        let limits = SourceLimits::default().hold_every(Duration::from_millis(100));
        limits.with_order_keys().delays_from(Duration::ZERO).delays_in_order()
    }
}

#[derive(Debug)]
struct BrokenDelivery<const BUG: u8> {
    adapter: Arc<Adapter<BUG>>,
    delivery: Arc<dyn Delivery>,
    message: Message,
    place: u64,
}

impl<const BUG: u8> Delivery for BrokenDelivery<BUG> {
    fn message(&self) -> &Message {
        &self.message
    }

    fn is_redelivery(&self) -> bool {
        self.delivery.is_redelivery() && !self.adapter.has(Bug::MarksNothing)
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            if self.adapter.has(Bug::IgnoresAcknowledgements) {
                return Ok(());
            }
            if self.adapter.has(Bug::AcknowledgesByPlace) {
                let at_place = self.adapter.places.lock().unwrap().get(&self.place).cloned();
                return match at_place.and_then(|delivery| delivery.upgrade()) {
                    Some(delivery) => delivery.acknowledge().await,
                    None => Ok(()),
                };
            }
            self.delivery.acknowledge().await
        })
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        if self.adapter.has(Bug::HoldsByNak) {
            self.adapter.broker.send(self.message.clone());
        }
        self.delivery.hold()
    }

    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        Box::pin(async move {
            // What is not delayed is held.
            if self.adapter.has(Bug::HoldsByNak) || self.adapter.has(Bug::KeepsDelayed) {
                return Ok(false);
            }
            if self.adapter.has(Bug::LosesDelayed) {
                self.delivery.acknowledge().await?;
                return Ok(true);
            }
            let pause = if self.adapter.has(Bug::CutsDelays) { pause / 2 } else { pause };
            self.delivery.delay(pause).await
        })
    }

    fn return_behind_delayed(&self) -> bool {
        self.delivery.return_behind_delayed()
    }

    fn keep_followers(&self) -> bool {
        let delivers = [Bug::KeepsDelayed, Bug::DeliversFollowers];
        !delivers.iter().any(|bug| self.adapter.has(*bug)) && self.delivery.keep_followers()
    }
}

#[derive(Debug)]
pub(super) struct BrokenSink<const BUG: u8>(Arc<Adapter<BUG>>);

impl<const BUG: u8> BrokenSink<BUG> {
    /// Returns the message that is sent instead.
    fn changed(&self, message: &OutgoingMessage) -> OutgoingMessage {
        let mut message = message.clone();
        if self.0.has(Bug::DropsHeaders) {
            message.headers.clear();
        }
        if self.0.has(Bug::KeepsFirstValue) {
            let mut names = HashSet::new();
            message.headers.retain(|(name, _)| names.insert(name.clone()));
        }
        if self.0.has(Bug::SendsText) {
            message.payload = String::from_utf8_lossy(&message.payload).into_owned().into();
        }
        if self.0.has(Bug::MakesIds) {
            let number = self.0.connections.fetch_add(1, Ordering::SeqCst);
            message.id = MessageId::new(format!("made-{number}")).unwrap();
        }
        message
    }

    /// Publishes a message after it was confirmed, unless the connection is lost before.
    fn publish_later(&self, message: OutgoingMessage) {
        let adapter = Arc::clone(&self.0);
        let connection = adapter.connections.load(Ordering::SeqCst);
        tokio::spawn(async move {
            sleep(Duration::from_millis(50)).await;
            if adapter.connections.load(Ordering::SeqCst) == connection {
                adapter.broker.publish(&message).await.unwrap();
            }
        });
    }
}

impl<const BUG: u8> MessageSink for BrokenSink<BUG> {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(async move {
            let message = self.changed(message);
            if self.0.has(Bug::IgnoresBrokerIds)
                && !self.0.published.lock().unwrap().insert(message.id.clone())
            {
                return Ok(());
            }
            if self.0.has(Bug::ConfirmsFirst) {
                self.publish_later(message);
                return Ok(());
            }
            match self.0.broker.publish(&message).await {
                Err(PublishError::Rejected(_)) if self.0.has(Bug::SwallowsRejections) => Ok(()),
                Err(PublishError::Rejected(cause)) if self.0.has(Bug::RetriesRejections) => {
                    Err(PublishError::not_acknowledged(cause))
                }
                Err(error) if self.0.has(Bug::RejectsWhenDown) => {
                    Err(PublishError::rejected(error))
                }
                published => published,
            }
        })
    }
}

//! A delivery of a message.

use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, Message, SourceError};
use lapin::message::Delivery as LapinDelivery;
use lapin::options::BasicAckOptions;
use tokio::time::Instant;

use crate::connection::answered;
use crate::native::NativeProperties;
use crate::properties;
use crate::source::{ReceivedMessage, Shared};

/// A message, until it is acknowledged or dropped.
pub(crate) struct RabbitDelivery {
    source: Weak<Shared>,
    /// Number of the source's channel, to which the delivery tag belongs.
    channel_number: u64,
    /// `None` only while it is dropped.
    delivery: Option<LapinDelivery>,
    message: Message,
    /// As they were received.
    encoded: Bytes,
    received_at: Instant,
    is_redelivery: bool,
    was_delayed: bool,
    /// Whether an acknowledgement was sent or may have been sent.
    may_be_acknowledged: AtomicBool,
    is_acknowledged: AtomicBool,
}

impl fmt::Debug for RabbitDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitDelivery").field("message", &self.message).finish_non_exhaustive()
    }
}

impl RabbitDelivery {
    pub(crate) fn new(
        source: &Arc<Shared>,
        channel_number: u64,
        received: ReceivedMessage,
        is_redelivery: bool,
    ) -> Self {
        let ReceivedMessage { delivery, encoded, message, received_at, was_delayed } = received;
        Self {
            source: Arc::downgrade(source),
            channel_number,
            delivery: Some(delivery),
            message,
            encoded,
            received_at,
            is_redelivery,
            was_delayed,
            may_be_acknowledged: AtomicBool::new(false),
            is_acknowledged: AtomicBool::new(false),
        }
    }

    async fn publish_to_delay_queue(&self, pause: Duration) -> Result<bool, SourceError> {
        let Some(source) = self.source.upgrade() else { return Ok(false) };
        if !source.settings.uses_delay_queue(pause, self.received_at.elapsed()) {
            return Ok(false);
        }
        // Without its channel the delivery cannot be acknowledged, and the copy would be a second one.
        let Some(delivery) = self.delivery.as_ref().filter(|it| !it.acker.poisoned()) else {
            return Err(stale());
        };
        source.delay(self.native_properties(delivery), &self.message, pause).await?;
        // Not before: see `delay.rs` for why no message is lost.
        self.send_acknowledgement().await?;
        Ok(true)
    }

    fn native_properties(&self, delivery: &LapinDelivery) -> NativeProperties {
        let delivered = delivery.routing_key.as_str();
        let routing_key = properties::original_routing_key(delivered, &delivery.properties);
        let properties = NativeProperties::parse(self.encoded.clone()).unwrap_or_default();
        properties::delayed(properties, &routing_key)
    }

    async fn send_acknowledgement(&self) -> Result<(), SourceError> {
        if self.is_acknowledged.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Some(delivery) = &self.delivery else { return Err(stale()) };
        // Before anything is sent, so that a future that is dropped leaves a message that is not
        // delivered here again: the acknowledgement is in the client's queue after the first poll.
        self.may_be_acknowledged.store(true, Ordering::SeqCst);
        match answered(delivery.acker.ack(BasicAckOptions::default())).await? {
            true => {
                self.is_acknowledged.store(true, Ordering::SeqCst);
                Ok(())
            }
            false => Err(stale()),
        }
    }
}

fn stale() -> SourceError {
    SourceError::new(
        "expected the channel of the message, found that it is closed: the server delivers the message \
         again",
    )
}

impl Delivery for RabbitDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    fn native(&self) -> Option<Bytes> {
        Some(self.native_properties(self.delivery.as_ref()?).to_native())
    }

    fn is_redelivery(&self) -> bool {
        self.is_redelivery
    }

    fn was_delayed(&self) -> bool {
        self.was_delayed
    }

    fn has_ended(&self) -> bool {
        self.delivery.as_ref().is_none_or(|delivery| delivery.acker.poisoned())
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(self.send_acknowledgement())
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        // The server delivers the message again once the channel is closed, and not before.
        Box::pin(std::future::ready(if self.has_ended() { Err(stale()) } else { Ok(()) }))
    }

    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        Box::pin(self.publish_to_delay_queue(pause))
    }
}

impl Drop for RabbitDelivery {
    fn drop(&mut self) {
        let Some(delivery) = self.delivery.take() else { return };
        if self.may_be_acknowledged.load(Ordering::SeqCst) || delivery.acker.poisoned() {
            return;
        }
        // Without the source the connection ends, and the server delivers the message again.
        let Some(source) = self.source.upgrade() else { return };
        let message = mem::take(&mut self.message);
        let encoded = mem::take(&mut self.encoded);
        let (received_at, was_delayed) = (self.received_at, self.was_delayed);
        let dropped = ReceivedMessage { delivery, encoded, message, received_at, was_delayed };
        source.keep_dropped(self.channel_number, dropped);
    }
}

//! The interface to a broker from which messages are received.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;

use crate::message::Message;
use crate::partition::PositionStep;

/// Error of a source: of its broker, of the connection to it, or of the database that has its positions.
/// Messages that were not acknowledged are delivered again.
#[derive(Debug, thiserror::Error)]
#[error("the source failed: {0}")]
pub struct SourceError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl SourceError {
    /// Creates an error with its cause.
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }
}

/// Properties of a source that the consumer has to respect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SourceLimits {
    /// Interval at which the consumer calls [`Delivery::hold`] so that the broker does not deliver
    /// the message again; `None` if the broker waits for as long as the connection lasts.
    pub hold_every: Option<Duration>,
    /// Largest number of unacknowledged messages that the broker delivers; `None` without a limit.
    pub max_unacknowledged: Option<NonZeroUsize>,
    /// Time for which the broker may deliver a message again; `None` if that is unknown or has no
    /// end. A shorter retention of ids is reported at start.
    pub redelivers_for: Option<Duration>,
    /// Number of deliveries after which the broker removes a message that was not acknowledged; `None`
    /// without a limit. A consumer starts only if it is above the lower one of
    /// [`max_crashes`](crate::Attempts::max_crashes) and [`max`](crate::Attempts::max).
    pub delivery_limit: Option<NonZeroU32>,
    /// Whether messages have order keys, and arrive in order by key. An ordered inbox is not started
    /// without them.
    pub has_order_keys: bool,
    /// Whether the positions of the source are in the database of the handler's rows: its deliveries have
    /// [steps](Delivery::step). It limits the messages of each partition in memory itself.
    pub has_positions: bool,
    /// Shortest pause for which the source [takes back](Delivery::delay) a message that waits for its next attempt;
    /// `None` if it takes none back. While more than three quarters of the consumer's messages are such ones, it lengthens
    /// shorter pauses to this one.
    pub delays_from: Option<Duration>,
    /// Whether the source also takes back messages with order keys, and delivers none
    /// [behind](Delivery::return_behind_delayed) them.
    pub delays_in_order: bool,
}

impl SourceLimits {
    /// Sets the time between two calls of [`Delivery::hold`].
    #[must_use]
    pub const fn hold_every(mut self, every: Duration) -> Self {
        self.hold_every = Some(every);
        self
    }

    /// Sets the largest number of unacknowledged messages that the broker delivers.
    #[must_use]
    pub const fn max_unacknowledged(mut self, max: NonZeroUsize) -> Self {
        self.max_unacknowledged = Some(max);
        self
    }

    /// Sets the time for which the broker may deliver a message again.
    #[must_use]
    pub const fn redelivers_for(mut self, time: Duration) -> Self {
        self.redelivers_for = Some(time);
        self
    }

    /// Sets the number of deliveries after which the broker removes a message.
    #[must_use]
    pub const fn delivery_limit(mut self, limit: NonZeroU32) -> Self {
        self.delivery_limit = Some(limit);
        self
    }

    /// States that messages have order keys, and arrive in order by key.
    #[must_use]
    pub const fn with_order_keys(mut self) -> Self {
        self.has_order_keys = true;
        self
    }

    /// States that the positions of the source are in the database of the handler's rows.
    #[must_use]
    pub const fn with_positions(mut self) -> Self {
        self.has_positions = true;
        self
    }

    /// Sets the shortest pause for which the source takes back a message.
    #[must_use]
    pub const fn delays_from(mut self, pause: Duration) -> Self {
        self.delays_from = Some(pause);
        self
    }

    /// States that the source takes back messages with order keys, and delivers none behind them.
    #[must_use]
    pub const fn delays_in_order(mut self) -> Self {
        self.delays_in_order = true;
        self
    }
}

/// A queue, stream or subscription of a broker.
///
/// 1. A message that is not acknowledged is delivered again, after the connection is lost or after
///    nothing has held it for a time.
/// 2. The broker has no limit of deliveries, or one above the crashes after which the consumer parks a
///    message: the consumer counts attempts itself, and stores dead letters. An adapter that cannot know the limit does not start, or
///    states it in [`SourceLimits::delivery_limit`], and the consumer does not start.
/// 3. A message that was received and dropped without an acknowledgement is delivered again. A source
///    keeps at most a [`Weak`](std::sync::Weak) of a delivery, so that only the consumer keeps it alive.
pub trait MessageSource: fmt::Debug + Send + Sync + 'static {
    /// Waits for messages, and receives at least one and at most `max`. Dropping the future loses
    /// none: those that it received are delivered again.
    ///
    /// # Errors
    /// [`SourceError`]; the caller calls again after a pause.
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>>;

    /// Returns the properties that a consumer has to respect.
    fn limits(&self) -> SourceLimits;

    /// Returns the limit, of the source or its broker, because of which nothing else is delivered while messages wait
    /// for their next attempts: its name and value. The consumer logs it. The default is `None`.
    fn full_limit(&self) -> Option<String> {
        None
    }
}

/// A message that was delivered, until it is acknowledged or dropped.
pub trait Delivery: fmt::Debug + Send + Sync + 'static {
    /// Returns the message.
    fn message(&self) -> &Message;

    /// Returns the [native form](field@crate::DeadLetter::native) of the message: what the broker's form has and
    /// [`Delivery::message`] has not. The default is `None`.
    fn native(&self) -> Option<Bytes> {
        None
    }

    /// Returns whether the broker has delivered the message before, as far as it knows.
    fn is_redelivery(&self) -> bool;

    /// Returns whether the message was [delayed](Self::delay) before, or may have been. Such messages have a share of the
    /// consumer's limits. The default is whether this is a redelivery.
    fn was_delayed(&self) -> bool {
        self.is_redelivery()
    }

    /// Returns why the source cannot read the message as its producer wrote it, as one text for operators.
    /// The consumer does not handle it: it becomes a dead letter, and is acknowledged. Its id and headers
    /// are those that can be read. The default is `None`.
    fn unreadable(&self) -> Option<&str> {
        None
    }

    /// Returns whether the source knows that the delivery has ended: its connection, channel or assignment
    /// has ended, or its partition is being revoked, so that the message is delivered again. A consumer
    /// begins nothing with such a message, and drops it. The default is false.
    fn has_ended(&self) -> bool {
        false
    }

    /// Returns the step of the partition's position over this message, from a source
    /// [with positions](SourceLimits::has_positions). The consumer commits it with the effects, and
    /// handles the messages of a partition in the order of their delivery. The default is `None`.
    fn step(&self) -> Option<&PositionStep> {
        None
    }

    /// Ends the deliveries of the partition, whose position another owner has acquired, or an operator has
    /// set. A source to which the partition is still assigned acquires the position again, and continues
    /// there. By default nothing is done.
    fn acquire_position_again(&self) {}

    /// Acknowledges the message: the broker does not deliver it again.
    ///
    /// # Errors
    /// [`SourceError`]; the message may be delivered again.
    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>>;

    /// Extends the time within which the broker does not deliver the message again, without
    /// counting that as a delivery.
    ///
    /// # Errors
    /// [`SourceError`]; the message may be delivered again.
    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>>;

    /// Returns the message to the source or its broker for at least `pause`, after which it is delivered again,
    /// marked as a redelivery if the source knows, and ends this delivery: the caller drops it. Returns false if the
    /// message stays unacknowledged here instead. The consumer calls it for a message that waits for its next attempt,
    /// or for another delivery of its id to end; for one with an order key only if the source
    /// [delays in order](SourceLimits::delays_in_order).
    ///
    /// At each instant the message is unacknowledged, or the source or its broker has it for the next delivery, also if
    /// the future is dropped: a second copy does no harm, and a message without any is lost. The end of the delivery does not
    /// depend on its drop, since handlers may keep clones of it.
    ///
    /// # Errors
    /// [`SourceError`]; the message stays unacknowledged, and may be delivered again.
    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        let _ = pause;
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Returns the message to the source, if an earlier one with its order key was [delayed](Self::delay) or
    /// [keeps its followers](Self::keep_followers), and is not acknowledged: this one was delivered before that. Returns
    /// whether it did; then this delivery has ended, the caller
    /// drops it, and the source delivers the message again once the earlier ones are acknowledged. No later one of the key
    /// passes it in between. The consumer calls it before it begins with the message. The default is false.
    fn return_behind_delayed(&self) -> bool {
        false
    }

    /// Keeps later messages with the order key of this one, which stays with the consumer, in the source until it is
    /// acknowledged, as [`delay`](Self::delay) does. Those that were delivered already
    /// [return](Self::return_behind_delayed). Returns whether the source does so. The consumer calls it before a pause in
    /// which the message may not be delayed. The default is false.
    fn keep_followers(&self) -> bool {
        false
    }
}

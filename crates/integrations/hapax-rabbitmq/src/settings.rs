//! Settings of a source, and their errors.

use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use hapax_messages::SourceError;

use crate::connection::RabbitUrlError;

/// Rule that finds the order key of a message.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum RabbitOrderKey {
    /// Messages have no order.
    #[default]
    None,
    /// The routing key of the message.
    RoutingKey,
    /// A header; a message without it has no order. The sink sends order keys in the header
    /// `message-order-key`.
    Header(String),
}

/// Errors of starting a source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RabbitStartError {
    /// The URL is invalid.
    #[error(transparent)]
    Url(#[from] RabbitUrlError),
    /// The name of the queue is invalid.
    #[error(
        "expected the name of a queue, of 1 to {max} bytes, found {found}: choose another queue; the \
         names of its delay queues are longer, and AMQP limits a name to 255 bytes"
    )]
    QueueName {
        /// Longest name, in bytes.
        max: usize,
        /// Length of the name, in bytes.
        found: usize,
    },
    /// A message may be handled for longer than the server waits for its acknowledgement.
    #[error(
        "expected a handler that ends within the server's `consumer_timeout` of {timeout:?}, found \
         {found:?}: set a longer `consumer_timeout` in the server's configuration and here, or a \
         shorter `longest_handler`; after that time the server closes the channel, and delivers each \
         of its messages again"
    )]
    ConsumerTimeout {
        /// Time for which the server waits for an acknowledgement.
        timeout: Duration,
        /// Longest time of a handler.
        found: Duration,
    },
    /// The server did not answer, or rejected a request: there may be no such queue.
    #[error(
        "expected a RabbitMQ server with the queue {queue}, found an error: {source}: check the \
         address, the user and its permissions, and create the queue if there is none"
    )]
    Server {
        /// Name of the queue.
        queue: String,
        /// The cause.
        #[source]
        source: SourceError,
    },
}

/// Settings of a source.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) queue: String,
    pub(crate) prefetch: NonZeroU16,
    pub(crate) order_key: RabbitOrderKey,
    pub(crate) consumer_timeout: Option<Duration>,
    pub(crate) longest_handler: Duration,
    pub(crate) delivery_limit: Option<NonZeroU32>,
    pub(crate) delay_from: Option<Duration>,
}

impl Settings {
    /// Returns whether a message that was received some time ago goes through a delay queue for a pause: the
    /// pause is long, or the server would close the channel during it.
    pub(crate) fn uses_delay_queue(&self, pause: Duration, received_ago: Duration) -> bool {
        let Some(from) = self.delay_from else { return false };
        let held = received_ago.saturating_add(pause);
        pause >= from || self.consumer_timeout.is_some_and(|timeout| held >= timeout / 2)
    }
}

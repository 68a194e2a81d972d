//! Delay queues: the broker keeps a message for a time, and then delivers it again.
//!
//! A queue expires messages at its head only. So there is a queue for each pause, of one second and its
//! doubles, and all of its messages expire in the order in which they were published.
//!
//! No message is lost on its way: at each instant it is unacknowledged in its own queue, or a delay queue has it, or its
//! record has its outcome. There may be two copies in between, of which the inbox handles one.
//!
//! 1. Its acknowledgement is sent only after [`publish`] has returned without an error: the server has confirmed the
//!    persistent message, which was `mandatory`. A server returns one that it routes to no queue before it confirms it, and
//!    a quorum queue has one that was confirmed on the disks of most of its members.
//! 2. After every other end no acknowledgement is sent: an error, a message that was rejected or returned, no answer, or a future
//!    that is dropped. The server delivers the message again once its channel has ended.
//! 3. The acknowledgement belongs to the channel of the delivery. If that has ended, nothing is acknowledged.
//! 4. A delay queue removes an expired message only after the message's own queue has confirmed it (`at-least-once`). While
//!    that queue does not exist or is full, the message stays.
//! 5. A server that is killed may lose a queue that was declared just before, with its messages, although it has confirmed
//!    them: it writes its directory of queues with a delay. So a queue is used only some time after it was declared
//!    ([`DelayQueues`]). One that an operator deletes is declared again, and used at once.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax_messages::{Message, SourceError};
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use tokio::time::{Instant, sleep_until};

use crate::connection::{answered, short};
use crate::native::NativeProperties;
use crate::publisher::{Published, PublisherPool};
use crate::wrapped;

/// Longest pause of a delay queue: twelve days, which is more than a consumer's longest pause.
const LONGEST_S: u64 = 1 << 20;

/// Time after which a server that is killed has a queue that was declared. RabbitMQ writes the directory of quorum queues
/// about a second after the last change.
pub(crate) const SETTLES_FOR: Duration = Duration::from_secs(3);

/// Bytes that the server adds to the headers of a message that expires: `x-death` and its like, with names of queues and
/// exchanges of up to 255 bytes each.
const OF_EXPIRY: usize = 4096;

/// Delay queues that this process has declared, and when it did so first, since its connection to the server was opened: a
/// server that was killed may not have those that were declared before.
#[derive(Debug, Default)]
pub(crate) struct DelayQueues(Mutex<HashMap<Duration, Instant>>);

impl DelayQueues {
    /// Forgets the queues.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Notes that the queue of a pause was declared. Returns the time from which on it is used.
    fn declared(&self, rounded: Duration) -> Instant {
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *queues.entry(rounded).or_insert_with(Instant::now) + SETTLES_FOR
    }
}

/// Returns a pause rounded up to that of a delay queue: a power of two, in seconds.
fn round_up_pause(pause: Duration) -> Duration {
    let whole = pause.as_secs().saturating_add(u64::from(pause.subsec_nanos() > 0));
    Duration::from_secs(whole.clamp(1, LONGEST_S).next_power_of_two())
}

/// Returns the beginning of the names of a queue's delay queues.
pub(crate) fn name_start(queue: &str) -> String {
    format!("{queue}.delay-")
}

fn name(queue: &str, rounded: Duration) -> String {
    format!("{}{}s", name_start(queue), rounded.as_secs())
}

/// Returns the arguments of a delay queue. A quorum queue is the only one that dead-letters at least once;
/// the strategy needs `reject-publish`. There is no `x-expires`: a quorum queue expires at a fixed time after
/// its creation, whether it is declared again or not, and is deleted with its messages.
fn arguments(queue: &str, rounded: Duration) -> FieldTable {
    let milliseconds = i64::try_from(rounded.as_millis()).unwrap_or(i64::MAX);
    let text = |text: &str| AMQPValue::LongString(text.into());
    let mut arguments = FieldTable::default();
    for (name, value) in [
        ("x-queue-type", text("quorum")),
        ("x-message-ttl", AMQPValue::LongLongInt(milliseconds)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(queue)),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ] {
        arguments.insert(name.into(), value);
    }
    arguments
}

/// Publishes a message to the delay queue for a pause. Once this returns, the broker has a copy of it, and
/// the delivery can be acknowledged. A failure in between leaves both, of which one is a duplicate.
pub(crate) async fn publish(
    publishers: &PublisherPool,
    queues: &DelayQueues,
    queue: &str,
    properties: NativeProperties,
    message: &Message,
    pause: Duration,
) -> Result<(), SourceError> {
    let rounded = round_up_pause(pause);
    let name = name(queue, rounded);
    let Some(routing_key) = short(&name) else {
        return Err(SourceError::new("expected a delay queue's name of at most 255 bytes"));
    };
    // An error of the declaration closes the channel, which is dropped then.
    let pooled = publishers.acquire().await.map_err(SourceError::new)?;
    let publisher = &pooled.publisher;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    // Each time: the queue may have been deleted.
    let declare =
        publisher.channel().queue_declare(routing_key.clone(), options, arguments(queue, rounded));
    answered(declare).await?;
    sleep_until(queues.declared(rounded)).await;
    let properties = wrapped::to_publish(&properties.encode());
    let payload = &message.payload;
    let published =
        publisher.publish(&"".into(), &routing_key, properties, payload, OF_EXPIRY).await;
    let published = published.map_err(SourceError::new)?;
    pooled.put_back();
    match published {
        Published::Confirmed => Ok(()),
        Published::Returned(error) => Err(SourceError::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_queue_keeps_its_messages_until_their_pause_is_over() {
        let arguments = arguments("orders", round_up_pause(Duration::from_secs(30)));
        let arguments = arguments.inner();
        assert_eq!(arguments.get("x-message-ttl"), Some(&AMQPValue::LongLongInt(32_000)));
        for deletes in ["x-expires", "x-max-length", "x-max-length-bytes"] {
            assert!(!arguments.contains_key(deletes), "{deletes}");
        }
    }

    #[test]
    fn a_pause_is_never_shortened_and_at_most_doubled() {
        let steps = [0, 1, 999, 1_000, 1_001, 2_000, 30_000, 300_000, 604_800_000];
        let steps = steps.map(|millis| round_up_pause(Duration::from_millis(millis)).as_secs());
        assert_eq!(steps, [1, 1, 1, 1, 2, 2, 32, 512, LONGEST_S]);
        assert_eq!(round_up_pause(Duration::MAX).as_secs(), LONGEST_S);
        assert_eq!(name("orders", round_up_pause(Duration::from_secs(30))), "orders.delay-32s");
    }
}

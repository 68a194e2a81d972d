//! Rules of every adapter to a broker, as one test for each.
//!
//! An adapter's crate implements [`BrokerFixture`], which starts a broker and opens the adapter's
//! source and sink, and calls the macro:
//!
//! ```text
//! mod suite {
//!     hapax_testkit::broker_suite!(super::NatsBroker);
//! }
//! ```
//!
//! Each rule is a separate `#[tokio::test]` with a broker of its own, so that the crate needs tokio
//! with `rt-multi-thread` among its dev-dependencies. The rules are in three groups: sources, sinks,
//! and consumers, which run an inbox over the source. Times are the broker's own: a rule that needs
//! the timeout of an acknowledgement waits until the broker has delivered another message again.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a suite fails by panicking"
)]

mod bench;
mod consumers;
mod sinks;
mod sources;

use std::future::Future;
use std::time::Duration;

use hapax_messages::{MessageSink, MessageSource};

pub use self::consumers::*;
pub use self::sinks::*;
pub use self::sources::*;

/// A private broker with one empty queue, and the adapter to it.
pub trait BrokerFixture: Sized + Send + Sync + 'static {
    /// The adapter's source.
    type Source: MessageSource;
    /// The adapter's sink.
    type Sink: MessageSink;

    /// Time after which the broker delivers a message again that nothing has acknowledged or held;
    /// `None` if it waits for as long as the connection lasts. Two seconds is long enough for a busy
    /// machine, and short enough for a test.
    const ACK_TIMEOUT: Option<Duration>;
    /// Size of a payload, in bytes, that the broker accepts: 1 MiB, or nearly its limit.
    const LARGE: usize;
    /// Sizes of payloads that the broker rejects, one for each of its limits.
    const TOO_LARGE: &'static [usize];
    /// Whether a single source receives the messages of an order key in the order in which they were
    /// published, with their key.
    const KEEPS_ORDER: bool;
    /// Whether the broker knows that a delivery is a redelivery.
    const MARKS_REDELIVERIES: bool;

    /// Starts a broker. Messages that it confirmed survive [`kill`](Self::kill).
    fn start() -> impl Future<Output = Self> + Send;

    /// Opens a source on a connection of its own. All sources share the queue, as the processes of a
    /// consumer do.
    fn source(&self) -> impl Future<Output = Self::Source> + Send;

    /// Opens a sink on a connection of its own.
    fn sink(&self) -> impl Future<Output = Self::Sink> + Send;

    /// Returns the destination of messages for the queue.
    fn destination(&self) -> String;

    /// Returns the number of messages in the queue that are not acknowledged, delivered or not.
    fn unacknowledged(&self) -> impl Future<Output = u64> + Send;

    /// Returns the number of deliveries that the broker has counted; `None` if it counts none.
    fn deliveries(&self) -> impl Future<Output = Option<u64>> + Send;

    /// Ends the connections of all sources and sinks, which may connect again at once.
    fn cut(&self);

    /// Freezes the broker: connections stay open without a reply.
    fn freeze(&self);

    /// Lets a frozen broker continue.
    fn thaw(&self);

    /// Kills the broker; its files stay.
    fn kill(&mut self) -> impl Future<Output = ()> + Send;

    /// Starts the broker again on its files.
    fn restart(&mut self) -> impl Future<Output = ()> + Send;
}

macro_rules! broker_rules {
    ($($rule:ident)*) => { broker_rules!(@export ($) $($rule)*); };
    (@export ($d:tt) $($rule:ident)*) => {
        /// Makes a `#[tokio::test]` of each rule of adapters to brokers; takes the type of the
        /// [`BrokerFixture`]($crate::messages::suite::BrokerFixture).
        #[macro_export]
        macro_rules! broker_suite {
            ($d fixture:ty) => {
                $(
                    #[::tokio::test(flavor = "multi_thread", worker_threads = 4)]
                    async fn $rule() {
                        $d crate::messages::suite::$rule::<$d fixture>().await;
                    }
                )*
            };
        }
    };
}

broker_rules! {
    every_message_is_received_and_at_most_max_at_a_time
    a_message_that_was_dropped_is_delivered_again
    a_message_is_delivered_again_after_its_connection_was_lost
    an_acknowledged_message_is_not_delivered_again
    a_held_message_is_not_delivered_again
    a_stale_acknowledgement_does_no_harm
    a_delayed_message_is_delivered_again_after_its_pause
    a_receive_that_is_dropped_loses_no_message
    messages_with_one_order_key_are_received_in_order
    every_message_is_received_although_the_broker_is_killed
    a_frozen_broker_is_an_error_in_time_and_found_again
    a_message_arrives_byte_for_byte
    a_message_that_cannot_arrive_as_it_is_is_rejected
    a_message_that_is_too_large_is_rejected
    a_confirmed_message_survives_a_kill
    no_confirmed_message_is_lost_with_its_connection
    a_repeated_publication_has_the_same_id
    a_message_with_another_broker_id_is_delivered_again
    a_broker_that_is_down_does_not_reject
    a_dead_letter_is_published_with_its_data
    each_id_has_one_effect
    a_message_that_waits_for_its_next_attempt_is_not_handled_before
    messages_that_fail_keep_no_other_from_being_handled
    an_order_key_that_waits_keeps_no_other_key_from_being_handled
    an_order_key_whose_message_stays_keeps_no_other_key_from_being_handled
    a_shutdown_loses_no_message
}

//! NATS JetStream as [`MessageSource`](hapax_messages::MessageSource) and
//! [`MessageSink`](hapax_messages::MessageSink).
//!
//! # Guarantees
//! - *Source*: a message stays in the stream's consumer until the server has confirmed its
//!   acknowledgement. It is delivered again when nothing has held it for the consumer's `ack_wait`.
//! - *Pauses*: a message without an order that waits for 1 s or longer is given to the server, by a negative
//!   acknowledgement with a delay, and takes no place in this process. The server counts that as a delivery, of
//!   which there is no limit, and the message for `max_ack_pending`. A message that the stream may delete before its
//!   next attempt stays with the process, since it would be lost: by `max_age`, by its header `Nats-TTL`, or by a limit
//!   at which the stream deletes old messages.
//! - *Sink*: [`publish`](hapax_messages::MessageSink::publish) returns after the stream has
//!   confirmed the message.
//!
//! JetStream itself does not promise:
//!
//! - that a message which it has confirmed survives a power loss: it writes messages to disk every two
//!   minutes (`sync_interval`). A relay has deleted the row by then, and the message is lost. Set
//!   `sync_interval: always` in the server's configuration, or give the stream three replicas on
//!   hosts that do not fail together.
//! - that a message with a known `Nats-Msg-Id` is the same one: within its window it drops any
//!   message with that id, whatever its subject. The sink sends id and subject as `Nats-Msg-Id`,
//!   compares the message that is stored, and rejects another one.
//! - that its window is kept: it is short (two minutes by default) and a part of it may be lost
//!   with the server. So an inbox knows ids by the header `message-id`, for as long as its own
//!   retention.
//! - that an acknowledgement which it has confirmed survives: a server that is killed delivers
//!   messages of the last seconds again (measured with 2.9). Inboxes drop them.
//! - an order of messages that are in progress together: those of a process that ended, or whose
//!   request was interrupted, are delivered again after `ack_wait`, behind later ones. So a source
//!   with order keys has one message in progress.
//! - that a header arrives with white space at its ends: its clients remove it. The sink rejects
//!   such an id, order key or header.
//! - that a client can read what it delivers: it stores the headers and subjects that a producer has sent, and the client
//!   library ends its connection at a header that it cannot parse. The source then reads such messages by
//!   `$JS.API.STREAM.MSG.GET.STREAM`, to which its user must be permitted to publish. They are delivered as
//!   [unreadable](hapax_messages::Delivery::unreadable), become dead letters, and are then terminated (`+TERM`).
//!
//! # Settings that are checked
//! [`NatsSourceBuilder::start`] creates the durable consumer, or reads an existing one, and
//! rejects:
//!
//! | setting | required | reason |
//! | --- | --- | --- |
//! | `max_deliver` | unlimited | a crash counts as a delivery of each message that was pulled, and so does a pause; after the limit the server drops them without a trace |
//! | `ack_policy` | explicit | another policy acknowledges messages that were not handled |
//! | `max_ack_pending` | bounded | it bounds the messages that a crash delivers again, and those that wait |
//! | `max_ack_pending` | 1, with [order keys](NatsSourceBuilder::order_key) | with more, a restart changes the order |
//! | `headers_only` | off | the payload is the fingerprint |
//! | `ack_wait` | at least 1 s | a process holds its messages at a third of it |
//! | `backoff` | none | it replaces `ack_wait`, by which messages are held |
//! | `deliver_subject` | none | the source pulls |
//!
//! Set `ack_wait` to the time for which a dead process may delay its messages: a live process holds
//! its messages at intervals of a third of it. Set `max_ack_pending` to the largest number of
//! unacknowledged messages of all processes together, with those that wait at the server: while so many wait, no
//! other message is delivered ([`full_limit`](hapax_messages::MessageSource::full_limit)).
//!
//! # Example
//! ```no_run
//! # use std::sync::Arc;
//! # async fn example() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! use hapax_nats::{NatsConnector, NatsSink, NatsSource};
//! let connector = NatsConnector::new("nats://127.0.0.1:4222");
//! let context = connector.connect().await?;
//! let source = NatsSource::builder(context.clone(), "ORDERS", "invoices").connector(connector);
//! let source = source.start().await?;
//! let sink = NatsSink::new(context);
//! # drop((Arc::new(source), sink));
//! # Ok(()) }
//! ```

mod connection;
mod connector;
mod delivery;
mod headers;
mod inspection;
mod pending;
mod sink;
mod source;
mod stored;

/// JetStream of a connection, of the crate async-nats.
pub use async_nats::jetstream::Context as JetStream;

pub use connector::{NatsConnector, NatsCredentials, NatsCredentialsError};
pub use sink::NatsSink;
pub use source::{NatsOrderKey, NatsSource, NatsSourceBuilder, NatsSourceStats, NatsStartError};

/// Connects to a server by its URL alone, as [`NatsConnector::connect`] does.
///
/// # Errors
/// The error of the client, which does not repeat the URL.
pub async fn jetstream(url: &str) -> Result<JetStream, async_nats::Error> {
    NatsConnector::new(url).connect().await
}

/// Creates a stream of `subjects` with the server's defaults, unless there is one of this name: for
/// tests and small set-ups. It has one replica: unless the server has `sync_interval: always`, a power
/// loss loses messages of the last two minutes that it has confirmed.
///
/// # Errors
/// The error of the server.
pub async fn create_stream(
    context: &JetStream,
    name: &str,
    subjects: &[&str],
) -> Result<(), async_nats::Error> {
    let config = async_nats::jetstream::stream::Config {
        name: name.to_owned(),
        subjects: subjects.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    context.get_or_create_stream(config).await?;
    Ok(())
}

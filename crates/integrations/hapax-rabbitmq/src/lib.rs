//! RabbitMQ as [`MessageSource`](hapax_messages::MessageSource) and
//! [`MessageSink`](hapax_messages::MessageSink), over AMQP 0.9.1.
//!
//! # Guarantees
//! - *Source*: a message stays unacknowledged, and so in its queue, until the consumer acknowledges it. It
//!   is delivered again after its channel or connection was lost. The source connects again by itself. An
//!   acknowledgement of an earlier channel is an error, and acknowledges nothing else.
//! - *Source*: a message that is dropped without an acknowledgement, or that waits for its next attempt outside
//!   of a delay queue, stays with this process. The source sends no negative acknowledgement, which the server would count against the delivery limit.
//! - *Delay queues*: a message without an order that waits for a [long
//!   pause](RabbitSourceBuilder::delay_from) is published to a delay queue, with confirm, and acknowledged
//!   then. It keeps its id, headers, payload, origin and time of publication. After a crash in between there
//!   are two copies, of which the inbox handles one. A message from a delay queue counts as a redelivery.
//! - *Sink*: [`publish`](hapax_messages::MessageSink::publish) returns after the server has confirmed the
//!   persistent message, and rejects one whose destination has had no queue for 30 s.
//!
//! RabbitMQ itself does not guarantee:
//!
//! - *an order*, if several consumers of a queue are active: give the queue the argument
//!   `x-single-active-consumer`. A source with [order keys](RabbitSourceBuilder::order_key) then receives all
//!   messages, and other processes wait. After a consumer was lost, the server delivers its unacknowledged
//!   messages before later ones.
//! - *that each consumer has its own copy*: a queue has one copy of a message. Bind a queue for each
//!   consumer to an exchange.
//! - *deduplication by id*: a message that is published twice is delivered twice. The inbox drops the second.
//! - *that an acknowledgement has arrived*: AMQP confirms none. One that is lost with its connection leads to
//!   another delivery, which is a duplicate.
//! - *that dead-lettering loses nothing*: by default the broker moves a message to a dead-letter exchange at
//!   most once, and it may be lost on the way. The consumer stores dead letters itself, and delay queues are
//!   quorum queues with the strategy `at-least-once`, which need RabbitMQ 3.10. An earlier server rejects
//!   their declaration; messages then stay unacknowledged.
//! - *that a classic queue survives the loss of its node*: use a quorum queue, whose confirmed messages are on
//!   a majority of its nodes.
//!
//! # Delivery limit
//! A quorum queue removes a message that was returned to it too often. Before RabbitMQ 4.3 a crash counts against
//! every message that the process had received, so that a limit removes messages that were never handled.
//!
//! | RabbitMQ | default limit | what counts |
//! | --- | --- | --- |
//! | 3.x | none | each return: a lost consumer, channel or connection, `consumer_timeout`, a negative acknowledgement |
//! | 4.0 to 4.2 | 20 | the same |
//! | 4.3 and later | 20 | `basic.reject`, which this crate does not send; not a lost channel or `consumer_timeout` |
//!
//! Neither limit nor queue type can be read over AMQP. State the limit by
//! [`RabbitSourceBuilder::delivery_limit`]; without that, 20 is assumed. A consumer does not start if the limit
//! is not above the lower one of its `max_crashes` (5 by default) and `max` (60), and logs a warning if it is less
//! than four times that. Set
//! `x-delivery-limit` to at least 20, or from RabbitMQ 4.0 on to -1, which is no limit; and give the queue a
//! dead-letter exchange: messages that the broker removes are lost without one.
//!
//! # `consumer_timeout`
//! The server closes a channel that has had a message unacknowledged for 30 minutes (`consumer_timeout`),
//! and delivers all messages of the channel again. State another value by
//! [`RabbitSourceBuilder::consumer_timeout`]. The source does not start if
//! [`longest_handler`](RabbitSourceBuilder::longest_handler) is not below it. A handler that takes longer
//! nevertheless has one effect: the redelivered message waits for it. Messages without an
//! order that wait go to a delay queue at half of that time, unless `delay_from` is `None`; messages with an order
//! stay, and so do all messages while the store is unavailable.
//!
//! # Malformed messages
//! RabbitMQ forwards contents that the client library cannot parse, and that would end the connection on each
//! delivery. The source repairs them:
//!
//! - A `message-id` that is not UTF-8 is left out. If no other [id rule](hapax_messages::IdRule) applies, the
//!   message becomes a dead letter, one for all such messages of equal contents.
//! - In other properties, names of headers, and routing keys, `?` replaces each byte that is not UTF-8. If two
//!   names become equal, the message has one of both headers.
//! - All headers are left out if with them the frame is larger than `frame_max` (128 KiB by default): the server
//!   does not apply that limit to them. An id or an order key in a header is left out too. The source logs a
//!   warning.
//! - All properties are left out if they cannot be parsed.
//!
//! A message that is redriven from a dead letter has its properties and headers byte for byte: types, order, tables of any depth
//! and bytes that are not UTF-8. Those within 32 bytes of `frame_max` are an exception: they are repaired. One that was in a delay
//! queue has its headers as the server encodes them again, in the order of their names.
//!
//! Tables, void values and arrays within arrays are left out of the headers of every message; the other
//! values of an array stay. The age of a message that is redriven counts from the header `hapax-redriven-at`.
//!
//! # Log
//! The client library (lapin) logs a message that was routed to no queue, with its payload, as a warning of the
//! target `lapin::returned_messages`. Filter it where payloads must not be in a log; the program `hapax` does.
//!
//! # Settings that are checked
//! [`RabbitSourceBuilder::start`] rejects a queue that does not exist or cannot be consumed, a name of a queue over
//! 220 bytes, and a `longest_handler` that is not below `consumer_timeout`. It creates no queue except delay queues, whose names are that of the queue, `.delay-` and a number of
//! seconds, a power of two. They stay until someone deletes them: RabbitMQ deletes a quorum queue that expires
//! with the messages in it.
//!
//! # Example
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use hapax_rabbitmq::{RabbitSink, RabbitSource};
//! let url = "amqp://invoices:secret@127.0.0.1:5672";
//! // A classic queue. Of a quorum queue, state the limit that it has.
//! let source = RabbitSource::builder(url, "invoices").delivery_limit(None).start().await?;
//! let sink = RabbitSink::builder(url)?.exchange("orders").connect().await?;
//! # drop((source, sink));
//! # Ok(()) }
//! ```

mod connection;
mod delay;
mod delivery;
mod frames;
mod login;
mod native;
mod network;
mod properties;
mod publisher;
mod settings;
mod sink;
mod source;
mod wrapped;

pub use connection::RabbitUrlError;
pub use login::{RabbitCertificateError, RabbitLogin};
pub use properties::queue_of_origin;
pub use settings::{RabbitOrderKey, RabbitStartError};
pub use sink::{RabbitSink, RabbitSinkBuilder};
pub use source::{RabbitSource, RabbitSourceBuilder};

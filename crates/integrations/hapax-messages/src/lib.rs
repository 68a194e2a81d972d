//! Message consumers that handle each message once, and a relay that publishes an outbox.
//!
//! Brokers deliver a message again when an acknowledgement is lost, a consumer dies or is cut off, or
//! a producer sends it twice. An [`Inbox`] handles each id once. An outbox holds messages that were
//! written in the same transaction as the rows that they report; a [`Relay`] publishes each at least
//! once, and the inboxes behind it drop the repetitions. This crate knows no broker and no database:
//!
//! | part | interface | implementations |
//! | --- | --- | --- |
//! | broker to receive from | [`MessageSource`] | `hapax-nats` |
//! | broker or service to publish to | [`MessageSink`] | `hapax-nats`, `hapax-webhooks` (feature `sink`) |
//! | records of ids | [`Store`](hapax_core::Store) | file, Redis, PostgreSQL, memory |
//! | ids beside the handler's rows | [`BatchInbox`] | `hapax-postgres-messages` |
//! | dead letters | [`DeadLetters`] | `hapax-postgres-messages`, [`PublishedDeadLetters`] |
//! | rows to publish | [`Outbox`] | `hapax-postgres-messages` |
//!
//! # Modes
//! The mode of a consumer follows from the place of its effects:
//!
//! - *Claims* ([`Inbox`]): effects anywhere, records in any store, two writes for each id. The
//!   handler of a process that dies is executed again, if the inbox says [`reexecute`]. So the effect
//!   itself is safe to repeat, by [`LeaseHandle::downstream`](hapax_core::LeaseHandle::downstream) for
//!   instance, or the inbox says [`block`] or [`reconcile_with`].
//! - *Claims with a transaction* ([`InboxBuilder::transactions`]): effects are rows of the database
//!   that has the records, and commit with the record of the message. A second execution has no second
//!   effect. Duplicates see the claim, and wait for no transaction.
//! - *Direct* ([`BatchConsumer`]): effects are rows, and many messages share one transaction with
//!   their ids. The least cost for each id, and no order among messages.
//!
//! # Promises
//! 1. A message is acknowledged after its effects and its id are durable. A crash at any point leads
//!    to another delivery, and at most to another execution, never to a lost message.
//! 2. The id of a message is found by [`IdRules`] and within the scope of its consumer. A message
//!    without a valid id, with the id of another payload, or older than the retention of ids becomes
//!    a [`DeadLetter`]; nothing else stops.
//! 3. A duplicate of a message in flight is held, not acknowledged: if the execution fails, one of
//!    them is executed.
//! 4. Attempts are counted before the handler begins, in the store. A message whose process died is a
//!    *suspect*: it is executed while no other message is, so that a message that ends its process
//!    makes a dead letter of itself and of no other one.
//! 5. A dead letter is stored before the record says that its message is parked, and the record
//!    before the acknowledgement.
//! 6. While the store is unavailable nothing is received, messages in hand are held, and none
//!    becomes a dead letter. A message whose dead letter cannot be stored is held, and no other one.
//! 7. With [`InboxBuilder::ordered`], messages with one order key are handled in the order in which
//!    the source delivers them, and those behind a dead letter are parked. A source that delivers one
//!    key to several processes at a time, or a message behind another before it again, has no such
//!    order.
//! 8. A redriven message is handled if its record was released, and its letter is removed then. For
//!    other consumers that receive the copy it is a duplicate.
//!
//! Not promised: an order that the broker does not keep; effects outside of a transaction that are
//! not safe to repeat, under `reexecute`; duplicates that arrive after the retention, except that
//! they become dead letters.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use hapax_core::{Idempotency, MemoryStore};
//! use hapax_messages::{
//!     Consumer, ConsumerLimits, DeadLetters, HandledMessage, Inbox, MessageFailure, MessageSource,
//! };
//!
//! # fn example(
//! #     source: Arc<dyn MessageSource>,
//! #     dead_letters: Arc<dyn DeadLetters>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! async fn send_invoice(message: HandledMessage) -> Result<(), MessageFailure> {
//!     // The mail service has one effect for each key, in every attempt the same.
//!     let key = message.lease().downstream();
//!     println!("mail {} under {}", message.message().payload.len(), key.as_str());
//!     Ok(())
//! }
//!
//! # async fn stopped() {}
//! let engine = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
//! let inbox = Inbox::builder("invoices", engine).reexecute().dead_letters(dead_letters).build()?;
//! let consumer = Consumer::new(inbox, source, send_invoice, ConsumerLimits::default());
//! tokio::spawn(consumer.run(stopped()));
//! # Ok(()) }
//! ```
//!
//! [`block`]: InboxBuilder::block
//! [`reconcile_with`]: InboxBuilder::reconcile_with
//! [`reexecute`]: InboxBuilder::reexecute

mod batch;
mod blocked;
mod consumer;
mod dead_letter;
mod handler;
mod id;
mod inbox;
mod message;
mod outbox;
mod relay;
mod retention;
mod sink;
mod source;

pub use batch::{
    BatchConsumer, BatchConsumerError, BatchConsumerLimits, BatchError, BatchInbox, BatchItem,
    BatchMonitor, BatchOptions, EntryState,
};
pub use consumer::{Consumer, ConsumerLimits, ConsumerMonitor, ConsumerStats};
pub use dead_letter::{
    DeadLetter, DeadLetterError, DeadLetterReason, DeadLetters, PublishedDeadLetters,
};
pub use handler::{FailureCause, HandledMessage, MessageFailure, MessageHandler};
pub use id::{IdRule, IdRules, MessageId, MessageIdError};
pub use inbox::{Attempts, Inbox, InboxBuilder, InboxError, MessageReconcileCall, TooOld};
pub use message::{Message, Position};
pub use outbox::{
    OUTBOX_SHARDS, Outbox, OutboxError, OutboxFuture, OutboxLag, OutboxMessage, OutboxPage,
    OutboxPlace, OutboxQuery, OutboxWriters,
};
pub use relay::{Relay, RelayError, RelayLimits, RelayMonitor, RelayStats};
pub use sink::{MessageSink, OutgoingMessage, PublishError};
pub use source::{Delivery, MessageSource, SourceError, SourceLimits};

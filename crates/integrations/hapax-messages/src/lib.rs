//! Message consumers that handle each message once, and a relay that publishes an outbox.
//!
//! Brokers deliver a message again when an acknowledgement is lost, a consumer dies or is cut off,
//! or a producer sends it twice. An [`Inbox`] handles each id once. An outbox holds messages that
//! were written in the same transaction as the rows that they report; a [`Relay`] publishes each at
//! least once, and the inboxes behind it drop the repetitions. This crate depends on no broker and
//! no database:
//!
//! | part | interface | implementations |
//! | --- | --- | --- |
//! | broker to receive from | [`MessageSource`] | `hapax-nats`, `hapax-rabbitmq`, `hapax-kafka` |
//! | broker or service to publish to | [`MessageSink`] | `hapax-nats`, `hapax-rabbitmq`, `hapax-kafka`, `hapax-webhooks` (feature `sink`) |
//! | records of ids | [`Store`](hapax_core::Store) | file, Redis, PostgreSQL, memory |
//! | ids beside the handler's rows | [`BatchInbox`] | `hapax-postgres-messages` |
//! | positions beside the handler's rows | [`PositionStore`] | `hapax-postgres-messages` |
//! | dead letters | [`DeadLetterStore`] | `hapax-postgres-messages`, [`PublishedDeadLetters`] |
//! | rows to publish | [`Outbox`] | `hapax-postgres-messages` |
//!
//! # Modes
//! Choose the mode of a consumer by where its effects are:
//!
//! - *Claim mode* ([`Inbox`]): effects anywhere, records in any store, two writes for each id. The
//!   processes of a consumer share the store. A file is for one process, whose disk outlives it:
//!   replicas that have a file each handle a message once each, and nothing detects that. After a
//!   crash [`reexecute`] executes the handler again: the effect must be safe to repeat, for instance
//!   by [`LeaseHandle::downstream`](hapax_core::LeaseHandle::downstream). If it is not, choose
//!   [`block`] or [`reconcile_with`].
//! - *Claim mode with a transaction* ([`InboxBuilder::transactions`]): effects are rows of the
//!   database that has the records, and commit with the record of the message. A second execution
//!   has no second effect. Duplicates see the claim, and do not wait for a transaction.
//! - *Batch mode* ([`BatchConsumer`]): effects are rows, and the messages of a batch share one
//!   transaction with their ids. It has the lowest cost for each id, and keeps no order of
//!   messages.
//! - *Positions mode*: batch mode with a source that has the positions of its partitions in the
//!   database of the rows ([`PositionStore`]), such as Kafka. The position advances in the transaction of
//!   a batch, so that a record that is delivered again is not handled again, with or without ids. The
//!   messages of a partition are handled in order.
//!
//! # Guarantees
//! 1. A message is acknowledged after its effects and its id are durable. A crash at any point
//!    leads to another delivery, and at most to another execution, never to a lost message.
//! 2. The id of a message is found by [`IdRules`] and within the scope of its consumer. A message
//!    without a valid id, with the id of another payload, or older than the retention of ids
//!    (except in positions mode, or with [`OnTooOld::Handle`]), becomes a [`DeadLetter`]; nothing else stops.
//! 3. A duplicate of a message in flight is held, not acknowledged: if the execution fails, one of
//!    them is executed.
//! 4. Attempts are counted in the store before the handler begins; in batch mode all but the first.
//!    A message whose last owner died, in batch mode each that was delivered before, is a *suspect*
//!    (a possible poison message): it is handled while no other message is. So only the message that
//!    crashes its process becomes a dead letter.
//! 5. A dead letter is stored before the record says that its message is parked, and the record
//!    before the acknowledgement.
//! 6. While the store is unavailable nothing is received, unacknowledged messages are held, and
//!    none becomes a dead letter. A message whose dead letter cannot be stored is held, and no
//!    other one.
//! 7. With [`InboxBuilder::ordered`], which needs a source with order keys, messages with one order key are handled in the order in which
//!    the source delivers them, and those behind a dead letter are parked. A source that delivers
//!    one key to several processes at a time, or a message behind another before it again, has no
//!    such order.
//! 8. A redriven message is handled if its record was released, and its dead letter is removed
//!    then. With an order key it is handled if its dead letter is the oldest with that key. For other consumers that receive the copy it is a duplicate.
//!
//! Not guaranteed:
//!
//! - an order that the broker does not keep;
//! - one effect under `reexecute`, if the effect is outside of a transaction and not safe to
//!   repeat;
//! - the detection of a duplicate that arrives after the retention. It becomes a dead letter
//!   ([`OnTooOld`]) if it was published longer ago than the retention; if the producer published it
//!   again later, the source does not know the time, or in positions mode, it is handled a second time.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use hapax_core::{Idempotency, MemoryStore};
//! use hapax_messages::{
//!     Consumer, ConsumerLimits, DeadLetterStore, MessageExecution, Inbox, MessageFailure,
//!     MessageSource,
//! };
//!
//! # fn example(
//! #     source: Arc<dyn MessageSource>,
//! #     dead_letters: Arc<dyn DeadLetterStore>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! async fn send_invoice(execution: MessageExecution) -> Result<(), MessageFailure> {
//!     // The key is the same in every attempt, so that the mail service sends one mail.
//!     let key = execution.lease().downstream();
//!     println!("mail {} under {}", execution.message().payload.len(), key.as_str());
//!     Ok(())
//! }
//!
//! # async fn stopped() {}
//! let engine = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
//! let inbox = Inbox::builder("invoices", engine).reexecute().dead_letters(dead_letters).build()?;
//! let consumer = Consumer::new(inbox, source, send_invoice, ConsumerLimits::default())?;
//! tokio::spawn(consumer.run(stopped()));
//! # Ok(()) }
//! ```
//!
//! [`block`]: InboxBuilder::block
//! [`reconcile_with`]: InboxBuilder::reconcile_with
//! [`reexecute`]: InboxBuilder::reexecute

mod batch;
mod consumer;
mod dead_letter;
mod failures;
mod handler;
mod id;
mod inbox;
mod message;
mod outbox;
mod partition;
mod relay;
mod retention;
mod sink;
mod source;

pub use batch::{
    BatchAttempt, BatchConsumer, BatchConsumerError, BatchConsumerLimits, BatchError, BatchInbox,
    BatchItem, BatchMonitor, BatchOptions, EntryState,
};
pub use consumer::{
    Consumer, ConsumerError, ConsumerLimits, ConsumerMonitor, ConsumerStats, FullLimit,
};
pub use dead_letter::{
    DeadLetter, DeadLetterError, DeadLetterReason, DeadLetterStore, OrderKeyQuery, OrderKeyState,
    PublishedDeadLetters,
};
pub use handler::{FailureCause, MessageExecution, MessageFailure, MessageHandler};
pub use id::{IdRule, IdRules, MessageId, MessageIdError};
pub use inbox::{Attempts, Inbox, InboxBuilder, InboxError, MessageReconcileCall, OnTooOld};
pub use message::{LogPosition, Message};
pub use outbox::{
    OUTBOX_SHARDS, Outbox, OutboxError, OutboxFuture, OutboxLag, OutboxMessage, OutboxPage,
    OutboxPosition, OutboxQuery, OutboxWriters,
};
pub use partition::{AcquiredPosition, Partition, PositionError, PositionStep, PositionStore};
pub use relay::{Relay, RelayError, RelayLimits, RelayMonitor, RelayStats};
pub use sink::{MessageSink, OutgoingMessage, PublishError};
pub use source::{Delivery, MessageSource, SourceError, SourceLimits};

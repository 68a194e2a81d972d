//! Kafka as [`MessageSource`](hapax_messages::MessageSource) and
//! [`MessageSink`](hapax_messages::MessageSink).
//!
//! # Guarantees
//! - *Source*: the committed offset of a partition never passes a record that is not acknowledged. Later
//!   records that are acknowledged already are received again after a crash or a rebalance, and are
//!   duplicates then: their ids are in the store of the inbox.
//! - One thread polls. Neither handlers nor requests to brokers or databases delay it, except while partitions
//!   are revoked. A partition pauses at 10,000 unacknowledged records, 64 MiB of them, or 100,000 records from the
//!   first unacknowledged one on: further records stay in the client. Other partitions continue, also if a leader
//!   does not answer.
//! - *Pauses*: a record that waits for its next attempt is returned to the source until then, and with
//!   [`order_by_key`](KafkaSourceBuilder::order_by_key) the source keeps later records of its key until it is acknowledged.
//!   They count for [`max_waiting`](KafkaSourceBuilder::max_waiting), and other keys continue. In positions mode later
//!   records of the partition wait.
//! - *Order*: the records of a partition are delivered in order, and so those of a key. An ordered inbox
//!   ([`KafkaSourceBuilder::order_by_key`]) handles the messages of a key one after the other.
//! - Partitions that are *revoked*, because a member joins or leaves, are drained: no record is delivered,
//!   deliveries in progress have some [time](KafkaSourceBuilder::drain_for) to end, acknowledged records are
//!   committed, and the deliveries that are left are fenced: their acknowledgements are errors. Partitions
//!   that are *lost*, because the process was too slow, are fenced at once.
//! - *Suspects*: Kafka does not mark a record that was delivered before. The metadata of each commit does:
//!   `open` with an offset before which records may have been delivered, and `clean` if none was left after a
//!   drain. If the metadata is missing or of another program, it counts as `open`. Records that may have been delivered
//!   before are [redeliveries](hapax_messages::Delivery::is_redelivery): in batch mode their attempts are
//!   counted, and they are handled one at a time. In claim mode the store has their attempts.
//! - A committed offset outside of its log stops the partition, and [`receive`] returns an error with the
//!   cause. So does a topic that was created again: the record before the next one has another timestamp or checksum than
//!   the one that was received, or the topic another id. That is checked at each assignment, after each error about the
//!   topic or partition, and when the start, the end or the leader epoch of the log goes back; meanwhile nothing of the
//!   partition is delivered or committed. No offset is ever reset by the source.
//!   [`KafkaSourceBuilder::start_at`] applies to partitions without a committed offset, and
//!   [`KafkaSourceBuilder::retention`] rejects those whose records are older.
//! - *Positions mode* ([`KafkaSourceBuilder::positions`]): the positions are in the database of the
//!   handler's rows, and advance in their transactions. A record has one effect, however often it is
//!   delivered. The member to which a partition is assigned acquires its position: that waits for a
//!   transaction of the previous owner, and fences it. The committed offsets follow.
//! - *Sink*: [`publish`](hapax_messages::MessageSink::publish) returns after all replicas in sync have
//!   the record.
//!
//! Kafka itself does not guarantee:
//!
//! - that a record which it has confirmed survives a power loss: brokers confirm records that are in
//!   memory. Give topics three replicas on hosts that do not fail together, and `min.insync.replicas=2`.
//! - that a producer publishes a message once: a relay publishes again each message that was not confirmed.
//!   So an inbox keeps ids from the header `message-id`, for its retention. With
//!   [`IdRule::Position`](hapax_messages::IdRule::Position) such a message has two ids.
//! - an order over partitions, or of a key when the number of partitions changes.
//! - a way to tell a topic that was created again from the one before: its name is the same. It is detected as above,
//!   from what the client logs (debugging context `topic`), since the client returns neither ids of topics nor errors after
//!   which it fetches again. If no record was being fetched while the topic did not exist, as of a paused partition, brokers
//!   before Kafka 3.1 do not reject the next fetch: by the id it is detected later, and before 2.8, without ids, only by the
//!   offsets.
//!
//! # Limits
//! - Kafka transactions are not used: nothing that is available to the tests of this crate can test them.
//!   Records of other producers' aborted transactions are not received.
//! - The committed offset passes control records, as of transactions, while the partition is assigned. In positions mode the
//!   position in the database does not: if the last offsets of a partition are those of control records, and retention deletes
//!   the records before them, the partition stops at its next assignment as if records were lost. Set the position.
//! - A record without a value has an empty payload; one that is redriven has none again. A header whose name is not UTF-8 is left out, with a
//!   warning: the client panics at it, so that a program whose panics abort must not receive such records.
//!
//! # Properties
//! Properties are those of librdkafka. Other values than these are rejected:
//!
//! | property | required | reason |
//! | --- | --- | --- |
//! | `enable.auto.commit`, `enable.auto.offset.store` | false | the client would commit records that are not handled |
//! | `auto.offset.reset` | error | a group would skip or repeat records |
//! | `isolation.level` | read_committed | records of aborted transactions would be handled |
//! | `partition.assignment.strategy` | `range`, `roundrobin` | a commit during a cooperative rebalance may lose the assignment |
//! | `group.protocol` | classic | the other protocol has no eager assignment |
//! | `group.id` | that of the source | |
//! | `enable.idempotence`, of a sink | true | a retry of the client would repeat and reorder records |
//! | `allow.auto.create.topics`, of a sink | false | a mistyped destination would create a topic |
//! | `acks`, of a sink | all | a confirmed record would be lost with its broker |
//!
//! Other defaults than those of librdkafka: of sources, `socket.timeout.ms` 10,000, `queued.min.messages`
//! 10,000, `queued.max.messages.kbytes` 1,024, `fetch.queue.backoff.ms` 10, `topic.metadata.refresh.interval.ms` 30,000 and
//! `partition.assignment.strategy` `range`; of sinks, `message.timeout.ms` 9,000 and `partitioner`
//! `murmur2_random`. Set `session.timeout.ms` (45,000) to the time for which a dead process may delay its
//! partitions.
//!
//! For each partition, the client fetches ahead until it has `queued.min.messages` records or
//! `queued.max.messages.kbytes` of payloads, and exceeds that by at most one fetch (`fetch.message.max.bytes`,
//! 1 MiB). Each uncompressed record in a queue keeps the whole response of its broker in memory
//! (`fetch.max.bytes`, 50 MiB).
//!
//! # Example
//! ```no_run
//! # use std::sync::Arc;
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use hapax_kafka::{KafkaSink, KafkaSource};
//! let properties = [("bootstrap.servers", "127.0.0.1:9092")];
//! let source = KafkaSource::builder(properties, ["orders"], "invoices").order_by_key();
//! let source = Arc::new(source.start().await?);
//! let sink = KafkaSink::new(properties)?;
//! # drop(sink);
//! // After the consumer has ended:
//! source.close().await;
//! # Ok(()) }
//! ```
//!
//! Invoices in PostgreSQL, in positions mode. The inbox also keeps ids, since a relay may publish a
//! message again.
//! ```no_run
//! # use std::{sync::Arc, time::Duration};
//! # use deadpool_postgres::Object;
//! # use hapax_core::store::BoxFuture;
//! # use hapax_postgres_data::Pooled;
//! use hapax_kafka::KafkaSource;
//! use hapax_messages::{BatchConsumer, BatchItem, BatchOptions, MessageFailure};
//! use hapax_postgres_messages::{Connections, PgInbox};
//!
//! fn invoice<'a>(
//!     connection: &'a mut Pooled<Object>,
//!     messages: &'a [BatchItem],
//! ) -> BoxFuture<'a, Result<(), MessageFailure>> {
//!     Box::pin(async move {
//!         for item in messages {
//!             let order = &item.message().payload[..];
//!             connection.execute("INSERT INTO invoices (order_document) VALUES ($1)", &[&order]).await?;
//!         }
//!         Ok(())
//!     })
//! }
//!
//! # async fn example(connections: Connections<Pooled<Object>>) -> Result<(), Box<dyn std::error::Error>> {
//! # async fn stopped() {}
//! let month = Duration::from_secs(30 * 24 * 60 * 60);
//! let inbox = Arc::new(PgInbox::new("invoices", connections, month, invoice).advance_positions());
//! let properties = [("bootstrap.servers", "127.0.0.1:9092")];
//! let source = KafkaSource::builder(properties, ["orders"], "invoices").order_by_key();
//! let source = Arc::new(source.positions(inbox.clone()).start().await?);
//! let consumer = BatchConsumer::new(inbox, source.clone(), BatchOptions::default())?;
//! consumer.run(stopped()).await;
//! source.close().await;
//! # Ok(()) }
//! ```
//!
//! [`receive`]: hapax_messages::MessageSource::receive

mod config;
mod native;
mod sink;
mod source;

pub use config::KafkaStartError;
pub use sink::KafkaSink;
pub use source::{KafkaSource, KafkaSourceBuilder, KafkaStartAt, StoppedPartition};

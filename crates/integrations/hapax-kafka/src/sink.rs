//! The sink: an idempotent producer.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use hapax_core::store::BoxFuture;
use hapax_messages::{MessageSink, OutgoingMessage, PublishError};
use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use crate::config::{KafkaStartError, Properties, is_topic};

/// Publishes messages to the topic that is their destination, with the header `message-id`. The order
/// key is the key of the record.
///
/// - The producer is idempotent and waits for all replicas in sync (`enable.idempotence`, `acks=all`):
///   the client repeats a request without a second record. A message that is published again, because
///   it was not confirmed, may be in the topic twice. Consumers know it by its id.
/// - A topic that does not exist is a temporary error, because it may be created: the message is
///   published again later.
/// - A record over a limit of client, topic or broker, an invalid name of a topic, and a header name
///   that is empty or has a zero byte are permanently rejected.
/// - A producer with a fatal error is replaced. Its messages are not confirmed.
/// - Kafka has no deduplication by ids, so that [`OutgoingMessage::broker_id`] is not used.
#[derive(Clone)]
pub struct KafkaSink {
    config: Arc<ClientConfig>,
    producer: Arc<Mutex<Numbered>>,
}

type KafkaProducer = FutureProducer<SinkContext>;

/// A producer, and how many there were before it.
#[derive(Clone)]
struct Numbered {
    number: u64,
    producer: KafkaProducer,
}

/// The context of the client.
#[derive(Clone, Copy, Debug)]
struct SinkContext;

impl ClientContext for SinkContext {
    fn error(&self, error: KafkaError, reason: &str) {
        // The message that it is about has an error too.
        tracing::debug!(%error, reason, "the Kafka client reports an error");
    }
}

impl fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KafkaSink")
    }
}

impl KafkaSink {
    /// Creates a sink. `properties` are those of librdkafka, at least `bootstrap.servers`. Defaults are
    /// `message.timeout.ms` 9000, less than a relay waits, and `partitioner` `murmur2_random`, by which
    /// clients in Java choose partitions too. No broker has to be there yet.
    ///
    /// # Errors
    /// [`KafkaStartError`].
    pub fn new<K: Into<String>, V: Into<String>>(
        properties: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, KafkaStartError> {
        let config = Properties::new(properties).producer()?;
        let producer = Numbered { number: 0, producer: create(&config)? };
        Ok(Self { config: Arc::new(config), producer: Arc::new(Mutex::new(producer)) })
    }

    fn producer(&self) -> Numbered {
        self.producer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn send(&self, message: &OutgoingMessage) -> Result<(), PublishError> {
        if !is_topic(&message.destination) {
            return Err(PublishError::rejected(format!(
                "expected a topic of 1 to 249 letters, digits, dots, underscores and hyphens, found \
                 {:?}: change the destination",
                message.destination
            )));
        }
        let mut record = FutureRecord::<[u8], [u8]>::to(&message.destination)
            .payload(&message.payload)
            .headers(headers(message)?);
        if let Some(key) = &message.key {
            record = record.key(key.as_bytes());
        }
        let current = self.producer();
        let sent = match current.producer.send_result(record) {
            Ok(confirmed) => match confirmed.await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err((error, _))) => error,
                Err(_) => KafkaError::Canceled,
            },
            Err((error, _)) => error,
        };
        self.replace(&current);
        Err(failed(sent))
    }

    /// Replaces a producer that has a fatal error, unless another message has replaced it.
    fn replace(&self, failed: &Numbered) {
        let Some((code, reason)) = failed.producer.client().fatal_error() else { return };
        let mut current = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != failed.number {
            return;
        }
        match create(&self.config) {
            Ok(producer) => {
                tracing::warn!(%code, reason, "a Kafka producer with a fatal error is replaced");
                *current = Numbered { number: failed.number + 1, producer };
            }
            // The next message tries it again.
            Err(error) => tracing::warn!(%error, %code, "a Kafka producer was not replaced"),
        }
    }
}

fn create(config: &ClientConfig) -> Result<KafkaProducer, KafkaStartError> {
    config.create_with_context(SinkContext).map_err(KafkaStartError::Client)
}

fn failed(error: KafkaError) -> PublishError {
    match error.rdkafka_error_code() {
        Some(
            RDKafkaErrorCode::MessageSizeTooLarge
            | RDKafkaErrorCode::MessageBatchTooLarge
            | RDKafkaErrorCode::InvalidTopic
            | RDKafkaErrorCode::InvalidRecord,
        ) => PublishError::rejected(error),
        _ => PublishError::not_acknowledged(error),
    }
}

fn headers(message: &OutgoingMessage) -> Result<OwnedHeaders, PublishError> {
    let id = Header { key: "message-id", value: Some(message.id.as_str().as_bytes()) };
    let mut headers = OwnedHeaders::new_with_capacity(message.headers.len() + 1).insert(id);
    for (name, value) in &message.headers {
        if name.eq_ignore_ascii_case("message-id") {
            continue;
        }
        if name.is_empty() || name.contains('\0') {
            return Err(PublishError::rejected(format!(
                "the header {name:?}: expected a name without zero bytes, found another one: change it \
                 where the message is written"
            )));
        }
        headers = headers.insert(Header { key: name, value: Some(&value[..]) });
    }
    Ok(headers)
}

impl MessageSink for KafkaSink {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(self.send(message))
    }
}

//! The sink: an idempotent producer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_messages::{DeadLetter, MessageSink, OutgoingMessage, PublishError};
use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::metadata::MetadataTopic;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use tokio::time::{Instant, timeout};

use crate::config::{KafkaStartError, Properties, is_topic};
use crate::native::{NativeRecord, record_key};

/// Publishes messages to the topic that is their destination, with the header `message-id`. The order
/// key is the key of the record. A redriven record has the key that it had, byte for byte, or none, and is in its
/// partition, unless the topic has no longer that many.
///
/// - The producer is idempotent and waits for all replicas in sync (`enable.idempotence`, `acks=all`):
///   the client repeats a request without a second record. A message that is published again, because
///   it was not confirmed, may be in the topic twice. Consumers know it by its id.
/// - The sink creates no topic (`allow.auto.create.topics`). One that does not exist is a temporary error, because it may
///   be created: the message is published again later, and the error names the topic.
/// - A record over a limit of client, topic or broker, an invalid name of a topic, one that begins with `__`,
///   which Kafka reserves, and a header name that is empty or has a zero byte are permanently rejected. A broker rejects a whole batch if it is over
///   the limit: its messages are published again, each in a batch of its own, whose rejection decides.
/// - A producer with a fatal error is replaced. Its messages are not confirmed.
/// - Kafka has no deduplication by ids, so that [`OutgoingMessage::broker_id`] is not used.
#[derive(Clone)]
pub struct KafkaSink {
    batches: Arc<Producer>,
    /// Publishes each message in a batch of its own. It connects when it is used.
    singles: Arc<Producer>,
    topics: TopicChecks,
}

/// Time for the brokers to answer whether a topic exists, after a message was not confirmed, and for which the answer is
/// known.
const CHECK_TOPIC: Duration = Duration::from_secs(1);

/// Most topics whose answers are known.
const CHECKED_TOPICS: usize = 1_000;

/// Answers of the brokers whether topics are missing. One request at a time, which has the lock.
#[derive(Clone, Default)]
struct TopicChecks(Arc<tokio::sync::Mutex<HashMap<String, (Instant, bool)>>>);

type KafkaProducer = FutureProducer<SinkContext>;

/// A producer that is replaced after a fatal error.
struct Producer {
    config: ClientConfig,
    current: Mutex<Option<NumberedProducer>>,
}

/// A producer, and the number of those before it.
#[derive(Clone)]
struct NumberedProducer {
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
        let mut single = config.clone();
        single.set("batch.num.messages", "1");
        let (batches, singles) = (Producer::new(config), Producer::new(single));
        batches.current()?;
        let (batches, singles) = (Arc::new(batches), Arc::new(singles));
        Ok(Self { batches, singles, topics: TopicChecks::default() })
    }

    /// Checks that a broker answers within a time.
    ///
    /// # Errors
    /// [`PublishError::NotAcknowledged`].
    pub async fn check_brokers(&self, timeout: Duration) -> Result<(), PublishError> {
        let current = self.batches.current().map_err(PublishError::not_acknowledged)?;
        let check = move || current.producer.client().fetch_metadata(None, timeout).map(drop);
        let checked = tokio::task::spawn_blocking(check).await;
        checked.unwrap_or(Err(KafkaError::Canceled)).map_err(|error| {
            PublishError::not_acknowledged(format!(
                "expected an answer of the Kafka brokers within {timeout:?}, found an error: {error}: check \
                 that they run and can be reached"
            ))
        })
    }

    async fn send(&self, message: &OutgoingMessage) -> Result<(), PublishError> {
        check_topic(&message.destination)?;
        let mut record = OutgoingRecord::new(message)?;
        let mut sent = self.send_record(&record).await;
        if record.partition.is_some() && sent.as_ref().is_err_and(Failure::is_unknown_partition) {
            // The topic has fewer partitions than it had: the partitioner chooses.
            record.partition = None;
            sent = self.send_record(&record).await;
        }
        let Err(failure) = sent else { return Ok(()) };
        let error = failure.error();
        match may_lack_topic(&error) && self.lacks_topic(message.destination.clone()).await {
            true => Err(PublishError::not_acknowledged(format!(
                "expected the topic {}, found none: create it, or correct the destination; the message is published \
                 again",
                message.destination
            ))),
            false => Err(failed(error)),
        }
    }

    async fn send_record(&self, record: &OutgoingRecord<'_>) -> Result<(), Failure> {
        match self.batches.send(record).await {
            Err(Failure::Broker(error)) if is_too_large(&error) => self.singles.send(record).await,
            sent => sent,
        }
    }

    /// Returns whether the brokers answer that a topic does not exist. Dropping the future does not matter: the request
    /// changes nothing.
    async fn lacks_topic(&self, topic: String) -> bool {
        let Ok(current) = self.batches.current() else { return false };
        let lacks = move |topic: &str, time| {
            let metadata = current.producer.client().fetch_metadata(Some(topic), time).ok()?;
            let found = metadata.topics().iter().find(|it| it.name() == topic);
            let error = found.and_then(MetadataTopic::error).map(RDKafkaErrorCode::from);
            Some(error == Some(RDKafkaErrorCode::UnknownTopicOrPartition))
        };
        self.topics.lacks(topic, lacks).await
    }
}

impl TopicChecks {
    /// Returns whether a topic is missing, by the known answer or that of `request`, which gets the time that is left.
    /// False if there is no answer in time. After the future is dropped, its request keeps the lock until it ends.
    async fn lacks(
        &self,
        topic: String,
        request: impl FnOnce(&str, Duration) -> Option<bool> + Send + 'static,
    ) -> bool {
        let begun = Instant::now();
        let lock = Arc::clone(&self.0).lock_owned();
        let Ok(mut answers) = timeout(CHECK_TOPIC, lock).await else { return false };
        answers.retain(|_, (at, _)| at.elapsed() < CHECK_TOPIC);
        if let Some((_, lacks)) = answers.get(&topic) {
            return *lacks;
        }
        let requested = tokio::task::spawn_blocking(move || {
            let lacks = request(&topic, CHECK_TOPIC.saturating_sub(begun.elapsed()))?;
            if answers.len() < CHECKED_TOPICS {
                answers.insert(topic, (Instant::now(), lacks));
            }
            Some(lacks)
        });
        requested.await.ok().flatten().unwrap_or(false)
    }
}

/// A record to publish.
struct OutgoingRecord<'a> {
    topic: &'a str,
    /// The partition of a redriven record; else the partitioner chooses.
    partition: Option<i32>,
    key: Option<Bytes>,
    value: Option<&'a [u8]>,
    headers: OwnedHeaders,
}

impl<'a> OutgoingRecord<'a> {
    /// Returns the record of a message. One that was redriven is as it was, apart from the headers of its id and its dead
    /// letter.
    fn new(message: &'a OutgoingMessage) -> Result<Self, PublishError> {
        let native = message.native.as_ref().and_then(NativeRecord::decode);
        let headers = headers(message, native.as_ref())?;
        let topic = &*message.destination;
        let value = Some(&message.payload[..]);
        Ok(match native {
            Some(NativeRecord { partition, key, has_null_value, .. }) => {
                let value = value.filter(|value| !has_null_value || !value.is_empty());
                Self { topic, partition: Some(partition), key, value, headers }
            }
            None => {
                let is_redriven = |(name, _): &(String, Bytes)| name == DeadLetter::REDRIVE_HEADER;
                let key = message.key.as_deref().map(|key| {
                    // An earlier release has stored the dead letter of a binary key with the order key only.
                    match message.headers.iter().any(is_redriven) {
                        true => record_key(key),
                        false => Bytes::copy_from_slice(key.as_bytes()),
                    }
                });
                Self { topic, partition: None, key, value, headers }
            }
        })
    }
}

/// Error of a publication.
enum Failure {
    /// The client did not accept the message.
    Client(KafkaError),
    /// The broker rejected the batch of the message, or did not confirm it.
    Broker(KafkaError),
}

impl Failure {
    fn is_unknown_partition(&self) -> bool {
        let (Self::Client(error) | Self::Broker(error)) = self;
        error.rdkafka_error_code() == Some(RDKafkaErrorCode::UnknownPartition)
    }

    fn error(self) -> KafkaError {
        match self {
            Self::Client(error) | Self::Broker(error) => error,
        }
    }
}

impl Producer {
    fn new(config: ClientConfig) -> Self {
        Self { config, current: Mutex::new(None) }
    }

    /// Returns the producer; creates it if there is none.
    fn current(&self) -> Result<NumberedProducer, KafkaError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(current) = &*current {
            return Ok(current.clone());
        }
        let producer = self.config.create_with_context(SinkContext)?;
        Ok(current.insert(NumberedProducer { number: 0, producer }).clone())
    }

    async fn send(&self, outgoing: &OutgoingRecord<'_>) -> Result<(), Failure> {
        let mut record = FutureRecord::<[u8], [u8]>::to(outgoing.topic);
        record.partition = outgoing.partition;
        (record.key, record.payload) = (outgoing.key.as_deref(), outgoing.value);
        record.headers = Some(outgoing.headers.clone());
        let current = self.current().map_err(Failure::Client)?;
        let failure = match current.producer.send_result(record) {
            Ok(confirmed) => match confirmed.await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err((error, _))) => Failure::Broker(error),
                Err(_) => Failure::Broker(KafkaError::Canceled),
            },
            Err((error, _)) => Failure::Client(error),
        };
        self.replace(&current);
        Err(failure)
    }

    /// Replaces a producer that has a fatal error, unless another message has replaced it.
    fn replace(&self, failed: &NumberedProducer) {
        let Some((code, reason)) = failed.producer.client().fatal_error() else { return };
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|current| current.number != failed.number) {
            return;
        }
        match self.config.create_with_context(SinkContext) {
            Ok(producer) => {
                tracing::warn!(%code, reason, "a Kafka producer with a fatal error is replaced");
                *current = Some(NumberedProducer { number: failed.number + 1, producer });
            }
            // The next message tries it again.
            Err(error) => tracing::warn!(%error, %code, "a Kafka producer was not replaced"),
        }
    }
}

/// Rejects a name that no topic has, and one of Kafka's own topics (`__consumer_offsets`,
/// `__transaction_state`): who writes a message must not write these by the sink's permissions.
fn check_topic(topic: &str) -> Result<(), PublishError> {
    if !is_topic(topic) {
        return Err(PublishError::rejected(format!(
            "expected a topic of 1 to 249 letters, digits, dots, underscores and hyphens, found \
             {topic:?}: change the destination"
        )));
    }
    if topic.starts_with("__") {
        return Err(PublishError::rejected(format!(
            "expected a topic of the application, found {topic:?}: Kafka reserves names that begin with __; \
             change the destination"
        )));
    }
    Ok(())
}

/// Returns whether an error is what the client returns for a topic that does not exist, among others.
fn may_lack_topic(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::MessageTimedOut
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownPartition
        )
    )
}

/// Returns whether a batch is over a limit of the topic or broker.
fn is_too_large(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(RDKafkaErrorCode::MessageSizeTooLarge | RDKafkaErrorCode::MessageBatchTooLarge)
    )
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

fn headers(
    message: &OutgoingMessage,
    native: Option<&NativeRecord>,
) -> Result<OwnedHeaders, PublishError> {
    let null_headers = native.map_or(&[][..], |native| &native.null_headers);
    let id = Header { key: "message-id", value: Some(message.id.as_str().as_bytes()) };
    let mut headers = OwnedHeaders::new_with_capacity(message.headers.len() + 1).insert(id);
    for (index, (name, value)) in message.headers.iter().enumerate() {
        if name.eq_ignore_ascii_case("message-id") {
            continue;
        }
        // A redriven record keeps one without a name, which only records of other producers have.
        if (name.is_empty() && native.is_none()) || name.contains('\0') {
            return Err(PublishError::rejected(format!(
                "expected a header's name of at least 1 byte without zero bytes, found {name:?}: change it where \
                 the message is written"
            )));
        }
        let is_null = value.is_empty() && null_headers.binary_search(&index).is_ok();
        headers = headers.insert(Header { key: name, value: (!is_null).then_some(&value[..]) });
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_topic_is_requested_at_a_time_and_its_answer_is_known_for_a_second() {
        let (topics, requests) = (TopicChecks::default(), Arc::new(AtomicUsize::new(0)));
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (answer, answered) = std::sync::mpsc::channel();
        let request = |topics: &TopicChecks, topic: &str, answer: Option<bool>| {
            let (topics, topic, requests) =
                (topics.clone(), topic.to_owned(), Arc::clone(&requests));
            async move {
                let request = move |_: &str, _| {
                    requests.fetch_add(1, Ordering::SeqCst);
                    answer
                };
                topics.lacks(topic, request).await
            }
        };
        let held = topics.clone();
        // The future is dropped, and its request goes on.
        let dropped = tokio::spawn(async move {
            let request = move |_: &str, _| {
                begun.send(()).unwrap();
                answered.recv().unwrap()
            };
            held.lacks("oders".to_owned(), request).await
        });
        while has_begun.try_recv().is_err() {
            tokio::task::yield_now().await;
        }
        dropped.abort();
        let waiting = tokio::spawn(request(&topics, "other", Some(true)));
        tokio::task::yield_now().await;
        tokio::time::advance(CHECK_TOPIC).await;
        assert!(!waiting.await.unwrap(), "no answer in time");
        assert_eq!(requests.load(Ordering::SeqCst), 0);
        answer.send(Some(true)).unwrap();
        let (one, two) = (request(&topics, "oders", Some(false)), request(&topics, "oders", None));
        assert_eq!(tokio::join!(one, two), (true, true), "the answer is known");
        assert_eq!(requests.load(Ordering::SeqCst), 0);
        assert!(!request(&topics, "orders", None).await, "an error is no answer");
        assert!(request(&topics, "orders", Some(true)).await);
        assert_eq!(requests.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_topic_of_kafka_itself_or_an_invalid_one_is_rejected() {
        let long = "x".repeat(250);
        for topic in ["__consumer_offsets", "__transaction_state", "__", "", "..", "a b", &long] {
            let checked = check_topic(topic);
            assert!(matches!(checked, Err(PublishError::Rejected(_))), "{topic}: {checked:?}");
        }
        for topic in ["orders", "_orders", "orders.__x", &long[..249]] {
            check_topic(topic).unwrap();
        }
    }
}

//! The brokers of runs, and the sources of their messages.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::PullConsumer;
#[cfg(feature = "kafka")]
use hapax_kafka::{KafkaSink, KafkaSource};
use hapax_messages::{MessageId, MessageSink, MessageSource, OutgoingMessage};
use hapax_nats::NatsSource;
use hapax_rabbitmq::{RabbitSink, RabbitSource};
#[cfg(feature = "kafka")]
use hapax_testkit::servers::KafkaMock;
use hapax_testkit::servers::{NatsServer, RabbitMqServer};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::consumer::LEASE;
use crate::{ConsumersError, failed};

/// Name of the stream, of the queue or topic, and of the consumer.
const STREAM: &str = "ORDERS";
const DESTINATION: &str = "orders";
pub(crate) const CONSUMER: &str = "orders";

#[cfg(feature = "kafka")]
const PARTITIONS: i32 = 6;

/// Messages that are published at the same time.
const CHUNK: usize = 500;

/// A kind of broker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum BrokerKind {
    /// NATS JetStream.
    #[default]
    Nats,
    /// RabbitMQ, with a classic queue.
    #[value(name = "rabbitmq")]
    RabbitMq,
    /// The mock cluster of librdkafka: when it is killed, connections end, and its log stays.
    #[cfg(feature = "kafka")]
    Kafka,
}

impl BrokerKind {
    /// Returns the name that the command line has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nats => "nats",
            Self::RabbitMq => "rabbitmq",
            #[cfg(feature = "kafka")]
            Self::Kafka => "kafka",
        }
    }
}

/// A private broker.
pub(crate) enum Broker {
    Nats {
        server: Box<NatsServer>,
        context: Context,
    },
    RabbitMq(Box<RabbitMqServer>),
    #[cfg(feature = "kafka")]
    Kafka(KafkaMock),
}

impl Broker {
    pub(crate) async fn start(kind: BrokerKind) -> Result<Self, ConsumersError> {
        match kind {
            BrokerKind::Nats => {
                let server = Box::new(NatsServer::start().await);
                let context =
                    hapax_nats::jetstream(&server.url()).await.map_err(failed("connecting"))?;
                hapax_nats::create_stream(&context, STREAM, &["orders.>"])
                    .await
                    .map_err(failed("creating the stream"))?;
                Ok(Self::Nats { server, context })
            }
            BrokerKind::RabbitMq => {
                let server = RabbitMqServer::start().await;
                server.declare_queue(DESTINATION).await;
                Ok(Self::RabbitMq(Box::new(server)))
            }
            #[cfg(feature = "kafka")]
            BrokerKind::Kafka => Ok(Self::Kafka(KafkaMock::start(DESTINATION, PARTITIONS))),
        }
    }

    /// Returns the URL for [`open`].
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Nats { server, .. } => server.url(),
            // Each second, so that the server notices a process that is frozen.
            Self::RabbitMq(server) => format!("{}?heartbeat=1", server.url()),
            #[cfg(feature = "kafka")]
            Self::Kafka(mock) => format!("kafka://{}", mock.bootstrap()),
        }
    }

    /// Publishes a message for each number.
    pub(crate) async fn publish(&self, numbers: &[u64]) -> Result<(), ConsumersError> {
        let sink: Arc<dyn MessageSink> = match self {
            // The sink would set the id that the broker itself deduplicates.
            Self::Nats { context, .. } => return publish_to_nats(context, numbers).await,
            Self::RabbitMq(server) => {
                let builder = RabbitSink::builder(&server.url()).map_err(failed("connecting"))?;
                Arc::new(builder.connect().await.map_err(failed("connecting"))?)
            }
            #[cfg(feature = "kafka")]
            Self::Kafka(mock) => {
                let properties = [("bootstrap.servers", mock.bootstrap())];
                Arc::new(KafkaSink::new(properties).map_err(failed("connecting"))?)
            }
        };
        for numbers in numbers.chunks(CHUNK) {
            let mut publishing = JoinSet::new();
            for number in numbers {
                let id = MessageId::new(id(*number)).map_err(failed("publishing"))?;
                let message = OutgoingMessage::new(DESTINATION, id, payload(*number));
                let sink = Arc::clone(&sink);
                publishing.spawn(async move { sink.publish(&message).await });
            }
            for published in publishing.join_all().await {
                published.map_err(failed("publishing"))?;
            }
        }
        Ok(())
    }

    /// Kills it, and starts it again after a time.
    pub(crate) async fn restart(&mut self, away: Duration) {
        match self {
            Self::Nats { server, .. } => {
                server.kill().await;
                tokio::time::sleep(away).await;
                server.restart().await;
            }
            Self::RabbitMq(server) => {
                server.kill().await;
                tokio::time::sleep(away).await;
                server.restart().await;
            }
            #[cfg(feature = "kafka")]
            #[allow(clippy::expect_used, reason = "a harness")]
            Self::Kafka(mock) => {
                mock.call(|mock| mock.broker_down(-1)).expect("a mock cluster");
                tokio::time::sleep(away).await;
                mock.call(|mock| mock.broker_up(-1)).expect("a mock cluster");
            }
        }
    }

    /// Returns the number of messages that the broker has to deliver, or waits to be acknowledged.
    pub(crate) async fn backlog(&self) -> u64 {
        match self {
            Self::Nats { context, .. } => {
                let info = async {
                    let stream = context.get_stream(STREAM).await.ok()?;
                    let mut consumer: PullConsumer = stream.get_consumer(CONSUMER).await.ok()?;
                    let info = consumer.info().await.ok()?;
                    Some(info.num_pending + u64::try_from(info.num_ack_pending).unwrap_or(0))
                };
                timeout(Duration::from_secs(5), info).await.ok().flatten().unwrap_or(u64::MAX)
            }
            Self::RabbitMq(server) => server.messages(DESTINATION).await,
            #[cfg(feature = "kafka")]
            Self::Kafka(mock) => tokio::task::block_in_place(|| {
                mock.lag(CONSUMER, DESTINATION, PARTITIONS).unwrap_or(u64::MAX)
            }),
        }
    }
}

/// The client limits the publications that are not confirmed.
async fn publish_to_nats(context: &Context, numbers: &[u64]) -> Result<(), ConsumersError> {
    for numbers in numbers.chunks(CHUNK) {
        let mut confirmations = Vec::with_capacity(numbers.len());
        for number in numbers {
            let mut headers = HeaderMap::new();
            headers.insert("message-id", id(*number).as_str());
            let published =
                context.publish_with_headers("orders.new", headers, payload(*number).into());
            confirmations.push(published.await.map_err(failed("publishing"))?);
        }
        for confirmation in confirmations {
            confirmation.await.map_err(failed("publishing"))?;
        }
    }
    Ok(())
}

/// Returns the id of a message.
pub(crate) fn id(number: u64) -> String {
    format!("m-{number}")
}

fn payload(number: u64) -> String {
    format!("{{\"order\":{number}}}")
}

/// A source that is open.
pub(crate) struct OpenSource {
    pub(crate) source: Arc<dyn MessageSource>,
    #[cfg(feature = "kafka")]
    kafka: Option<Arc<KafkaSource>>,
}

impl OpenSource {
    fn new(source: Arc<dyn MessageSource>) -> Self {
        Self {
            source,
            #[cfg(feature = "kafka")]
            kafka: None,
        }
    }

    /// Leaves the group of a Kafka cluster.
    pub(crate) async fn close(self) {
        #[cfg(feature = "kafka")]
        if let Some(source) = self.kafka {
            source.close().await;
        }
    }
}

/// Connects to the broker at a URL.
pub(crate) async fn open(url: &str) -> Result<OpenSource, ConsumersError> {
    const STARTING: &str = "starting the source";
    if url.starts_with("nats://") {
        let context = hapax_nats::jetstream(url).await.map_err(failed("connecting"))?;
        let builder =
            NatsSource::builder(context, STREAM, CONSUMER).ack_wait(LEASE).max_ack_pending(300);
        let source = builder.start().await.map_err(failed(STARTING))?;
        return Ok(OpenSource::new(Arc::new(source)));
    }
    #[cfg(feature = "kafka")]
    if let Some(brokers) = url.strip_prefix("kafka://") {
        let properties = [
            ("bootstrap.servers", brokers),
            ("session.timeout.ms", "3000"),
            ("heartbeat.interval.ms", "300"),
            ("max.poll.interval.ms", "6000"),
            ("reconnect.backoff.max.ms", "500"),
        ];
        let builder = KafkaSource::builder(properties, [DESTINATION], CONSUMER)
            .commit_every(Duration::from_millis(200))
            // A crash makes as many suspects, which batch mode handles one at a time.
            .max_unacknowledged(20)
            .drain_for(Duration::from_secs(1));
        let source = Arc::new(builder.start().await.map_err(failed(STARTING))?);
        let kafka = Some(Arc::clone(&source));
        return Ok(OpenSource { source, kafka });
    }
    let prefetch = NonZeroU16::MIN.saturating_add(99);
    // Without delay queues: a RabbitMQ node (3.10) that is killed just after a queue was declared starts it anew, without a
    // leader and without its time to live.
    let builder = RabbitSource::builder(url, DESTINATION)
        .prefetch(prefetch)
        .delivery_limit(None)
        .delay_from(None);
    Ok(OpenSource::new(Arc::new(builder.start().await.map_err(failed(STARTING))?)))
}

//! Brokers with messages.

use std::num::NonZeroUsize;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use hapax_kafka::{KafkaSink, KafkaSource};
use hapax_messages::{Message, MessageId, MessageSink, MessageSource, OutgoingMessage};
use hapax_rabbitmq::{RabbitSink, RabbitSource};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::RabbitMqServer;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use crate::{Outcome, PAYLOAD};

/// Messages that are published at a time.
const PUBLISHED: usize = 256;

/// Channels of the sink to RabbitMQ, each of which has one message in progress.
const CHANNELS: NonZeroUsize = NonZeroUsize::new(64).unwrap();

const PARTITIONS: i32 = 4;

pub enum Broker {
    /// Messages in memory.
    Memory,
    /// A mock cluster of librdkafka.
    Kafka(MockCluster<'static, DefaultProducerContext>),
    RabbitMq(RabbitMqServer),
}

impl Broker {
    pub const NAMES: [&str; 3] = ["memory", "kafka", "rabbitmq"];

    pub async fn start(name: &str) -> Outcome<Self> {
        Ok(match name {
            "memory" => Self::Memory,
            "kafka" => Self::Kafka(MockCluster::new(1)?),
            "rabbitmq" => Self::RabbitMq(RabbitMqServer::start().await),
            other => {
                return Err(format!("expected {:?} or all, found `{other}`", Self::NAMES).into());
            }
        })
    }

    /// Creates a queue with messages, and returns a source of them.
    pub async fn fill(&self, queue: &str, messages: u64) -> Outcome<Arc<dyn MessageSource>> {
        let id = |number| format!("{queue}-{number}");
        match self {
            Self::Memory => {
                let broker = MemoryBroker::default();
                for number in 0..messages {
                    let message = Message::new("memory://rate", PAYLOAD.to_vec());
                    broker.send(message.with_header("message-id", id(number)));
                }
                Ok(Arc::new(broker))
            }
            Self::Kafka(cluster) => {
                cluster.create_topic(queue, PARTITIONS, 1)?;
                let properties = [("bootstrap.servers", cluster.bootstrap_servers())];
                publish(&KafkaSink::new(properties.clone())?, queue, messages).await?;
                let source = KafkaSource::builder(properties, [queue], queue).start().await?;
                Ok(Arc::new(source))
            }
            Self::RabbitMq(server) => {
                server.declare_queue(queue).await;
                let sink = RabbitSink::builder(&server.url())?.channels(CHANNELS).connect().await?;
                publish(&sink, queue, messages).await?;
                let builder = RabbitSource::builder(server.url(), queue).delivery_limit(None);
                Ok(Arc::new(builder.start().await?))
            }
        }
    }
}

async fn publish(sink: &dyn MessageSink, queue: &str, messages: u64) -> Outcome<()> {
    let publish = |number| async move {
        let id = MessageId::new(format!("{queue}-{number}"))?;
        sink.publish(&OutgoingMessage::new(queue, id, PAYLOAD.to_vec())).await?;
        Ok(())
    };
    stream::iter(0..messages).map(publish).buffer_unordered(PUBLISHED).try_collect().await
}

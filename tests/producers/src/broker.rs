//! The brokers, and the messages that they have.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hapax_testkit::servers::{KafkaMock, NatsServer, RabbitMqServer};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{BorrowedMessage, Headers as _};
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};
use serde_json::{Value, json};

use crate::amqp::{self, text};
use crate::raw::Raw;

/// Result of a step of a run.
pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Kind of a broker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Rabbitmq,
    Nats,
    Kafka,
}

const PARTITIONS: i32 = 3;
const LIMIT: Duration = Duration::from_secs(60);

/// The place of one producer's messages: a queue, a stream or a topic.
pub(crate) struct Place<'a> {
    name: String,
    broker: Broker<'a>,
}

enum Broker<'a> {
    Rabbitmq(&'a RabbitMqServer),
    /// The server, a connection, and the sequence of the last message that was read.
    Nats(&'a NatsServer, async_nats::Client, u64),
    /// The brokers, and the offset of the next record to read of each partition.
    Kafka(KafkaMock, BTreeMap<i32, i64>),
}

/// Servers that all places share.
pub(crate) struct Servers {
    pub(crate) rabbitmq: Option<RabbitMqServer>,
    pub(crate) nats: Option<NatsServer>,
}

impl<'a> Place<'a> {
    /// Creates a queue, a stream or a topic.
    pub(crate) async fn create(servers: &'a Servers, kind: Kind, name: &str) -> Outcome<Self> {
        let broker = match (kind, &servers.rabbitmq, &servers.nats) {
            (Kind::Rabbitmq, Some(server), _) => {
                server.declare_queue(name).await;
                Broker::Rabbitmq(server)
            }
            (Kind::Nats, _, Some(server)) => {
                let client = async_nats::connect(server.url()).await?;
                let stream = json!({ "name": name, "subjects": [format!("{name}.>")] });
                ask(&client, &format!("STREAM.CREATE.{name}"), &stream).await?;
                Broker::Nats(server, client, 0)
            }
            (Kind::Kafka, ..) => Broker::Kafka(KafkaMock::start(name, PARTITIONS), BTreeMap::new()),
            _ => return Err("expected the server of the broker, found none".into()),
        };
        Ok(Self { name: name.to_owned(), broker })
    }

    /// Returns the address for a producer.
    pub(crate) fn address(&self) -> String {
        match &self.broker {
            Broker::Rabbitmq(server) => server.url(),
            Broker::Nats(server, ..) => server.url(),
            Broker::Kafka(mock, _) => mock.bootstrap().to_owned(),
        }
    }

    /// Returns the URL for a redrive.
    pub(crate) fn to(&self) -> String {
        match &self.broker {
            Broker::Rabbitmq(server) => format!("amqp://{}", server.address()),
            Broker::Nats(server, ..) => server.url(),
            Broker::Kafka(mock, _) => format!("kafka://{}", mock.bootstrap()),
        }
    }

    /// Returns the flags of the source of a consumer.
    pub(crate) fn flags(&self) -> Vec<String> {
        let to = self.to();
        let flags = match &self.broker {
            Broker::Rabbitmq(_) => {
                vec!["--from", &to, "--queue", &self.name, "--delivery-limit", "none"]
            }
            Broker::Nats(..) => vec!["--from", &to, "--stream", &self.name],
            Broker::Kafka(..) => {
                return vec!["--from".to_owned(), format!("{to}/{}", self.name)];
            }
        };
        flags.into_iter().map(str::to_owned).collect()
    }

    /// Returns the messages that were published since the last call, which stay where they are.
    pub(crate) async fn read(&mut self) -> Outcome<Vec<Raw>> {
        match &mut self.broker {
            Broker::Rabbitmq(server) => Ok(amqp::read(server.address(), &self.name).await?),
            Broker::Nats(_, client, last) => read_stream(client, &self.name, last).await,
            Broker::Kafka(mock, next) => {
                tokio::task::block_in_place(|| read_topic(mock.bootstrap(), &self.name, next))
            }
        }
    }

    /// Returns the number of messages that the consumer has not acknowledged.
    pub(crate) async fn left(&self, consumer: &str) -> Outcome<u64> {
        match &self.broker {
            Broker::Rabbitmq(server) => Ok(server.messages(&self.name).await),
            Broker::Nats(_, client, _) => {
                let subject = format!("CONSUMER.INFO.{}.{consumer}", self.name);
                let info = ask(client, &subject, &Value::Null).await?;
                let count = |name: &str| info[name].as_u64().unwrap_or_default();
                Ok(count("num_pending") + count("num_ack_pending"))
            }
            Broker::Kafka(mock, _) => {
                let lag = || mock.lag(consumer, &self.name, PARTITIONS);
                Ok(tokio::task::block_in_place(lag).unwrap_or(u64::MAX))
            }
        }
    }
}

/// Asks the JetStream of a server.
async fn ask(client: &async_nats::Client, subject: &str, request: &Value) -> Outcome<Value> {
    let request = if request.is_null() { String::new() } else { request.to_string() };
    let answer = client.request(format!("$JS.API.{subject}"), request.into()).await?;
    let answer: Value = serde_json::from_slice(&answer.payload)?;
    match &answer["error"] {
        Value::Null => Ok(answer),
        error => Err(format!("{subject}: {error}").into()),
    }
}

async fn read_stream(client: &async_nats::Client, name: &str, last: &mut u64) -> Outcome<Vec<Raw>> {
    let info = ask(client, &format!("STREAM.INFO.{name}"), &Value::Null).await?;
    let end = info["state"]["last_seq"].as_u64().unwrap_or_default();
    let mut all = Vec::new();
    for sequence in *last + 1..=end {
        let request = json!({ "seq": sequence });
        let answer = ask(client, &format!("STREAM.MSG.GET.{name}"), &request).await?;
        let part = |name: &str| {
            BASE64_STANDARD.decode(answer["message"][name].as_str().unwrap_or_default())
        };
        let mut raw = Raw { payload: part("data")?, ..Raw::default() };
        raw.fields.insert("subject".to_owned(), answer["message"]["subject"].to_string());
        let headers = part("hdrs")?;
        // The first line is the version, and the last one is empty.
        for line in lines(&headers).into_iter().skip(1).filter(|line| !line.is_empty()) {
            let at = line.iter().position(|byte| *byte == b':');
            let (name, value) = line.split_at(at.unwrap_or(line.len()));
            let value = value.get(1..).unwrap_or_default();
            raw.add_header(name, &text(value.strip_prefix(b" ").unwrap_or(value)));
        }
        all.push(raw);
    }
    *last = end;
    Ok(all)
}

fn lines(headers: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    let mut rest = headers;
    while let Some(at) = rest.windows(2).position(|pair| pair == b"\r\n") {
        all.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    all.push(rest);
    all
}

fn read_topic(bootstrap: &str, topic: &str, next: &mut BTreeMap<i32, i64>) -> Outcome<Vec<Raw>> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", bootstrap).set("group.id", "reader");
    let reader: BaseConsumer = config.create()?;
    let (mut list, mut ends) = (TopicPartitionList::new(), BTreeMap::new());
    for partition in 0..PARTITIONS {
        let (low, high) = reader.fetch_watermarks(topic, partition, LIMIT)?;
        let from = *next.entry(partition).or_insert(low);
        if from < high {
            list.add_partition_offset(topic, partition, Offset::Offset(from))?;
            ends.insert(partition, high);
        }
    }
    let mut all = Vec::new();
    reader.assign(&list)?;
    while ends.iter().any(|(partition, end)| next.get(partition) < Some(end)) {
        let record = reader.poll(LIMIT).ok_or("expected a record, found none in a minute")??;
        next.insert(record.partition(), record.offset() + 1);
        all.push(raw_record(&record));
    }
    Ok(all)
}

fn raw_record(record: &BorrowedMessage<'_>) -> Raw {
    let optional = |bytes: Option<&[u8]>| bytes.map_or_else(|| "null".to_owned(), text);
    let mut raw = Raw { payload: record.payload().unwrap_or_default().to_vec(), ..Raw::default() };
    let value = if record.payload().is_some() { "bytes" } else { "null" };
    for (name, value) in [
        ("partition", record.partition().to_string()),
        ("key", optional(record.key())),
        ("value", value.to_owned()),
    ] {
        raw.fields.insert(name.to_owned(), value);
    }
    for header in record.headers().iter().flat_map(|headers| headers.iter()) {
        raw.add_header(header.key.as_bytes(), &optional(header.value));
    }
    raw
}

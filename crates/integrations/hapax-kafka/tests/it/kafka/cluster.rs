//! A cluster of librdkafka's mock brokers, in a thread of this process, or the one of
//! `KAFKA_BOOTSTRAP`.

use std::io::Write as _;
use std::time::Duration;

use hapax_kafka::{KafkaSource, KafkaSourceBuilder};
use hapax_testkit::servers::{KafkaMock, MockBrokers};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// Partitions of the topic.
pub(crate) const PARTITIONS: i32 = 3;

/// Time of what a cluster must do; longer than a busy machine needs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

const TIMEOUT: Duration = Duration::from_secs(10);

/// A cluster with a topic, and a group without a position.
pub(crate) struct Cluster {
    bootstrap: String,
    pub(crate) topic: String,
    pub(crate) group: String,
    reader: BaseConsumer,
    producer: FutureProducer,
    mock: Option<KafkaMock>,
}

/// A position of the group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Committed {
    pub(crate) offset: Option<i64>,
    pub(crate) metadata: String,
    /// End of the log.
    pub(crate) end: i64,
}

/// Starts a mock cluster, and connects to the cluster of `KAFKA_BOOTSTRAP` if it is set.
pub(crate) async fn clusters(test: &str) -> Vec<Cluster> {
    let mut clusters = vec![Cluster::start()];
    clusters.extend(real_cluster(test).await);
    clusters
}

/// Connects to the cluster of `KAFKA_BOOTSTRAP`; `None` if it is not set.
pub(crate) async fn real_cluster(test: &str) -> Option<Cluster> {
    match std::env::var("KAFKA_BOOTSTRAP") {
        Ok(bootstrap) => Some(Cluster::connect(&bootstrap, test).await),
        // Tests that pass print nothing else.
        Err(_) => {
            let line = format!("{test}: skipped on a real cluster: KAFKA_BOOTSTRAP is not set\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            None
        }
    }
}

fn admin(bootstrap: &str) -> AdminClient<DefaultClientContext> {
    ClientConfig::new().set("bootstrap.servers", bootstrap).create().expect("a client")
}

impl Cluster {
    /// Starts a mock cluster of one broker.
    pub(crate) fn start() -> Self {
        Self::mock(KafkaMock::start("orders", PARTITIONS))
    }

    /// Connects to a mock cluster with the topic `orders`.
    pub(crate) fn mock(mock: KafkaMock) -> Self {
        Self::of(mock.bootstrap().to_owned(), "orders".to_owned(), Some(mock))
    }

    /// Creates a topic in a real cluster.
    pub(crate) async fn connect(bootstrap: &str, test: &str) -> Self {
        let topic = format!("hapax-{test}-{}", std::process::id());
        let admin = admin(bootstrap);
        let new = NewTopic::new(&topic, PARTITIONS, TopicReplication::Fixed(-1));
        let created = admin.create_topics([&new], &AdminOptions::new()).await;
        created.expect("the cluster of KAFKA_BOOTSTRAP")[0].as_ref().expect("a topic");
        Self::of(bootstrap.to_owned(), topic, None)
    }

    /// Deletes the topic of a real cluster, and creates it again after the time.
    pub(crate) async fn create_again(&self, after: Duration) {
        let (admin, options) = (admin(&self.bootstrap), AdminOptions::new());
        let deleted = admin.delete_topics(&[&self.topic], &options).await;
        deleted.expect("an answer")[0].as_ref().expect("it is deleted");
        sleep(after).await;
        let new = NewTopic::new(&self.topic, PARTITIONS, TopicReplication::Fixed(-1));
        // A broker may delete a topic later than it answers.
        while admin.create_topics([&new], &options).await.expect("an answer")[0].is_err() {
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn of(bootstrap: String, topic: String, mock: Option<KafkaMock>) -> Self {
        let group = format!("{topic}-invoices");
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &bootstrap);
        let producer = config.create().expect("a client");
        let reader = config.set("group.id", &group).create().expect("a client");
        Self { bootstrap, topic, group, reader, producer, mock }
    }

    pub(crate) fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Returns the builder of a source with short times.
    pub(crate) fn source(&self) -> KafkaSourceBuilder {
        self.source_with(("client.id", "test"))
    }

    /// Returns the builder of a source with short times and a property.
    pub(crate) fn source_with(&self, property: (&str, &str)) -> KafkaSourceBuilder {
        let properties = [
            property,
            ("bootstrap.servers", self.bootstrap()),
            ("session.timeout.ms", "3000"),
            ("heartbeat.interval.ms", "200"),
            ("max.poll.interval.ms", "6000"),
            ("reconnect.backoff.max.ms", "200"),
            ("fetch.wait.max.ms", "50"),
        ];
        KafkaSource::builder(properties, [&self.topic], &self.group)
            .commit_every(Duration::from_millis(50))
            .drain_for(Duration::from_secs(1))
            .idle_check_after(Duration::from_secs(1))
            .request_timeout(Duration::from_secs(1))
    }

    /// Starts a source, and waits until it has partitions.
    pub(crate) async fn started(&self, builder: KafkaSourceBuilder) -> KafkaSource {
        let source = builder.start().await.unwrap();
        timeout(LIMIT, source.wait_assigned()).await.expect("partitions are assigned");
        source
    }

    /// Publishes records to a partition.
    pub(crate) async fn publish(&self, partition: i32, payloads: impl IntoIterator<Item = String>) {
        let sent: Vec<_> = payloads
            .into_iter()
            .map(|payload| {
                let record = FutureRecord::to(&self.topic).partition(partition).key("k");
                self.producer.send_result(record.payload(&payload)).expect("the client accepts it")
            })
            .collect();
        for sent in sent {
            timeout(TIMEOUT, sent)
                .await
                .expect("an answer")
                .expect("a client")
                .expect("it is confirmed");
        }
    }

    /// Appends the record by which a transaction is committed, as a broker does.
    pub(crate) async fn append_control_record(&self, partition: i32) {
        // Length, attributes, deltas, key (version 0, type 1), value (version 0, epoch 0), no headers.
        let record = [32, 0, 0, 0, 8, 0, 0, 0, 1, 12, 0, 0, 0, 0, 0, 0, 0];
        let mut batch = Vec::new();
        batch.extend(0_i64.to_be_bytes()); // base offset
        batch.extend((49 + i32::try_from(record.len()).unwrap()).to_be_bytes());
        batch.extend(0_i32.to_be_bytes()); // leader epoch
        batch.push(2); // magic
        batch.extend(0_u32.to_be_bytes()); // checksum, which nothing checks here
        batch.extend(0x30_i16.to_be_bytes()); // a control record of a transaction
        batch.extend(0_i32.to_be_bytes()); // last offset delta
        batch.extend([1_790_000_000_000_i64; 2].map(i64::to_be_bytes).concat());
        batch.extend(1_i64.to_be_bytes()); // producer
        batch.extend(0_i16.to_be_bytes());
        batch.extend((-1_i32).to_be_bytes()); // sequence
        batch.extend(1_i32.to_be_bytes()); // records
        batch.extend(record);
        let length = |text: &str| i16::try_from(text.len()).unwrap().to_be_bytes();
        let mut request = Vec::new();
        request.extend([0_i16, 3].map(i16::to_be_bytes).concat()); // Produce, version 3
        request.extend(1_i32.to_be_bytes());
        request.extend(length("test"));
        request.extend(b"test");
        request.extend([-1_i16, -1].map(i16::to_be_bytes).concat()); // no transaction, all replicas
        request.extend([10_000_i32, 1].map(i32::to_be_bytes).concat());
        request.extend(length(&self.topic));
        request.extend(self.topic.as_bytes());
        let size = i32::try_from(batch.len()).unwrap();
        request.extend([1, partition, size].map(i32::to_be_bytes).concat());
        request.extend(batch);
        let mut broker = TcpStream::connect(self.bootstrap()).await.unwrap();
        let size = i32::try_from(request.len()).unwrap().to_be_bytes();
        broker.write_all(&[&size[..], &request].concat()).await.unwrap();
        let answer = timeout(LIMIT, broker.read_i32()).await.expect("an answer").unwrap();
        assert!(answer > 0);
    }

    /// Commits as another program does.
    pub(crate) fn commit(&self, partition: i32, offset: i64, metadata: &str) {
        let mut list = TopicPartitionList::new();
        let mut element = list.add_partition(&self.topic, partition);
        element.set_offset(Offset::Offset(offset)).unwrap();
        element.set_metadata(metadata);
        self.reader.commit(&list, CommitMode::Sync).expect("the broker commits");
    }

    /// Uses another group from now on. The mock brokers accept no commit of another program for a group that had a member.
    pub(crate) fn set_group(&mut self, group: &str) {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap).set("group.id", group);
        (self.group, self.reader) = (group.to_owned(), config.create().expect("a client"));
    }

    /// Calls the mock cluster, and returns after that.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&MockBrokers) -> T + Send + 'static,
    ) -> T {
        self.mock.as_ref().expect("a mock cluster").call(call)
    }

    /// Returns the position of each partition; `None` if the brokers do not answer.
    pub(crate) fn try_positions(&self) -> Option<Vec<Committed>> {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let list = self.reader.committed_offsets(list, TIMEOUT).ok()?;
        let mut positions = Vec::new();
        for element in list.elements() {
            let log = self.reader.fetch_watermarks(&self.topic, element.partition(), TIMEOUT);
            let offset = match element.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
            let metadata = element.metadata().to_owned();
            positions.push(Committed { offset, metadata, end: log.ok()?.1 });
        }
        Some(positions)
    }

    /// Returns the position of each partition.
    pub(crate) fn positions(&self) -> Vec<Committed> {
        loop {
            if let Some(positions) = self.try_positions() {
                return positions;
            }
        }
    }

    /// Waits until the position of a partition is as expected.
    pub(crate) async fn until(&self, partition: usize, is_reached: impl Fn(&Committed) -> bool) {
        let reached = async {
            while !is_reached(&self.positions()[partition]) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let reached = timeout(LIMIT, reached).await;
        reached.unwrap_or_else(|_| panic!("{:?}", self.positions()[partition]));
    }

    /// Waits until every record is committed.
    pub(crate) async fn until_finished(&self) {
        for partition in 0..usize::try_from(PARTITIONS).unwrap() {
            self.until(partition, |it| it.end == it.offset.unwrap_or(0)).await;
        }
    }

    /// Returns the number of records that are not committed.
    pub(crate) fn lag(&self) -> u64 {
        let lag = |it: Committed| it.end - it.offset.unwrap_or(0);
        let lag = self.positions().into_iter().map(lag).sum::<i64>();
        u64::try_from(lag).expect("no position past the end")
    }
}

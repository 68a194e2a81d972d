//! A cluster of librdkafka's mock brokers: it has groups, commits and their metadata, lost members and injected
//! errors. It keeps its log in memory, and has neither transactions nor TLS.

use std::fmt;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::KafkaResult;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

/// The mock brokers.
pub type MockBrokers = MockCluster<'static, DefaultProducerContext>;

type Call = Box<dyn FnOnce(&MockBrokers) + Send>;

/// A mock cluster. It runs in a thread of its own, since its type can be neither sent nor shared.
/// Other processes can connect to it.
pub struct KafkaMock {
    bootstrap: String,
    /// `None` only while the value is dropped.
    calls: Option<mpsc::Sender<Call>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for KafkaMock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaMock").field("bootstrap", &self.bootstrap).finish_non_exhaustive()
    }
}

impl KafkaMock {
    /// Starts a cluster of one broker with a topic of some partitions.
    #[must_use]
    pub fn start(topic: &str, partitions: i32) -> Self {
        Self::with_brokers(1, topic, partitions)
    }

    /// Starts a cluster of some brokers, whose ids count from 1.
    #[must_use]
    pub fn with_brokers(brokers: i32, topic: &str, partitions: i32) -> Self {
        let topic = topic.to_owned();
        let (calls, received) = mpsc::channel::<Call>();
        let (ready, bootstrap) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mock = MockCluster::new(brokers).expect("a mock cluster");
            mock.create_topic(&topic, partitions, 1).expect("a topic");
            ready.send(mock.bootstrap_servers()).expect("the test waits");
            for call in received {
                call(&mock);
            }
        });
        let bootstrap = bootstrap.recv().expect("the cluster starts");
        Self { bootstrap, calls: Some(calls), thread: Some(thread) }
    }

    /// Returns `HOST:PORT,…` of the brokers.
    #[must_use]
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Returns a client of a group of which it is no member.
    fn reader(&self, group: &str) -> KafkaResult<BaseConsumer> {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap).set("group.id", group).create()
    }

    /// Commits an offset of a group that has no member. Blocks.
    ///
    /// # Panics
    /// If the brokers do not commit it.
    pub fn commit(&self, group: &str, topic: &str, partition: i32, offset: i64) {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, partition, Offset::Offset(offset)).expect("an offset");
        let reader = self.reader(group).expect("a client");
        reader.commit(&list, CommitMode::Sync).expect("the broker commits");
    }

    /// Returns the number of records that a group has not committed; `None` if the brokers do not answer. Blocks.
    #[must_use]
    pub fn lag(&self, group: &str, topic: &str, partitions: i32) -> Option<u64> {
        const TIMEOUT: Duration = Duration::from_secs(5);
        let reader = self.reader(group).ok()?;
        let mut list = TopicPartitionList::new();
        list.add_partition_range(topic, 0, partitions - 1);
        let committed = reader.committed_offsets(list, TIMEOUT).ok()?;
        let mut lag = 0;
        for element in committed.elements() {
            let log = reader.fetch_watermarks(topic, element.partition(), TIMEOUT).ok()?;
            let first = match element.offset() {
                Offset::Offset(offset) => offset,
                _ => log.0,
            };
            lag += u64::try_from(log.1 - first).ok()?;
        }
        Some(lag)
    }

    /// Calls a function of the mock brokers, and returns its result.
    pub fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&MockBrokers) -> T + Send + 'static,
    ) -> T {
        let (done, result) = mpsc::channel();
        let call = move |mock: &MockBrokers| drop(done.send(call(mock)));
        let calls = self.calls.as_ref().expect("the cluster runs");
        calls.send(Box::new(call)).expect("the cluster runs");
        result.recv().expect("the cluster runs")
    }
}

impl Drop for KafkaMock {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

//! A cluster of librdkafka's mock brokers, in a thread of this process.

use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

/// The topic of each test.
pub(crate) const TOPIC: &str = "orders";
/// The group of each test.
pub(crate) const GROUP: &str = "invoices";
/// Partitions of the topic.
pub(crate) const PARTITIONS: i32 = 3;

const TIMEOUT: Duration = Duration::from_secs(10);

type Mock = MockCluster<'static, DefaultProducerContext>;
type Call = Box<dyn FnOnce(&Mock) + Send>;

/// A mock cluster. It belongs to a thread, since its type can be neither sent nor shared.
pub(crate) struct Cluster {
    bootstrap: String,
    calls: Option<mpsc::Sender<Call>>,
    thread: Option<JoinHandle<()>>,
    reader: BaseConsumer,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        let (calls, received) = mpsc::channel::<Call>();
        let (ready, bootstrap) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mock = MockCluster::new(1).expect("a mock cluster");
            mock.create_topic(TOPIC, PARTITIONS, 1).expect("a topic");
            ready.send(mock.bootstrap_servers()).expect("the test waits");
            for call in received {
                call(&mock);
            }
        });
        let bootstrap = bootstrap.recv().expect("the cluster starts");
        let reader = ClientConfig::new()
            .set("bootstrap.servers", &bootstrap)
            .set("group.id", GROUP)
            .create()
            .expect("a client");
        Self { bootstrap, calls: Some(calls), thread: Some(thread), reader }
    }

    pub(crate) fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Calls the mock cluster, and returns after that.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Mock) -> T + Send + 'static,
    ) -> T {
        let (done, result) = mpsc::channel();
        let calls = self.calls.as_ref().expect("the cluster runs");
        let call = move |mock: &Mock| drop(done.send(call(mock)));
        calls.send(Box::new(call)).expect("the cluster runs");
        result.recv().expect("the cluster runs")
    }

    /// Returns the committed position and metadata of each partition, and the end of its log.
    pub(crate) fn positions(&self) -> Option<Vec<(Option<i64>, String, i64)>> {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(TOPIC, 0, PARTITIONS - 1);
        let list = self.reader.committed_offsets(list, TIMEOUT).ok()?;
        let mut positions = Vec::new();
        for element in list.elements() {
            let (_, high) =
                self.reader.fetch_watermarks(TOPIC, element.partition(), TIMEOUT).ok()?;
            let position = match element.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
            positions.push((position, element.metadata().to_owned(), high));
        }
        Some(positions)
    }

    /// Returns the number of records that are not committed.
    pub(crate) fn lag(&self) -> u64 {
        loop {
            // Fails while the brokers are down.
            if let Some(positions) = self.positions() {
                let lag = positions.iter().map(|(at, _, high)| high - at.unwrap_or(0)).sum::<i64>();
                return u64::try_from(lag).expect("no position past the end");
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

//! The rules of every adapter to a broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_kafka::{KafkaSink, KafkaSource};
use hapax_testkit::messages::suite::BrokerFixture;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::cluster::Cluster;

hapax_testkit::broker_suite!(super::suite::Kafka);

/// A mock cluster.
struct Kafka {
    cluster: Arc<Cluster>,
    sources: AtomicUsize,
}

impl BrokerFixture for Kafka {
    type Source = KafkaSource;
    type Sink = KafkaSink;

    const ACK_TIMEOUT: Option<Duration> = None;
    const LARGE: usize = 900_000;
    const TOO_LARGE: &'static [usize] = &[1_000_001];
    const KEEPS_ORDER: bool = true;
    const MARKS_REDELIVERIES: bool = true;

    async fn start() -> Self {
        Self { cluster: Arc::new(Cluster::start()), sources: AtomicUsize::new(0) }
    }

    async fn source(&self) -> KafkaSource {
        self.sources.fetch_add(1, Ordering::SeqCst);
        self.cluster.started(self.cluster.source().order_by_key()).await
    }

    async fn sink(&self) -> KafkaSink {
        let properties = [
            ("bootstrap.servers", self.cluster.bootstrap()),
            ("message.timeout.ms", "3000"),
            ("linger.ms", "0"),
            ("reconnect.backoff.max.ms", "200"),
        ];
        KafkaSink::new(properties).unwrap()
    }

    fn destination(&self) -> String {
        self.cluster.topic.clone()
    }

    async fn unacknowledged(&self) -> u64 {
        let cluster = Arc::clone(&self.cluster);
        tokio::task::spawn_blocking(move || cluster.lag()).await.unwrap()
    }

    async fn deliveries(&self) -> Option<u64> {
        None
    }

    /// A connection that ends loses nothing on Kafka. What delivers records again is the loss of an
    /// assignment.
    fn cut(&self) {
        let count = self.sources.load(Ordering::SeqCst);
        self.cluster.call(move |mock| {
            let error = RDKafkaRespErr::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION;
            mock.request_errors(RDKafkaApiKey::Heartbeat, &vec![error; count]);
        });
    }

    fn freeze(&self) {
        self.cluster
            .call(|mock| mock.broker_round_trip_time(-1, Duration::from_secs(3600)))
            .unwrap();
    }

    fn thaw(&self) {
        self.cluster.call(|mock| {
            mock.broker_round_trip_time(-1, Duration::ZERO).unwrap();
            // Answers that are delayed go with their connections.
            mock.broker_down(-1).unwrap();
            mock.broker_up(-1).unwrap();
        });
    }

    async fn kill(&mut self) {
        self.cluster.call(|mock| mock.broker_down(-1)).unwrap();
    }

    async fn restart(&mut self) {
        self.cluster.call(|mock| mock.broker_up(-1)).unwrap();
    }
}

//! Servers, messages, and the check of their effects.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax_kafka::KafkaSink;
use hapax_messages::{MessageId, MessageSink as _, OutgoingMessage, PublishError};
use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, Config, NoTls};

use super::consumer::{Mode, Process, TABLES};
use crate::kafka::cluster::{Cluster, LIMIT};

/// Number of order keys.
const KEYS: u32 = 12;

/// A cluster, a database, and the messages so far.
pub(crate) struct World {
    pub(crate) cluster: Cluster,
    database: PostgresServer,
    observer: Client,
    sink: Arc<KafkaSink>,
    published: Arc<AtomicU32>,
}

impl World {
    /// Starts a database, and a mock cluster.
    pub(crate) async fn start() -> Self {
        Self::on(Cluster::start()).await
    }

    /// Starts a database for a cluster.
    pub(crate) async fn on(cluster: Cluster) -> Self {
        let database = PostgresServer::start().await;
        database
            .sql("postgres", &hapax_postgres_messages::message_migrations(&Default::default()))
            .await;
        database.sql("postgres", TABLES).await;
        let sink = KafkaSink::new([("bootstrap.servers", cluster.bootstrap())]).unwrap();
        let config: Config = database.url("postgres").parse().unwrap();
        let (observer, connection) = config.connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        Self { cluster, database, observer, sink: Arc::new(sink), published: Arc::default() }
    }

    pub(crate) fn process(&self, mode: Mode) -> Process {
        let database = self.database.url("postgres");
        let Cluster { topic, group, .. } = &self.cluster;
        Process::start(mode, &[self.cluster.bootstrap(), topic, group, &database])
    }

    /// Publishes messages until `stop`, in order by key.
    pub(crate) fn publish_until(&self, stop: &Arc<AtomicBool>) -> JoinHandle<()> {
        let (sink, topic) = (Arc::clone(&self.sink), self.cluster.topic.clone());
        let (published, stop) = (Arc::clone(&self.published), Arc::clone(stop));
        tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                for key in 0..KEYS {
                    let number = published.load(Ordering::SeqCst);
                    publish(&sink, &topic, &format!("m-{number}"), key, "x").await;
                    published.fetch_add(1, Ordering::SeqCst);
                }
                sleep(Duration::from_millis(100)).await;
            }
        })
    }

    /// Publishes messages until the task is aborted, in order by key.
    pub(crate) fn publish_all_the_time(&self) -> JoinHandle<()> {
        self.publish_until(&Arc::default())
    }

    pub(crate) async fn publish(&self, id: &str, key: u32, payload: &str) {
        publish(&self.sink, &self.cluster.topic, id, key, payload).await;
    }

    pub(crate) async fn count(&self, query: &str) -> i64 {
        self.observer.query_one(query, &[]).await.unwrap().get(0)
    }

    pub(crate) async fn effects(&self) -> i64 {
        self.count("SELECT count(DISTINCT id) FROM effects").await
    }

    /// Waits until this number of further messages have effects.
    pub(crate) async fn progress(&self, count: i64) {
        let enough = self.effects().await + count;
        let reached = async {
            while self.effects().await < enough {
                self.check_positions().await;
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(LIMIT, reached).await.expect("messages are handled");
    }

    /// Waits for this number of further effects.
    pub(crate) async fn more_effects(&self, count: i64) {
        const LAST: &str = "SELECT coalesce(max(seq), 0) FROM effects";
        let enough = self.count(LAST).await + count;
        let reached = async {
            while self.count(LAST).await < enough {
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(LIMIT, reached).await.expect("messages are handled");
    }

    /// Waits until the lag is zero, for at most this time.
    pub(crate) async fn drained(&self, time: Duration) {
        let drained = async {
            while self.cluster.lag() > 0 {
                sleep(Duration::from_millis(100)).await;
            }
        };
        let begun = Instant::now();
        if timeout(time, drained).await.is_err() {
            let positions = self.cluster.positions();
            self.finished().await;
            panic!(
                "the lag is zero only after {:?}; after {time:?}: {positions:?}",
                begun.elapsed()
            );
        }
    }

    /// Waits until messages of every key, and so of every partition, have effects that they do not have
    /// now: each partition has an owner that runs.
    pub(crate) async fn every_partition_goes_on(&self) {
        let last = self.count("SELECT coalesce(max(seq), 0) FROM effects").await;
        // Messages that were in progress may still get their effects.
        let keys = format!(
            "SELECT count(*) FROM (
                SELECT FROM effects WHERE seq > {last} GROUP BY order_key HAVING count(*) > 5
            ) AS keys"
        );
        let go_on = async {
            while self.count(&keys).await < i64::from(KEYS) {
                self.check_positions().await;
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(LIMIT, go_on).await.expect("every partition has an owner");
    }

    /// Waits until every message is acknowledged.
    pub(crate) async fn finished(&self) {
        let finished = async {
            while self.cluster.lag() > 0 {
                self.check_positions().await;
                sleep(Duration::from_millis(100)).await;
            }
        };
        let finished = timeout(LIMIT, finished).await;
        finished
            .unwrap_or_else(|_| panic!("the lag returns to zero: {:?}", self.cluster.positions()));
    }

    /// Returns the records before the committed positions that have no effect.
    pub(crate) async fn passed(&self) -> i64 {
        let mut passed = 0;
        // Read before the effects: a position that is seen is that of effects which are there.
        for (number, committed) in self.cluster.positions().iter().enumerate() {
            let position = committed.offset.unwrap_or(0);
            let handled = format!(
                "SELECT count(DISTINCT \"offset\") FROM effects
                 WHERE partition = {number} AND \"offset\" < {position}"
            );
            passed += position - self.count(&handled).await;
        }
        passed
    }

    async fn check_positions(&self) {
        assert_eq!(self.passed().await, 0, "records without an effect were committed");
    }

    /// Checks that each message has one effect, in order by key, and that no other record is committed.
    pub(crate) async fn check(&self) {
        self.check_effects().await;
        self.check_order().await;
        self.check_positions().await;
    }

    /// Checks that each message has one effect.
    pub(crate) async fn check_effects(&self) {
        let published = i64::from(self.published.load(Ordering::SeqCst));
        let distinct = self.effects().await;
        // The publication that was aborted may have arrived.
        assert!((published..=published + 1).contains(&distinct), "{distinct} of {published}");
        assert_eq!(self.count("SELECT count(*) FROM effects").await, distinct, "one effect each");
    }

    /// Checks that the effects of each key are in order.
    pub(crate) async fn check_order(&self) {
        let disordered = "
            SELECT count(*) FROM (
                SELECT \"offset\" < lag(\"offset\") OVER (PARTITION BY order_key ORDER BY seq) AS is_late
                FROM effects) AS ordered
            WHERE is_late";
        assert_eq!(self.count(disordered).await, 0, "effects out of order");
    }
}

async fn publish(sink: &KafkaSink, topic: &str, id: &str, key: u32, payload: &str) {
    let id = MessageId::new(id).unwrap();
    let mut message = OutgoingMessage::new(topic, id, payload.to_owned());
    message.key = Some(format!("key-{key}"));
    // As a relay does.
    while let Err(error) = sink.publish(&message).await {
        assert!(matches!(error, PublishError::NotAcknowledged { .. }), "{error}");
        sleep(Duration::from_millis(100)).await;
    }
}

//! Topics that were created again, and logs that may be others.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_kafka::{KafkaSink, KafkaSource, KafkaSourceBuilder};
use hapax_messages::{
    AcquiredPosition, MessageId, MessageSink as _, MessageSource as _, OutgoingMessage, Partition,
    PositionError, PositionStep, PositionStore, PublishError,
};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::metadata::MetadataTopic;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tokio::time::timeout;

use super::cluster::{Cluster, LIMIT, real_cluster};

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

/// The position of partition 0: the last step, or what an operator has set.
#[derive(Debug, Default)]
struct Position(Mutex<Option<(u64, Option<i64>)>>);

impl Position {
    fn advance(&self, step: &PositionStep) {
        *self.0.lock().unwrap() = Some((step.to, Some(step.timestamp_ms)));
    }
}

impl PositionStore for Position {
    fn acquire<'a>(
        &'a self,
        partition: &'a Partition,
        first: u64,
    ) -> BoxFuture<'a, Result<AcquiredPosition, PositionError>> {
        let stored = self.0.lock().unwrap().filter(|_| partition.number == 0);
        let (next, handled_timestamp_ms) = stored.unwrap_or((first, None));
        let is_new = stored.is_none();
        Box::pin(
            async move { Ok(AcquiredPosition { next, fence: 1, is_new, handled_timestamp_ms }) },
        )
    }

    fn is_owner<'a>(
        &'a self,
        _: &'a Partition,
        _: u64,
    ) -> BoxFuture<'a, Result<bool, PositionError>> {
        Box::pin(async { Ok(true) })
    }
}

/// Receives and acknowledges this many records.
async fn handle(source: &KafkaSource, count: usize) -> Vec<String> {
    handle_at(source, count, &Position::default()).await
}

/// Receives and acknowledges this many records, and advances the position in positions mode.
async fn handle_at(source: &KafkaSource, count: usize, position: &Position) -> Vec<String> {
    let mut handled = Vec::new();
    while handled.len() < count {
        // Errors of requests during a fault.
        for delivery in timeout(LIMIT, source.receive(MANY)).await.unwrap().into_iter().flatten() {
            delivery.step().into_iter().for_each(|step| position.advance(step));
            handled.push(String::from_utf8(delivery.message().payload.to_vec()).unwrap());
            delivery.acknowledge().await.unwrap();
        }
    }
    handled
}

/// Receives until a partition is stopped. Returns the cause.
async fn stopped(source: &KafkaSource) -> String {
    let stopped = async {
        loop {
            match source.receive(MANY).await {
                Ok(received) => {
                    let payloads: Vec<_> =
                        received.iter().map(|it| &it.message().payload).collect();
                    panic!("{payloads:?} of another topic are received");
                }
                Err(_) if source.stopped_partitions().is_empty() => {}
                Err(_) => return source.stopped_partitions().remove(0).cause,
            }
        }
    };
    timeout(LIMIT, stopped).await.expect("a partition is stopped")
}

fn records(range: std::ops::Range<u32>) -> impl Iterator<Item = String> {
    range.map(|number| format!("r-{number}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_again_and_filled_under_a_running_source_stops_its_partition() {
    for (number, gap) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
        let Some(cluster) = real_cluster(&format!("recreated-{number}")).await else { return };
        let (position, is_in_database) = (Arc::new(Position::default()), number % 2 == 1);
        let builder = || match is_in_database {
            true => cluster.source().positions(Arc::clone(&position) as Arc<dyn PositionStore>),
            false => cluster.source(),
        };
        let source = cluster.started(builder()).await;
        cluster.publish(0, records(0..20)).await;
        handle_at(&source, 20, &position).await;
        cluster.until(0, |it| it.offset == Some(20)).await;
        cluster.create_again(Duration::from_secs(gap)).await;
        cluster.publish(0, records(20..70)).await;
        let cause = stopped(&source).await;
        assert!(cause.contains("the topic was created again"), "{cause}");
        source.close().await;
        cluster.until(0, |it| it.offset == Some(20)).await;
        // Nor does another process lose them.
        let source = cluster.started(builder()).await;
        let cause = stopped(&source).await;
        assert!(cause.contains("the topic was created again"), "{cause}");
        source.close().await;
        // The operator decides.
        if is_in_database {
            *position.0.lock().unwrap() = Some((0, None));
        } else {
            cluster.commit(0, 0, "");
        }
        let source = cluster.started(builder()).await;
        let expected: Vec<_> = records(20..70).collect();
        assert_eq!(handle_at(&source, 50, &position).await, expected);
        source.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_record_with_the_timestamp_of_the_handled_one_stops_the_partition() {
    let mut cluster = Cluster::start();
    let source = cluster.started(cluster.source()).await;
    cluster.publish(0, records(0..3)).await;
    handle(&source, 3).await;
    for _ in 0..2 {
        cluster.append_control_record(0).await;
    }
    cluster.until(0, |it| it.offset == Some(5)).await;
    source.close().await;
    let metadata = cluster.positions()[0].metadata.clone();
    let parts: Vec<_> = metadata.split(' ').collect();
    let ["hapax1", "clean", timestamp, checksum, "2"] = parts[..] else { panic!("{metadata}") };
    cluster.publish(0, records(3..4)).await;
    // The record of another topic has another checksum; an earlier release has written none, and no offset.
    let other: String = checksum.chars().rev().collect();
    let mut builders = Vec::new();
    for (group, offset, words) in [
        ("same", 3, checksum.to_owned()),
        ("earlier", 3, String::new()),
        ("other", 3, other.clone()),
        ("same after control records", 5, format!("{checksum} 2")),
        ("other after control records", 5, format!("{other} 2")),
    ] {
        cluster.set_group(group);
        cluster.commit(0, offset, format!("hapax1 clean {timestamp} {words}").trim_end());
        builders.push((group, cluster.source()));
    }
    // At a time: the brokers wait three seconds for each group.
    let check = |(group, builder): (&'static str, KafkaSourceBuilder)| {
        let cluster = &cluster;
        async move {
            let source = cluster.started(builder).await;
            if group.starts_with("other") {
                let cause = stopped(&source).await;
                assert!(cause.contains("found one with another key, header or payload"), "{cause}");
            } else {
                assert_eq!(handle(&source, 1).await, ["r-3"], "{group}");
            }
        }
    };
    futures_util::future::join_all(builders.into_iter().map(check)).await;
}

/// Lines of a log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_error_about_the_topic_its_log_is_checked_and_no_record_is_lost_or_repeated() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG);
    let subscriber = subscriber.with_writer(move || writer.clone()).finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let cluster = Cluster::start();
    let source = cluster.started(cluster.source()).await;
    let mut next = 0;
    for error in [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_ID,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_FENCED_LEADER_EPOCH,
    ] {
        cluster.publish(0, records(next..next + 20)).await;
        assert_eq!(handle(&source, 20).await, records(next..next + 20).collect::<Vec<_>>());
        log.0.lock().unwrap().clear();
        let is_checked = async || {
            while !String::from_utf8(log.0.lock().unwrap().clone())
                .unwrap()
                .contains("the identity of a log is checked")
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        // The client drops the reply to a fetch from before a pause or a seek, and the error with it.
        let checked = async {
            let answered = Duration::from_secs(5);
            cluster.call(move |mock| mock.request_errors(RDKafkaApiKey::Fetch, &[error]));
            while timeout(answered, is_checked()).await.is_err() {
                cluster.call(move |mock| mock.request_errors(RDKafkaApiKey::Fetch, &[error]));
            }
        };
        timeout(LIMIT, checked).await.unwrap_or_else(|_| panic!("{error:?} is found"));
        next += 20;
    }
    cluster.publish(0, records(next..next + 20)).await;
    assert_eq!(handle(&source, 20).await, records(next..next + 20).collect::<Vec<_>>());
    assert_eq!(source.stopped_partitions(), []);
    cluster.until_finished().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_does_not_exist_is_not_created_by_a_sink() {
    let cluster = Cluster::start();
    let properties = [("bootstrap.servers", cluster.bootstrap()), ("message.timeout.ms", "1000")];
    let sink = KafkaSink::new(properties).unwrap();
    let id = MessageId::new("m-1").unwrap();
    let published = timeout(LIMIT, sink.publish(&OutgoingMessage::new("oders", id, "x"))).await;
    let error = published.expect("it ends").unwrap_err();
    assert!(matches!(error, PublishError::NotAcknowledged { .. }), "{error:?}");
    assert!(error.to_string().contains("expected the topic oders, found none"), "{error}");
    let mut config = ClientConfig::new();
    let config = config.set("bootstrap.servers", cluster.bootstrap()).set("group.id", "g");
    let reader: BaseConsumer = config.create().unwrap();
    let metadata = reader.fetch_metadata(None, LIMIT).unwrap();
    let topics: Vec<_> = metadata.topics().iter().map(MetadataTopic::name).collect();
    assert_eq!(topics, ["orders"]);
}

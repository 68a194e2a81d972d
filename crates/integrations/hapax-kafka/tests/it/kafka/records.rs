//! Records as producers in other languages write them, and groups and topics that are new.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{Clock as _, SystemClock, Timestamp};
use hapax_kafka::{KafkaSink, KafkaSource, KafkaStartAt, KafkaStartError};
use hapax_messages::{
    DeadLetter, Delivery, MessageId, MessageSink as _, MessageSource as _, OutgoingMessage,
};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, Headers as _, Message as _, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::timeout;

use super::cluster::{Cluster, LIMIT, PARTITIONS, real_cluster};

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

/// Receives this many records, whatever errors come before.
async fn receive(source: &KafkaSource, count: usize) -> Vec<Arc<dyn Delivery>> {
    let mut received = Vec::new();
    while received.len() < count {
        let next = timeout(LIMIT, source.receive(MANY)).await.expect("records are there");
        received.extend(next.into_iter().flatten());
    }
    received
}

/// Receives and acknowledges this many records.
async fn handle(source: &KafkaSource, count: usize) -> Vec<Bytes> {
    let received = receive(source, count).await;
    for delivery in &received {
        delivery.acknowledge().await.unwrap();
    }
    received.iter().map(|it| it.message().payload.clone()).collect()
}

fn producer(cluster: &Cluster, property: (&str, &str)) -> FutureProducer {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", cluster.bootstrap()).set(property.0, property.1);
    config.create().expect("a client")
}

async fn publish(producer: &FutureProducer, record: FutureRecord<'_, [u8], [u8]>) {
    producer.send(record, LIMIT).await.map(drop).unwrap();
}

/// Returns the first records of the topic, as another program reads them.
fn read(cluster: &Cluster, count: usize) -> Vec<OwnedMessage> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", cluster.bootstrap()).set("group.id", "reader");
    let reader: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        list.add_partition_offset(&cluster.topic, partition, Offset::Beginning).unwrap();
    }
    reader.assign(&list).unwrap();
    let read = || reader.poll(LIMIT).expect("a record").expect("no error").detach();
    (0..count).map(|_| read()).collect()
}

/// Returns the headers of a record but those that a sink and a redrive add.
fn headers(record: &OwnedMessage) -> Vec<(String, Option<Vec<u8>>)> {
    let headers = record.headers().into_iter().flat_map(|headers| headers.iter());
    let headers = headers.map(|it| (it.key.to_owned(), it.value.map(<[u8]>::to_vec)));
    headers.filter(|(name, _)| name != "message-id" && name != "hapax-redrive").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redriven_record_has_its_key_and_partition_and_null_values() {
    let cluster = Cluster::start();
    let producer = producer(&cluster, ("linger.ms", "0"));
    let header = |key, value| Header { key, value };
    let own = OwnedHeaders::new()
        .insert(header("tenant", Some(&b"t"[..])))
        .insert(header("none", None))
        .insert(header("empty", Some(&b""[..])))
        .insert(header("tenant", Some(&[0xff, 0, b'\n'])))
        .insert(header("none", Some(&b"1"[..])))
        .insert(header("", Some(&b"without a name"[..])))
        .insert(header("", None))
        .insert(header("tenant", None));
    let keys: [Option<&[u8]>; 5] =
        [None, Some(b"k 1"), Some(&[0, 42]), Some(b""), Some(&[b'x'; 1025])];
    let values: [Option<&[u8]>; 3] = [Some(b"v"), None, Some(b"")];
    for (key, value) in keys.into_iter().flat_map(|key| values.map(|value| (key, value))) {
        let mut record = FutureRecord::to(&cluster.topic).partition(2).headers(own.clone());
        (record.key, record.payload) = (key, value);
        publish(&producer, record).await;
    }
    let count = keys.len() * values.len();
    let source = cluster.started(cluster.source().order_by_key()).await;
    let sink = KafkaSink::new([("bootstrap.servers", cluster.bootstrap())]).unwrap();
    for (number, delivery) in receive(&source, count).await.into_iter().enumerate() {
        let (id, message) = (MessageId::new(format!("m-{number}")).unwrap(), delivery.message());
        let mut redriven = OutgoingMessage::new(&cluster.topic, id, message.payload.clone());
        // A dead letter of a consumer without an order has no order key.
        redriven.native = Some(delivery.native().expect("a record has one"));
        redriven.headers.clone_from(&message.headers);
        redriven.headers.push((DeadLetter::REDRIVE_HEADER.to_owned(), Bytes::from("d")));
        sink.publish(&redriven).await.unwrap();
    }
    let records = read(&cluster, 2 * count);
    for (before, after) in records[..count].iter().zip(&records[count..]) {
        let key = before.key();
        assert_eq!((after.key(), after.payload()), (key, before.payload()));
        assert_eq!((after.partition(), headers(after)), (2, headers(before)), "{key:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redriven_record_of_a_partition_that_is_gone_or_of_an_earlier_dead_letter_has_its_key() {
    let cluster = Cluster::start();
    let sink = KafkaSink::new([("bootstrap.servers", cluster.bootstrap())]).unwrap();
    type Case = (u8, Option<&'static str>, Option<&'static str>, Option<&'static [u8]>);
    let cases: [Case; 5] = [
        (1, Some("kafka/1 3 bytes bytes \nk"), None, Some(b"k")),
        (2, Some("kafka/1 99 null bytes \n"), None, None),
        // Of another broker.
        (3, Some("amqp/1 0"), Some("base16:00ff"), Some(&[0, 255])),
        (4, None, Some("base16:00ff"), Some(&[0, 255])),
        (5, None, Some("k"), Some(b"k")),
    ];
    let mut expected = Vec::new();
    for (number, native, order_key, key) in cases {
        let payload = vec![number];
        let id = MessageId::new(format!("m-{number}")).unwrap();
        let mut message = OutgoingMessage::new(&cluster.topic, id, payload.clone());
        message.native = native.map(Bytes::from);
        message.key = order_key.map(str::to_owned);
        message.headers = vec![(DeadLetter::REDRIVE_HEADER.to_owned(), Bytes::from("d"))];
        sink.publish(&message).await.unwrap();
        expected.push((payload, key.map(<[u8]>::to_vec)));
    }
    let records = read(&cluster, expected.len());
    let bytes = |bytes: Option<&[u8]>| bytes.map(<[u8]>::to_vec);
    let found = records.iter().map(|it| (bytes(it.payload()).unwrap(), bytes(it.key())));
    let mut found: Vec<_> = found.collect();
    found.sort();
    assert_eq!(found, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_each_compression_are_received() {
    let cluster = Cluster::start();
    let codecs = ["none", "gzip", "snappy", "lz4", "zstd"];
    for codec in codecs {
        let producer = producer(&cluster, ("compression.type", codec));
        // Longer than what the client leaves uncompressed.
        let payload = codec.repeat(1_000).into_bytes();
        let record = FutureRecord::to(&cluster.topic).partition(0).payload(&payload[..]);
        publish(&producer, record).await;
    }
    let source = cluster.started(cluster.source()).await;
    let expected: Vec<_> = codecs.map(|codec| codec.repeat(1_000)).into();
    assert_eq!(handle(&source, codecs.len()).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_committed_offset_reaches_the_end_of_a_log_that_ends_with_control_records() {
    let cluster = Cluster::start();
    // A new group whose log has nothing else.
    cluster.append_control_record(1).await;
    let retention = Duration::from_secs(3600);
    let source = cluster.started(cluster.source().retention(retention)).await;
    cluster.until(1, |it| it.offset == Some(1)).await;
    cluster.publish(0, ["r-0", "r-1"].map(str::to_owned)).await;
    let mut received = receive(&source, 2).await;
    for _ in 0..2 {
        cluster.append_control_record(0).await;
    }
    let last = received.pop().unwrap();
    received[0].acknowledge().await.unwrap();
    cluster.until(0, |it| it.offset == Some(1)).await;
    // It does not pass the record that is unacknowledged.
    last.acknowledge().await.unwrap();
    cluster.until_finished().await;
    assert_eq!(cluster.positions()[0].offset, Some(4));
    source.close().await;
    assert!(cluster.positions()[0].metadata.starts_with("hapax1 clean "));
    cluster.append_control_record(0).await;
    let source = cluster.started(cluster.source()).await;
    cluster.until_finished().await;
    cluster.publish(0, ["r-2".to_owned()]).await;
    assert_eq!(handle(&source, 1).await, ["r-2"]);
    cluster.until_finished().await;
    assert_eq!(source.stopped_partitions(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_whose_first_record_is_older_than_the_retention_ends_and_commits_nothing() {
    let cluster = Cluster::start();
    let producer = producer(&cluster, ("linger.ms", "0"));
    let now = SystemClock.now().as_micros() / 1000;
    for hours in [3, 2, 0] {
        let at = i64::try_from(now - hours * 3_600_000).unwrap();
        let record = FutureRecord::to(&cluster.topic).partition(0).timestamp(at);
        publish(&producer, record.payload(&b"v"[..])).await;
    }
    let hour = Duration::from_secs(3600);
    // Each poll commits.
    let refused = cluster.source().retention(hour).commit_every(Duration::from_millis(1));
    let source = cluster.started(refused.clone()).await;
    let error = timeout(LIMIT, source.until_records_are_too_old()).await.expect("it is refused");
    let expected =
        "the partition 0 of orders: expected records within the retention of ids (3600 s)";
    assert!(error.starts_with(expected) && error.contains("one of up to 3"), "{error}");
    let received = source.receive(MANY).await.map(|it| it.len());
    assert!(received.unwrap_err().to_string().contains(&error));
    source.close().await;
    assert_eq!(cluster.positions()[0].offset, None, "it is still new");
    // A group with a commit is not new, and a longer retention has them all.
    let source = cluster.started(cluster.source().retention(hour * 4)).await;
    assert_eq!(receive(&source, 3).await.len(), 3);
    source.close().await;
    let source = cluster.started(refused).await;
    assert_eq!(handle(&source, 3).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_group_that_has_handled_records_only_a_partition_with_older_ones_is_stopped() {
    let cluster = Cluster::start();
    let producer = producer(&cluster, ("linger.ms", "0"));
    let hour = Duration::from_secs(3600);
    // The group has no commit of partition 1, as if it had been added.
    cluster.publish(0, ["r-0".to_owned()]).await;
    cluster.commit(0, 1, "");
    let record = FutureRecord::to(&cluster.topic).partition(1).timestamp(1_000);
    publish(&producer, record.payload(&b"old"[..])).await;
    let source = cluster.started(cluster.source().retention(hour)).await;
    cluster.publish(0, ["r-1".to_owned()]).await;
    assert_eq!(handle(&source, 1).await, ["r-1"]);
    cluster.until(0, |it| it.offset == Some(2)).await;
    let stopped = async {
        while source.stopped_partitions().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, stopped).await.expect("it is stopped");
    let stopped = source.stopped_partitions();
    assert_eq!((stopped.len(), stopped[0].partition), (1, 1));
    let cause = &stopped[0].cause;
    assert!(cause.contains("found the record 0 of 1970-") && cause.contains("reset"), "{cause}");
    assert_eq!(cluster.positions()[1].offset, None, "nothing of it is committed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_with_a_wrong_checksum_stops_its_partition_and_is_not_passed() {
    let cluster = Cluster::start();
    let source = cluster.started(cluster.source_with(("check.crcs", "true"))).await;
    cluster.publish(0, ["r-0".to_owned()]).await;
    assert_eq!(handle(&source, 1).await, ["r-0"]);
    // It has no checksum.
    cluster.append_control_record(0).await;
    cluster.publish(0, ["r-1".to_owned()]).await;
    let stopped = async {
        while source.stopped_partitions().is_empty() {
            if let Ok(received) = source.receive(MANY).await {
                panic!("{received:?} after the batch are received");
            }
        }
    };
    timeout(LIMIT, stopped).await.expect("it is stopped");
    let cause = source.stopped_partitions().remove(0).cause;
    assert!(cause.contains("from the offset 1 on"), "{cause}");
    source.close().await;
    assert!(cluster.positions()[0].offset.is_none_or(|offset| offset <= 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_begins_at_the_time_that_start_at_has() {
    let Some(cluster) = real_cluster("a_new_group_begins_at_the_time").await else { return };
    let producer = producer(&cluster, ("linger.ms", "0"));
    for at in [1_790_000_000_000, 1_790_000_100_000, 1_790_000_200_000] {
        let payload = at.to_string().into_bytes();
        let record = FutureRecord::to(&cluster.topic).partition(0).timestamp(at);
        publish(&producer, record.payload(&payload[..])).await;
    }
    let at = Timestamp::from_micros(1_790_000_050_000_000);
    let builder = cluster.source().start_at(KafkaStartAt::Time(at));
    let source = cluster.started(builder).await;
    assert_eq!(handle(&source, 2).await, ["1790000100000", "1790000200000"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_delays_no_other_and_is_received_from_its_first_record_on() {
    let cluster = Cluster::start();
    let properties = [
        ("bootstrap.servers", cluster.bootstrap()),
        ("topic.metadata.refresh.interval.ms", "100"),
        ("session.timeout.ms", "3000"),
        ("heartbeat.interval.ms", "200"),
    ];
    let builder = |topics: &[&str]| {
        KafkaSource::builder(properties, topics.iter().copied(), &cluster.group)
            .idle_check_after(Duration::from_millis(100))
            .request_timeout(Duration::from_secs(1))
            .start_at(KafkaStartAt::Latest)
    };
    let error = builder(&["later", "never"]).start().await.unwrap_err();
    assert!(matches!(&error, KafkaStartError::Topic { topic, .. } if topic == "later"), "{error}");
    let source = cluster.started(builder(&["later", "orders"])).await;
    assert_eq!(source.missing_topics(), ["later"]);
    cluster.until(0, |it| it.offset == Some(0)).await;
    cluster.publish(0, ["r-0".to_owned()]).await;
    assert_eq!(handle(&source, 1).await, ["r-0"]);
    cluster.call(|mock| mock.create_topic("later", 1, 1)).unwrap();
    let producer = producer(&cluster, ("linger.ms", "0"));
    publish(&producer, FutureRecord::to("later").payload(&b"first"[..])).await;
    assert_eq!(handle(&source, 1).await, ["first"]);
    let found = async {
        while !source.missing_topics().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, found).await.expect("it is found");
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_with_which_no_client_can_be_created_are_an_error_of_the_properties() {
    for (properties, expected) in [
        (vec![("sasl.mechanism", "GSSAPI"), ("security.protocol", "sasl_plaintext")], true),
        (vec![("session.timeout.ms", "3000"), ("max.poll.interval.ms", "2000")], true),
        (vec![("statistics.interval.ms", "-1")], false),
        #[cfg(feature = "tls")]
        (vec![("security.protocol", "ssl"), ("ssl.ca.location", "/missing")], false),
        #[cfg(feature = "tls")]
        (vec![("security.protocol", "ssl"), ("ssl.keystore.location", "/missing")], false),
    ] {
        let servers = [("bootstrap.servers", "127.0.0.1:1")];
        let properties: Vec<_> = servers.into_iter().chain(properties).collect();
        let builder = KafkaSource::builder(properties.clone(), ["orders"], "g");
        let builder = builder.drain_for(Duration::ZERO).request_timeout(Duration::from_millis(100));
        let error = builder.start().await.unwrap_err();
        let found = matches!(error, KafkaStartError::Properties { .. });
        assert_eq!(found, expected, "{properties:?}: {error}");
    }
}

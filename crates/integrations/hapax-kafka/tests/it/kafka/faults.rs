//! Rebalances, brokers that do not answer, and errors of brokers and of the client.

use std::future::ready;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_kafka::{KafkaSink, KafkaSource};
use hapax_messages::{
    Delivery, MessageId, MessageSink as _, MessageSource as _, OutgoingMessage, PublishError,
};
use hapax_testkit::servers::KafkaMock;
use rdkafka::ClientConfig;
use rdkafka::mocking::MockCoordinator;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tokio::time::{sleep, timeout};

use super::cluster::{Cluster, LIMIT, PARTITIONS};

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

async fn receive(source: &KafkaSource) -> Vec<Arc<dyn Delivery>> {
    let received = timeout(LIMIT, source.receive(MANY)).await;
    received.expect("records are received").expect("no error")
}

async fn acknowledge(delivery: Arc<dyn Delivery>, handled: &mut Vec<String>) {
    delivery.acknowledge().await.unwrap();
    handled.push(String::from_utf8(delivery.message().payload.to_vec()).unwrap());
}

/// Injects an error into the answers to requests of a kind.
fn fail(cluster: &Cluster, request: RDKafkaApiKey, errors: Vec<RDKafkaRespErr>) {
    cluster.call(move |mock| mock.request_errors(request, &errors));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_partition_continues_after_it_was_assigned_again() {
    let cluster = Cluster::start();
    cluster.publish(0, (0..40).map(|number| format!("r-{number}"))).await;
    let source = cluster.started(cluster.source().max_unacknowledged(8)).await;
    let mut paused = Vec::new();
    while paused.len() < 8 {
        paused.extend(receive(&source).await);
    }
    // The member is lost, and joins again.
    let illegal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION;
    fail(&cluster, RDKafkaApiKey::Heartbeat, vec![illegal]);
    while !paused.iter().all(|delivery| delivery.has_ended()) {
        sleep(Duration::from_millis(10)).await;
    }
    drop(paused);
    let mut received = 0;
    while received < 40 {
        for delivery in receive(&source).await {
            delivery.acknowledge().await.unwrap();
            received += 1;
        }
    }
    cluster.until_finished().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_paused_partition_are_not_fetched_again() {
    let cluster = Cluster::mock(KafkaMock::with_brokers(2, "orders", PARTITIONS));
    let group = cluster.group.clone();
    cluster.call(move |mock| {
        mock.coordinator(MockCoordinator::Group(group), 1).unwrap();
        mock.partition_leader("orders", 0, Some(2)).unwrap();
    });
    let mut config = ClientConfig::new();
    let config = config.set("bootstrap.servers", cluster.bootstrap()).set("linger.ms", "60000");
    let producer: FutureProducer = config.create().unwrap();
    let payloads: Vec<_> = (0..1_000).map(|number| format!("r-{number}")).collect();
    // The producer learns the leader by the first record. It sends the others as one batch, which one fetch returns
    // whole.
    for batch in [&payloads[..1], &payloads[1..]] {
        for payload in batch {
            let record = FutureRecord::<(), _>::to(&cluster.topic).partition(0).payload(payload);
            producer.send_result(record).unwrap();
        }
        producer.flush(LIMIT).unwrap();
    }
    let source = cluster.started(cluster.source().max_unacknowledged(8)).await;
    // A check of the logs at the start, or records that arrive before the partition has its own queue, assign all
    // partitions again, which fetches again. Both have ended when the partition is paused a second time.
    let mut handled = Vec::new();
    let mut received = Vec::new();
    for _ in 0..2 {
        for delivery in std::mem::take(&mut received) {
            acknowledge(delivery, &mut handled).await;
        }
        while received.len() < 8 {
            received.extend(receive(&source).await);
        }
        assert_eq!(received.len(), 8, "the partition is paused");
    }
    // From here on its leader does not answer.
    cluster.call(|mock| mock.broker_round_trip_time(2, Duration::from_secs(3600))).unwrap();
    while handled.len() < payloads.len() {
        for delivery in std::mem::take(&mut received) {
            acknowledge(delivery, &mut handled).await;
        }
        if handled.len() < payloads.len() {
            received = receive(&source).await;
        }
    }
    assert_eq!(handled, payloads);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_without_a_leader_that_answers_does_not_delay_others() {
    const RECORDS: usize = 5_000;
    let mock = KafkaMock::with_brokers(2, "orders", PARTITIONS);
    let cluster = Cluster::mock(mock);
    let group = cluster.group.clone();
    cluster.call(move |mock| {
        mock.coordinator(MockCoordinator::Group(group), 1).unwrap();
        for (partition, broker) in [(0, 1), (1, 2), (2, 1)] {
            mock.partition_leader("orders", partition, Some(broker)).unwrap();
        }
    });
    for partition in [0, 1] {
        cluster.publish(partition, (0..RECORDS).map(|number| format!("r-{number}"))).await;
    }
    cluster.call(|mock| mock.broker_round_trip_time(2, Duration::from_secs(3600))).unwrap();
    let source = cluster.source().max_unacknowledged(500).start().await.unwrap();
    let handled = async {
        let mut handled = 0;
        while handled < RECORDS {
            // The errors are those of the other partition.
            for delivery in source.receive(MANY).await.into_iter().flatten() {
                assert_eq!(delivery.message().position.as_ref().unwrap().partition, 0);
                delivery.acknowledge().await.unwrap();
                handled += 1;
            }
        }
    };
    timeout(LIMIT, handled).await.expect("the other partitions continue");
    cluster.call(|mock| mock.broker_round_trip_time(2, Duration::ZERO)).unwrap();
    // Answers that are delayed go with their connections.
    cluster.call(|mock| mock.broker_down(2).and_then(|()| mock.broker_up(2))).unwrap();
    let first = async {
        loop {
            if let Ok(received) = source.receive(NonZeroUsize::MIN).await {
                break received;
            }
        }
    };
    let first = timeout(LIMIT, first).await.expect("it is received once its leader answers");
    assert_eq!(first[0].message().position.as_ref().unwrap().partition, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_dropped_leaves_the_group() {
    let cluster = Cluster::start();
    for _ in 0..5 {
        let mut start = Box::pin(cluster.source().start());
        tokio::select! {
            biased;
            _ = &mut start => panic!("it waits for brokers"),
            () = ready(()) => {}
        }
    }
    let source = cluster.source().start().await.unwrap();
    let assigned = async {
        while source.partition_count() < usize::try_from(PARTITIONS).unwrap() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, assigned).await.expect("no other member has a partition");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_ends_is_an_error_and_the_source_can_be_closed() {
    for is_assigned in [false, true] {
        let cluster = Cluster::start();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let source = runtime.spawn(cluster.source().start()).await.unwrap().unwrap();
        if is_assigned {
            timeout(LIMIT, source.wait_assigned()).await.unwrap();
        }
        runtime.shutdown_background();
        cluster.publish(0, ["r-0".to_owned()]).await;
        let failed = async {
            loop {
                if let Err(error) = source.receive(MANY).await {
                    break error.to_string();
                }
            }
        };
        let error = timeout(LIMIT, failed).await.expect("it is reported");
        assert!(error.contains("the runtime in which the source was started"), "{error}");
        timeout(LIMIT, source.close()).await.expect("it ends");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_next_record_was_deleted_stops_while_it_is_fetched() {
    let cluster = Cluster::start();
    let source = cluster.started(cluster.source().max_unacknowledged(1)).await;
    let (mut of_stopped, mut of_other) = (Vec::new(), Vec::new());
    for (partition, received) in [(0, &mut of_stopped), (2, &mut of_other)] {
        cluster.publish(partition, ["r-0".to_owned()]).await;
        *received = receive(&source).await;
    }
    // The mock cluster keeps 5 MiB of a partition.
    let large = "x".repeat(900_000);
    for _ in 0..60 {
        cluster.publish(0, [large.clone()]).await;
    }
    for delivery in &of_stopped {
        delivery.acknowledge().await.unwrap();
    }
    let failed = async {
        loop {
            match source.receive(MANY).await {
                Ok(received) => {
                    for delivery in received {
                        delivery.acknowledge().await.unwrap();
                    }
                }
                Err(error) => break error.to_string(),
            }
        }
    };
    let error = timeout(LIMIT, failed).await.expect("it is reported");
    assert!(error.contains("records were deleted before they were handled"), "{error}");
    assert_eq!(source.stopped_partitions().len(), 1);
    // The others continue, also one that is paused during the new assignment.
    cluster.publish(1, ["r-1".to_owned()]).await;
    let received = receive(&source).await;
    assert_eq!(received[0].message().position.as_ref().unwrap().partition, 1);
    cluster.publish(2, ["r-1".to_owned()]).await;
    of_other[0].acknowledge().await.unwrap();
    let received = receive(&source).await;
    assert_eq!(received[0].message().position.as_ref().unwrap().partition, 2);
    assert_eq!(received[0].message().payload, "r-1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_logs_much_joins_its_group_and_receives() {
    // The client takes its log level from the global subscriber.
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG);
    let subscriber = subscriber.with_writer(std::io::sink).finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let cluster = Cluster::start();
    cluster.publish(0, ["r-0".to_owned()]).await;
    let properties = [("bootstrap.servers", cluster.bootstrap()), ("debug", "all")];
    let builder = KafkaSource::builder(properties, [&cluster.topic], &cluster.group);
    let source = cluster.started(builder).await;
    receive(&source).await[0].acknowledge().await.unwrap();
    cluster.until_finished().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fatal_error_of_the_client_is_an_error_of_each_call() {
    let cluster = Cluster::start();
    let properties = [
        ("bootstrap.servers", cluster.bootstrap()),
        ("group.instance.id", "one"),
        ("session.timeout.ms", "3000"),
        ("heartbeat.interval.ms", "200"),
    ];
    let builder = KafkaSource::builder(properties, [&cluster.topic], &cluster.group);
    let source = cluster.started(builder).await;
    let fenced = RDKafkaRespErr::RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID;
    fail(&cluster, RDKafkaApiKey::Heartbeat, vec![fenced]);
    for _ in 0..2 {
        let received = timeout(LIMIT, source.receive(MANY)).await.expect("it is reported");
        let error = received.map(|received| received.len()).unwrap_err().to_string();
        assert!(error.contains("a fatal error"), "{error}");
    }
    timeout(LIMIT, source.close()).await.expect("it has ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_too_large_is_published_one_message_at_a_time() {
    let cluster = Cluster::start();
    let sink = KafkaSink::new([("bootstrap.servers", cluster.bootstrap())]).unwrap();
    let publish = |id: &str| {
        let id = MessageId::new(id).unwrap();
        let (sink, message) = (sink.clone(), OutgoingMessage::new("orders", id, "x"));
        async move { timeout(LIMIT, sink.publish(&message)).await.expect("it ends") }
    };
    publish("m-0").await.unwrap();
    let too_large = RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE;
    fail(&cluster, RDKafkaApiKey::Produce, vec![too_large]);
    publish("m-1").await.unwrap();
    fail(&cluster, RDKafkaApiKey::Produce, vec![too_large; 2]);
    let error = publish("m-2").await.unwrap_err();
    assert!(matches!(error, PublishError::Rejected { .. }), "{error}");
    publish("m-3").await.unwrap();
    let records: i64 = cluster.positions().iter().map(|it| it.end).sum();
    assert_eq!(records, 3);
}

//! The source.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_kafka::{KafkaSource, KafkaStartAt, KafkaStartError};
use hapax_messages::{Delivery, IdRule, IdRules, MessageSource as _};
use tokio::time::timeout;

use super::cluster::{Cluster, LIMIT, clusters};

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

/// Receives this many records.
async fn receive(source: &KafkaSource, count: usize) -> Vec<Arc<dyn Delivery>> {
    let mut received = Vec::new();
    while received.len() < count {
        let next = timeout(LIMIT, source.receive(MANY)).await.expect("records are there");
        received.extend(next.expect("the broker is there"));
    }
    received
}

fn payload(delivery: &dyn Delivery) -> String {
    String::from_utf8(delivery.message().payload.to_vec()).unwrap()
}

fn payloads(received: &[Arc<dyn Delivery>]) -> Vec<String> {
    received.iter().map(|it| payload(&**it)).collect()
}

fn texts(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|number| format!("r-{number}")).collect()
}

/// Receives until there is an error. What is received before is returned, and received again.
async fn error(source: &KafkaSource) -> String {
    let failed = async {
        // Records come before an error, and those that are dropped come again.
        let mut received = Vec::new();
        loop {
            match source.receive(MANY).await {
                Ok(records) => received.extend(records),
                Err(error) => return error.to_string(),
            }
        }
    };
    timeout(LIMIT, failed).await.expect("an error is there")
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_cannot_work_are_rejected() {
    let cluster = Cluster::start();
    let builder = cluster.source();
    for (name, builder) in [
        ("max_unacknowledged", builder.clone().max_unacknowledged(0)),
        ("max_unacknowledged_bytes", builder.clone().max_unacknowledged_bytes(0)),
        ("max_uncommitted", builder.clone().max_uncommitted(0)),
        ("commit_every", builder.clone().commit_every(Duration::ZERO)),
        // More than half of max.poll.interval.ms.
        ("drain_for", builder.clone().drain_for(Duration::from_millis(3001))),
        ("idle_check_after", builder.clone().idle_check_after(Duration::ZERO)),
        ("request_timeout", builder.clone().request_timeout(Duration::from_secs(61))),
    ] {
        let error = builder.start().await.unwrap_err();
        assert!(error.to_string().starts_with(&format!("{name}: expected ")), "{error}");
    }
    let properties = [("bootstrap.servers", cluster.bootstrap())];
    let none: [&str; 0] = [];
    let error = KafkaSource::builder(properties, none, "g").start().await.unwrap_err();
    assert!(matches!(error, KafkaStartError::TopicName { .. }), "{error}");
    let error = KafkaSource::builder(properties, ["missing"], "g").start().await.unwrap_err();
    assert!(
        matches!(&error, KafkaStartError::Topic { topic, .. } if topic == "missing"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metadata_of_a_commit_marks_records_that_may_have_been_started() {
    for cluster in clusters("the_position_tells").await {
        cluster.publish(0, texts(0..4)).await;
        let source = cluster.started(cluster.source()).await;
        let received = receive(&source, 4).await;
        assert!(received.iter().all(|it| !it.is_redelivery()));
        let committed = cluster.positions()[0].clone();
        assert_eq!(committed.offset, Some(0), "it is opened before it is delivered");
        assert!(committed.metadata.starts_with("hapax1 open "), "{committed:?}");
        // The position stays before the first unfinished record.
        for at in [2, 0] {
            received[at].acknowledge().await.unwrap();
        }
        cluster.until(0, |it| it.offset == Some(1)).await;
        // Its owner ends with two records in progress, which are fenced after the time of a drain.
        source.close().await;
        let error = received[1].acknowledge().await.unwrap_err().to_string();
        assert!(error.contains("it was revoked or lost"), "{error}");
        received[3].hold().await.unwrap_err();
        cluster.publish(0, texts(4..5)).await;
        let source = cluster.started(cluster.source()).await;
        let received = receive(&source, 4).await;
        let redelivered: Vec<_> = received.iter().map(|it| it.is_redelivery()).collect();
        assert_eq!(payloads(&received), texts(1..5));
        assert_eq!(redelivered, [true, true, true, false]);
        for delivery in &received {
            delivery.acknowledge().await.unwrap();
        }
        source.close().await;
        let committed = cluster.positions()[0].clone();
        assert_eq!(committed.offset, Some(5));
        assert!(committed.metadata.starts_with("hapax1 clean "), "{committed:?}");
        let closed = source.receive(MANY).await.map(|it| payloads(&it)).unwrap_err();
        assert!(closed.to_string().contains("was closed"), "{closed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_of_a_revoked_partition_may_end_and_are_fenced_after_that() {
    for cluster in clusters("deliveries_of_a_revoked").await {
        for partition in 0..3 {
            cluster.publish(partition, texts(0..1)).await;
        }
        let builder = cluster.source().drain_for(Duration::from_secs(3));
        let first = cluster.started(builder.clone()).await;
        let received = receive(&first, 3).await;
        let second = builder.start().await.unwrap();
        // It joins, and gets partitions only after the first source has ended its deliveries.
        for delivery in &received[..2] {
            delivery.acknowledge().await.expect("the partitions are not fenced yet");
        }
        timeout(LIMIT, second.wait_assigned()).await.expect("partitions are assigned");
        received[2].acknowledge().await.expect_err("its partition was revoked");
        drop(received);
        let finished = async {
            loop {
                let (one, other) = (first.receive(MANY), second.receive(MANY));
                let received = tokio::select! { it = one => it, it = other => it };
                for delivery in received.into_iter().flatten() {
                    // The mock cluster rejects commits while a member joins, so that others come too.
                    assert!(delivery.is_redelivery());
                    delivery.acknowledge().await.unwrap();
                }
            }
        };
        tokio::select! {
            () = finished => {}
            () = cluster.until_finished() => {}
        }
        assert!(first.partition_count() > 0 && second.partition_count() > 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_committed_offset_outside_of_the_log_stops_its_partition() {
    for cluster in clusters("a_position_outside").await {
        cluster.publish(0, texts(0..2)).await;
        cluster.publish(1, texts(0..2)).await;
        cluster.commit(0, 17, "");
        let source = cluster.started(cluster.source()).await;
        let found = error(&source).await;
        assert!(found.contains("expected an offset from 0 to 2, found 17"), "{found}");
        let received = receive(&source, 2).await;
        assert!(received.iter().all(|it| it.message().position.as_ref().unwrap().partition == 1));
        let stopped = source.stopped_partitions();
        assert_eq!((stopped.len(), stopped[0].partition), (1, 0));
        assert_eq!(cluster.positions()[0].offset, Some(17), "it is not moved");
        drop(received);
        source.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_was_created_again_stops_its_partition() {
    for cluster in clusters("a_topic_that_was_created_again").await {
        cluster.publish(0, texts(0..3)).await;
        // The record 0 of the topic before had another time.
        cluster.commit(0, 1, "hapax1 clean 1600000000000");
        let source = cluster.started(cluster.source()).await;
        let found = error(&source).await;
        assert!(found.contains("the topic was created again"), "{found}");
        assert_eq!(source.stopped_partitions().len(), 1);
        source.close().await;
        assert_eq!(cluster.positions()[0].offset, Some(1), "it is not moved");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_begins_as_start_at_says() {
    for cluster in clusters("a_new_group").await {
        cluster.publish(0, texts(0..3)).await;
        let builder = cluster.source().start_at(KafkaStartAt::Latest);
        let source = cluster.started(builder.clone()).await;
        // The position is committed before a record is there, so that a restart skips none.
        cluster.until(0, |it| it.offset == Some(3)).await;
        source.close().await;
        cluster.publish(0, texts(3..4)).await;
        let source = cluster.started(builder).await;
        let received = receive(&source, 1).await;
        assert_eq!(payloads(&received), texts(3..4));
        let id = IdRules::new([IdRule::Position]).id(received[0].message()).unwrap();
        assert!(id.as_str().starts_with(&format!("{}:0:3:1", cluster.topic)), "{id}");
        assert_eq!(received[0].message().key.as_deref(), Some("k"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_with_too_many_records_pauses_and_others_continue() {
    for cluster in clusters("a_partition_with_too_many").await {
        cluster.publish(0, texts(0..40)).await;
        let source = cluster.started(cluster.source().max_unacknowledged(8)).await;
        let mut first = receive(&source, 8).await;
        cluster.publish(1, texts(0..1)).await;
        let other = receive(&source, 1).await;
        let partitions = other.iter().map(|it| it.message().position.as_ref().unwrap().partition);
        assert_eq!((first.len(), partitions.collect::<Vec<_>>()), (8, vec![1]));
        // The first partition continues, in order.
        let mut seen = Vec::new();
        while seen.len() < 40 {
            for delivery in std::mem::take(&mut first) {
                delivery.acknowledge().await.unwrap();
                seen.push(payload(&*delivery));
            }
            if seen.len() < 40 {
                first = receive(&source, 1).await;
            }
        }
        assert_eq!(seen, texts(0..40));
    }
}

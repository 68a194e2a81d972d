//! Tests of the end of a delivery.

use super::super::metadata::CommitMetadata;
use super::super::partition::{Commit, Partition, PartitionLimits, Record};
use super::super::state::PartitionKey;
use super::*;

const LIMITS: PartitionLimits =
    PartitionLimits { records: 100, bytes: 10_000, uncommitted: 100, waiting: 100 };

/// An ordered source with a partition of assignment 1 that has records with one order key.
struct Source {
    shared: Arc<Shared>,
    key: PartitionKey,
}

impl Source {
    fn new(records: i64) -> Self {
        let key: PartitionKey = (Arc::from("orders"), 0);
        let open = CommitMetadata::Open { end: records, handled: None };
        let committed = Some(Commit { offset: 0, metadata: open });
        let mut partition = Partition::new(LIMITS, 1, 0, committed, (0, 0));
        for offset in 0..records {
            let message = Message::new("kafka://orders", "x").with_key("a");
            let record = Record { message, bytes: 1, ..Record::default() };
            partition.accept(offset, Box::new(record)).unwrap();
        }
        partition.confirm();
        let shared = Arc::new(Shared::default());
        shared.lock().partitions.insert(key.clone(), partition);
        Self { shared, key }
    }

    fn receive(&self) -> Vec<KafkaDelivery> {
        let received = self.shared.lock().deliver(std::num::NonZeroUsize::new(100).unwrap());
        let runtime = Handle::current();
        let delivery = |it| KafkaDelivery::new(Arc::clone(&self.shared), runtime.clone(), it, true);
        received.into_iter().map(delivery).collect()
    }

    /// Returns the number of records that are delivered, and the offset that is committed at the end.
    fn state(&self) -> (usize, i64) {
        let state = self.shared.lock();
        let partition = &state.partitions[&self.key];
        (partition.delivered(), partition.last_commit().map_or(0, |it| it.offset))
    }
}

const PAUSE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_delayed_record_is_delivered_after_its_pause_although_a_clone_of_its_delivery_is_kept() {
    let source = Source::new(1);
    let kept = source.receive().pop().unwrap();
    assert!(kept.delay(PAUSE).await.unwrap());
    assert_eq!(source.state(), (0, 0));
    assert!(kept.acknowledge().await.is_err(), "another delivery decides");
    assert!(!kept.delay(PAUSE).await.unwrap() && source.receive().is_empty());
    tokio::time::sleep(PAUSE * 2).await;
    let again = source.receive().pop().unwrap();
    assert!(again.was_delayed() && again.is_redelivery() && !kept.was_delayed());
    drop(kept);
    assert_eq!(source.state(), (1, 0), "the end of the first one changes nothing");
    again.acknowledge().await.unwrap();
    assert_eq!(source.state(), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_record_behind_a_delayed_one_is_passed_by_none_while_a_clone_of_its_delivery_is_kept() {
    let source = Source::new(4);
    let received = source.receive();
    let [first, second, third, fourth] = <[_; 4]>::try_from(received).unwrap();
    assert!(first.delay(PAUSE).await.unwrap());
    // As the turn of each one comes. The fourth is dropped before.
    assert!(second.return_behind_delayed() && third.return_behind_delayed());
    drop(fourth);
    assert_eq!(source.state(), (0, 0));
    assert!(source.receive().is_empty());
    tokio::time::sleep(PAUSE * 2).await;
    let again = source.receive().pop().unwrap();
    assert!(!again.return_behind_delayed());
    again.acknowledge().await.unwrap();
    drop((first, second, third));
    for offset in 1..4 {
        let [next] = <[_; 1]>::try_from(source.receive()).unwrap();
        assert_eq!((next.delivered.offset, next.was_delayed()), (offset, false));
        assert!(!next.return_behind_delayed());
        assert_eq!(source.state(), (1, offset));
        next.acknowledge().await.unwrap();
    }
    assert!(source.receive().is_empty());
}

#[tokio::test]
async fn a_record_that_stays_keeps_its_followers_until_it_is_acknowledged() {
    let source = Source::new(3);
    let [first, second, third] = <[_; 3]>::try_from(source.receive()).unwrap();
    assert!(!second.return_behind_delayed());
    assert!(first.keep_followers() && first.keep_followers());
    assert!(!first.return_behind_delayed() && second.return_behind_delayed());
    assert!(!second.keep_followers(), "its delivery has ended");
    drop(third);
    assert!(source.receive().is_empty());
    first.acknowledge().await.unwrap();
    assert!(!first.keep_followers() && !first.delay(PAUSE).await.unwrap());
    assert_eq!(source.receive().len(), 1);
    drop((first, second));
}

#[tokio::test]
async fn a_record_whose_delivery_is_dropped_is_passed_by_none_that_was_delivered_with_it() {
    let source = Source::new(2);
    let [first, second] = <[_; 2]>::try_from(source.receive()).unwrap();
    drop(first);
    assert!(second.return_behind_delayed());
    let [first] = <[_; 1]>::try_from(source.receive()).unwrap();
    assert!(!first.return_behind_delayed() && first.is_redelivery());
    first.acknowledge().await.unwrap();
    let [second] = <[_; 1]>::try_from(source.receive()).unwrap();
    assert_eq!(second.delivered.offset, 1);
}

#[test]
fn a_pause_ends_although_the_runtime_of_the_consumer_has_ended() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (of_source, of_consumer) = (runtime(), runtime());
    let source = Source::new(1);
    let delivery = of_source.block_on(async { source.receive().pop().unwrap() });
    assert!(of_consumer.block_on(delivery.delay(Duration::ZERO)).unwrap());
    drop((delivery, of_consumer));
    of_source.block_on(async {
        while source.receive().is_empty() {
            tokio::task::yield_now().await;
        }
    });
}

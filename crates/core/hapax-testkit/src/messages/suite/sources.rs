//! Rules of sources.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_messages::{Delivery, MessageSink, MessageSource};
use tokio::time::{Instant, sleep, timeout};

use super::BrokerFixture;
use super::bench::{Bench, Receiver, Rounds, TIMEOUT, id_of, ids, payload};
use crate::SeededEntropy;

/// Every message that was published is received, and no call receives more than it wants.
pub async fn every_message_is_received_and_at_most_max_at_a_time<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let source = bench.broker.source().await;
    for id in ids(50) {
        bench.send(&id).await;
    }
    let mut missing: Vec<_> = ids(50).collect();
    for most in (1..=4).cycle() {
        if missing.is_empty() {
            break;
        }
        let most = NonZeroUsize::new(most).unwrap();
        let received = timeout(TIMEOUT, source.receive(most)).await.expect("messages are there");
        let received = received.expect("the broker is there");
        assert!((1..=most.get()).contains(&received.len()), "{} of {most}", received.len());
        for delivery in received {
            let id = id_of(&*delivery);
            assert_eq!(delivery.message().payload, payload(&id));
            delivery.acknowledge().await.expect("the broker is there");
            missing.retain(|it| *it != id);
        }
    }
}

/// A message that was received and dropped without an acknowledgement is delivered again, as often
/// as that happens, and marked where the broker knows.
pub async fn a_message_that_was_dropped_is_delivered_again<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    bench.send("one").await;
    let mut receiver = bench.receiver().await;
    let first = receiver.next().await;
    assert!(!first.is_redelivery(), "the first delivery");
    drop(first);
    for _ in 0..3 {
        let again = receiver.next().await;
        assert_eq!(
            (id_of(&*again), &again.message().payload[..]),
            ("one".to_owned(), &payload("one")[..])
        );
        assert!(again.is_redelivery() || !F::MARKS_REDELIVERIES, "a redelivery is not marked");
    }
    // Its process ends, and another one gets the message.
    drop(receiver);
    let mut receiver = bench.receiver().await;
    receiver.take("one").await.acknowledge().await.expect("the broker is there");
    bench.acknowledge_rest(&mut receiver).await;
}

/// An unacknowledged message is delivered again after the connection was lost, although its owner
/// does not know that and still has it.
pub async fn a_message_is_delivered_again_after_its_connection_was_lost<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    bench.send("one").await;
    let mut receiver = bench.receiver().await;
    let first = receiver.take("one").await;
    bench.broker.cut();
    let again = receiver.take("one").await;
    again.acknowledge().await.expect("the source has connected again");
    bench.acknowledge_rest(&mut receiver).await;
    drop(first);
    bench.send("two").await;
    bench.only(&mut receiver, "two").await;
}

/// A message that was acknowledged does not come again, neither to its source nor to another one
/// after an orderly end.
pub async fn an_acknowledged_message_is_not_delivered_again<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    for id in ["one", "two"] {
        bench.send(id).await;
    }
    let mut receiver = bench.receiver().await;
    for id in ["one", "two"] {
        receiver.take(id).await.acknowledge().await.expect("the broker is there");
    }
    bench.acknowledge_rest(&mut receiver).await;
    drop(receiver);
    bench.send("three").await;
    let mut receiver = bench.receiver().await;
    bench.only(&mut receiver, "three").await;
}

/// A message that is held is not delivered to any source for longer than the broker waits for an
/// acknowledgement, and holding counts as no delivery.
pub async fn a_held_message_is_not_delivered_again<F: BrokerFixture>() {
    for _ in 0..5 {
        if timeout(TIMEOUT * 2, held::<F>()).await.expect("another message is delivered again") {
            return;
        }
        eprintln!("the machine was too busy to hold the message in time: once more");
    }
    panic!("the message was not held in time, five times");
}

/// Returns false if the message was not held in time, so that nothing follows from a redelivery.
async fn held<F: BrokerFixture>() -> bool {
    let bench = Bench::<F>::start().await;
    let sources = [bench.broker.source().await, bench.broker.source().await];
    let every = sources[0].limits().hold_every;
    let mut receiver = Receiver::new(sources.map(|it| Arc::new(it) as Arc<dyn MessageSource>));
    let mut holding = Holding { last: Instant::now(), longest: Duration::ZERO };
    bench.send("held").await;
    let held = receiver.take("held").await;
    let counted = bench.broker.deliveries().await;
    for _ in 0..5 {
        holding.hold(&*held).await;
    }
    let clear_attempts = bench.broker.deliveries().await != counted;
    // It comes again and again meanwhile, so that the broker's own clock shows that time has
    // passed.
    bench.send("left").await;
    let mut rounds = Rounds::<F>::begin();
    loop {
        tokio::select! {
            delivery = receiver.next() => {
                if id_of(&*delivery) == "held" {
                    assert!(!holding.is_in_time::<F>(), "a message that is held is delivered again");
                    return false;
                }
                if rounds.next_is_last() {
                    delivery.acknowledge().await.expect("the broker is there");
                    break;
                }
            }
            () = sleep(every.unwrap_or(TIMEOUT)) => {}
        }
        holding.hold(&*held).await;
    }
    if !holding.is_in_time::<F>() {
        return false;
    }
    assert!(!clear_attempts, "holding counts as a delivery");
    held.acknowledge().await.expect("the broker is there");
    bench.send("last").await;
    bench.only(&mut receiver, "last").await;
    true
}

/// Times at which a message was held.
struct Holding {
    last: Instant,
    longest: Duration,
}

impl Holding {
    async fn hold(&mut self, delivery: &dyn Delivery) {
        delivery.hold().await.expect("the broker is there");
        self.longest = self.longest.max(self.last.elapsed());
        self.last = Instant::now();
    }

    /// Returns whether the broker has no reason to deliver the message again.
    fn is_in_time<F: BrokerFixture>(&self) -> bool {
        let longest = self.longest.max(self.last.elapsed());
        F::ACK_TIMEOUT.is_none_or(|timeout| longest < timeout * 2 / 3)
    }
}

/// An acknowledgement of a delivery that is over, because the message was delivered again, neither
/// acknowledges another message nor breaks the source.
pub async fn a_stale_acknowledgement_does_no_harm<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    // So that the places of the deliveries in their connections are not the same before and after.
    bench.send("zero").await;
    receiver.take("zero").await.acknowledge().await.expect("the broker is there");
    bench.send("one").await;
    let stale = receiver.take("one").await;
    bench.broker.cut();
    let again = receiver.take("one").await;
    bench.send("two").await;
    let other = receiver.take("two").await;
    // It may fail, or acknowledge the message that it is about.
    let _ = stale.acknowledge().await;
    drop(stale);
    drop(other);
    receiver.take("two").await.acknowledge().await.expect("the broker is there");
    again.hold().await.expect("the broker is there");
    again.acknowledge().await.expect("the broker is there");
    bench.acknowledge_rest(&mut receiver).await;
}

/// A message that is delayed for a pause is delivered again after it, once, as it was, and is marked as a
/// redelivery. An adapter may keep it instead.
pub async fn a_delayed_message_is_delivered_again_after_its_pause<F: BrokerFixture>() {
    const PAUSE: Duration = Duration::from_secs(2);
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    let mut message = bench.message("later", payload("later"));
    message.key = Some("ä 1".to_owned());
    for value in ["1", "0"] {
        message.headers.push(("X-Many".to_owned(), value.into()));
    }
    bench.publish(&message).await;
    let first = receiver.take("later").await;
    let sent = first.message().clone();
    let begun = Instant::now();
    if first.delay(PAUSE).await.expect("the broker is there") {
        drop(first);
        bench.send("meanwhile").await;
        receiver.take("meanwhile").await.acknowledge().await.expect("the broker is there");
        let again = receiver.take("later").await;
        assert!(begun.elapsed() >= PAUSE, "after {:?}", begun.elapsed());
        assert!(again.is_redelivery() || !F::MARKS_REDELIVERIES, "a redelivery is not marked");
        let (mut found, mut sent) = (again.message().clone(), sent);
        found.position.clone_from(&sent.position);
        // The values of a name are in their order; a client of NATS keeps no order of names.
        for message in [&mut found, &mut sent] {
            message.headers.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        assert!(found == sent, "{:?} instead of {:?}", found, sent);
        again.acknowledge().await.expect("the broker is there");
    } else {
        first.acknowledge().await.expect("it stays with its delivery");
    }
    bench.acknowledge_rest(&mut receiver).await;
    bench.send("last").await;
    bench.only(&mut receiver, "last").await;
}

/// A future of `receive` that is dropped at any moment loses no message.
pub async fn a_receive_that_is_dropped_loses_no_message<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let source = bench.broker.source().await;
    let entropy = SeededEntropy::new(1);
    let mut missing: Vec<_> = ids(40).collect();
    let mut dropped = 0;
    for id in ids(40) {
        bench.send(&id).await;
        let moment = Duration::from_micros(entropy.below(3_000));
        let received = timeout(moment, source.receive(NonZeroUsize::new(3).unwrap())).await;
        let Ok(received) = received else {
            dropped += 1;
            continue;
        };
        for delivery in received.expect("the broker is there") {
            delivery.acknowledge().await.expect("the broker is there");
            missing.retain(|it| *it != id_of(&*delivery));
        }
    }
    drop(source);
    let mut receiver = bench.receiver().await;
    let rest = async {
        while !missing.is_empty() {
            let delivery = receiver.next().await;
            delivery.acknowledge().await.expect("the broker is there");
            missing.retain(|it| *it != id_of(&*delivery));
        }
    };
    timeout(TIMEOUT, rest).await.expect("every message is received");
    eprintln!("{dropped} of 40 futures were dropped");
}

/// The messages of an order key are received in the order in which they were published, and have
/// their key; of a source that claims no order, all are received.
pub async fn messages_with_one_order_key_are_received_in_order<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    for (number, id) in ids(60).enumerate() {
        let mut message = bench.message(&id, payload(&id));
        message.key = Some(format!("ä {}", number % 4));
        bench.publish(&message).await;
    }
    let mut receiver = bench.receiver().await;
    let mut seen: BTreeMap<usize, Option<String>> = BTreeMap::new();
    let mut last = BTreeMap::new();
    while seen.len() < 60 {
        let delivery = receiver.next().await;
        let (id, key) = (id_of(&*delivery), delivery.message().key.clone());
        delivery.acknowledge().await.expect("the broker is there");
        let number: usize = id.trim_start_matches("m-").parse().unwrap();
        // A redelivery, on a slow machine, is no message out of order.
        if seen.insert(number, key).is_none()
            && let Some(before) = last.insert(number % 4, number)
            && F::KEEPS_ORDER
        {
            assert!(before < number, "{number} was received after {before}");
        }
    }
    for (number, key) in seen {
        let expected = F::KEEPS_ORDER.then(|| format!("ä {}", number % 4));
        assert!(!F::KEEPS_ORDER || key == expected, "the order key of {number}: {key:?}");
    }
}

/// Every message is received although some are dropped, some acknowledgements fail, and the broker
/// is killed.
pub async fn every_message_is_received_although_the_broker_is_killed<F: BrokerFixture>() {
    const MESSAGES: u32 = 200;
    /// Messages that are acknowledged before each kill.
    const BETWEEN: u32 = 60;
    let mut bench = Bench::<F>::start().await;
    for id in ids(MESSAGES) {
        bench.send(&id).await;
    }
    let mut receiver = bench.receiver().await;
    let entropy = SeededEntropy::new(1);
    let mut acknowledged: BTreeMap<String, u32> = BTreeMap::new();
    let (mut kills, mut dropped) = (0, 0);
    while acknowledged.len() < MESSAGES as usize {
        if acknowledged.len() > BETWEEN as usize * (kills + 1) && kills < 2 {
            kills += 1;
            bench.broker.kill().await;
            bench.broker.restart().await;
        }
        let delivery = receiver.next().await;
        if entropy.below(4) == 0 {
            dropped += 1;
        } else if delivery.acknowledge().await.is_ok() {
            *acknowledged.entry(id_of(&*delivery)).or_default() += 1;
        }
    }
    bench.acknowledge_rest(&mut receiver).await;
    assert!(kills == 2 && dropped > 20, "{kills} kills, {dropped} dropped");
    let received: Vec<_> = acknowledged.keys().cloned().collect();
    let mut sent: Vec<_> = ids(MESSAGES).collect();
    sent.sort();
    assert_eq!(received, sent);
    // A broker may lose acknowledgements of its last moments: inboxes drop what comes again. A kill
    // loses at most those of the messages so far.
    let again = acknowledged.values().map(|times| times - 1).sum::<u32>();
    assert!(again <= 3 * (BETWEEN + 1), "{again} acknowledgements were lost in {kills} kills");
}

/// A frozen broker is an error of source and sink in time, not of the message, and is found again.
pub async fn a_frozen_broker_is_an_error_in_time_and_found_again<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let source = bench.broker.source().await;
    bench.broker.freeze();
    let received = timeout(TIMEOUT, source.receive(NonZeroUsize::MIN)).await;
    assert!(received.expect("it ends").is_err(), "messages of a frozen broker");
    let message = bench.message("one", payload("one"));
    let published = timeout(TIMEOUT, bench.sink.publish(&message)).await.expect("it ends");
    super::sinks::expect_retry(&published);
    bench.broker.thaw();
    bench.publish(&message).await;
    let mut receiver = Receiver::new([Arc::new(source) as Arc<dyn MessageSource>]);
    receiver.collect(["one".to_owned()]).await;
    bench.acknowledge_rest(&mut receiver).await;
}

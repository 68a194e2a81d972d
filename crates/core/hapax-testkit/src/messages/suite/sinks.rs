//! Rules of sinks.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_messages::{
    DeadLetter, DeadLetterReason, DeadLetterStore, Message, MessageId, MessageSink,
    OutgoingMessage, PublishError, PublishedDeadLetters,
};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::BrokerFixture;
use super::bench::{Bench, TIMEOUT, id_of, ids, payload};

/// Checks that a result makes the caller publish the message again.
pub(super) fn expect_retry(published: &Result<(), PublishError>) {
    let is_retry = matches!(published, Err(PublishError::NotAcknowledged { .. }));
    assert!(is_retry, "expected NotAcknowledged, found {published:?}");
}

fn expect_rejection(published: &Result<(), PublishError>, what: &str) {
    let is_rejected = matches!(published, Err(PublishError::Rejected(_)));
    assert!(is_rejected, "{what}: expected Rejected, found {published:?}");
}

/// Payload, headers and id arrive as they were published: an empty payload, zero bytes, a large
/// one, headers that occur repeatedly, the longest id.
pub async fn a_message_arrives_byte_for_byte<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    let every_byte: Vec<u8> = (0..=255).cycle().take(1_000).collect();
    let payloads = [Vec::new(), vec![0], every_byte, vec![b'\n'; 3], vec![0xff; F::LARGE]];
    let longest = "ü".repeat(MessageId::MAX_LEN / 2);
    let ids = ["m-1", "a b/c?d=e#f", "ü 漢字 \u{1f980}", "{\"order\": 17}", &longest];
    for (payload, id) in payloads.into_iter().zip(ids) {
        let mut message = bench.message(id, payload);
        message.headers = headers(&[
            ("trace", "ä b: c, \"d\""),
            ("empty", ""),
            ("X-Many", "1"),
            ("X-Many", "0"),
            ("content-type", "application/json"),
            // The id of the message is the one that counts.
            ("Message-ID", "of another"),
        ]);
        bench.publish(&message).await;
        let received = receiver.take(id).await;
        expect_same(received.message(), &message);
        received.acknowledge().await.expect("the broker is there");
    }
    bench.acknowledge_rest(&mut receiver).await;
}

fn headers(headers: &[(&str, &str)]) -> Vec<(String, Bytes)> {
    headers.iter().map(|(name, value)| ((*name).to_owned(), value.to_string().into())).collect()
}

fn expect_same(received: &Message, sent: &OutgoingMessage) {
    assert!(received.payload == sent.payload, "the payload of {}", sent.id);
    assert!(!received.origin.is_empty(), "the origin of {}", sent.id);
    let mut values: BTreeMap<String, Vec<&Bytes>> = BTreeMap::new();
    for (name, value) in &sent.headers {
        values.entry(name.to_ascii_lowercase()).or_default().push(value);
    }
    let id = Bytes::from(sent.id.to_string());
    values.insert("message-id".to_owned(), vec![&id]);
    for (name, expected) in values {
        let found = received.headers.iter().filter(|(it, _)| it.eq_ignore_ascii_case(&name));
        let found: Vec<_> = found.map(|(_, value)| value).collect();
        assert_eq!(found, expected, "the header {name} of {}", sent.id);
    }
}

/// A header, an id or an order key that the broker cannot carry is permanently rejected: it neither
/// arrives as another one nor is left out. With an id that is altered, two messages could share
/// one.
pub async fn a_message_that_cannot_arrive_as_it_is_is_rejected<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    let mut odd = Vec::new();
    for id in [" m", "m ", "m\t", "\u{a0}m", "m\u{2003}", "m\n", "m\r\nx: y", "\u{7f}", "\u{1}m"] {
        odd.push(bench.message(id, payload(id)));
    }
    let values = [" x", "x ", "\tx", "x\u{a0}", "x\r\ny: z", "x\ny", "x\0y", "\u{85}"];
    let values = values.map(Bytes::from).into_iter().chain([Bytes::from_static(&[0xff, 0xfe])]);
    let valued = values.map(|value| ("odd".to_owned(), value));
    let named =
        ["", "a b", "a:b", " a", "ä", "a\nb", "a\0b"].map(|name| (name.to_owned(), "x".into()));
    for (number, header) in valued.chain(named).enumerate() {
        let id = format!("header-{number}");
        let mut message = bench.message(&id, payload(&id));
        message.headers = vec![header];
        odd.push(message);
    }
    let mut rejected = 0;
    for (number, message) in odd.iter().enumerate() {
        match timeout(TIMEOUT, bench.sink.publish(message)).await.expect("it ends") {
            Err(PublishError::Rejected(_)) => rejected += 1,
            Err(error) => panic!("message {number}, {:?}: {error}", message.id.as_str()),
            Ok(()) => {
                let received = receiver.next().await;
                assert_eq!(id_of(&*received), message.id.as_str(), "the id of message {number}");
                expect_same(received.message(), message);
                received.acknowledge().await.expect("the broker is there");
            }
        }
    }
    eprintln!("{rejected} of {} messages were rejected", odd.len());
    bench.send("last").await;
    bench.only(&mut receiver, "last").await;
}

/// A message over a limit of the broker is permanently rejected, and does not stop those behind it.
pub async fn a_message_that_is_too_large_is_rejected<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    assert!(!F::TOO_LARGE.is_empty());
    for size in F::TOO_LARGE {
        let message = bench.message(&format!("large-{size}"), vec![b'x'; *size]);
        let published = timeout(TIMEOUT, bench.sink.publish(&message)).await.expect("it ends");
        expect_rejection(&published, &format!("{size} bytes"));
        bench.send(&format!("behind-{size}")).await;
        receiver.collect([format!("behind-{size}")]).await;
    }
    bench.acknowledge_rest(&mut receiver).await;
}

/// A message that was confirmed is in the broker, also if that is killed at once.
pub async fn a_confirmed_message_survives_a_kill<F: BrokerFixture>() {
    let mut bench = Bench::<F>::start().await;
    for id in ids(30) {
        bench.send(&id).await;
    }
    bench.broker.kill().await;
    bench.broker.restart().await;
    let mut receiver = bench.receiver().await;
    receiver.collect(ids(30)).await;
    bench.acknowledge_rest(&mut receiver).await;
}

/// Messages that were confirmed arrive although connections end while they are published. Each is
/// published once, so that no repetition hides a loss.
pub async fn no_confirmed_message_is_lost_with_its_connection<F: BrokerFixture>() {
    let bench = Arc::new(Bench::<F>::start().await);
    let mut confirmed = Vec::new();
    for wave in 0..3 {
        let mut publishing = JoinSet::new();
        for id in ids(120).skip(wave * 40).take(40) {
            let bench = Arc::clone(&bench);
            publishing.spawn(async move {
                let message = bench.message(&id, payload(&id));
                let published = timeout(TIMEOUT, bench.sink.publish(&message)).await;
                let published = published.expect("it ends");
                if published.is_err() {
                    expect_retry(&published);
                }
                published.is_ok().then_some(id)
            });
        }
        // Some are confirmed, and others in progress.
        let first = publishing.join_next().await.expect("it has tasks").expect("no panic");
        bench.broker.cut();
        confirmed.extend(publishing.join_all().await.into_iter().chain([first]).flatten());
    }
    eprintln!("{} of 120 messages were confirmed", confirmed.len());
    bench.send("last").await;
    let mut receiver = bench.receiver().await;
    let mut missing = confirmed;
    missing.push("last".to_owned());
    while !missing.is_empty() {
        let delivery = receiver.next().await;
        let id = id_of(&*delivery);
        delivery.acknowledge().await.expect("the broker is there");
        missing.retain(|it| *it != id);
    }
}

/// A message may be published again under its id, as after a lost confirmation, and each delivery
/// has that id.
pub async fn a_repeated_publication_has_the_same_id<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    for _ in 0..3 {
        bench.send("again").await;
    }
    bench.send("last").await;
    receiver.collect(["again".to_owned(), "last".to_owned()]).await;
    // A broker without a window delivers it three times.
    bench.acknowledge_rest(&mut receiver).await;
}

/// A message that is published again on purpose, with another id for the broker's own
/// deduplication, is delivered again under its id.
pub async fn a_message_with_another_broker_id_is_delivered_again<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    bench.send("redriven").await;
    receiver.collect(["redriven".to_owned()]).await;
    bench.acknowledge_rest(&mut receiver).await;
    for number in 1..=2 {
        let mut again = bench.message("redriven", payload("redriven"));
        again.broker_id = Some(format!("redriven {number}"));
        bench.publish(&again).await;
        receiver.collect(["redriven".to_owned()]).await;
        bench.acknowledge_rest(&mut receiver).await;
    }
}

/// A broker that is down rejects nothing: the message is published again once it is back.
pub async fn a_broker_that_is_down_does_not_reject<F: BrokerFixture>() {
    let mut bench = Bench::<F>::start().await;
    bench.send("before").await;
    bench.broker.kill().await;
    let message = bench.message("meanwhile", payload("meanwhile"));
    for _ in 0..2 {
        let published = timeout(TIMEOUT, bench.sink.publish(&message)).await.expect("it ends");
        expect_retry(&published);
    }
    bench.broker.restart().await;
    bench.publish(&message).await;
    let mut receiver = bench.receiver().await;
    receiver.collect(["before".to_owned(), "meanwhile".to_owned()]).await;
    bench.acknowledge_rest(&mut receiver).await;
}

/// A dead letter is published with its data, whatever characters id and error have.
pub async fn a_dead_letter_is_published_with_its_data<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let mut receiver = bench.receiver().await;
    let letters =
        PublishedDeadLetters::new(Arc::new(bench.broker.sink().await), bench.broker.destination());
    let id = MessageId::new(" of\na payload ").expect("a valid id");
    let message = Message::new("memory://orders", payload("m-1")).with_header("trace", "t-1");
    let (reason, error) = (DeadLetterReason::Rejected, "line 1: ä\n  line 2\n");
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    let letter = DeadLetter::new("orders", Some(&id), message, reason, error, now).attempts(3);
    letters.park(&letter).await.expect("it is published");
    let received = receiver.take(&letter.id_hex()).await;
    for (name, expected) in [
        ("trace", "t-1"),
        ("dead-letter-consumer", "orders"),
        ("dead-letter-message-id", "%20of%0Aa payload%20"),
        ("dead-letter-origin", "memory://orders"),
        ("dead-letter-reason", "rejected"),
        ("dead-letter-attempts", "3"),
        ("dead-letter-error", "line 1: ä%0A  line 2%0A"),
    ] {
        let found = received.message().header(name).expect(name);
        assert_eq!(found, expected.as_bytes(), "{name}");
    }
    assert_eq!(received.message().payload, payload("m-1"));
    received.acknowledge().await.expect("the broker is there");
    bench.acknowledge_rest(&mut receiver).await;
}

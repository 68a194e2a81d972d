//! The source.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, pull, push};
use hapax_messages::{Delivery, MessageSource};
use hapax_nats::{NatsOrderKey, NatsSource, NatsStartError};
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::NatsServer;

use super::context;

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

async fn send(context: &Context, payload: String) {
    context.publish("orders.created", payload.into()).await.unwrap().await.unwrap();
}

async fn start(context: &Context) -> NatsSource {
    let builder = NatsSource::builder(context.clone(), "ORDERS", "test");
    builder.ack_wait(Duration::from_secs(1)).start().await.unwrap()
}

fn payload(delivery: &dyn Delivery) -> String {
    String::from_utf8(delivery.message().payload.to_vec()).unwrap()
}

#[tokio::test]
async fn a_consumer_that_would_lose_messages_is_rejected() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let stream = context.get_stream("ORDERS").await.unwrap();
    let right = pull::Config { ack_policy: AckPolicy::Explicit, ..pull::Config::default() };
    let cases = [
        ("max_deliver", pull::Config { max_deliver: 5, ..right.clone() }),
        ("ack policy", pull::Config { ack_policy: AckPolicy::None, ..right.clone() }),
        ("max_ack_pending", pull::Config { max_ack_pending: -1, ..right.clone() }),
        ("ack_wait", pull::Config { ack_wait: Duration::from_millis(100), ..right.clone() }),
        ("headers_only", pull::Config { headers_only: true, ..right.clone() }),
    ];
    for (number, (what, config)) in cases.into_iter().enumerate() {
        let name = format!("bad-{number}");
        let config = pull::Config { durable_name: Some(name.clone()), ..config };
        stream.create_consumer(config).await.unwrap();
        let error =
            NatsSource::builder(context.clone(), "ORDERS", &name).start().await.unwrap_err();
        assert!(error.to_string().contains(what), "{what}: {error}");
    }
    let config = push::Config {
        durable_name: Some("push".to_owned()),
        deliver_subject: "pushed".to_owned(),
        ack_policy: AckPolicy::Explicit,
        ..push::Config::default()
    };
    stream.create_consumer(config).await.unwrap();
    let error = NatsSource::builder(context.clone(), "ORDERS", "push").start().await.unwrap_err();
    assert!(matches!(error, NatsStartError::Push { .. }), "{error}");
    let error = NatsSource::builder(context.clone(), "NONE", "x").start().await.unwrap_err();
    assert!(matches!(error, NatsStartError::Server { .. }), "{error}");
    // A right one is found again.
    start(&context).await;
    start(&context).await;
}

#[tokio::test]
async fn a_message_is_delivered_again_until_it_is_acknowledged() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = start(&context).await;
    send(&context, "one".to_owned()).await;
    let first = source.receive(MANY).await.unwrap();
    assert!(!first[0].is_redelivery());
    drop(first);
    let second = source.receive(MANY).await.unwrap();
    assert_eq!((payload(&*second[0]), second[0].is_redelivery()), ("one".to_owned(), true));
    second[0].acknowledge().await.unwrap();
    let mut consumer = context
        .get_stream("ORDERS")
        .await
        .unwrap()
        .get_consumer::<pull::Config>("test")
        .await
        .unwrap();
    let info = consumer.info().await.unwrap();
    assert_eq!((info.num_ack_pending, info.num_pending), (0, 0));
}

#[tokio::test]
async fn a_message_that_is_held_is_not_delivered_again() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = start(&context).await;
    for text in ["held", "left"] {
        send(&context, text.to_owned()).await;
    }
    let mut received = source.receive(MANY).await.unwrap();
    assert_eq!(received.len(), 2);
    let held = received.remove(0);
    drop(received);
    // The other one comes again and again meanwhile: by the server's own clock the time has passed.
    for _ in 0..3 {
        let again = {
            let receiving = source.receive(MANY);
            tokio::pin!(receiving);
            loop {
                tokio::select! {
                    again = &mut receiving => break again.unwrap(),
                    () = tokio::time::sleep(Duration::from_millis(250)) => held.hold().await.unwrap(),
                }
            }
        };
        let texts: Vec<_> = again.iter().map(|it| payload(&**it)).collect();
        assert_eq!(texts, ["left"]);
    }
    held.acknowledge().await.unwrap();
}

#[tokio::test]
async fn with_order_keys_a_message_that_was_under_way_comes_before_those_behind_it() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let start = || {
        NatsSource::builder(context.clone(), "ORDERS", "ordered")
            .ack_wait(Duration::from_secs(1))
            .order_key(NatsOrderKey::Subject)
            .start()
    };
    for text in ["k-1", "k-2"] {
        send(&context, text.to_owned()).await;
    }
    let source = start().await.unwrap();
    let received = source.receive(MANY).await.unwrap();
    assert_eq!((payload(&*received[0]), received.len()), ("k-1".to_owned(), 1));
    drop((received, source));
    let source = start().await.unwrap();
    for text in ["k-1", "k-2"] {
        let received = source.receive(MANY).await.unwrap();
        assert_eq!(payload(&*received[0]), text);
        received[0].acknowledge().await.unwrap();
    }
    let several = NatsSource::builder(context, "ORDERS", "several");
    several.clone().start().await.unwrap();
    let error = several.order_key(NatsOrderKey::Subject).start().await.unwrap_err();
    assert!(error.to_string().contains("expected max_ack_pending 1 "), "{error}");
}

#[tokio::test]
async fn keys_come_from_the_subject_or_a_header() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("customer", "c-1");
    let sent = context.publish_with_headers("orders.a", headers, "x".into()).await.unwrap();
    sent.await.unwrap();
    for (name, order_key, expected) in [
        ("none", NatsOrderKey::None, None),
        ("subject", NatsOrderKey::Subject, Some("orders.a")),
        ("header", NatsOrderKey::Header("Customer".to_owned()), Some("c-1")),
        ("missing", NatsOrderKey::Header("cart".to_owned()), None),
    ] {
        let builder = NatsSource::builder(context.clone(), "ORDERS", name).order_key(order_key);
        let source = builder.start().await.unwrap();
        let received = source.receive(MANY).await.unwrap();
        assert_eq!(received[0].message().key.as_deref(), expected, "{name}");
    }
}

#[tokio::test]
async fn every_message_arrives_although_some_are_dropped_and_the_server_is_killed() {
    let mut server = NatsServer::start().await;
    let context = context(&server).await;
    let source = start(&context).await;
    for number in 0..300 {
        send(&context, number.to_string()).await;
    }
    let dice = SeededEntropy::new(1);
    let mut acknowledged = BTreeMap::new();
    let (mut kills, mut errors) = (0, 0);
    while acknowledged.len() < 300 {
        if acknowledged.len() > 100 * (kills + 1) && kills < 2 {
            kills += 1;
            server.kill().await;
            server.restart().await;
        }
        let received = match source.receive(MANY.min(NonZeroUsize::new(25).unwrap())).await {
            Ok(received) => received,
            Err(_) => {
                errors += 1;
                continue;
            }
        };
        for delivery in received {
            if dice.below(4) > 0 && delivery.acknowledge().await.is_ok() {
                *acknowledged.entry(payload(&*delivery)).or_insert(0) += 1;
            }
        }
    }
    // A server that is killed forgets acknowledgements that it has confirmed: these are delivered
    // again, and inboxes drop them.
    let again = acknowledged.values().filter(|times| **times > 1).count();
    println!("{kills} kills, {errors} errors, {again} messages again");
    assert!(kills == 2 && acknowledged.len() == 300);
}

#[tokio::test]
async fn a_frozen_server_is_an_error_in_time_and_found_again() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = start(&context).await;
    server.pause();
    let received = tokio::time::timeout(Duration::from_secs(60), source.receive(MANY)).await;
    assert!(received.expect("it ends").is_err());
    server.resume();
    send(&context, "one".to_owned()).await;
    loop {
        if let Ok(received) = source.receive(MANY).await {
            assert_eq!(payload(&*received[0]), "one");
            return;
        }
    }
}

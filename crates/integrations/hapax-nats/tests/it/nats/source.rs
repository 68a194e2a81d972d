//! The source.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, pull, push};
use hapax_core::{Idempotency, MemoryStore};
use hapax_messages::{
    Consumer, ConsumerLimits, Delivery, Inbox, MessageExecution, MessageFailure, MessageSource,
};
use hapax_nats::{NatsConnector, NatsOrderKey, NatsSource, NatsStartError};
use hapax_testkit::messages::MemoryDeadLetters;
use hapax_testkit::servers::NatsServer;
use tokio::sync::oneshot;

use super::{MANY, context};

async fn send(context: &Context, payload: String) {
    context.publish("orders.created", payload.into()).await.unwrap().await.unwrap();
}

async fn send_with_id(context: &Context, id: &str) {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("message-id", id);
    let sent = context.publish_with_headers("orders.created", headers, "x".into()).await.unwrap();
    sent.await.unwrap();
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
async fn a_limit_that_is_full_of_messages_that_wait_is_named_after_a_pull_without_messages() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let builder = NatsSource::builder(context.clone(), "ORDERS", "test").max_ack_pending(2);
    let source = builder.start().await.unwrap();
    for number in 0..3 {
        send(&context, number.to_string()).await;
    }
    let received = source.receive(MANY).await.unwrap();
    assert_eq!(received.len(), 2);
    for delivery in &received {
        assert!(delivery.delay(Duration::from_secs(60)).await.unwrap());
    }
    assert_eq!(source.full_limit(), None);
    let is_named = async {
        while source.full_limit().is_none() {
            let pulled = source.receive(MANY);
            assert!(tokio::time::timeout(Duration::from_secs(3), pulled).await.is_err());
        }
    };
    tokio::time::timeout(Duration::from_secs(60), is_named).await.unwrap();
    assert_eq!(source.full_limit().unwrap(), "max_ack_pending of the consumer test, 2");
}

#[tokio::test]
async fn a_limit_that_is_full_of_messages_that_come_again_and_again_is_named() {
    const WAITING: usize = 20;
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let builder = NatsSource::builder(context.clone(), "ORDERS", "test");
    let source = builder.max_ack_pending(20).start().await.unwrap();
    for number in 0..=WAITING {
        send(&context, number.to_string()).await;
    }
    let pause = Duration::from_secs(1);
    let received = source.receive(MANY).await.unwrap();
    assert_eq!(received.len(), WAITING);
    for (number, delivery) in received.iter().enumerate() {
        if number == WAITING / 2 {
            // So that the next pulls find messages at once, each time those of one half.
            tokio::time::sleep(pause / 2).await;
        }
        assert!(delivery.delay(pause).await.unwrap());
    }
    let is_named = async {
        // None is delivered for the first time.
        while source.full_limit().is_none() {
            for delivery in source.receive(MANY).await.unwrap() {
                assert!(delivery.is_redelivery());
                assert!(delivery.delay(pause).await.unwrap());
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(15), is_named).await.unwrap();
    assert_eq!(source.full_limit().unwrap(), "max_ack_pending of the consumer test, 20");
}

#[tokio::test]
async fn a_message_that_the_stream_deletes_during_its_pauses_is_handled() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let mut config = context.get_stream("ORDERS").await.unwrap().cached_info().config.clone();
    (config.max_age, config.duplicate_window) = (Duration::from_secs(4), Duration::from_secs(1));
    context.update_stream(config).await.unwrap();
    let source = start(&context).await;
    let engine = Idempotency::builder(Arc::new(MemoryStore::default())).build().unwrap();
    let letters = Arc::new(MemoryDeadLetters::default());
    let inbox = Inbox::builder("orders", engine).reexecute().dead_letters(letters.clone());
    let (handled, is_handled) = oneshot::channel();
    let handled = Mutex::new(Some(handled));
    let handler = move |message: MessageExecution| {
        let result = match message.attempt() {
            1 | 2 => Err(MessageFailure::retry_after(Duration::from_secs(2), "not yet")),
            _ => {
                if let Some(handled) = handled.lock().unwrap().take() {
                    handled.send(()).unwrap();
                }
                Ok(())
            }
        };
        std::future::ready(result)
    };
    let (inbox, limits) = (inbox.build().unwrap(), ConsumerLimits::default());
    let consumer = Consumer::new(inbox, Arc::new(source), handler, limits).unwrap();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    send_with_id(&context, "m-1").await;
    tokio::time::timeout(Duration::from_secs(15), is_handled).await.expect("it is lost").unwrap();
    running.abort();
    assert_eq!(letters.list().len(), 0);
}

#[tokio::test]
async fn a_message_stays_if_the_stream_or_its_header_limits_its_life() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = start(&context).await;
    assert!(source.limits().delays_from.is_some());
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Nats-TTL", "1h");
    let sent = context.publish_with_headers("orders.created", headers, "x".into()).await.unwrap();
    let _ = sent.await;
    send(&context, "y".to_owned()).await;
    let pause = Duration::from_secs(1);
    for delivery in source.receive(MANY).await.unwrap() {
        let has_ttl = delivery.message().header("Nats-TTL").is_some();
        assert_eq!(delivery.delay(pause).await.unwrap(), !has_ttl);
        delivery.acknowledge().await.unwrap();
    }
    let mut config = context.get_stream("ORDERS").await.unwrap().cached_info().config.clone();
    config.max_bytes = 1 << 30;
    context.update_stream(config).await.unwrap();
    let limited = start(&context).await;
    assert_eq!(limited.limits().delays_from, None);
    send(&context, "z".to_owned()).await;
    let received = limited.receive(MANY).await.unwrap();
    assert!(!received[0].delay(pause).await.unwrap());
}

#[tokio::test]
async fn a_message_that_waits_stays_once_the_server_has_a_limit_of_deliveries() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = start(&context).await;
    send(&context, "x".to_owned()).await;
    let stream = context.get_stream("ORDERS").await.unwrap();
    let found = stream.consumer_info("test").await.unwrap().config;
    let (mut delays, mut limited) = (0, false);
    let stays = async {
        loop {
            let received = source.receive(MANY).await.unwrap();
            if !received[0].delay(Duration::from_secs(1)).await.unwrap() {
                return received[0].acknowledge().await.unwrap();
            }
            delays += 1;
            if !std::mem::replace(&mut limited, true) {
                let config = pull::Config {
                    durable_name: Some("test".to_owned()),
                    ack_policy: AckPolicy::Explicit,
                    ack_wait: found.ack_wait,
                    max_ack_pending: found.max_ack_pending,
                    max_deliver: 1_000,
                    ..pull::Config::default()
                };
                stream.create_consumer(config).await.unwrap();
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), stays).await.unwrap();
    assert!((1..500).contains(&delays), "{delays}");
    let info = stream.consumer_info("test").await.unwrap();
    assert_eq!((info.num_pending, info.num_ack_pending, info.num_redelivered), (0, 0, 0));
}

#[tokio::test]
async fn with_order_keys_a_message_that_was_in_progress_comes_before_those_behind_it() {
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
async fn a_connector_has_the_domain_of_its_streams() {
    let server = NatsServer::with("jetstream { domain: hub }").await;
    let connector = NatsConnector::new(server.url());
    let context = connector.clone().domain("hub").connect().await.unwrap();
    hapax_nats::create_stream(&context, "ORDERS", &["orders.>"]).await.unwrap();
    start(&context).await;
    let other = connector.domain("other").connect().await.unwrap();
    assert!(other.get_stream("ORDERS").await.is_err());
}

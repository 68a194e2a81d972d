//! The source.

use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, pull, push};
use hapax_messages::{Delivery, MessageSource};
use hapax_nats::{NatsConnector, NatsOrderKey, NatsSource, NatsStartError};
use hapax_testkit::servers::NatsServer;

use super::{MANY, context};

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

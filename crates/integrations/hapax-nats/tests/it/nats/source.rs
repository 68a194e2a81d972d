//! The source.

use std::num::NonZeroUsize;
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, pull, push};
use hapax_messages::MessageSource;
use hapax_nats::{NatsOrderKey, NatsSource, NatsStartError};
use hapax_testkit::servers::NatsServer;

use super::context;

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

async fn start(context: &Context) -> NatsSource {
    let builder = NatsSource::builder(context.clone(), "ORDERS", "test");
    builder.ack_wait(Duration::from_secs(1)).start().await.unwrap()
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

//! The search for messages that the client library cannot read, among many others.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Subscriber;
use async_nats::jetstream::Context;
use futures_util::{FutureExt as _, StreamExt as _};
use hapax_messages::{Delivery, MessageSource};
use hapax_nats::{NatsConnector, NatsSource};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::NatsServer;

use super::unreadable::{HEADERS, headers, id, receive};
use super::{MANY, context};

/// Headers that the client can read, and some that it cannot read.
const READABLE: &[u8] = HEADERS[HEADERS.len() - 1].0;
const UNREADABLE: &[u8] = b"NATS/1.0\r\nmessage-id: ID\r\nmy header: 1\r\n\r\n";

/// A server, and a source behind a proxy, whose messages are not delivered again soon.
struct World {
    server: NatsServer,
    proxy: FaultProxy,
    context: Context,
    source: NatsSource,
}

impl World {
    async fn start(subjects: &[&str]) -> Self {
        let server = NatsServer::start().await;
        let context = context(&server).await;
        let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
        let connector = NatsConnector::new(format!("nats://{}", proxy.address()));
        let source = NatsSource::builder(connector.connect().await.unwrap(), "ORDERS", "test")
            .connector(connector)
            .ack_wait(Duration::from_secs(600))
            .filter_subjects(subjects.iter().map(ToString::to_string))
            .start()
            .await
            .unwrap();
        Self { server, proxy, context, source }
    }

    async fn publish(&self, subject: &str, template: &[u8], id: &str) {
        self.server.publish_raw(subject.as_bytes(), &headers(template, id), b"x").await;
    }

    /// Publishes messages of `orders.other`, and waits until they are stored.
    async fn publish_others(&self, count: usize) {
        let client = self.context.client();
        for _ in 1..count {
            client.publish("orders.other", "x".into()).await.unwrap();
        }
        self.context.publish("orders.other", "x".into()).await.unwrap().await.unwrap();
    }

    /// Receives a message, which is not acknowledged, and another one, with this number of absent ones in between. Then
    /// cuts the connection, until all of them are read.
    async fn search(&self, absent: usize) -> Vec<Arc<dyn Delivery>> {
        self.publish("orders.created", READABLE, "m-1").await;
        let mut received = receive(&self.source).await;
        self.publish_others(absent).await;
        let stream = self.context.get_stream("ORDERS").await.unwrap();
        stream.purge().filter("orders.other").await.unwrap();
        self.publish("orders.created", READABLE, "m-2").await;
        received.push(self.receive("m-2").await);
        self.cut_twice().await;
        received
    }

    /// Receives until this message arrives.
    async fn receive(&self, expected: &str) -> Arc<dyn Delivery> {
        loop {
            let received = receive(&self.source).await;
            let found = received.into_iter().find(|delivery| id(&**delivery) == expected);
            if let Some(found) = found {
                return found;
            }
        }
    }

    /// Cuts the connection twice, and receives until the source has noted it.
    async fn cut_twice(&self) {
        for ends in 1..=2 {
            self.proxy.cut();
            while self.source.stats().connection_ends < ends {
                self.source.receive(MANY).await.ok();
            }
        }
    }

    /// Subscribes to the requests for single messages.
    async fn requests(&self) -> Subscriber {
        let subject = "$JS.API.STREAM.MSG.GET.ORDERS";
        let requests = self.context.client().subscribe(subject).await.unwrap();
        self.answer().await;
        requests
    }

    /// Waits for an answer, which arrives behind the requests before it.
    async fn answer(&self) {
        self.context.get_stream("ORDERS").await.unwrap();
    }

    /// Returns the number of requests so far.
    async fn count(&self, mut requests: Subscriber) -> usize {
        self.answer().await;
        let mut count = 0;
        while requests.next().now_or_never().flatten().is_some() {
            count += 1;
        }
        count
    }
}

#[tokio::test]
async fn a_message_does_not_wait_until_many_others_were_read() {
    let world = World::start(&[]).await;
    let _unacknowledged = world.search(20_000).await;
    let requests = world.requests().await;
    world.publish("orders.created", READABLE, "m-3").await;
    world.receive("m-3").await;
    let count = world.count(requests).await;
    assert!(count <= 1024, "{count}");
}

#[tokio::test]
async fn a_search_goes_on_until_all_were_read() {
    let world = World::start(&[]).await;
    let _unacknowledged = world.search(600).await;
    world.publish("orders.created", UNREADABLE, "m-3").await;
    let found = world.receive("m-3").await;
    assert!(found.unreadable().is_some());
    let stats = world.source.stats();
    assert_eq!((stats.unreadable, stats.ends_often), (1, false));
}

#[tokio::test]
async fn messages_of_other_subjects_are_not_read() {
    let world = World::start(&["orders.paid.*"]).await;
    world.publish("orders.paid.a", READABLE, "m-1").await;
    let mut unacknowledged = receive(&world.source).await;
    world.publish_others(20_000).await;
    for expected in ["m-2", "m-3"] {
        let requests = world.requests().await;
        world.publish("orders.paid.a", UNREADABLE, expected).await;
        unacknowledged.push(world.receive(expected).await);
        let count = world.count(requests).await;
        assert!(count <= 256, "{expected}: {count}");
    }
    assert_eq!(world.source.stats().unreadable, 2);
}

#[tokio::test]
async fn a_subject_with_a_replacement_character_is_readable_once_it_was_received() {
    let world = World::start(&[]).await;
    world.publish("orders.\u{fffd}", READABLE, "m-1").await;
    let first = receive(&world.source).await;
    assert!(first[0].unreadable().is_none());
    world.cut_twice().await;
    world.publish("orders.created", READABLE, "m-2").await;
    world.receive("m-2").await;
    let stats = world.source.stats();
    assert_eq!((stats.connection_ends, stats.unreadable), (2, 0));
}

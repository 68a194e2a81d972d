//! Messages that the client library cannot read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Subscriber;
use async_nats::jetstream::consumer::{AckPolicy, pull};
use futures_util::{FutureExt as _, StreamExt as _};
use hapax_messages::{Delivery, MessageSource};
use hapax_nats::{NatsConnector, NatsSource};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::NatsServer;

use super::{MANY, context};

/// Headers of messages, and whether the client can read them. The id replaces `ID`.
pub(super) const HEADERS: [(&[u8], bool); 16] = [
    // At this one the client panics.
    (b"NATS/1.0\r\nmessage-id: ID\r\nlone: a\rb\r\n\r\n", false),
    (b"NATS/1.0\r\nmessage-id: ID\r\nname: M\xfcller\r\n\r\n", false),
    (b"NATS/1.0\r\nmessage-id: ID\r\nmy header: 1\r\n\r\n", false),
    ("NATS/1.0\r\nmessage-id: ID\r\ngröße: 1\r\n\r\n".as_bytes(), false),
    (b"NATS/1.0\r\nmessage-id: ID\r\nnocolon\r\n\r\n", false),
    (b"NATS/2.0\r\nmessage-id: ID\r\n\r\n", false),
    (b"NATS/1.0 abc\r\nmessage-id: ID\r\n\r\n", false),
    // Here it panics too: of a continuation it removes no white space at the start.
    (b"NATS/1.0\r\nmessage-id: ID\r\nfolded:\r\n\rb\r\n\r\n", false),
    (b"NATS/1.0\r\nmessage-id: ID\r\nnocolon\r\n :a\r\n\r\n", false),
    ("NATS/1.0\r\nmessage-id: ID\r\nname: Müller\r\n\r\n".as_bytes(), true),
    (b"NATS/1.0\r\nmessage-id: ID\r\nfolded: a\r\n b\r\n\r\n", true),
    (b"NATS/1.0\r\nmessage-id: ID\r\nempty:\r\n: nameless\r\n\r\n", true),
    (b"NATS/1.0\nmessage-id: ID\n\n", true),
    (b"NATS/1.0\r\nmessage-id: ID", true),
    (b"NATS/1.0\r\nmessage-id: ID\r\n\r", true),
    // A client takes it for the answer that there is no message.
    (b"NATS/1.0 404 No Messages\r\nmessage-id: ID\r\n\r\n", true),
];

pub(super) fn headers(template: &[u8], id: &str) -> Vec<u8> {
    let at = template.windows(2).position(|two| two == b"ID").unwrap();
    [&template[..at], id.as_bytes(), &template[at + 2..]].concat()
}

/// Returns the rights of the user of a consumer, `invoices`, as the documentation has them.
fn documented_rights() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/messages.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rights) = page.split_once("{ user: invoices, password: …,").unwrap();
    let (rights, _) = rights.split_once("```").unwrap();
    format!("{{ user: invoices, password: word,{rights}")
}

async fn source(connector: NatsConnector, subjects: &[&str]) -> NatsSource {
    NatsSource::builder(connector.connect().await.unwrap(), "ORDERS", "test")
        .connector(connector)
        .ack_wait(Duration::from_secs(1))
        .filter_subjects(subjects.iter().map(ToString::to_string))
        .start()
        .await
        .unwrap()
}

pub(super) fn id(delivery: &dyn Delivery) -> String {
    String::from_utf8(delivery.message().header("message-id").unwrap().to_vec()).unwrap()
}

/// Receives until there are messages, whatever happens to the connection.
pub(super) async fn receive(source: &NatsSource) -> Vec<Arc<dyn Delivery>> {
    loop {
        if let Ok(received) = source.receive(MANY).await {
            return received;
        }
    }
}

/// Subscribes to the server's notices of terminated messages.
async fn terminations(server: &NatsServer) -> Subscriber {
    let client = async_nats::connect(server.url()).await.unwrap();
    let subject = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.ORDERS.test";
    let terminations = client.subscribe(subject).await.unwrap();
    client.flush().await.unwrap();
    terminations
}

#[tokio::test]
async fn messages_that_the_client_cannot_read_are_delivered_terminated_once_and_stop_no_others() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = source(NatsConnector::new(server.url()), &[]).await;
    let mut terminations = terminations(&server).await;
    let mut expected = BTreeMap::new();
    for (number, (template, is_readable)) in HEADERS.into_iter().enumerate() {
        let id = format!("m-{number}");
        server.publish_raw(b"orders.created", &headers(template, &id), id.as_bytes()).await;
        expected.insert(id, is_readable);
    }
    let (readable, _) = HEADERS.last().unwrap();
    server.publish_raw(b"orders.M\xfcller", &headers(readable, "subject"), b"subject").await;
    expected.insert("subject".to_owned(), false);

    let mut found = BTreeMap::new();
    while found.len() < expected.len() {
        for delivery in receive(&source).await {
            let id = id(&*delivery);
            assert_eq!(delivery.message().payload, id.as_bytes());
            let unreadable = delivery.unreadable().is_some();
            let is_first = found.insert(id.clone(), !unreadable).is_none();
            assert!(is_first || !unreadable, "{id} was delivered again while it was in progress");
            delivery.acknowledge().await.unwrap();
        }
    }
    assert_eq!(found, expected);
    let stream = context.get_stream("ORDERS").await.unwrap();
    let info = stream.consumer_info("test").await.unwrap();
    assert_eq!((info.num_ack_pending, info.num_pending), (0, 0));
    assert_eq!(info.ack_floor.stream_sequence, info.delivered.stream_sequence);
    let count = expected.values().filter(|is_readable| !*is_readable).count();
    for _ in 0..count {
        terminations.next().await.unwrap();
    }
    assert!(terminations.next().now_or_never().is_none(), "one is terminated again");
    let stats = source.stats();
    assert_eq!((stats.unreadable, stats.ends_often), (count as u64, false));
    assert!(stats.connection_ends > 0);
}

#[tokio::test]
async fn a_message_that_the_client_cannot_read_and_that_is_dropped_is_delivered_again() {
    // The other connections are those of an administrator.
    let users = "authorization { users: [{ user: admin, password: word }, ";
    let rights = documented_rights();
    let server = NatsServer::with(&format!("{users}{rights}] }}\nno_auth_user: admin")).await;
    let _context = context(&server).await;
    let connector = NatsConnector::new(server.url().replace("//", "//invoices:word@"));
    let source = source(connector.clone(), &["orders.created"]).await;
    for (subject, id) in [("orders.other", "m-1"), ("orders.created", "m-2")] {
        server.publish_raw(subject.as_bytes(), &headers(HEADERS[1].0, id), b"x").await;
    }
    for _ in 0..2 {
        let received = receive(&source).await;
        assert_eq!((id(&*received[0]), received.len()), ("m-2".to_owned(), 1));
        let message = received[0].message();
        assert_eq!(&*message.origin, "nats://ORDERS/orders.created");
        assert_eq!(message.position.as_ref().unwrap().offset, 2);
        assert_eq!(message.header("unreadable-header").unwrap(), "name: M%FCller");
        received[0].hold().await.unwrap();
    }
    // Another process, which has received nothing yet.
    let other = self::source(connector, &[]).await;
    let received = receive(&other).await;
    assert_eq!((id(&*received[0]), received.len()), ("m-2".to_owned(), 1));
    received[0].acknowledge().await.unwrap();
}

#[tokio::test]
async fn a_message_that_was_terminated_is_not_found_again_while_an_earlier_one_is_in_progress() {
    let server = NatsServer::start().await;
    let _context = context(&server).await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let source = source(NatsConnector::new(format!("nats://{}", proxy.address())), &[]).await;
    let readable = HEADERS.last().unwrap().0;
    server.publish_raw(b"orders.created", &headers(readable, "m-1"), b"x").await;
    let earlier = receive(&source).await;
    server.publish_raw(b"orders.created", &headers(HEADERS[1].0, "m-2"), b"x").await;
    let mut unreadable = receive(&source).await;
    unreadable.retain(|delivery| delivery.unreadable().is_some());
    assert_eq!((id(&*unreadable[0]), unreadable.len()), ("m-2".to_owned(), 1));
    unreadable[0].acknowledge().await.unwrap();
    // After two ends without a known cause all messages behind the first one are read.
    for ends in 1..3 {
        proxy.cut();
        while source.stats().connection_ends <= ends {
            source.receive(MANY).await.ok();
        }
    }
    server.publish_raw(b"orders.created", &headers(readable, "m-3"), b"x").await;
    while !receive(&source).await.iter().any(|delivery| id(&**delivery) == "m-3") {}
    assert_eq!(source.stats().unreadable, 1);
    earlier[0].acknowledge().await.unwrap();
}

#[tokio::test]
async fn a_message_that_waits_at_the_server_comes_to_the_client_that_replaces_one_which_has_ended()
{
    let server = NatsServer::start().await;
    let _context = context(&server).await;
    let source = source(NatsConnector::new(server.url()), &[]).await;
    let pause = Duration::from_secs(1);
    server.publish_raw(b"orders.created", &headers(HEADERS.last().unwrap().0, "m-1"), b"x").await;
    assert!(receive(&source).await[0].delay(pause).await.unwrap());
    server.publish_raw(b"orders.created", &headers(HEADERS[0].0, "m-2"), b"x").await;
    let (mut delays, mut is_terminated) = (0, false);
    while delays < 2 || !is_terminated {
        for delivery in receive(&source).await {
            if delivery.unreadable().is_some() {
                // The server would deliver it to the client, which would end.
                assert!(!delivery.delay(pause).await.unwrap() && !delivery.was_delayed());
                is_terminated |= delivery.acknowledge().await.is_ok();
                continue;
            }
            assert!(delivery.was_delayed());
            // The client may have ended again meanwhile.
            delays += u32::from(delivery.delay(pause).await.unwrap_or(false));
        }
    }
    let stats = source.stats();
    assert!(stats.unreadable > 0 && !stats.ends_often);
    assert!(stats.connection_ends > 0 && source.full_limit().is_none());
}

#[tokio::test]
async fn a_client_that_has_ended_is_an_error_without_a_connector() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let source = NatsSource::builder(context, "ORDERS", "test").start().await.unwrap();
    server.publish_raw(b"orders.created", &headers(HEADERS[0].0, "m-1"), b"x").await;
    for _ in 0..2 {
        let error = source.receive(MANY).await.unwrap_err().to_string();
        assert!(error.contains("found one whose task has ended"), "{error}");
    }
}

#[tokio::test]
async fn a_new_client_receives_from_no_other_stream_and_from_no_consumer_that_loses_messages() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let connector = NatsConnector::new(server.url());
    let first = source(connector.clone(), &[]).await;
    context.delete_stream("ORDERS").await.unwrap();
    let context = super::context(&server).await;
    let second = source(connector, &[]).await;
    server.publish_raw(b"orders.created", &headers(HEADERS[0].0, "m-1"), b"x").await;
    let error = first.receive(MANY).await.unwrap_err().to_string();
    assert!(error.contains("expected the stream ORDERS that was created at"), "{error}");

    let stream = context.get_stream("ORDERS").await.unwrap();
    stream.delete_consumer("test").await.unwrap();
    let config = pull::Config {
        durable_name: Some("test".to_owned()),
        ack_policy: AckPolicy::Explicit,
        max_deliver: 5,
        ..pull::Config::default()
    };
    stream.create_consumer(config).await.unwrap();
    let error = second.receive(MANY).await.unwrap_err().to_string();
    assert!(error.contains("max_deliver"), "{error}");
}

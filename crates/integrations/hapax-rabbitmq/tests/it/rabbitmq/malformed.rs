//! Malformed messages, and servers that do not answer.

use std::collections::BTreeMap;
use std::fs;
use std::future::ready;
use std::num::NonZeroUsize;
use std::time::Duration;

use hapax_messages::{
    DeadLetterReason, MessageExecution, MessageId, MessageSink, MessageSource, OutgoingMessage,
    PublishError,
};
use hapax_rabbitmq::{RabbitOrderKey, RabbitSink, RabbitSource};
use hapax_testkit::servers::RabbitMqServer;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::time::sleep;

use super::{Process, World, channel, declare};

/// Publishes a message that no client library sends: every short string that a producer sets
/// is not UTF-8, and a header is nested 10,000 deep. `id` is an Erlang binary, and the payload contains it.
async fn publish_malformed(server: &RabbitMqServer, queue: &str, id: &str) {
    let nested = "lists:foldl(fun(_,T)->[{<<\"n\">>,table,T}] end,[],lists:seq(1,10000))";
    let text = "<<\"t\",255>>";
    let headers = format!(
        "[{{<<\"deep\">>,table,{nested}}},{{{text},longstr,{text}}},{{<<\"key\">>,longstr,{text}}}]"
    );
    let properties = format!(
        "{{'P_basic',{text},{text},{headers},2,undefined,{text},{text},undefined,{id},undefined,{text},\
         undefined,{text},undefined}}"
    );
    // An exchange and its binding: the routing key is malformed too.
    let resource =
        |kind: &str, name: &str| format!("rabbit_misc:r(<<\"/\">>,{kind},<<\"{name}\">>)");
    let (from, to) = (resource("exchange", "amq.fanout"), resource("queue", queue));
    let bind = format!("rabbit_binding:add({{binding,{from},<<>>,{to},[]}},<<\"guest\">>).");
    assert_eq!(server.eval(&bind).await, "ok");
    let publish = format!("rabbit_basic:publish({from},{text},{properties},term_to_binary({id})).");
    let answer = server.eval(&publish).await;
    assert!(answer.starts_with("ok"), "{publish}: {answer}");
}

#[tokio::test]
async fn malformed_messages_are_handled_or_become_dead_letters_and_the_connection_stays() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    for id in ["<<\"m-1\">>", "<<\"m\",255>>", "<<\"m\",254>>", "<<\"m-2\">>"] {
        publish_malformed(&server, "orders", id).await;
    }
    let builder = RabbitSource::builder(server.url(), "orders");
    let source = builder.order_key(RabbitOrderKey::Header("key".to_owned())).start().await.unwrap();
    let max = NonZeroUsize::new(4).unwrap();
    let mut received = Vec::new();
    while received.len() < 4 {
        received.extend(source.receive(max).await.unwrap());
    }
    for (delivery, id) in received.iter().zip([Some("m-1"), None, None, Some("m-2")]) {
        let message = delivery.message();
        assert_eq!(message.header("message-id").map(|it| &**it), id.map(str::as_bytes));
        assert_eq!(message.header("content-type").unwrap(), "t?");
        assert_eq!(message.header("t?").unwrap(), &b"t\xff"[..]);
        assert!(message.header("deep").is_none());
        assert_eq!(&*message.origin, "amqp://orders/t?");
        assert_eq!(message.key.as_deref(), Some("t\u{fffd}"));
        assert!(!delivery.is_redelivery() && !delivery.has_ended());
    }
    drop((received, source));

    let world = World::default();
    let source = RabbitSource::builder(server.url(), "orders").start().await.unwrap();
    let effects = world.clone();
    let process = Process::start(source, &world, move |message: MessageExecution| {
        effects.effect(&message);
        ready(Ok(()))
    });
    while server.messages("orders").await > 0 {
        sleep(Duration::from_millis(20)).await;
    }
    assert!(process.stop().await);
    assert_eq!(world.effects(), BTreeMap::from([("m-1".to_owned(), 1), ("m-2".to_owned(), 1)]));
    let reasons: Vec<_> = world.letters.list().iter().map(|letter| letter.reason).collect();
    assert_eq!(reasons, [DeadLetterReason::NoId; 2]);
}

#[tokio::test]
async fn a_malformed_message_has_the_same_contents_after_a_delay() {
    const PAUSE: Duration = Duration::from_secs(1);
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    publish_malformed(&server, "orders", "<<\"m-1\">>").await;
    let source = RabbitSource::builder(server.url(), "orders").delay_from(Some(PAUSE));
    let source = source.start().await.unwrap();
    let first = source.receive(NonZeroUsize::MIN).await.unwrap();
    assert!(first[0].delay(PAUSE).await.unwrap());
    let second = source.receive(NonZeroUsize::MIN).await.unwrap();
    assert_eq!(second[0].message(), first[0].message());
}

#[tokio::test]
async fn a_message_whose_headers_do_not_fit_into_a_frame_has_no_headers() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    // The server's `frame_max` is 131,072.
    for (id, bytes) in [("m-0", 130_000), ("m-1", 131_072), ("m-2", 1_000_000), ("m-3", 1)] {
        let publish = format!(
            "X=rabbit_misc:r(<<\"/\">>,exchange,<<>>),H=binary:copy(<<\"h\">>,{bytes}),\
             P={{'P_basic',undefined,undefined,[{{<<\"h\">>,longstr,H}}],2,undefined,undefined,undefined,\
             undefined,<<\"{id}\">>,undefined,undefined,undefined,undefined,undefined}},\
             rabbit_basic:publish(X,<<\"orders\">>,P,<<\"{id}\">>)."
        );
        let answer = server.eval(&publish).await;
        assert!(answer.starts_with("ok"), "{publish}: {answer}");
    }
    let source = RabbitSource::builder(server.url(), "orders").start().await.unwrap();
    let mut received = Vec::new();
    while let Some(max) = NonZeroUsize::new(4 - received.len()) {
        received.extend(source.receive(max).await.unwrap());
    }
    let found = received.iter().map(|delivery| {
        let message = delivery.message();
        let header = message.header("h").map(bytes::Bytes::len);
        (message.header("message-id").unwrap().clone(), message.payload.clone(), header)
    });
    let expected = [("m-0", Some(130_000)), ("m-1", None), ("m-2", None), ("m-3", Some(1))];
    assert!(found.eq(expected.map(|(id, header)| (id.into(), id.into(), header))));
    for delivery in &received {
        delivery.acknowledge().await.unwrap();
    }
    while server.messages("orders").await > 0 {
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn an_explanation_that_is_cut_within_a_character_is_an_error_of_its_channel() {
    let server = RabbitMqServer::start().await;
    // One of both is cut within a character.
    for name in ["\u{fc}".repeat(120), format!("x{}", "\u{fc}".repeat(120))] {
        let sink = RabbitSink::builder(&server.url()).unwrap().exchange(name);
        let sink = sink.connect().await.unwrap();
        let id = MessageId::new("m-1").unwrap();
        let message = OutgoingMessage::new("orders", id, "x");
        let error = sink.publish(&message).await.unwrap_err();
        assert!(matches!(error, PublishError::NotAcknowledged { .. }), "{error}");
        assert!(error.to_string().contains("NOT_FOUND"), "{error}");
    }
}

/// Number of threads of connections in this process.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("lapin-io-loop")).count()
}

#[tokio::test]
async fn an_attempt_to_connect_that_is_dropped_leaves_neither_connection_nor_thread() {
    const ATTEMPTS: usize = 30;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("amqp://{}", silent.local_addr().unwrap());
    for _ in 0..ATTEMPTS {
        let mut attempt = Box::pin(RabbitSource::builder(&url, "orders").start());
        let (mut accepted, _) = tokio::select! {
            accepted = silent.accept() => accepted.unwrap(),
            _ = &mut attempt => panic!("the server does not answer"),
        };
        let mut header = [0; 8];
        tokio::select! {
            read = accepted.read_exact(&mut header) => assert_eq!(read.unwrap(), 8),
            _ = &mut attempt => panic!("the server does not answer"),
        }
        drop(attempt);
        assert_eq!(accepted.read(&mut header).await.unwrap(), 0, "the connection ends");
    }
    // Other tests of this process have few connections.
    while threads() >= ATTEMPTS / 2 {
        sleep(Duration::from_millis(20)).await;
    }
}

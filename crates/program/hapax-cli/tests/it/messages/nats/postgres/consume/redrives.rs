//! Redrives of a consumer of which some messages fail again.

use super::*;
use crate::world::run;

#[tokio::test(flavor = "multi_thread")]
async fn i41_12_a_redrive_goes_on_with_other_order_keys_after_a_message_that_fails_again() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url, "--order-by", "header:message-order-key"]);
    let service = &consume.service;
    service.serve(socket);
    for id in ["a-1", "b-1", "c-1"] {
        service.reply(id, &[Reply::Rejected(422)]);
    }
    let process = consume.process();
    for (id, key) in [
        ("a-1", Some("a")),
        ("a-2", Some("a")),
        ("a-3", Some("a")),
        ("b-1", Some("b")),
        ("b-2", Some("b")),
    ] {
        consume.publish(id, key, None).await;
    }
    // With headers that HTTP does not carry as they are.
    let mut message = OutgoingMessage::new("orders.created", MessageId::new("c-1").unwrap(), "{}");
    let headers = [("a@b", "1"), ("city", "Zürich"), ("content-encoding", "utf-8")];
    message.headers = headers.map(|(name, value)| (name.to_owned(), value.into())).to_vec();
    consume.sink.publish(&message).await.unwrap();
    let parked = "a-1 rejected, a-2 blocked, a-3 blocked, b-1 rejected, b-2 blocked, c-1 rejected";
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, parked);
    for id in ["b-1", "c-1"] {
        service.reply(id, &[]);
    }
    let broker = consume.world.broker.url();
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--reason", "fixed"];
    let redrive = [&redrive[..], &["--database", &url, "--to", &broker]].concat();
    let (code, line) = blocking(|| refused(&redrive));
    assert!(code == 64 && line.contains("--store: expected the store of the consumer"), "{line}");

    let redrive = [&redrive[..], &["--store", &url]].concat();
    let output = blocking(|| run(&redrive));
    let [said, error] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert_eq!(output.status.code(), Some(1), "{error}");
    let expected = "found 1 that were not, 2 behind them with their order keys, which were left out, and 0 behind others";
    assert!(error.contains(expected) && error.contains("422 Unprocessable Entity"), "{error}");
    assert!(said.contains(" not redriven: ") && said.contains("4 published"), "{said}");
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, "a-1 rejected, a-2 blocked, a-3 blocked");
    let ids = || service.effects().into_iter().map(|(_, id)| id).collect::<Vec<_>>();
    assert_eq!(ids(), ["b-1", "b-2", "c-1"]);
    let posts = service.received_of("c-1");
    for name in ["a@b", "city", "content-encoding"] {
        let found: Vec<_> = posts.iter().map(|it| it.headers.get(name).cloned()).collect();
        let expected = (name == "city").then(|| "Z%C3%BCrich".parse().unwrap());
        assert_eq!(found, [expected.clone(), expected], "{name}");
    }

    service.reply("a-1", &[]);
    blocking(|| ok(&redrive));
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, "");
    assert_eq!(ids()[3..], ["a-1", "a-2", "a-3"]);
    blocking(|| process.end());

    // No consumer runs: the command does not wait for each key.
    let process = consume.process();
    for id in ["d", "e", "f", "g"] {
        service.reply(id, &[Reply::Rejected(422)]);
        consume.publish(id, Some(id), None).await;
    }
    consume.until_empty().await;
    blocking(|| process.end());
    let output = blocking(|| run(&[&redrive[..], &["--wait", "10ms"]].concat()));
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = "it is the third one in a row: check that the consumer runs";
    assert!(output.status.code() == Some(1) && error.contains(expected), "{error}");
    let begun = "SELECT string_agg(redrives::text, ' ' ORDER BY number) FROM hapax_dead_letters";
    assert_eq!(consume.world.sql(begun).await, "1 1 1 0");
}

/// Parks messages as a consumer in batch mode does, each with an id, an order key and a subject.
async fn park(consume: &Consume, messages: &[(&str, Option<&str>, &str)]) {
    let url = consume.world.database.url("postgres");
    let dead_letters = PgDeadLetterStore::new(&connections(url));
    for (id, key, subject) in messages {
        let mut message = Message::new(format!("nats://ORDERS/{subject}"), "{}");
        message.key = key.map(str::to_owned);
        let (id, reason) = (MessageId::new(id).unwrap(), DeadLetterReason::Rejected);
        let now = Timestamp::from_micros(1);
        let letter = DeadLetter::new("invoices", Some(&id), message, reason, "of the test", now);
        dead_letters.park(&letter).await.unwrap();
    }
}

/// Has the redrive of one message run a statement: it is gone, or handled, when the next one is redriven.
async fn once_begun(consume: &Consume, id: &str, then: &str) {
    let text = format!(
        "CREATE FUNCTION once_begun() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN {then}; RETURN NULL; END $$;
        CREATE TRIGGER once_begun AFTER UPDATE ON hapax_dead_letters FOR EACH ROW
            WHEN (NEW.message_id = '{id}') EXECUTE FUNCTION once_begun()"
    );
    consume.world.sql(&text).await;
}

/// Redrives all messages of the consumer, none of which is handled. Returns the exit code, and what the command printed.
fn redrive(consume: &Consume) -> (Option<i32>, String, String) {
    let (url, broker) = (consume.world.database.url("postgres"), consume.world.broker.url());
    let of = ["messages", "redrive", "--consumer", "invoices", "--reason", "fixed", "--force"];
    let at = ["--database", &url, "--to", &broker, "--wait", "10ms"];
    let output = blocking(|| run(&[&of[..], &at].concat()));
    let [said, error] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    (output.status.code(), said, error)
}

/// Returns the ids of the messages whose redrives have begun.
async fn begun(consume: &Consume) -> String {
    let begun = "SELECT string_agg(message_id, ' ' ORDER BY number) FROM hapax_dead_letters
        WHERE redrives > 0";
    consume.world.sql(begun).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_broker_does_not_acknowledge_fails_alone_and_three_in_a_row_end_the_redrive()
 {
    let (_socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    // No stream has the subjects.
    let messages = [
        ("a-1", Some("a"), "returns.1"),
        ("a-2", Some("a"), "orders.created"),
        ("b-1", None, "returns.2"),
        ("c-1", None, "orders.created"),
    ];
    park(&consume, &messages).await;
    let (code, said, error) = redrive(&consume);
    assert!(error.contains("found 2 that were not, 1 behind them"), "{error}");
    assert_eq!(code, Some(1), "the broker is available: {error}");
    assert!(said.contains("1 published"), "{said}");
    assert_eq!(begun(&consume).await, "a-1 b-1 c-1");

    consume.world.sql("DELETE FROM hapax_dead_letters").await;
    let messages = ["d-1", "d-2", "d-3", "d-4"].map(|id| (id, None, "returns.3"));
    park(&consume, &messages).await;
    let (code, _, error) = redrive(&consume);
    let expected = "it is the third one in a row: check the broker of --to";
    assert!(code == Some(69) && error.contains(expected), "{code:?} {error}");
    assert_eq!(begun(&consume).await, "d-1 d-2 d-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_is_gone_meanwhile_has_not_failed() {
    let (_socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let keys = [("a-1", None), ("b-1", Some("b")), ("b-2", Some("b")), ("c-1", None)];
    park(&consume, &keys.map(|(id, key)| (id, key, "orders.created"))).await;
    let gone = "DELETE FROM hapax_dead_letters WHERE message_id IN ('b-1', 'c-1')";
    once_begun(&consume, "a-1", gone).await;
    let (code, said, error) = redrive(&consume);
    // The next one of the key was redriven.
    assert!(code == Some(1) && error.contains("within --wait"), "{error}");
    assert_eq!(begun(&consume).await, "a-1 b-2");
    assert_eq!(said.matches(" gone meanwhile\n").count(), 2, "{said}");
    assert!(said.contains("2 published"), "{said}");
    // All others are gone.
    consume.world.sql("DELETE FROM hapax_dead_letters WHERE message_id = 'b-2'").await;
    park(&consume, &[("c-1", None, "orders.created")]).await;
    let (code, said, error) = redrive(&consume);
    assert_eq!((code, &*error), (Some(0), ""), "{said}");
    assert!(said.contains("1 published") && said.contains(" gone meanwhile\n"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_handled_after_its_wait_shows_that_the_consumer_runs() {
    let (_socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let ids = ["d", "e", "f", "g"];
    park(&consume, &ids.map(|id| (id, Some(id), "orders.created"))).await;
    let handled = "DELETE FROM hapax_dead_letters WHERE message_id = 'd'";
    once_begun(&consume, "f", handled).await;
    let (code, _, error) = redrive(&consume);
    assert_eq!(begun(&consume).await, "e f g");
    assert!(code == Some(1) && error.contains("found 4 that were not"), "{error}");
    // Those that are left: nothing handles them.
    let (code, _, error) = redrive(&consume);
    let expected = "check that the consumer runs; if it does, its handler fails";
    assert!(code == Some(1) && error.contains(expected), "{error}");
}

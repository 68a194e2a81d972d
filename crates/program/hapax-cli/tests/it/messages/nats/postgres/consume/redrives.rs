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

//! Messages that the client of NATS cannot read, and connections that end again and again.

use hapax_testkit::faults::FaultProxy;

use super::*;

/// Lines of headers that the client cannot read. At the first one it panics.
const LINES: [&[u8]; 4] = [b"lone: a\rb", b"name: M\xfcller", b"my header: 1", b"nocolon"];

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_client_cannot_read_becomes_a_dead_letter_and_others_go_on() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    // One message at a time: a message that is delivered again and again stops all others.
    let consume = consume.with(&["--store", &url, "--order-by", "subject"]);
    let (service, broker) = (&consume.service, &consume.world.broker);
    service.serve(socket);
    let process = consume.process();
    for (number, line) in LINES.into_iter().enumerate() {
        let id = format!("message-id: odd-{number}\r\n");
        let headers = [b"NATS/1.0\r\n", id.as_bytes(), line, b"\r\n\r\n"].concat();
        broker.publish_raw(format!("orders.{number}").as_bytes(), &headers, b"odd").await;
        consume.publish(&format!("m-{number}"), None, None).await;
    }
    consume.until_empty().await;
    let effects = service.effects().into_iter().map(|(_, id)| id);
    assert!(effects.eq((0..LINES.len()).map(|number| format!("m-{number}"))));
    let parked = "odd-0 unreadable, odd-1 unreadable, odd-2 unreadable, odd-3 unreadable";
    assert_eq!(consume.dead_letters().await, parked);
    assert_eq!(blocking(|| get_with(process.admin, "/readyz", "")).status, 200);
    assert_eq!(blocking(|| process.metric("unreadable_total")), 4);

    let (database, broker) = (["--database", &*url], broker.url());
    let list = [&["messages", "list", "--parked-as", "unreadable", "--json"], &database[..]];
    let listed: Value = serde_json::from_str(&blocking(|| ok(&list.concat()))).unwrap();
    let hex = listed["dead_letters"][1]["id"].as_str().unwrap();
    let shown = blocking(|| ok(&[&["messages", "show", hex], &database[..]].concat()));
    assert!(shown.contains("name: M%FCller") && shown.contains("not UTF-8"), "{shown}");
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--reason", "a test"];
    let at = ["--to", &broker, "--store", &url];
    blocking(|| ok(&[&redrive[..], &at, &database].concat()));
    consume.world.until("SELECT count(*) FROM hapax_dead_letters", "0").await;
    let received = service.received_of("odd-1");
    assert_eq!(received.len(), 1);
    assert_eq!(received[0].headers["unreadable-header"], "name: M%FCller");
    blocking(|| process.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_again_and_again_is_not_ready() {
    let (socket, address) = Service::bind();
    let mut consume = Consume::start(address).await;
    let proxy = FaultProxy::before(consume.world.broker.address(), 1).await.unwrap();
    let from = consume.flags.iter().position(|flag| flag == "--from").unwrap();
    consume.flags[from + 1] = format!("nats://{}", proxy.address());
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url]);
    consume.service.serve(socket);
    let process = consume.process();
    for ends in 1..=3 {
        proxy.cut();
        while blocking(|| process.metric("connection_ends_total")) < ends {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let ready = || blocking(|| get_with(process.admin, "/readyz", ""));
    while !ready().body.contains("ends again and again") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(ready().status, 503);
    // Others go on.
    consume.publish("m-1", None, None).await;
    consume.until_empty().await;
    blocking(|| process.end());
}

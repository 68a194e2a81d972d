//! Faults of a deployment: a service that refuses every message, and rules that find no id.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_path_parks_nothing_and_is_not_ready_until_the_service_accepts_a_message() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let more = ["--store", &url, "--attempts", "12", "--longest-pause", "50ms"];
    let consume = consume.with(&more);
    let service = &consume.service;
    service.serve(socket);
    for (id, status) in [("m-1", 404), ("m-2", 401), ("m-3", 415)] {
        service.reply(id, &[Reply::Rejected(status)]);
        consume.publish(id, None, None).await;
    }
    let process = consume.process();
    let ready = || blocking(|| get_with(process.admin, "/readyz", ""));
    // More than --attempts.
    let tries = |service: &Service, id: &str| service.received_of(id).len();
    consume.until(|service| ["m-1", "m-2", "m-3"].iter().all(|id| tries(service, id) > 14)).await;
    assert_eq!(consume.dead_letters().await, "");
    let found = ready();
    let expected = "the service has accepted no message yet, and answers 4";
    assert!(found.status == 503 && found.body.starts_with(expected), "{found:?}");
    for id in ["m-1", "m-2", "m-3"] {
        service.reply(id, &[]);
    }
    consume.until(|service| service.effects().len() == 3).await;
    consume.until_empty().await;
    assert_eq!(ready().status, 200);

    // From now on such a status may be the message's.
    service.reply("m-4", &[Reply::Rejected(404)]);
    service.reply("m-5", &[Reply::Rejected(422)]);
    for id in ["m-4", "m-5"] {
        consume.publish(id, None, None).await;
    }
    consume.world.until("SELECT count(*) FROM hapax_dead_letters", "2").await;
    assert_eq!(consume.dead_letters().await, "m-5 rejected, m-4 rejected");
    assert_eq!((tries(service, "m-4"), tries(service, "m-5")), (10, 1));
    blocking(|| process.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_none_of_which_has_an_id_stop_the_command_with_the_name_of_the_flag() {
    let (_socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url, "--id", "header:order-id"]);
    for number in 0..20 {
        let (context, payload) = (&consume.world.context, format!("no id {number}"));
        context.publish("orders.created", payload.into()).await.unwrap().await.unwrap();
    }
    let mut words = vec!["consume", "--admin", "off", "--log-level", "off"];
    words.extend(consume.flags.iter().map(String::as_str));
    let (code, line) = blocking(|| refused(&words));
    let expected =
        "--id: expected an id by the header order-id, found none in any of the first messages";
    assert!(code == 64 && line.contains(expected), "{code} {line}");
    assert_eq!(consume.world.sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_without_an_id_is_redriven_under_a_new_one() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url]);
    let service = &consume.service;
    service.serve(socket);
    let process = consume.process();
    consume.publish("m-1", None, None).await;
    consume.until(|service| service.effects().len() == 1).await;
    let context = &consume.world.context;
    context.publish("orders.created", "no id".into()).await.unwrap().await.unwrap();
    consume.world.until("SELECT count(*) FROM hapax_dead_letters", "1").await;

    let broker = consume.world.broker.url();
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--reason", "fixed"];
    let at = ["--database", &url, "--store", &url, "--to", &broker];
    let (code, line) = blocking(|| refused(&[&redrive[..], &at].concat()));
    assert!(code == 1 && line.contains("add --new-id"), "{code} {line}");
    // The service does not accept it: it becomes the same dead letter, and is redriven again under the same id.
    let hex = consume.world.sql("SELECT encode(id, 'hex') FROM hapax_dead_letters").await;
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    let id = DeadLetter::redriven_id("invoices", &std::array::from_fn(byte), b"no id").to_string();
    service.reply(&id, &[Reply::Rejected(422)]);
    blocking(|| ok(&[&redrive[..], &at, &["--new-id"]].concat()));
    let parked = "SELECT encode(id, 'hex') || ' ' || reason FROM hapax_dead_letters";
    consume.world.until(parked, &format!("{hex} rejected")).await;
    service.reply(&id, &[]);
    blocking(|| ok(&[&redrive[..], &at].concat()));
    consume.until(|service| service.effects().len() == 2).await;
    consume.until_empty().await;
    consume.world.until("SELECT count(*) FROM hapax_dead_letters", "0").await;
    assert_eq!(service.effects().remove(1).1, id);
    blocking(|| process.end());
}

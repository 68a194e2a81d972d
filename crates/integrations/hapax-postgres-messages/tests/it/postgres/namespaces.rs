//! Services that share the tables, with a consumer of one name.

use hapax_core::Namespace;
use hapax_messages::{BatchError, BatchInbox as _, PositionStore as _};
use hapax_testkit::messages::MemoryBroker;

use super::batch::{DEAD_LETTER, run_inbox, send, with_effects, write};
use super::log::{item, partition};
use super::positions::{IN_ORDER, failing, inbox, message, run, server};

fn named(name: &str) -> Namespace {
    name.parse().unwrap()
}

const NAMES: &str = "
    SELECT string_agg(consumer || ' ' || next_offset, ', ' ORDER BY consumer) FROM hapax_positions";

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_consumers_with_one_name_in_three_namespaces_is_handled_by_each_once() {
    let server = with_effects().await;
    for round in 1..=2 {
        for (count, namespace) in ["", "invoices", "mails"].into_iter().enumerate() {
            let broker = MemoryBroker::default();
            let inbox = inbox(&server, write).namespace(&named(namespace));
            let running = run_inbox(&broker, inbox);
            send(&broker, "m-1");
            broker.emptied().await;
            running.stop().await;
            let effects = server.sql("postgres", "SELECT count(*) FROM effects").await;
            let expected = if round == 1 { count + 1 } else { 3 };
            assert_eq!(effects, expected.to_string(), "{namespace:?} in round {round}");
        }
    }
    // The ids of programs that know no namespace are those of the default one.
    let earlier = "SELECT count(*) FROM hapax_inbox WHERE id = hapax_scoped_hash('orders', 'm-1')";
    assert_eq!(server.sql("postgres", earlier).await, "1");
    let sql = "SELECT state FROM hapax_inbox('namespace:mails/orders', ARRAY['m-1'])";
    assert_eq!(server.sql("postgres", sql).await, "duplicate");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_of_another_namespace_blocks_no_message_and_has_its_own_position() {
    let server = server().await;
    let parking = run(inbox(&server, failing).namespace(&named("invoices")).advance_positions());
    parking.log.publish(message(7, Some("seven")));
    parking.log.acknowledged(1).await;
    parking.stop().await;
    assert_eq!(server.sql("postgres", DEAD_LETTER).await.len(), 64);
    let running = run(inbox(&server, write).namespace(&named("mails")).advance_positions());
    for id in [7, 12] {
        running.log.publish(message(id, Some("seven")));
    }
    running.log.acknowledged(2).await;
    running.stop().await;
    assert_eq!(server.sql("postgres", IN_ORDER).await, "7 12");
    assert_eq!(
        server.sql("postgres", NAMES).await,
        "namespace:invoices/orders 1, namespace:mails/orders 2"
    );
    let parked = "SELECT string_agg(consumer, ', ') FROM hapax_dead_letters";
    assert_eq!(server.sql("postgres", parked).await, "namespace:invoices/orders");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_with_the_name_of_one_in_a_namespace_writes_nothing() {
    let server = server().await;
    let (connections, hour) = (super::connections(&server), super::positions::HOUR);
    let name = "namespace:mails/orders";
    let inbox = hapax_postgres_messages::PgInbox::new(name, connections, hour, write);
    let inbox = inbox.advance_positions();
    let error = inbox.acquire(&partition(), 0).await.unwrap_err().to_string();
    assert!(error.contains("name the consumer orders"), "{error}");
    let error = inbox.apply(vec![item(1, 0)], false).await.unwrap_err();
    assert!(
        matches!(error, BatchError::Unavailable(cause) if cause.to_string().contains("PgInbox::namespace"))
    );
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_positions").await, "0");
    // With the namespace it has the rows of that name.
    let inbox = super::positions::inbox(&server, write).namespace(&named("mails"));
    assert_eq!(inbox.consumer(), name);
}

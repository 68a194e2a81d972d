//! Consumers with one name in several namespaces.

use hapax_core::Idempotency;
use hapax_messages::{InboxBuilder, InboxError, MessageExecution, MessageFailure};

use super::world::*;

fn inbox(world: &World, namespace: &str, consumer: &str) -> InboxBuilder {
    let engine = Idempotency::builder(std::sync::Arc::clone(&world.memory)).namespace(namespace);
    world.named_inbox(consumer, engine.build().unwrap()).reexecute().ordered()
}

async fn reject(_: MessageExecution) -> Result<(), MessageFailure> {
    Err(MessageFailure::reject("no such customer"))
}

#[tokio::test(start_paused = true)]
async fn a_message_that_one_namespace_parks_is_handled_or_parked_by_the_others_too() {
    let world = World::new();
    for namespace in ["", "invoices"] {
        let process = world.process(|_| inbox(&world, namespace, "orders"), reject);
        world.broker.send(message("m-1").with_key("k"));
        world.broker.emptied().await;
        assert!(process.stop().await);
    }
    let process = world.process(|_| inbox(&world, "mails", "orders"), world.counting());
    for id in ["m-1", "m-2"] {
        world.broker.send(message(id).with_key("k"));
    }
    world.broker.emptied().await;
    assert!(process.stop().await);
    assert_eq!(world.effects(), once(["m-1".to_owned(), "m-2".to_owned()]));
    let mut consumers: Vec<_> =
        world.dead_letters.list().into_iter().map(|letter| letter.consumer).collect();
    consumers.sort();
    assert_eq!(consumers, ["namespace:invoices/orders", "orders"]);
}

#[tokio::test]
async fn a_name_that_a_consumer_of_a_namespace_has_is_rejected() {
    let world = World::new();
    let name = "namespace:mails/orders";
    let error = inbox(&world, "", name).build().unwrap_err();
    assert_eq!(error, InboxError::NamespacedConsumer { name: name.to_owned() });
    assert!(inbox(&world, "mails", "orders").build().is_ok());
    let length = 255 - "namespace:mails/".len();
    assert!(inbox(&world, "mails", &"o".repeat(length)).build().is_ok());
    let error = inbox(&world, "mails", &"o".repeat(length + 1)).build().unwrap_err();
    assert_eq!(error, InboxError::Consumer { length: 256 });
    assert_eq!(inbox(&world, "mails", "").build().unwrap_err(), InboxError::Consumer { length: 0 });
}

use hapax_consumers::{BrokerKind, ConsumerMode, PlantedBug};

use crate::{each_message_has_one_effect, is_found};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_has_one_effect_in_every_mode() {
    Box::pin(each_message_has_one_effect(BrokerKind::Nats)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planted_bugs_are_found() {
    let twice = "has more than one effect";
    tokio::join!(
        is_found(ConsumerMode::ClaimsPostgres, PlantedBug::AckFirst, "has no effect"),
        is_found(ConsumerMode::ClaimsPostgres, PlantedBug::NoFence, twice),
        is_found(ConsumerMode::ClaimsFile, PlantedBug::Reexecute, twice),
        is_found(ConsumerMode::Transaction, PlantedBug::OwnConnection, twice),
        is_found(ConsumerMode::Batch, PlantedBug::OwnConnection, twice),
    );
}

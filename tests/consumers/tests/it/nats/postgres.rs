use hapax_consumers::{BrokerKind, ConsumerMode, PlantedBug};

use crate::{each_message_has_one_effect, under_faults};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_has_one_effect_in_every_mode() {
    Box::pin(each_message_has_one_effect(BrokerKind::Nats)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planted_bugs_are_found() {
    let reports = tokio::try_join!(
        under_faults(BrokerKind::Nats, ConsumerMode::ClaimsPostgres, Some(PlantedBug::AckFirst)),
        under_faults(BrokerKind::Nats, ConsumerMode::ClaimsPostgres, Some(PlantedBug::NoFence)),
        under_faults(BrokerKind::Nats, ConsumerMode::ClaimsFile, Some(PlantedBug::Reexecute)),
        under_faults(BrokerKind::Nats, ConsumerMode::Transaction, Some(PlantedBug::OwnConnection)),
        under_faults(BrokerKind::Nats, ConsumerMode::Batch, Some(PlantedBug::OwnConnection)),
    )
    .unwrap();
    for (report, found) in <[_; 5]>::from(reports).into_iter().zip([
        "has no effect",
        "has more than one effect",
        "has more than one effect",
        "has more than one effect",
        "has more than one effect",
    ]) {
        let finds = report.violations.iter().any(|text| text.contains(found));
        assert!(finds, "expected: {found}, found:\n{report}");
    }
}

//! Tests of consumers that are killed and frozen. `cargo xtask torture` runs more of the same.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[cfg(feature = "kafka")]
mod kafka;
mod nats;
mod rabbitmq;

use std::time::Duration;

use hapax_consumers::{
    BrokerKind, ConsumerMode, ConsumersError, ConsumersOptions, ConsumersReport, PlantedBug, run,
};

async fn under_faults(
    broker: BrokerKind,
    mode: ConsumerMode,
    plant: Option<PlantedBug>,
    seed: u64,
) -> Result<ConsumersReport, ConsumersError> {
    let options = ConsumersOptions {
        program: env!("CARGO_BIN_EXE_hapax-consumers").into(),
        broker,
        mode,
        messages: 300,
        duplicates: 30,
        // A planted bug shows at some of the kills and freezes only.
        kills: if plant.is_some() { 4 } else { 2 },
        outage: Duration::from_secs(2),
        seed,
        plant,
        limit: Duration::from_secs(400),
    };
    run(&options).await
}

async fn each_message_has_one_effect(broker: BrokerKind) {
    let reports = tokio::try_join!(
        under_faults(broker, ConsumerMode::ClaimsFile, None, 1),
        under_faults(broker, ConsumerMode::ClaimsPostgres, None, 1),
        under_faults(broker, ConsumerMode::Transaction, None, 1),
        under_faults(broker, ConsumerMode::Batch, None, 1),
    )
    .unwrap();
    for report in <[_; 4]>::from(reports) {
        assert!(report.violations.is_empty() && report.kills >= 4, "{report}");
    }
}

/// Checks that runs over NATS find the planted bug: it shows at some of the kills and freezes only, so that a run may
/// have none of these.
async fn is_found(mode: ConsumerMode, plant: PlantedBug, violation: &str) {
    let mut reports = Vec::new();
    let finds =
        |report: &ConsumersReport| report.violations.iter().any(|it| it.contains(violation));
    for seed in 1..=3 {
        if !reports.iter().any(finds) {
            reports.push(under_faults(BrokerKind::Nats, mode, Some(plant), seed).await.unwrap());
        }
    }
    let found = reports.iter().map(ConsumersReport::to_string).collect::<Vec<_>>().join("\n");
    assert!(reports.iter().any(finds), "expected with {plant:?}: {violation}, found:\n{found}");
}

use std::time::Duration;

use hapax_consumers::{
    ConsumerMode, ConsumersError, ConsumersOptions, ConsumersReport, PlantedBug, run,
};

async fn under_faults(
    mode: ConsumerMode,
    plant: Option<PlantedBug>,
) -> Result<ConsumersReport, ConsumersError> {
    let options = ConsumersOptions {
        program: env!("CARGO_BIN_EXE_hapax-consumers").into(),
        mode,
        messages: 300,
        duplicates: 30,
        // A planted bug shows at some of the kills and freezes only.
        kills: if plant.is_some() { 4 } else { 2 },
        outage: Duration::from_secs(2),
        seed: 1,
        plant,
        limit: Duration::from_secs(400),
    };
    run(&options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_has_one_effect_in_every_mode() {
    let reports = tokio::try_join!(
        under_faults(ConsumerMode::ClaimsFile, None),
        under_faults(ConsumerMode::ClaimsPostgres, None),
        under_faults(ConsumerMode::Transaction, None),
        under_faults(ConsumerMode::Batch, None),
    )
    .unwrap();
    for report in <[_; 4]>::from(reports) {
        assert!(report.violations.is_empty() && report.kills >= 6, "{report}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planted_bugs_are_found() {
    let reports = tokio::try_join!(
        under_faults(ConsumerMode::ClaimsPostgres, Some(PlantedBug::AckFirst)),
        under_faults(ConsumerMode::ClaimsPostgres, Some(PlantedBug::NoFence)),
        under_faults(ConsumerMode::ClaimsFile, Some(PlantedBug::Reexecute)),
        under_faults(ConsumerMode::Transaction, Some(PlantedBug::OwnConnection)),
        under_faults(ConsumerMode::Batch, Some(PlantedBug::OwnConnection)),
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

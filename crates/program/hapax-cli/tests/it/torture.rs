//! Gateways that are killed under load, a few times; `cargo xtask torture` does it often.

use hapax_torture::{OnUnknownPolicy, TortureOptions, TortureReport, run};

fn options(store: Option<&str>) -> TortureOptions {
    TortureOptions {
        gateway: env!("CARGO_BIN_EXE_hapax").into(),
        kills: 12,
        seed: 1,
        clients: 8,
        duplicates: 2,
        gateways: 1,
        store: store.map(String::from),
    }
}

fn total(report: &TortureReport, count: impl Fn(&hapax_torture::TortureCounts) -> u64) -> u64 {
    report.counts.iter().map(|(_, counts)| count(counts)).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_responses_are_replayed_after_every_kill() {
    let report = run(&options(None)).await.expect("every gateway comes up again");
    assert_eq!(report.violations, [""; 0]);
    assert_eq!(total(&report, |counts| counts.kills), 12);
    assert!(total(&report, |counts| counts.kills_in_execution) > 0, "no kill was in time");
    assert!(total(&report, |counts| counts.replays) > 0, "nothing was asked for again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_torture_test_detects_a_store_that_loses_records() {
    let report = run(&options(Some("memory:"))).await.expect("every gateway comes up again");
    for policy in OnUnknownPolicy::ALL {
        let begins = format!("{policy}: ");
        let found = report.violations.iter().any(|violation| violation.starts_with(&begins));
        assert!(found, "nothing was found under {policy}");
    }
}

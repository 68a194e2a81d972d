//! Journals and records in files, and a server in Stripe's manner.

use std::path::Path;
use std::time::Duration;

use hapax_callers::{CallsOptions, CallsReport, CallsStore, PlantedCallBug, ServerKind, run};

/// Returns the options of a test. `HAPAX_CALLS` sets another number of operations.
pub(crate) fn options(kind: ServerKind, store: CallsStore) -> CallsOptions {
    let program = Path::new(env!("CARGO_BIN_EXE_hapax-callers"));
    let hapax = program.with_file_name("hapax");
    let hint = "expected the program `hapax` beside this one, found none: cargo build -p hapax-cli";
    assert!(hapax.exists(), "{hint}");
    let operations = std::env::var("HAPAX_CALLS").map_or(600, |text| text.parse().unwrap());
    CallsOptions {
        program: program.to_owned(),
        hapax,
        kind,
        records: store,
        journal: store,
        operations,
        kills: (operations / 250).max(6),
        seed: 1,
        plant: None,
        within: Duration::from_secs(300),
        limit: Duration::from_secs(1_800),
    }
}

/// Runs clients, which must have one effect and one answer for each operation.
pub(crate) async fn succeeds(options: CallsOptions) {
    let report = run(&options).await.unwrap();
    println!("{report}");
    assert!(report.violations.is_empty(), "{report}");
}

/// Runs clients with a planted bug, which must be found.
pub(crate) async fn finds(plant: PlantedCallBug, kind: ServerKind, texts: &[&str]) {
    let mut options = options(kind, CallsStore::File);
    (options.operations, options.kills) = (150, 4);
    options.plant = Some(plant);
    // Operations whose service cannot say what happened stay open until then.
    options.within = Duration::from_secs(5);
    let report: CallsReport = run(&options).await.unwrap();
    for text in texts {
        let finds = report.violations.iter().any(|violation| violation.contains(text));
        assert!(finds, "expected: {text}, found:\n{report}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_through_a_gateway_on_a_file_have_one_effect_and_one_answer() {
    succeeds(options(ServerKind::Hapax, CallsStore::File)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_at_a_server_in_stripes_manner_have_one_effect_and_one_answer() {
    succeeds(options(ServerKind::Stripe, CallsStore::File)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_send_new_keys_are_found() {
    tokio::join!(
        finds(PlantedCallBug::NewKeys, ServerKind::Hapax, &[" effects", " answers:"]),
        finds(PlantedCallBug::NewKeys, ServerKind::Stripe, &[" effects", " answers:"]),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_forget_their_journals_are_found() {
    finds(PlantedCallBug::ForgetJournal, ServerKind::Hapax, &[" effects", " answers:"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_denies_its_effects_is_found() {
    finds(PlantedCallBug::DenyEffects, ServerKind::Hapax, &[" effects"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_cannot_say_what_happened_leaves_operations_open() {
    finds(PlantedCallBug::CannotSay, ServerKind::Hapax, &["is not known", "pending"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgets_its_keys_is_found() {
    finds(PlantedCallBug::ForgetKeys, ServerKind::Stripe, &[" effects"]).await;
}

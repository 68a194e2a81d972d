//! Jobs at the same time on one journal, in a file and on PostgreSQL.

use std::time::Duration;

use hapax_callers::{CallsStore, JobsOptions, ServerKind, run_jobs};

use crate::calls::options;

/// The server stalls after the effect of the first operation.
const SEED: u64 = 66;

/// Returns the options of a test. `HAPAX_CALLS=10000` sets 100 operations and 300 kills.
fn jobs(journal: CallsStore) -> JobsOptions {
    let calls = options(ServerKind::Stripe, journal);
    JobsOptions {
        program: calls.program,
        hapax: calls.hapax,
        journal,
        operations: (calls.operations / 100).clamp(3, 100),
        kills: calls.operations * 3 / 100,
        seed: SEED,
        plant: false,
        limit: Duration::from_secs(1_800),
    }
}

async fn succeeds(options: JobsOptions) {
    let report = run_jobs(&options).await.unwrap();
    println!("{report}");
    assert!(report.violations.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_on_a_file_have_one_effect_for_each_name() {
    succeeds(jobs(CallsStore::File)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_on_postgres_have_one_effect_for_each_name() {
    succeeds(jobs(CallsStore::Postgres)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_continue_with_other_credentials_are_found() {
    let planted = JobsOptions { operations: 1, kills: 0, plant: true, ..jobs(CallsStore::File) };
    let report = run_jobs(&planted).await.unwrap();
    assert!(report.violations.iter().any(|it| it.contains(" effects")), "{report}");
}

//! The examples, as they are, run.

use std::path::Path;
use std::time::Duration;

use hapax_client::Journal;
use tokio::time::timeout;

#[cfg(any(feature = "reqwest-middleware", feature = "tower"))]
use crate::bank::answer;
use crate::bank::{Act, Bank};
use crate::world::{LONG, process};

#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/invoices.rs"]
pub(crate) mod invoices;

#[cfg(feature = "reqwest-middleware")]
#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/middleware.rs"]
mod middleware;

#[cfg(feature = "tower")]
#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/layer.rs"]
mod layer;

/// Runs processes, each with more time than the one before, until one ends by itself. Returns its end, and
/// the number of those that were killed.
async fn killed_until_it_ends<T: Send, E: std::fmt::Debug>(
    run: impl AsyncFn(&Path) -> Result<T, E> + Sync,
) -> (T, u32) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let (mut killed, mut pause) = (0, 1);
    loop {
        let mut ended = None;
        process(async || {
            ended =
                timeout(Duration::from_millis(pause), run(&path)).await.ok().map(Result::unwrap);
        });
        if let Some(ended) = ended {
            return (ended, killed);
        }
        (killed, pause) = (killed + 1, pause + 1 + pause / 20);
    }
}

async fn pay_all(path: &Path, origin: &str) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let journal = Journal::file_within(path, LONG).await?;
    invoices::pay_all(journal, origin, "one".to_owned(), 1..=5).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_is_killed_again_and_again_pays_each_invoice_once() {
    let bank = Bank::start().await;
    // At least two runs die in a request that the server has executed.
    bank.act([Act::Silent, Act::Silent]);
    let origin = bank.origin();
    let (paid, killed) = killed_until_it_ends(async |path| pay_all(path, &origin).await).await;
    assert_eq!(paid, [1, 2, 3, 4, 5].map(|it| format!("invoice {it}: 201 Created")));
    assert!(killed > 3 && bank.arrived().len() >= 7, "{killed}");
    assert_eq!(bank.effects(), [1; 5]);
}

/// Checks a program that reads a rate, which is no operation, and then pays.
#[cfg(any(feature = "reqwest-middleware", feature = "tower"))]
async fn pays_once<E: std::fmt::Debug>(pay: impl AsyncFn(&Path, &str) -> Result<String, E> + Sync) {
    let bank = Bank::start().await;
    bank.answer_all("GET /rate", &answer(200, &[], "1.17"));
    // At least one run dies in a payment that the server has executed.
    bank.act([Act::Silent]);
    let origin = bank.origin();
    let (line, killed) = killed_until_it_ends(async |path| pay(path, &origin).await).await;
    assert_eq!(line, "201 Created: paid 10 at 1.17");
    assert!(killed > 1, "{killed}");
    assert_eq!(bank.effects(), [1]);
    let (rates, payments): (Vec<_>, Vec<_>) =
        bank.arrived().into_iter().partition(|it| it.line.starts_with("GET"));
    assert!(rates.len() > 1 && payments.len() > 1);
    assert!(rates.iter().all(|it| it.header("idempotency-key").is_none()));
    assert!(payments.iter().all(|it| *it == payments[0]));
}

#[cfg(feature = "reqwest-middleware")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_with_reqwest_middleware_that_is_killed_pays_once() {
    pays_once(async |path, origin| middleware::pay(path, origin).await).await;
}

#[cfg(feature = "tower")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_with_a_tower_stack_that_is_killed_pays_once() {
    pays_once(async |path, origin| layer::pay(path, origin).await).await;
}

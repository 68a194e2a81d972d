//! Kills clients, gateways and services under load, and checks that each operation has one effect and
//! one answer.
//!
//! A run has three client processes (`hapax-client`), and behind them either the program
//! `hapax gateway` and a service, or a server in the manner of Stripe. All of them get SIGKILL at
//! instants that the seed selects, and are started again. The service fails for some operations, once
//! each, in every way of [`CallFault`]. Then a second run of the clients, in which nothing is killed,
//! sends every operation again.
//!
//! 1. Each operation has one effect. The service executes every request that it gets, and counts its
//!    effects, in a synchronized file, by the name in the body.
//! 2. Each operation is answered in the second run at the latest, and no journal has one left.
//! 3. All answers that the clients recorded for one name, in each process and run, are equal, and are
//!    that of its effect.
//! 4. Each kind of fault and of kill has happened.
//!
//! # One effect by the contract of the gateway
//! The gateway runs with `--on-unknown reconcile`. Under `block` an operation whose service was killed
//! stays unknown until an operator decides, and under `reexecute` it may execute twice, by policy. With
//! a reconcile URL the service decides, and the documentation promises one effect if the service keeps
//! its side: it looks the operation up by its id, and durably rejects the fence of an execution of which
//! it has said that it did not happen. A status before an effect is either retryable for the gateway (425,
//! 429, and 409 and 503 with `Idempotency-Outcome: retryable`) or unknown (500, 503), so that the service
//! is asked.
//!
//! # Jobs
//! [`run_jobs`] runs `hapax call` as eight jobs on one journal.
//!
//! With a [`PlantedCallBug`] a process is wrong: the run must report a violation.

mod args;
mod caller;
mod check;
mod effects;
mod fault;
mod http;
mod jobs;
mod process;
mod report;
mod run;
mod service;
mod stripe;

pub use args::{CallArgs, CallsOptions, CallsStore, PlantedCallBug, ServeArgs, ServerKind};
pub use caller::call;
pub use fault::CallFault;
pub use jobs::{JobsOptions, JobsReport, run_jobs};
pub use report::CallsReport;
pub use run::run;

/// Serves as the service, or as the server in Stripe's manner, until the process is killed.
///
/// # Errors
/// [`CallsError`] if the port or the file of effects cannot be opened.
pub async fn serve(args: ServeArgs) -> Result<(), CallsError> {
    match args.kind {
        ServerKind::Hapax => service::serve(args).await,
        ServerKind::Stripe => stripe::serve(args).await,
    }
}

/// Failure that ends a run without a verdict, or a process.
#[derive(Debug, thiserror::Error)]
#[error("failed while {doing}: {cause}")]
pub struct CallsError {
    doing: &'static str,
    #[source]
    cause: Box<dyn std::error::Error + Send + Sync>,
}

fn failed<E>(doing: &'static str) -> impl FnOnce(E) -> CallsError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    move |cause| CallsError { doing, cause: cause.into() }
}

/// Returns the name of an operation.
fn name(number: u64) -> String {
    format!("op-{number}")
}

/// Returns the number in a name.
fn number(name: &str) -> Option<u64> {
    name.strip_prefix("op-")?.parse().ok()
}

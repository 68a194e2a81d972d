//! `hapax demo`: the effect of idempotency, counted.
//!
//! A payments service loses replies, stalls, fails and is killed. Clients retry with the same key.
//! Four setups are compared: no gateway, and the gateway with each policy of `--on-unknown`.
//! Everything is real: processes of this program, HTTP over loopback, SIGKILL, files. The results
//! are counted in the ledger of the service.
//!
//! Exit codes: 0 if every setup kept its promise and every fault happened, 1 if not, 69 if a
//! process could not be started, 130 after an interrupt. In all of these cases, and after a panic,
//! no process and no file is left behind.

mod client;
mod ledger;
mod plan;
mod progress;
mod report;
mod service;
mod setup;
mod text;
mod times;

use std::future::pending;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use hapax_core::{Entropy as _, EntropyError, SystemEntropy};
use tempfile::TempDir;
use tokio::time::timeout;

use crate::process::ProcessError;
use plan::Plan;
use progress::Progress;
use report::Report;
use setup::{DemoContext, FinishedSetup, Setup};

/// The hidden command that runs the payments service.
const SERVICE: &str = "payments-service";

/// The limit of payments in each setup.
const MAX_PAYMENTS: i64 = 2000;

/// Arguments of `hapax demo`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    #[arg(
        long, value_name = "N", default_value_t = 120,
        help = format!("Payments in each setup, {} to {MAX_PAYMENTS}", Plan::MIN_PAYMENTS),
        value_parser = clap::value_parser!(u16).range(i64::from(Plan::MIN_PAYMENTS)..=MAX_PAYMENTS)
    )]
    payments: u16,
    /// Distribute the faults as in an earlier run; the timing differs [default: a random one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print the table as JSON
    #[arg(long)]
    json: bool,
    /// Leave the last gateway and its operators' address up until Ctrl-C
    #[arg(long)]
    keep: bool,
    #[command(subcommand)]
    part: Option<Part>,
}

/// Subcommands that the demo starts as processes.
#[derive(Debug, clap::Subcommand)]
enum Part {
    /// The flaky payments service
    #[command(name = SERVICE, hide = true)]
    Service(service::ServiceArgs),
}

/// Errors of the demo.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A process did not start, or ended early.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// An operation on a file or terminal failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The system provides no randomness.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The whole demo took too long.
    #[error("not done after {} seconds", times::WHOLE.as_secs())]
    Late,
}

/// Runs the demo, or the subcommand that the arguments name.
///
/// # Errors
/// [`DemoError`] if the demo has no result.
pub async fn run(args: DemoArgs) -> Result<ExitCode, DemoError> {
    match args.part {
        Some(Part::Service(args)) => Ok(service::run(args).await.map(|()| ExitCode::SUCCESS)?),
        None => interruptible(args).await,
    }
}

async fn interruptible(args: DemoArgs) -> Result<ExitCode, DemoError> {
    let folder = tempfile::Builder::new().prefix("hapax-demo-").tempdir()?;
    // Set before `--keep` waits for the interrupt.
    let verdict = OnceLock::new();
    let done = tokio::select! {
        done = Box::pin(whole(&args, folder.path(), &verdict)) => done,
        interrupted = interrupted() => interrupted
            .map(|()| verdict.get().copied().unwrap_or(ExitCode::from(130)))
            .map_err(Into::into),
    };
    // Every process has been killed by now; one that has not ended yet may still create a file.
    remove(folder).await?;
    done
}

async fn whole(
    args: &DemoArgs,
    folder: &Path,
    verdict: &OnceLock<ExitCode>,
) -> Result<ExitCode, DemoError> {
    let seed = args.seed.map_or_else(new_seed, Ok)?;
    let played = timeout(times::WHOLE, play(args, seed, folder)).await;
    let (rows, last) = played.map_err(|_| DemoError::Late)??;
    let failings = report::failings(&rows);
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Report { seed, rows: &rows, failings: &failings })
            .map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        // Without a current folder, the path is absolute.
        let here = std::env::current_dir().unwrap_or_default();
        let called = text::called(&std::env::current_exe()?, &here);
        let said = text::words(&rows, &called, args.keep);
        write!(out, "\n{}\n{said}", text::table(&rows))?;
    }
    drop(out);
    for failing in &failings {
        eprintln!("hapax: {failing}");
    }
    let code = if failings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if args.keep {
        let _ = verdict.set(code);
        point_at(&last);
        pending::<()>().await;
    }
    last.end().await?;
    Ok(code)
}

/// Runs the setups, two at a time: most of their time is waiting.
async fn play(
    args: &DemoArgs,
    seed: u64,
    folder: &Path,
) -> Result<([report::Row; 4], FinishedSetup), DemoError> {
    let payments = args.payments;
    let progress = Progress::new(u64::from(payments) * 4);
    progress.note(&text::intro(payments, seed));
    let program = std::env::current_exe()?;
    let stage = DemoContext { program, folder, seed, payments, progress: &progress };
    let run = |setup| stage.run(setup);
    let [first, second, third, fourth] = Setup::ALL;
    let ((first, up), (second, up_too)) =
        tokio::try_join!(Box::pin(run(first)), Box::pin(run(second)))?;
    up.end().await?;
    up_too.end().await?;
    let ((third, up), (fourth, last)) =
        tokio::try_join!(Box::pin(run(third)), Box::pin(run(fourth)))?;
    up.end().await?;
    Ok(([first, second, third, fourth], last))
}

/// Prints the addresses of the gateway, and a request to try.
fn point_at(last: &FinishedSetup) {
    let Some(gateway) = last.gateway() else { return };
    let address = gateway.address;
    eprintln!("\nUp until Ctrl-C, with what this run left:\n  gateway  http://{address}");
    if let Some(admin) = gateway.admin {
        eprintln!("  admin    http://{admin}");
        eprintln!("  token    {}", last.token_file().display());
    }
    eprintln!(
        "Send this twice, and look for Idempotency-Replayed in the second answer:\n  \
         curl -i http://{address}/charges -H 'Authorization: Bearer me' \
         -H 'Idempotency-Key: my-first-key' -H 'Content-Type: application/json' -d '{{\"order\":100001,\"amount\":1999}}'"
    );
}

/// Waits for Ctrl-C or another signal that ends a process.
async fn interrupted() -> io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted,
            _ = terminate.recv() => Ok(()),
            _ = hang_up.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}

async fn remove(folder: TempDir) -> io::Result<()> {
    let path = folder.keep();
    let mut tries = 0;
    loop {
        match tokio::fs::remove_dir_all(&path).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound && tries < 20 => {
                tries += 1;
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => return Ok(()),
        }
    }
}

fn new_seed() -> Result<u64, EntropyError> {
    let mut bytes = [0; 4];
    SystemEntropy.fill(&mut bytes)?;
    Ok(u64::from(u32::from_le_bytes(bytes)))
}

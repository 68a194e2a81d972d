//! `hapax demo`: the effect of idempotency, in one command.
//!
//! A payments service loses replies, stalls, fails and is killed. Clients retry with the same key.
//! Between them are four set-ups: no gateway, and the gateway with each of its `--on-unknown`
//! policies. Everything is real: processes of this program, HTTP over loopback, SIGKILL, files. The
//! result is not fixed in advance; it is counted in the service's own [`ledger`].
//!
//! Exit codes: 0 if every set-up kept its guarantees and had every fault, 1 if one did not, 69 if a
//! process could not be started, 130 after an interrupt. In all of these cases, and after a panic,
//! no process and no file is left behind.

mod client;
mod ledger;
mod plan;
mod process;
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

use crate::exit::CliError;
use plan::Plan;
use process::StartError;
use progress::Progress;
use report::Report;
use setup::{DemoContext, FinishedSetup, Setup};

/// The hidden command that runs the payments service.
const SERVICE: &str = "payments-service";

/// The most payments in each set-up.
const MAX_PAYMENTS: i64 = 2000;

/// The arguments of `hapax demo`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct DemoArgs {
    #[arg(
        long, value_name = "N", default_value_t = 120,
        help = format!("Payments in each set-up, {} to {MAX_PAYMENTS}", Plan::MIN_PAYMENTS),
        value_parser = clap::value_parser!(u16).range(i64::from(Plan::MIN_PAYMENTS)..=MAX_PAYMENTS)
    )]
    payments: u16,
    /// Assign faults to payments as in the run with this seed; the timing differs [default: a new
    /// one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print the table as JSON
    #[arg(long)]
    json: bool,
    /// Keep the last gateway and its admin page running until Ctrl-C
    #[arg(long)]
    keep: bool,
    #[command(subcommand)]
    part: Option<Part>,
}

/// The processes of the demo that are this program.
#[derive(Debug, clap::Subcommand)]
enum Part {
    /// The flaky payments service
    #[command(name = SERVICE, hide = true)]
    Service(service::ServiceArgs),
}

/// The errors for which the demo has no result.
#[derive(Debug, thiserror::Error)]
enum DemoError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    #[error("not finished after {} seconds", times::WHOLE.as_secs())]
    Late,
}

/// Runs the demo, or the part of it that the arguments name.
pub(crate) async fn run(args: DemoArgs) -> ExitCode {
    let done = match args.part {
        Some(Part::Service(args)) => {
            service::run(args).await.map(|()| ExitCode::SUCCESS).map_err(DemoError::from)
        }
        None => interruptible(args).await,
    };
    done.unwrap_or_else(|error| CliError::unavailable(error).report(false))
}

async fn interruptible(args: DemoArgs) -> Result<ExitCode, DemoError> {
    let folder = tempfile::Builder::new().prefix("hapax-demo-").tempdir()?;
    // With `--keep` the exit code is set before the interrupt that ends the demo.
    let exit_code = OnceLock::new();
    let done = tokio::select! {
        done = Box::pin(whole(&args, folder.path(), &exit_code)) => done,
        interrupted = interrupted() => interrupted
            .map(|()| exit_code.get().copied().unwrap_or(ExitCode::from(130)))
            .map_err(Into::into),
    };
    // Every process has been killed by now, but one that has not quite ended may still create a
    // file.
    remove(folder).await?;
    done
}

async fn whole(
    args: &DemoArgs,
    folder: &Path,
    exit_code: &OnceLock<ExitCode>,
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
        // If the working directory was removed, the program is named by its whole path.
        let here = std::env::current_dir().unwrap_or_default();
        let called = text::called(&std::env::current_exe()?, &here);
        let explanation = text::words(&rows, &called, args.keep);
        write!(out, "\n{}\n{explanation}", text::table(&rows))?;
    }
    drop(out);
    for failing in &failings {
        CliError::no(failing).report(false);
    }
    let code = if failings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if args.keep {
        let _ = exit_code.set(code);
        print_addresses(&last);
        pending::<()>().await;
    }
    last.end().await?;
    Ok(code)
}

/// Runs the set-ups, two at a time: most of the time they wait.
async fn play(
    args: &DemoArgs,
    seed: u64,
    folder: &Path,
) -> Result<([report::Row; 4], FinishedSetup), DemoError> {
    let payments = args.payments;
    let progress = Progress::new(u64::from(payments) * 4);
    progress.note(&text::intro(payments, seed));
    let program = std::env::current_exe()?;
    let context = DemoContext { program, folder, seed, payments, progress: &progress };
    let run = |setup| context.run(setup);
    let [first, second, third, fourth] = Setup::ALL;
    let ((first, up), (second, second_up)) =
        tokio::try_join!(Box::pin(run(first)), Box::pin(run(second)))?;
    up.end().await?;
    second_up.end().await?;
    let ((third, up), (fourth, last)) =
        tokio::try_join!(Box::pin(run(third)), Box::pin(run(fourth)))?;
    up.end().await?;
    Ok(([first, second, third, fourth], last))
}

/// Prints the addresses of the gateway, and a command to try.
fn print_addresses(last: &FinishedSetup) {
    let Some(gateway) = last.gateway() else { return };
    let address = gateway.address;
    eprintln!("\nRunning until Ctrl-C, with the records of this run:\n  gateway  http://{address}");
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

/// Waits for Ctrl-C, SIGTERM or SIGHUP.
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

/// Removes a folder, with retries while a killed process may still create files in it.
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

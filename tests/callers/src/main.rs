//! The program `hapax-callers`: its runs, and the processes of a run.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use hapax_callers::{
    CallArgs, CallsError, CallsOptions, CallsStore, JobsOptions, PlantedCallBug, ServeArgs,
    ServerKind, call, run, run_jobs, serve,
};

/// Kills clients, gateways and services under load, and checks that each operation has one effect and
/// one answer.
#[derive(Parser)]
enum Cli {
    /// Runs clients under faults
    Run(RunArgs),
    /// Runs `hapax call` in eight processes at the same time
    Jobs(JobsArgs),
    /// Runs one client
    Call(CallArgs),
    /// Runs a service, or a server in Stripe's manner
    Serve(ServeArgs),
}

#[derive(clap::Args)]
struct RunArgs {
    /// The program `hapax`; the one beside this program, if not given
    #[arg(long)]
    hapax: Option<PathBuf>,
    /// The server of the clients
    #[arg(long, default_value = "hapax")]
    kind: ServerKind,
    /// Store of the gateway's records
    #[arg(long, default_value = "file")]
    records: CallsStore,
    /// Store of the journals
    #[arg(long, default_value = "file")]
    journal: CallsStore,
    /// Operations
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..))]
    operations: u64,
    /// Kills of clients, of the gateway, and of the service
    #[arg(long, default_value_t = 40)]
    kills: u64,
    /// Seed of the choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A deliberate error, with which the run must fail
    #[arg(long)]
    plant: Option<PlantedCallBug>,
}

#[derive(clap::Args)]
struct JobsArgs {
    /// The program `hapax`; the one beside this program, if not given
    #[arg(long)]
    hapax: Option<PathBuf>,
    /// Store of the journal
    #[arg(long, default_value = "file")]
    journal: CallsStore,
    /// Operations
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    operations: u64,
    /// Kills of calls
    #[arg(long, default_value_t = 300)]
    kills: u64,
    /// Seed of the choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A deliberate error, with which the run must fail
    #[arg(long)]
    plant: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let ended = match Cli::parse() {
        Cli::Run(args) => all(args).await,
        Cli::Jobs(args) => jobs(args).await,
        Cli::Call(args) => {
            log();
            call(args).await.map(|()| true)
        }
        Cli::Serve(args) => {
            log();
            serve(args).await.map(|()| true)
        }
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn log() {
    let level = tracing_subscriber::filter::LevelFilter::WARN;
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).init();
}

async fn all(args: RunArgs) -> Result<bool, CallsError> {
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("hapax-callers"));
    let report = run(&CallsOptions {
        hapax: args.hapax.unwrap_or_else(|| program.with_file_name("hapax")),
        program,
        kind: args.kind,
        records: args.records,
        journal: args.journal,
        operations: args.operations,
        kills: args.kills,
        seed: args.seed,
        plant: args.plant,
        within: Duration::from_secs(300),
        limit: Duration::from_secs(1_800),
    })
    .await?;
    println!("{report}");
    Ok(kept(report.violations.is_empty()))
}

async fn jobs(args: JobsArgs) -> Result<bool, CallsError> {
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("hapax-callers"));
    let report = run_jobs(&JobsOptions {
        hapax: args.hapax.unwrap_or_else(|| program.with_file_name("hapax")),
        program,
        journal: args.journal,
        operations: args.operations,
        kills: args.kills,
        seed: args.seed,
        plant: args.plant,
        limit: Duration::from_secs(1_800),
    })
    .await?;
    println!("{report}");
    Ok(kept(report.violations.is_empty()))
}

/// Prints the verdict of a run.
fn kept(kept: bool) -> bool {
    println!(
        "{}",
        if kept { "each operation had one effect and one answer" } else { "a check failed" }
    );
    kept
}

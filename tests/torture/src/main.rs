//! The program `hapax-torture`; `cargo xtask torture` runs it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use hapax_torture::{TortureCounts, TortureOptions, missing, run};

/// Kills gateways under load and checks that no promise breaks.
#[derive(Parser)]
struct Cli {
    /// The program `hapax`; the one beside this program, if not given
    #[arg(long)]
    gateway: Option<PathBuf>,
    /// How often to kill, over all policies
    #[arg(long, default_value_t = 500)]
    kills: u64,
    /// Seed of the instants and of the clients' choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Concurrent clients for each policy
    #[arg(long, default_value_t = 12)]
    clients: u64,
    /// In how many copies one in four requests is sent at once
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1000))]
    copies: u64,
    /// Gateways for each policy, on one store
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=16))]
    gateways: u64,
    /// Another store than a file, redis://… or postgres://…; or `memory:`, to see this fail
    #[arg(long)]
    store: Option<String>,
}

type Row = (&'static str, fn(&TortureCounts) -> u64);

const ROWS: [Row; 16] = [
    ("kills", |counts| counts.kills),
    ("  in mid-request", |counts| counts.kills_in_execution),
    ("  during a start", |counts| counts.kills_in_start),
    ("operations", |counts| counts.operations),
    ("requests sent", |counts| counts.requests),
    ("executions", |counts| counts.executions),
    ("effects", |counts| counts.effects),
    ("executed again", |counts| counts.executed_again),
    ("  after a lost answer", |counts| counts.answers_lost),
    ("answered", |counts| counts.answered),
    ("replays compared", |counts| counts.replays),
    ("unknown for good", |counts| counts.unknown),
    ("hook: happened", |counts| counts.hook_happened),
    ("hook: did not", |counts| counts.hook_did_not),
    ("hook: cannot say", |counts| counts.hook_cannot_say),
    ("duplicate effects", |counts| counts.duplicates),
];

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { gateway, kills, seed, clients, copies, gateways, store } = Cli::parse();
    let beside = || std::env::current_exe().map(|this| this.with_file_name("hapax"));
    let gateway = match gateway.map_or_else(beside, Ok) {
        Ok(gateway) => gateway,
        Err(error) => {
            eprintln!("--gateway is needed: {error}");
            return ExitCode::from(64);
        }
    };
    println!("seed {seed}, {kills} kills, {clients} clients for each policy");
    let report = match run(&TortureOptions {
        gateway,
        kills,
        seed,
        clients,
        duplicates: copies,
        gateways,
        store,
    })
    .await
    {
        Ok(report) => report,
        Err(fault) => {
            eprintln!("BROKEN: {fault}");
            return ExitCode::FAILURE;
        }
    };
    print!("{:<24}", "");
    report.counts.iter().for_each(|(policy, _)| print!("{policy:>12}"));
    println!();
    for (name, count) in ROWS {
        print!("{name:<24}");
        report.counts.iter().for_each(|(_, counts)| print!("{:>12}", count(counts)));
        println!();
    }
    let missing = missing(&report);
    missing.iter().for_each(|what| eprintln!("NOT TESTED: {what}"));
    report.violations.iter().for_each(|what| eprintln!("BROKEN: {what}"));
    if missing.is_empty() && report.violations.is_empty() {
        println!("every response was replayed, no promise was broken");
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

//! Measures what protection costs, beside peers, and prints a table with the targets.
//!
//!     cargo xtask bench http
//!     cargo xtask bench stores
//!     cargo xtask bench connections
//!     cargo xtask bench growth
//!
//! Every measurement starts a new server, so that no case pays for the records of another. The cases
//! of a round follow each other, and ratios are taken within a round: load of the machine that lasts
//! longer than a round affects both sides.

mod cases;
mod connections;
mod growth;
mod machine;
mod measure;
mod plot;
mod report;
mod start;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use cases::{Case, Server};
use clap::{Parser, Subcommand};
use hapax_bench_cost::Any;
use machine::Pinning;
use measure::Bench;
use report::{CaseResult, Report};

/// Measures the cost of a protected request
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure requests of HTTP: layers, proxies, the gateway
    Http {
        #[command(flatten)]
        options: Options,
        /// The program `hapax`
        #[arg(long, value_name = "PATH")]
        hapax: PathBuf,
        /// Connections of the load generator; targets are stated for the default
        #[arg(long, value_name = "N", default_value_t = cases::TARGET_CONNECTIONS)]
        connections: usize,
    },
    /// Measure the swaps of stores, two a request, without HTTP and without an engine
    Stores {
        #[command(flatten)]
        options: Options,
    },
    /// Measure layers and the gateway by the number of connections
    Connections {
        #[command(flatten)]
        options: Options,
        /// The program `hapax`
        #[arg(long, value_name = "PATH")]
        hapax: PathBuf,
        /// Draw the results into this file, as SVG
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
    },
    /// Measure the swaps of stores with few records and with many
    Growth {
        #[command(flatten)]
        options: Options,
        /// Records of the large stores
        #[arg(long, value_name = "N", default_value_t = 10_000_000)]
        records: u64,
        /// Draw the results into this file, as SVG
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
    },
}

#[derive(clap::Args)]
struct Options {
    /// Length of a measurement
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    seconds: f64,
    /// Measurements of each case
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Measure only these cases, and those beside them
    #[arg(long, value_name = "CASE,..", value_delimiter = ',')]
    only: Vec<String>,
    /// Write the results to this file too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    hapax_bench_cost::exit(run(Cli::parse().command).await)
}

async fn run(command: Command) -> Result<(), Any> {
    let (options, hapax, connections, all) = match command {
        Command::Http { options, hapax, connections } => (options, hapax, connections, cases::HTTP),
        Command::Stores { options } => {
            (options, PathBuf::new(), cases::TARGET_CONNECTIONS, cases::STORES)
        }
        Command::Connections { options, hapax, plot } => {
            return connections::run(&options, hapax, plot.as_deref()).await;
        }
        Command::Growth { options, records, plot } => {
            return growth::run(&options, records, plot.as_deref()).await;
        }
    };
    let mut chosen = cases::choose(all, &options.only)?;
    if !machine::is_installed("nginx") && chosen.iter().any(|case| case.server == Server::Nginx) {
        chosen.retain(|case| case.server != Server::Nginx);
        println!("left out: nginx, which is not installed");
    }
    // Before any process is started: all inherit it.
    let pinning = Pinning::of_this_machine()?;
    let load_at_start = machine::load_average()?;
    let bench = Bench::start(hapax, pinning, options.seconds, connections).await?;
    println!("{}", pinning.describe());
    println!(
        "{} rounds of {} s, {connections} connections, load average at the start {load_at_start}",
        options.rounds, options.seconds
    );
    let mut results: Vec<CaseResult> = chosen.iter().map(|case| CaseResult::new(case)).collect();
    for round in 1..=options.rounds {
        for result in &mut results {
            eprint!("round {round}: {:22}", result.name);
            match bench.measure(case_of(&chosen, &result.name)).await {
                Ok(sample) => {
                    eprintln!("{:9.0} requests/s", sample.rate());
                    result.samples.push(sample);
                }
                Err(error) => {
                    eprintln!(" failed: {error}");
                    result.failed = Some(error.to_string());
                }
            }
        }
    }
    let report = Report::new(&options, connections, pinning, load_at_start, results)?;
    table::print(&report);
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)?)?;
    }
    match report.failed().as_slice() {
        [] => Ok(()),
        failed => Err(format!("failed: {}", failed.join(", ")).into()),
    }
}

fn case_of<'a>(cases: &[&'a Case], name: &str) -> &'a Case {
    let found = cases.iter().find(|case| case.name == name);
    found.expect("results are made of the cases")
}

//! The program `hapax-consumers`; `cargo xtask torture --messages` runs it.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use hapax_consumers::{
    BrokerKind, ConsumerArgs, ConsumerMode, ConsumersOptions, PlantedBug, consume, run,
};

/// Kills and freezes message consumers under load, and checks that each message has one effect.
#[derive(Parser)]
enum Cli {
    /// Runs consumers under faults
    Run(RunArgs),
    /// Runs one consumer
    Consume(ConsumerArgs),
}

#[derive(clap::Args)]
struct RunArgs {
    /// Brokers
    #[arg(long, value_enum, default_value = "nats")]
    broker: Vec<BrokerKind>,
    /// Modes; all of them if none is given
    #[arg(long)]
    mode: Vec<ConsumerMode>,
    /// Messages with different ids
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..))]
    messages: u64,
    /// Percentage of the messages that are published twice
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=100))]
    duplicates: u64,
    /// Kills of each kind
    #[arg(long, default_value_t = 12)]
    kills: u64,
    /// Seconds for which the store is unavailable
    #[arg(long, default_value_t = 30)]
    outage: u64,
    /// Seed of the choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A deliberate error, with which the run must fail
    #[arg(long)]
    plant: Option<PlantedBug>,
}

#[tokio::main]
async fn main() -> ExitCode {
    match Cli::parse() {
        Cli::Consume(args) => consumer(args).await,
        Cli::Run(args) => all(args).await,
    }
}

async fn consumer(args: ConsumerArgs) -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(LEVEL).init();
    match consume(args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(75)
        }
    }
}

const LEVEL: tracing_subscriber::filter::LevelFilter =
    tracing_subscriber::filter::LevelFilter::WARN;

async fn all(args: RunArgs) -> ExitCode {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("expected to find this program, which runs as the consumers: {error}");
            return ExitCode::FAILURE;
        }
    };
    let modes = if args.mode.is_empty() { ConsumerMode::ALL.to_vec() } else { args.mode };
    let mut kept = true;
    for (broker, mode) in
        args.broker.iter().flat_map(|it| modes.iter().map(move |mode| (*it, *mode)))
    {
        let begun = tokio::time::Instant::now();
        let options = ConsumersOptions {
            program: program.clone(),
            broker,
            mode,
            messages: args.messages,
            duplicates: args.duplicates,
            kills: args.kills,
            outage: Duration::from_secs(args.outage),
            seed: args.seed,
            plant: args.plant,
            limit: Duration::from_secs(900),
        };
        match run(&options).await {
            Ok(report) => {
                let seconds = begun.elapsed().as_secs();
                println!("{} on {} ({seconds} s)\n{report}", mode.name(), broker.name());
                kept &= report.violations.is_empty();
            }
            Err(error) => {
                eprintln!("{} on {}: {error}", mode.name(), broker.name());
                kept = false;
            }
        }
    }
    println!("{}", if kept { "every message had one effect" } else { "a check failed" });
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

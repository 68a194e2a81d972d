//! Measurements of what protection costs. They are built in a workspace of their own, `bench/cost`.

use crate::sh::{Failure, Outcome, Run};
use crate::test::target;

const MANIFEST: [&str; 2] = ["--manifest-path", "bench/cost/Cargo.toml"];

/// What is measured.
#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    /// Measure requests of HTTP: the layer, the gateway, other crates, other proxies
    ///
    /// The layer on axum beside the crates `idempotent` and axum-idempotent, over memory, Redis, a
    /// file and PostgreSQL; the gateway beside a bare hyper proxy and nginx; replays. Each request
    /// has a new key and 200 bytes; handlers and upstream do nothing. Where the machine has two
    /// cores, the server is pinned to one, and the load generator, the upstream and the databases
    /// to the other. Prints rates, processor time per request, ratios and targets; a response other
    /// than expected is a failure.
    Http {
        #[command(flatten)]
        options: Options,
        /// Connections of the load generator; targets are stated for the default
        #[arg(long, value_name = "N", default_value_t = 64)]
        connections: usize,
    },

    /// Measure the swaps of each store, two a request, by 64 callers and by one
    ///
    /// Without HTTP and without an engine: what the layer over a store is compared with.
    Stores(Options),

    /// Measure the layer and the gateway with 1 to 256 connections
    Connections {
        #[command(flatten)]
        options: Options,
        /// Draw the results into this file, as SVG
        #[arg(long, value_name = "FILE")]
        plot: Option<String>,
    },

    /// Measure the swaps of the file store and of PostgreSQL with many records and with few
    ///
    /// Filling a store with ten million records takes minutes and ten gigabytes.
    Growth {
        #[command(flatten)]
        options: Options,
        /// Records of the large stores; the small ones have 10,000
        #[arg(long, value_name = "N", default_value_t = 10_000_000)]
        records: u64,
        /// Draw the results into this file, as SVG
        #[arg(long, value_name = "FILE")]
        plot: Option<String>,
    },
}

/// Length and extent of a measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Length of a measurement
    #[arg(long, value_name = "N", default_value_t = 5)]
    seconds: u32,
    /// Measurements of each case; the cases take turns
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// Measure only these cases, and those beside them
    #[arg(long, value_name = "CASE,..")]
    only: Option<String>,
    /// Write all results to this file too
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

impl Options {
    fn words(&self) -> Vec<String> {
        let numbers = [("--seconds", self.seconds), ("--rounds", self.rounds)];
        let texts = [("--only", &self.only), ("--json", &self.json)];
        let numbers = numbers.map(|(name, value)| (name, Some(value.to_string())));
        let texts = texts.map(|(name, value)| (name, value.clone()));
        let given = numbers.into_iter().chain(texts);
        given.filter_map(|(name, value)| Some([name.to_owned(), value?])).flatten().collect()
    }
}

pub(crate) fn run(bench: &Bench) -> Outcome {
    // The crate `idempotent` states a newer compiler than it needs.
    let build = ["build", "--release", "--locked", "--ignore-rust-version"];
    Run::cargo().args(build).args(MANIFEST).show()?;
    let words = match bench {
        Bench::Http { options, connections } => {
            let connections = ["--connections".into(), connections.to_string()];
            [vec!["http".into()], options.words(), gateway()?, connections.into()].concat()
        }
        Bench::Connections { options, plot } => {
            [vec!["connections".into()], options.words(), gateway()?, plot_words(plot)].concat()
        }
        Bench::Stores(options) => [vec!["stores".into()], options.words()].concat(),
        Bench::Growth { options, records, plot } => {
            let records = ["--records".into(), records.to_string()];
            [vec!["growth".into()], options.words(), records.into(), plot_words(plot)].concat()
        }
    };
    let folder = std::env::temp_dir();
    Run::cargo()
        .args(["run", "--quiet", "--release", "--locked", "--ignore-rust-version"])
        .args(MANIFEST)
        .args(["--bin", "cost", "--"])
        .args(words)
        // Servers for tests have their files in memory, unless this is set.
        .env("TMPDIR", folder)
        .show()
}

/// Builds the program `hapax`, and returns the words that name it.
fn gateway() -> Result<Vec<String>, Failure> {
    Run::cargo().args(["build", "--release", "--package", "hapax-cli"]).show()?;
    let hapax = target()?.join("release/hapax");
    Ok(vec!["--hapax".into(), hapax.display().to_string()])
}

fn plot_words(plot: &Option<String>) -> Vec<String> {
    plot.iter().flat_map(|plot| ["--plot".to_owned(), plot.clone()]).collect()
}

//! The project's command list: `cargo xtask COMMAND`. There is no other.

mod bench;
mod ci;
mod deps;
mod features;
mod lint;
mod long;
mod producers;
mod setup;
mod sh;
mod soak;
mod sources;
mod test;
mod tools;
mod words;

use std::process::ExitCode;

use clap::Parser;

use setup::Skip;
use sh::Outcome;

/// Builds, checks and tests Hapax
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
enum Command {
    /// Install the packages that the tests need
    ///
    /// Looks for Redis, PostgreSQL, PgBouncer, Python 3, Node, npm, Go, nginx, make, OpenSSL, curl and kill. What is
    /// missing is installed with apt-get when this runs as root; otherwise the command to run is
    /// printed, and this fails. Does nothing if all is installed. The servers are only installed:
    /// tests start their own, on separate ports. Stripe's and gRPC's clients, httpx and FastAPI for
    /// Python come from PyPI into a virtual environment in the target folder, in the versions of
    /// crates/program/hapax-gateway/tests/pypi/requirements.txt; Stripe's client for Node, axios and
    /// Express come from npm into the target folder, in the versions of
    /// crates/program/hapax-gateway/tests/npm/package-lock.json.
    Setup(Skip),

    /// Run every test: libraries, programs, documentation
    ///
    /// Runs `setup` first. Uses cargo-nextest where it is installed, else `cargo test`. A server that
    /// is missing fails its tests, unless it is skipped by name. The last line states which tests
    /// ran, how many passed, and which were left out and why.
    Test(Skip),

    /// Check format, words, clippy, documentation, file lengths, default builds
    ///
    /// Warnings are errors. No Rust file may have more than 600 lines. Names and comments follow
    /// VOCABULARY.md, as far as xtask/src/words.rs checks it. Includes `deps`.
    Lint,

    /// Check each crate without features, and with each feature alone
    ///
    /// A build of the whole workspace unites the features of all crates, which hides a feature that
    /// does not compile without another one.
    Features,

    /// Check what default builds bring, and what reads the time
    ///
    /// The core's default features bring no runtime, no HTTP and no database; stores bring no HTTP;
    /// their default builds and that of HTTP compile no C, and the program only ring's, for TLS; only
    /// clock.rs and entropy.rs of the core read the time or randomness. `deny` checks the direction
    /// of dependencies between our crates.
    Deps,

    /// Check licences, bans and sources of all dependencies, and the direction of ours
    ///
    /// Runs cargo-deny with deny.toml. If it is not installed, it is built once, into target/tools.
    Deny,

    /// Run every fuzz target
    ///
    /// Installs the nightly toolchain if it is missing, with rustup, and builds cargo-fuzz once, into
    /// target/tools. Needs a C++ compiler. Each target starts from fuzz/seeds and stores what it
    /// finds in fuzz/corpus.
    Fuzz {
        /// Duration of each target
        #[arg(long, value_name = "N", default_value_t = 60)]
        seconds: u32,
        /// Run only this target
        #[arg(long, value_name = "NAME")]
        target: Option<String>,
    },

    /// Simulate installations under faults, from seeds
    ///
    /// Plays whole schedules of claims, crashes, lost and delayed messages, pauses and clock steps,
    /// and checks every promise. A failure prints its seed.
    Sim {
        /// Number of schedules
        #[arg(long, value_name = "N", default_value_t = 1_000_000)]
        seeds: u64,
        /// Seed of the first one
        #[arg(long, value_name = "SEED", default_value_t = 0)]
        from: u64,
        /// Play only this one, and print it step by step
        #[arg(long, conflicts_with_all = ["seeds", "from"])]
        seed: Option<u64>,
    },

    /// Kill gateways under load, and drop or tear what their file had not synced
    ///
    /// Four runs. Real gateways on files get SIGKILL at random instants while clients retry: every
    /// response that a client got must be replayed, and no key may execute twice where that is
    /// forbidden. Then images of the file as a power failure may leave it are opened: nothing that
    /// was acknowledged may be missing. Then message consumers are killed and frozen, in each mode:
    /// each message must have one effect. Then clients are killed with their servers: each operation
    /// must have one effect and one answer.
    Torture {
        /// Kills of a gateway; 0 leaves the first run out
        #[arg(long, value_name = "N", default_value_t = 500)]
        kills: u64,
        /// Images; 0 leaves the second run out
        #[arg(long, value_name = "N", default_value_t = 1000)]
        images: u64,
        /// Messages for the consumers of each mode; 0 leaves the third run out
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        messages: u64,
        /// Operations of the clients, for each store and each kind of server; 0
        /// leaves the fourth run out
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        calls: u64,
        /// Seed of the instants and of the losses
        #[arg(long, value_name = "N", default_value_t = 1)]
        seed: u64,
    },

    /// Run for hours the tests that find more the longer they last
    ///
    /// Runs each of them in a release build, one after the other, and names those that failed.
    /// `test` runs the same tests for seconds.
    Soak {
        /// Run only: copies, bank, sagas, stalls, brokers, standbys, histories, flips, emptied, properties
        #[arg(long, value_name = "NAME")]
        only: Option<String>,
        /// Seed of those that take one
        #[arg(long, value_name = "N", default_value_t = 1)]
        seed: u64,
    },

    /// Consume and redrive messages that frameworks of others publish
    ///
    /// kombu, Celery, pika, aio-pika, FastStream, amqplib, nats-py, confluent-kafka and kafkajs publish
    /// messages with their defaults, and hostile ones. Each is accepted once or is a dead letter with a
    /// reason, and each redriven message is what it was. The packages come from PyPI and npm into the
    /// target folder, in the versions of tests/producers; without them this fails.
    Producers {
        /// Messages of each framework
        #[arg(long, value_name = "N", default_value_t = 1_000)]
        messages: u32,
        /// Run only these
        #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
        only: Vec<String>,
    },

    /// Measure what protection costs
    ///
    /// Needs a machine without other work: the last line states how noisy the run was.
    #[command(subcommand)]
    Bench(bench::Bench),

    /// Run lint, features, deny, test, a short simulation, a short fuzz
    ///
    /// Stops at the first step that fails and names it; prints how long each took.
    Ci {
        /// Run `producers` too, after the others
        #[arg(long)]
        all: bool,
    },
}

impl Command {
    fn run(self) -> Outcome {
        match self {
            Self::Setup(skip) => setup::run(&skip),
            Self::Test(skip) => test::run(&skip),
            Self::Lint => lint::run(),
            Self::Features => features::run(),
            Self::Deps => deps::run(),
            Self::Deny => tools::deny(),
            Self::Fuzz { seconds, target } => tools::fuzz(seconds, target.as_deref()),
            Self::Sim { seed: Some(seed), .. } => long::simulate(&[("--seed", seed)]),
            Self::Sim { seeds, from, seed: None } => long::sim(seeds, from),
            Self::Torture { kills, images, messages, calls, seed } => {
                long::torture(kills, images, messages, calls, seed)
            }
            Self::Soak { only, seed } => soak::soak(only.as_deref(), seed),
            Self::Bench(bench) => bench::run(&bench),
            Self::Producers { messages, only } => producers::run(messages, &only),
            Self::Ci { all } => ci::run(all),
        }
    }
}

fn main() -> ExitCode {
    match Command::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

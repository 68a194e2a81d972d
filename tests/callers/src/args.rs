//! Options of a run, and arguments of its processes.

use std::path::PathBuf;
use std::time::Duration;

/// The server of the clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum ServerKind {
    /// `hapax gateway` in front of a service.
    Hapax,
    /// A server in Stripe's manner.
    Stripe,
}

/// The place of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum CallsStore {
    /// A file, which one process has open.
    File,
    /// PostgreSQL.
    Postgres,
}

/// A planted bug, which a run must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum PlantedCallBug {
    /// Clients send a new key for each try.
    NewKeys,
    /// Clients lose journal and secret when they end.
    ForgetJournal,
    /// The service says of each operation that it did not happen, and rejects no fence.
    DenyEffects,
    /// The server in Stripe's manner forgets its keys when it ends.
    ForgetKeys,
    /// The service cannot say what happened.
    CannotSay,
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct CallsOptions {
    /// The program of this package, which runs as clients and service.
    pub program: PathBuf,
    /// The program `hapax`.
    pub hapax: PathBuf,
    /// The server.
    pub kind: ServerKind,
    /// Store of the gateway's records.
    pub records: CallsStore,
    /// Store of the journals. In files, each client has its own, and a share of the operations; on
    /// PostgreSQL they share one, and each of them sends all operations.
    pub journal: CallsStore,
    /// Number of operations.
    pub operations: u64,
    /// Number of kills of clients, of the gateway, and of the service.
    pub kills: u64,
    /// Seed of the choices.
    pub seed: u64,
    /// A deliberate error.
    pub plant: Option<PlantedCallBug>,
    /// Time within which an operation is tried in the second run.
    pub within: Duration,
    /// Time within which each run of the clients must end.
    pub limit: Duration,
}

/// Arguments of a service, or of a server in Stripe's manner.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// The kind of server
    #[arg(long)]
    pub(crate) kind: ServerKind,
    /// Port on 127.0.0.1
    #[arg(long)]
    pub(crate) port: u16,
    /// File of the effects
    #[arg(long)]
    pub(crate) effects: PathBuf,
    /// Seed of the choices
    #[arg(long)]
    pub(crate) seed: u64,
    /// A deliberate error
    #[arg(long)]
    pub(crate) plant: Option<PlantedCallBug>,
}

/// Arguments of a client.
#[derive(Clone, Debug, clap::Args)]
pub struct CallArgs {
    /// Origin of the server
    #[arg(long)]
    pub(crate) server: String,
    /// Profile of the server
    #[arg(long)]
    pub(crate) kind: ServerKind,
    /// Path of the journal, or postgres://…
    #[arg(long)]
    pub(crate) journal: String,
    /// File to which answers are appended
    #[arg(long)]
    pub(crate) answers: PathBuf,
    /// Number of operations
    #[arg(long)]
    pub(crate) operations: u64,
    /// Sends one in this number of operations
    #[arg(long)]
    pub(crate) share: u64,
    /// The first operation that it sends, and its number among the clients
    #[arg(long)]
    pub(crate) first: u64,
    /// Seed of the order
    #[arg(long)]
    pub(crate) seed: u64,
    /// Milliseconds within which an operation is tried
    #[arg(long)]
    pub(crate) within: u64,
    /// A deliberate error
    #[arg(long)]
    pub(crate) plant: Option<PlantedCallBug>,
}

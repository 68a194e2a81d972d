//! Kills and freezes message consumers under load, and checks that each message has one effect.
//!
//! A run has a private broker ([`BrokerKind`]), a private database (PostgreSQL) and consumers, which are
//! processes of their own. Messages are published beforehand, some of them twice. The run injects
//! every fault of [`FaultKind`] at messages that the seed selects, kills and restarts the broker,
//! takes the store away, and drops replies of the database. It ends when the broker has nothing
//! left to deliver. Then each id must have one effect, and no message may be a dead letter.
//!
//! Effects are rows of a table without a unique index. In the modes with a transaction they are
//! written in it. In the modes of claims they are written by a statement of their own, to a system
//! downstream that rejects a lower fencing token than the highest it has seen; a reconciliation
//! hook raises that token before it looks for the effect.
//!
//! With a [`PlantedBug`] the consumers are wrong: the run must report a violation.

mod broker;
mod consumer;
mod database;
mod faults;
mod report;
mod run;

use std::path::PathBuf;
use std::time::Duration;

pub use broker::BrokerKind;
pub use consumer::{ConsumerArgs, consume};
pub use faults::{Fault, FaultKind};
pub use report::ConsumersReport;
pub use run::run;

/// A mode of a consumer, and the place of its records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum ConsumerMode {
    /// Claims in a file, which one process has open.
    ClaimsFile,
    /// Claims in PostgreSQL.
    ClaimsPostgres,
    /// Claims in PostgreSQL; the effect commits with the completion.
    Transaction,
    /// Ids and effects of a batch in one transaction, without claims.
    Batch,
}

impl ConsumerMode {
    /// All modes.
    pub const ALL: [Self; 4] =
        [Self::ClaimsFile, Self::ClaimsPostgres, Self::Transaction, Self::Batch];

    /// Returns the number of consumers that can share the records.
    const fn consumers(self) -> usize {
        match self {
            Self::ClaimsFile => 1,
            Self::ClaimsPostgres | Self::Transaction | Self::Batch => 3,
        }
    }

    /// Returns the name that the command line has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClaimsFile => "claims-file",
            Self::ClaimsPostgres => "claims-postgres",
            Self::Transaction => "transaction",
            Self::Batch => "batch",
        }
    }
}

/// A planted bug of the consumers, which a run must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum PlantedBug {
    /// Messages are acknowledged when they are received.
    AckFirst,
    /// The system downstream ignores fencing tokens.
    NoFence,
    /// A message whose handler may have succeeded is handled again, without reconciliation.
    Reexecute,
    /// The effect is written on a connection of its own instead of the one in the transaction.
    OwnConnection,
}

impl PlantedBug {
    /// Returns the name that the command line has for it.
    const fn name(self) -> &'static str {
        match self {
            Self::AckFirst => "ack-first",
            Self::NoFence => "no-fence",
            Self::Reexecute => "reexecute",
            Self::OwnConnection => "own-connection",
        }
    }
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct ConsumersOptions {
    /// The program of this package, which runs as the consumers.
    pub program: PathBuf,
    /// Kind of the broker.
    pub broker: BrokerKind,
    /// Mode of the consumers.
    pub mode: ConsumerMode,
    /// Number of messages with different ids.
    pub messages: u64,
    /// Percentage of the messages that are published twice.
    pub duplicates: u64,
    /// Number of kills of each kind, and twice the number of freezes of each kind.
    pub kills: u64,
    /// Time for which the store is unavailable.
    pub outage: Duration,
    /// Seed of the choices.
    pub seed: u64,
    /// A deliberate error.
    pub plant: Option<PlantedBug>,
    /// Time within which the broker must have nothing left to deliver.
    pub limit: Duration,
}

/// Failure that ends a run without a verdict.
#[derive(Debug, thiserror::Error)]
#[error("the run failed while {doing}: {cause}")]
pub struct ConsumersError {
    doing: &'static str,
    #[source]
    cause: Box<dyn std::error::Error + Send + Sync>,
}

fn failed<E>(doing: &'static str) -> impl FnOnce(E) -> ConsumersError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    move |cause| ConsumersError { doing, cause: cause.into() }
}

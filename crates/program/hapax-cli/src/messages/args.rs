//! The flags of `hapax messages`.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use hapax_gateway::{StoreUrl, UrlText};
use hapax_messages::DeadLetterReason;

/// List, show, redrive and drop the dead letters of consumers and outboxes in PostgreSQL
#[derive(Debug, Args)]
pub(crate) struct MessagesArgs {
    #[command(subcommand)]
    pub(super) command: MessagesCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum MessagesCommand {
    /// Print the SQL that creates or migrates the tables and functions
    ///
    /// Run it with psql, any number of times: with an error psql ends with an exit code of 3. For a
    /// migration tool leave out the first line, which is a command of psql.
    Migrations,
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        at: DatabaseSelector,
        /// Only those of this consumer; `hapax-outbox` for those of the outbox
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// Only those that were parked for this reason
        #[arg(long, value_enum)]
        parked_as: Option<ReasonArg>,
        /// Continue after this letter
        #[arg(long, value_name = "LETTER")]
        after: Option<String>,
        /// Largest number of letters
        #[arg(long, value_name = "N", default_value_t = 100,
            value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Show one dead letter with its headers and payload
    Show {
        #[command(flatten)]
        at: DatabaseSelector,
        /// The id of the letter, or the first 8 digits or more
        #[arg(value_name = "LETTER")]
        letter: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    Redrive(Box<RedriveArgs>),
    /// Drop dead letters: their messages are not handled
    Drop {
        #[command(flatten)]
        at: DatabaseSelector,
        /// The ids of the letters, or the first 8 digits or more
        #[arg(value_name = "LETTER", required = true)]
        letters: Vec<String>,
        /// The reason, stored with the decision
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

/// Handle the messages of dead letters again
///
/// The message is published again with its id, which its consumer has forgotten before, unless it has
/// handled it meanwhile. The letter is removed once the consumer has handled the message. A letter in
/// conflict is rejected, because its id belongs to another message. Letters with one order key are redriven
/// one after the other, oldest first, while later messages with that key are parked behind them.
/// Letters of the outbox return to their place in it, and need no --to. The command may be
/// interrupted and run again.
#[derive(Debug, Args)]
pub(super) struct RedriveArgs {
    #[command(flatten)]
    pub(super) at: DatabaseSelector,
    /// The ids of the letters, or the first 8 digits or more
    #[arg(value_name = "LETTER", required_unless_present = "consumer")]
    pub(super) letters: Vec<String>,
    /// All letters of this consumer
    #[arg(long, value_name = "NAME", conflicts_with = "letters")]
    pub(super) consumer: Option<String>,
    /// With --consumer: only those that were parked for this reason
    #[arg(long, value_enum, requires = "consumer")]
    pub(super) parked_as: Option<ReasonArg>,
    /// The broker: nats://HOST
    #[arg(long, value_name = "URL", env = "HAPAX_BROKER", hide_env_values = true)]
    pub(super) to: Option<HiddenUrl>,
    /// The store of a consumer in the mode of claims, whose records are released. Not for the direct
    /// mode
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    pub(super) store: Option<UrlText<StoreUrl>>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, value_name = "PATH", env = "HAPAX_SECRET_FILE")]
    pub(super) secret_file: Option<PathBuf>,
    /// Time for which the consumer may take to handle each message with an order key
    #[arg(long, value_name = "DUR", default_value = "60s", value_parser = duration)]
    pub(super) wait: std::time::Duration,
    /// The reason, stored with the decision
    #[arg(long, value_name = "TEXT")]
    pub(super) reason: String,
}

/// Option that names the database.
#[derive(Debug, Args)]
pub(crate) struct DatabaseSelector {
    /// The database with the dead letters: postgres://USER@HOST/DB
    #[arg(long, value_name = "URL", env = "HAPAX_DATABASE", hide_env_values = true)]
    pub(crate) database: HiddenUrl,
}

/// A URL that is never shown, because it may contain a password.
#[derive(Clone)]
pub(crate) struct HiddenUrl(pub(crate) String);

impl FromStr for HiddenUrl {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for HiddenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HiddenUrl(..)")
    }
}

/// Reasons of dead letters.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ReasonArg {
    NoId,
    Conflict,
    TooOld,
    Rejected,
    Attempts,
    Unknown,
    Behind,
    Gap,
    Unpublishable,
}

impl From<ReasonArg> for DeadLetterReason {
    fn from(reason: ReasonArg) -> Self {
        match reason {
            ReasonArg::NoId => Self::NoId,
            ReasonArg::Conflict => Self::Conflict,
            ReasonArg::TooOld => Self::TooOld,
            ReasonArg::Rejected => Self::Rejected,
            ReasonArg::Attempts => Self::Attempts,
            ReasonArg::Unknown => Self::Unknown,
            ReasonArg::Behind => Self::Behind,
            ReasonArg::Gap => Self::Gap,
            ReasonArg::Unpublishable => Self::Unpublishable,
        }
    }
}

fn duration(text: &str) -> Result<std::time::Duration, String> {
    hapax_gateway::parse_duration(text).map_err(|error| error.to_string())
}

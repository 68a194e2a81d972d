//! The flags of `hapax messages`.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use hapax_core::Namespace;
use hapax_gateway::{StoreUrl, UrlText};
use hapax_messages::DeadLetterReason;
use hapax_postgres_messages::SchemaName;

use super::broker::BrokerArgs;
use super::properties::PropertyArgs;
use crate::sql::RoleArgs;

/// List, show, redrive and drop the dead letters of consumers and outboxes in PostgreSQL
#[derive(Debug, Args)]
pub(crate) struct MessagesArgs {
    #[command(subcommand)]
    pub(super) command: MessagesCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum MessagesCommand {
    /// Print the SQL of the messages: the earlier name of `hapax sql`
    #[command(hide = true)]
    Migrations {
        #[command(flatten)]
        roles: RoleArgs,
    },
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        at: DatabaseSelector,
        /// Only those of this consumer: NAME, or namespace:NAMESPACE/NAME if it has a namespace;
        /// `hapax-outbox` for those of the outbox
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// Only those that were parked for this reason
        #[arg(long, value_enum)]
        parked_as: Option<ReasonArg>,
        /// Continue after this dead letter
        #[arg(long, value_name = "DEAD_LETTER")]
        after: Option<String>,
        /// Largest number of dead letters
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
        /// Id of the dead letter, or at least its first 8 digits
        #[arg(value_name = "DEAD_LETTER")]
        dead_letter: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    Redrive(Box<RedriveArgs>),
    /// Drop dead letters: their messages are not handled
    Drop {
        #[command(flatten)]
        at: DatabaseSelector,
        /// Ids of the dead letters, or at least the first 8 digits of each
        #[arg(value_name = "DEAD_LETTER", required = true)]
        dead_letters: Vec<String>,
        /// The reason, stored with the decision
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

/// Handle the messages of dead letters again
///
/// Removes the id of each parked message from the inbox of its consumer, and publishes the message
/// again under that id. An id of a message that was handled meanwhile stays: the message is a
/// duplicate then. The consumer removes the dead letter once it has handled the message. Dead letters
/// with one order key are redriven one after the other, oldest first. One that is behind an older one
/// which is not selected is not redriven, and the command fails. Those that are not selected stay, and
/// their order keys stay blocked. Messages with a selected order key that arrive meanwhile are parked;
/// they are redriven too, unless they are behind one that stays. After a message that fails again, the later ones of
/// its order key are left out, and the command goes on with the others: its exit code is 1, and the last line has the
/// numbers. So it does after a dead letter that cannot be redriven: one with the reason mismatch (publish
/// that message under an id of its own, and drop the dead letter), one with the reason no-id without --new-id, and one
/// whose former handler may still execute, until the time that is printed: a service may work on after its caller has
/// gone. Dead letters of the outbox are moved back to it, and need no --to. The command
/// may be interrupted and run again.
#[derive(Debug, Args)]
pub(super) struct RedriveArgs {
    #[command(flatten)]
    pub(super) at: DatabaseSelector,
    /// Ids of the dead letters, or at least the first 8 digits of each
    #[arg(value_name = "DEAD_LETTER", required_unless_present = "consumer")]
    pub(super) dead_letters: Vec<String>,
    /// Redrive all dead letters of this consumer
    #[arg(long, value_name = "NAME", conflicts_with = "dead_letters")]
    pub(super) consumer: Option<String>,
    /// With --consumer: only those that were parked for this reason
    #[arg(long, value_enum, requires = "consumer")]
    pub(super) parked_as: Option<ReasonArg>,
    /// The broker: nats://HOST, amqp://HOST/VHOST, or kafka://HOST[:PORT],… if this program was built with
    /// the feature kafka
    #[arg(long, value_name = "URL", env = "HAPAX_BROKER", hide_env_values = true)]
    pub(super) to: Option<HiddenUrl>,
    #[command(flatten)]
    pub(super) broker: BrokerArgs,
    #[command(flatten)]
    pub(super) properties: PropertyArgs,
    /// Store of the inbox of a consumer in claim mode, in which the records of the messages are
    /// released: that of its process. Before you name a file: store, stop the consumer. Omit it for a consumer in batch
    /// mode; for another one the command then ends with exit code 64
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    pub(super) store: Option<UrlText<StoreUrl>>,
    /// With --consumer: its namespace, as its process has it. Of a dead letter that is named by its id, the stored
    /// name gives it [default: the empty one]
    #[arg(long, value_name = "NAME", env = "HAPAX_NAMESPACE")]
    pub(super) namespace: Option<Namespace>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, value_name = "PATH", env = "HAPAX_SECRET_FILE")]
    pub(super) secret_file: Option<PathBuf>,
    /// Redrive a dead letter without an id under a new one, which is made of the dead letter: it is the
    /// same each time. Other consumers of the subject handle the message under this id too. A producer
    /// that published the message twice has two such messages
    #[arg(long)]
    pub(super) new_id: bool,
    /// Time that the consumer may take to handle a message with an order key, before the next is
    /// redriven
    #[arg(long, value_name = "DUR", default_value = "60s", value_parser = crate::duration)]
    pub(super) wait: std::time::Duration,
    /// With --store: even if a former handler of the message, or a request that it sent, may still execute. Without it:
    /// although --database does not have the ids of the messages, for a consumer in batch mode whose retention has ended
    #[arg(long)]
    pub(super) force: bool,
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
    #[command(flatten)]
    pub(crate) schema: SchemaSelector,
}

/// Option that names the schema of the messages.
#[derive(Clone, Debug, Args)]
pub(crate) struct SchemaSelector {
    /// The schema of the tables of messages [default: the only one of the database that has them]
    #[arg(long, value_name = "NAME")]
    pub(crate) schema: Option<SchemaName>,
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
    /// The message has no valid id
    NoId,
    /// Another payload was handled under the id of the message
    Mismatch,
    /// The message is older than the retention of ids
    TooOld,
    /// The handler rejected the message
    Rejected,
    /// The attempts are exhausted
    Attempts,
    /// The message may have been handled
    Unknown,
    /// An earlier message with the same order key is a dead letter
    Blocked,
    /// A number before it in its sequence is missing
    Gap,
    /// The sink of a relay rejected the message
    Unpublishable,
    /// The client of the broker cannot read the message
    Unreadable,
}

impl From<ReasonArg> for DeadLetterReason {
    fn from(reason: ReasonArg) -> Self {
        match reason {
            ReasonArg::NoId => Self::NoId,
            ReasonArg::Mismatch => Self::Mismatch,
            ReasonArg::TooOld => Self::TooOld,
            ReasonArg::Rejected => Self::Rejected,
            ReasonArg::Attempts => Self::Attempts,
            ReasonArg::Unknown => Self::Unknown,
            ReasonArg::Blocked => Self::Blocked,
            ReasonArg::Gap => Self::Gap,
            ReasonArg::Unpublishable => Self::Unpublishable,
            ReasonArg::Unreadable => Self::Unreadable,
        }
    }
}

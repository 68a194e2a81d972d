//! The flags of `hapax saga`.

use clap::{Args, Subcommand, ValueEnum};
use hapax_operators::SagaStateView;

use crate::keys::{StoreSelector, VerdictArg};

/// List and show unfinished sagas, and decide about stuck ones
///
/// While a process has the file of a store open, the commands use the operators' API of that process,
/// whose address the lock file names. Decisions go into the log of the saga and into the audit file.
#[derive(Debug, Args)]
pub(crate) struct SagaArgs {
    #[command(subcommand)]
    pub(super) command: SagaCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum SagaCommand {
    /// List unfinished sagas
    List {
        #[command(flatten)]
        at: StoreSelector,
        /// Only sagas in this state; overdue: due for more than 10 minutes, since no process has the
        /// definition
        #[arg(long, value_enum)]
        state: Option<SagaStateArg>,
        /// Only sagas of this definition: a name, or a name and a version, like place-order:2
        #[arg(long, value_name = "NAME", value_parser = definition)]
        definition: Option<String>,
        /// Continue after this id
        #[arg(long, value_name = "ID")]
        after: Option<String>,
        /// Largest number of sagas
        #[arg(long, value_name = "N", default_value_t = 100,
            value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Show one saga: state, steps with tries and results, decisions
    Show {
        #[command(flatten)]
        at: StoreSelector,
        /// The id of the saga
        #[arg(value_name = "ID")]
        id: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Try the stuck step or undo again
    Retry {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Resolve a stuck step: it happened, with a result, or it did not and is tried again
    Resolve {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Whether the step happened
        #[arg(long, value_enum)]
        outcome: VerdictArg,
        /// Result of a step that happened: JSON, @PATH or @- for standard input; null for a step that
        /// returns nothing
        #[arg(long, value_name = "JSON")]
        result: Option<String>,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Skip the stuck undo of a step, whose effect stays
    Skip {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Let a stuck saga fail: its steps are undone
    Abort {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Count the unfinished sagas of each definition and version
    ///
    /// A version without unfinished sagas is not listed: its code may be removed.
    Definitions {
        #[command(flatten)]
        at: StoreSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
}

/// Options of a decision.
#[derive(Debug, Args)]
pub(super) struct SagaDecisionArgs {
    /// The id of the saga
    #[arg(value_name = "ID")]
    pub(super) id: String,
    /// Only if the saga has this write id, as `show` prints it [default: its present one]
    #[arg(long, value_name = "ID")]
    pub(super) write_id: Option<String>,
    /// The reason, stored in the log of the saga and in the audit file
    #[arg(long, value_name = "TEXT")]
    pub(super) reason: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum SagaStateArg {
    Stuck,
    Parked,
    Running,
    Overdue,
}

impl From<SagaStateArg> for SagaStateView {
    fn from(state: SagaStateArg) -> Self {
        match state {
            SagaStateArg::Stuck => Self::Stuck,
            SagaStateArg::Parked => Self::Parked,
            SagaStateArg::Running => Self::Running,
            SagaStateArg::Overdue => Self::Overdue,
        }
    }
}

/// Parses a name of a definition, perhaps with a version.
fn definition(text: &str) -> Result<String, &'static str> {
    let fits = |char: char| char.is_ascii_alphanumeric() || "-_.:".contains(char);
    match !text.is_empty() && text.chars().all(fits) {
        true => Ok(text.to_owned()),
        false => Err("expected a name of letters, digits, '-', '_' and '.', or NAME:VERSION"),
    }
}

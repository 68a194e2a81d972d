//! The flags of `hapax saga`.

use clap::{Args, Subcommand, ValueEnum};
use hapax_core::Key;
use hapax_operators::{SagaId, SagaStateView};

use crate::exit::CliError;
use crate::keys::{NAMESPACE_OF_KEY, ScopeText, StoreSelector, VerdictArg};

/// List and show the sagas of a store, and decide about stuck ones
///
/// While a process has the file of a store open, the commands use the operators' API of that process,
/// whose address the lock file names, or --admin. A service mounts it with the crate hapax-operators.
/// Decisions go into the log of the saga and into the audit file.
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
        /// Only sagas in this state; overdue: due for more than 10 minutes, and no process runs it
        /// (none has the definition, or all are down or at their limit)
        #[arg(long, value_enum)]
        state: Option<SagaStateArg>,
        /// Only sagas of this definition: a name, or a name and a version, like place-order:2
        #[arg(long, value_name = "NAME", value_parser = definition)]
        definition: Option<String>,
        /// Begin after this id: the one that the last line of the previous page names
        #[arg(long, value_name = "ID")]
        after: Option<String>,
        /// Largest number of sagas, 1 to 1000
        #[arg(long, value_name = "N", default_value_t = 100,
            value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Show one saga: state, steps with keys, tries and results, decisions
    Show {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: SagaSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Give a stuck step, undo or flow new tries
    ///
    /// For `exhausted` after the called system is repaired, `crashed` and `panicked` after the code is
    /// corrected, `diverged`, `unreadable` and `no-such-step` after it is restored. A step that is stuck as
    /// `unknown` or `key-expired` is not called: resolve it.
    Retry {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: SagaSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// State whether a stuck step happened; the saga continues
    ///
    /// For `unknown`, `key-expired` and `too-large`, after a look into the records of the called system. With
    /// did-not-happen the step is called again under its key: it is rejected while an earlier call may still take
    /// effect, see `show`, since a system may work on after its caller has gone.
    Resolve {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: SagaSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Your verdict: whether the step happened
        #[arg(long, value_enum)]
        outcome: VerdictArg,
        /// Result of a step that happened: JSON, @PATH or @- for standard input; null for a step that
        /// returns nothing
        #[arg(long, value_name = "JSON")]
        result: Option<String>,
        /// With did-not-happen: even if a call may still take effect
        #[arg(long)]
        force: bool,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Skip a stuck undo: the effect of its step stays, and the compensation continues
    ///
    /// After the effect was undone by hand, or if it may stay.
    Skip {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: SagaSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Compensate a stuck saga: undo the steps that happened or may have happened, in reverse order
    ///
    /// Only before the compensation has begun. Its caller then gets the end `cancelled`. A saga that runs or
    /// waits can only be cancelled by its service or its caller. One that is overdue can be aborted: if it has
    /// run nothing, it ends at once, without a process that has its definition. Of a start that is stuck as
    /// `key-reused` only the audit file keeps the decision.
    Abort {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: SagaSelector,
        #[command(flatten)]
        sure: SagaDecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Count the unfinished sagas of each definition and version
    ///
    /// A version without unfinished sagas is not listed: its code may be removed. `overdue`: no process with
    /// the version runs its sagas.
    Definitions {
        #[command(flatten)]
        at: StoreSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
}

/// Options that name a saga. They come after those that name the store.
#[derive(Debug, Args)]
#[command(mut_arg("namespace", |arg| arg.help(NAMESPACE_OF_KEY)))]
pub(super) struct SagaSelector {
    /// The id of the saga, as `list` prints it; of an unfinished one the first 8 digits suffice
    #[arg(value_name = "ID", required_unless_present = "key", conflicts_with = "key")]
    id: Option<String>,
    /// The key under which it was started, instead of an id
    #[arg(long, value_name = "KEY", requires = "definition")]
    key: Option<String>,
    /// The name of its definition, without a version
    #[arg(long, value_name = "NAME", requires = "key", value_parser = definition)]
    definition: Option<String>,
    /// The caller of the key: the value of Authorization, or 'NAME: VALUE' for each header of the
    /// scope, or for each part of a scope in code, whose names are then in lower case
    #[arg(long, value_name = "VALUE", requires = "key")]
    scope: Vec<String>,
}

/// The name of a saga.
#[derive(Debug)]
pub(super) enum SagaName {
    Id(SagaId),
    /// The first digits of an id.
    Prefix(String),
    Key {
        definition: String,
        key: Key,
        scope: ScopeText,
    },
}

impl SagaSelector {
    pub(super) fn parse(&self) -> Result<SagaName, CliError> {
        if let Some(key) = &self.key {
            let key = Key::new(key).map_err(CliError::usage)?;
            let definition = self.definition.clone().unwrap_or_default();
            return Ok(SagaName::Key { definition, key, scope: ScopeText::parse(&self.scope)? });
        }
        let text = self.id.as_deref().unwrap_or_default();
        match SagaId::parse(text) {
            Some(id) => Ok(SagaName::Id(id)),
            None if SagaId::is_prefix(text) => Ok(SagaName::Prefix(text.to_owned())),
            None => Err(CliError::usage(format!(
                "expected an id of 64 hexadecimal digits or its first 8 to 63, of a rejected start with a \
                 hyphen and 32 more, found {text:?}: copy it from `list`"
            ))),
        }
    }
}

/// Options of a decision.
#[derive(Debug, Args)]
pub(super) struct SagaDecisionArgs {
    /// Decide only if the saga still has this write id, as `show` prints it [default: its present one]
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

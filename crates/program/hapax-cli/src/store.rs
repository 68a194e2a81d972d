//! `hapax store`.

mod quarantine;

use std::process::ExitCode;

use clap::builder::BoolishValueParser;
use clap::{Args, Subcommand};

use crate::exit::CliError;
use crate::keys::{StoreSelector, confirm};
use crate::output::print;

/// Commands about the whole store
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Accept a store that was emptied or replaced: new keys execute again under block and
    /// reconcile
    ///
    /// Operations of the previous store may execute a second time. No store is created. A file that a gateway has open
    /// is confirmed through the admin address of that gateway. On a server every gateway accepts
    /// the store with its next request.
    Confirm {
        #[command(flatten)]
        at: StoreSelector,
        /// The reason, stored in the audit file
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    Quarantine(quarantine::QuarantineArgs),
}

/// Whether a program creates a store. The gateway has a setting of the same name.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RequiredStoreArg {
    /// Reject a start without a store that was used before, rather than create one: a new store has no
    /// records. Leave it out for the first start
    #[arg(long, env = "HAPAX_STORE_MUST_EXIST", value_parser = BoolishValueParser::new())]
    pub(crate) store_must_exist: bool,
}

/// Runs `hapax store`.
pub(crate) async fn run(args: StoreArgs) -> Result<ExitCode, CliError> {
    crate::gateway::environment::warn_of_unknown();
    let (at, reason, json) = match args.command {
        StoreCommand::Confirm { at, reason, json } => (at, reason, json),
        StoreCommand::Quarantine(args) => return quarantine::run(args).await,
    };
    let replaced = confirm(&at, &reason).await?;
    let text = match (json, replaced) {
        (true, _) => format!("{{\n  \"replaced\": {replaced}\n}}\n"),
        (false, true) => {
            "confirmed: operations of the earlier records may execute again\n".to_owned()
        }
        (false, false) => {
            "confirmed; the store had not been found emptied or replaced\n".to_owned()
        }
    };
    print(&text);
    Ok(ExitCode::SUCCESS)
}

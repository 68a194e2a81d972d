//! `hapax doctor`: checks of a store.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use hapax_core::diagnose::Severity;
use hapax_gateway::{CacheUrl, Gateway, StoreFinding, StoreOpener, StoreUrl, UrlText};

use crate::exit::{CliError, of};
use crate::gateway::StoreSettings;
use crate::keys;
use crate::output::{json, print};

/// Look for settings that would silently break a store's promise
///
/// Prints one line for each finding, with its fix. Changes nothing in the store. With a gateway's
/// file, each --reconcile-url in it is probed too.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 if nothing breaks idempotency, 1 if a finding does, 64 for arguments or a file that
cannot be read, 69 if the store cannot be reached.")]
pub(crate) struct DoctorArgs {
    /// The gateway's file, for options that are not given here
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The store: file:PATH, redis://HOST, rediss://HOST or postgres://USER@HOST/DB [default:
    /// file:./hapax.db]
    #[arg(long, env = "HAPAX_STORE", value_name = "URL", hide_env_values = true)]
    store: Option<UrlText<StoreUrl>>,
    /// The cache in front of the store
    #[arg(long, env = "HAPAX_CACHE", value_name = "URL", hide_env_values = true)]
    cache: Option<UrlText<CacheUrl>>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, env = "HAPAX_SECRET_FILE", value_name = "PATH")]
    secret_file: Option<PathBuf>,
    /// The file of the gateway's admin token [default: as for the gateway]
    #[arg(long, env = "HAPAX_ADMIN_TOKEN_FILE", value_name = "PATH")]
    admin_token_file: Option<PathBuf>,
    /// Write the intact records of a damaged file to a new one, and report the lost ones; nothing
    /// else is checked
    #[arg(long, num_args = 2, value_names = ["OLD", "NEW"])]
    salvage: Option<Vec<PathBuf>>,
    /// Print one JSON array, for programs; an error is a JSON object on standard error, with a code
    #[arg(long)]
    json: bool,
}

/// Runs `hapax doctor`.
pub(crate) async fn run(args: DoctorArgs) -> Result<ExitCode, CliError> {
    crate::gateway::environment::warn_of_unknown();
    if let Some([old, new]) = args.salvage.as_deref() {
        return salvage(old, new, args.json);
    }
    let store = args.store.map(UrlText::read).transpose().map_err(of("--store"))?;
    let cache = args.cache.map(UrlText::read).transpose().map_err(of("--cache"))?;
    let file = StoreSettings::complete_from_file(args.config.as_deref(), store.is_some())?;
    let store = store.or(file.store).unwrap_or_else(|| StoreUrl::File("./hapax.db".into()));
    let opening = StoreOpener {
        cache: cache.or(file.cache),
        secret_file: args.secret_file.or(file.secret_file),
        token_file: args.admin_token_file.or(file.admin_token_file),
        make: false,
        must_exist: file.must_exist,
        ..StoreOpener::new(store)
    };
    let mut findings = opening.diagnose().await.map_err(CliError::unavailable)?;
    if let Some(admin) = findings.iter().find_map(|finding| finding.gateway) {
        match keys::is_replaced(admin, &opening.store, opening.token_file.clone()).await {
            Ok(replaced) => findings.extend(replaced.then(StoreFinding::unconfirmed)),
            Err(error) => findings.push(StoreFinding::unchecked(error)),
        }
    }
    if let Some(path) = &args.config {
        // If the store is given by a flag, `complete_from_file` has already warned of an invalid file.
        if let Ok(config) = crate::gateway::to_probe(path) {
            findings.extend(Gateway::probe(&config).await.map_err(CliError::usage)?);
        }
    }
    let text = if args.json {
        json(&findings)?
    } else {
        findings.iter().map(|finding| format!("{finding}\n")).collect()
    };
    print(&text);
    let broken = findings.iter().any(|finding| finding.severity == Severity::Broken);
    Ok(if broken { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// Reports the records that were read of a damaged file, the number that it should have, and the
/// difference; and the lost entries of its schedule.
fn salvage(old: &Path, new: &Path, json: bool) -> Result<ExitCode, CliError> {
    let done = hapax_file::salvage(old, new).map_err(CliError::unavailable)?;
    let (read, expected, lost, damaged) = (done.read, done.expected, done.lost(), done.damaged);
    let lost_entries = done.lost_entries();
    let text = if json {
        let report = serde_json::json!({
            "read": read, "expected": expected, "lost": lost, "lost_entries": lost_entries,
            "damaged_blocks": damaged,
        });
        format!("{report}\n")
    } else {
        let (old, new) = (old.display(), new.display());
        let mut then = String::new();
        if lost > 0 {
            then += "The keys of lost records look unused in the new file: requests with them \
                     execute again. Compare it with the records of your service before you use it.\n";
        }
        if lost_entries > 0 {
            let expected = done.expected_entries;
            then += &format!(
                "{lost_entries} of {expected} entries of the schedule are lost: their operations \
                 are not resumed. Start them again under the same keys.\n"
            );
        }
        format!(
            "{read} of {expected} records read from {old} and written to {new}, {lost} lost, \
             {damaged} damaged blocks.\n{then}Copy the secret as well: cp {old}.secret \
             {new}.secret\n"
        )
    };
    print(&text);
    Ok(if lost + lost_entries > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

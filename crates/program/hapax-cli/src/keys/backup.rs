//! `hapax backup` and `hapax restore`: copies of a file of records.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use hapax_file::{FileStore, OpenError, SecretSource};
use hapax_gateway::StoreUrl;
use http::Method;
use serde_json::json;

use super::args::StoreSelector;
use super::gateway::Remote;
use crate::exit::CliError;
use crate::output::print;
use crate::secrets;

/// Time within which a gateway must have copied a whole store.
const TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Copy the records of a `file:` store to a new file, while its gateway runs or is stopped
///
/// A running gateway writes the copy itself, as of one moment, and continues meanwhile. The copy
/// has no secret: store PATH.secret of the store separately, without which no copy can be used. Do
/// not use `cp` while the gateway runs: the file that it makes does not open.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// The new file, on the machine of the gateway; its folder must exist
    #[arg(value_name = "PATH")]
    to: PathBuf,
    #[command(flatten)]
    at: StoreSelector,
}

/// Restore a `file:` store from a backup; keys that were used after the backup look unused
///
/// Requests with those keys execute again when they are retried. An operation that was in flight
/// when the backup was made may have happened since, and becomes unknown. The backup is only read.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The backup
    #[arg(value_name = "BACKUP")]
    from: PathBuf,
    /// The file of the new store
    #[arg(value_name = "TO")]
    to: PathBuf,
    /// Accept that operations after the backup are lost, and may execute again
    #[arg(long)]
    accept_forgetting: bool,
    /// The file of the store's secrets [default: TO.secret]
    #[arg(long, env = "HAPAX_SECRET_FILE", value_name = "PATH")]
    secret_file: Option<PathBuf>,
}

#[derive(serde::Deserialize)]
struct Written {
    records: u64,
}

/// Runs `hapax backup`.
pub(crate) async fn backup(args: BackupArgs) -> Result<ExitCode, CliError> {
    crate::gateway::environment::warn_of_unknown();
    let location = args.at.location()?;
    let to = std::path::absolute(&args.to)
        .map_err(|error| CliError::usage(format!("{}: {error}", args.to.display())))?;
    // A file that was removed while a gateway has it open exists until that gateway ends.
    let removed = match &location.store {
        StoreUrl::File(path) if !path.exists() => {
            FileStore::lock_owner(path).ok().flatten().and_then(|owner| owner.admin)
        }
        _ => None,
    };
    let records = match (&location.store, location.admin.or(removed)) {
        (_, Some(admin)) => through(&Remote::new(admin, location.token()?), &to).await?,
        (StoreUrl::File(path), None) => match hapax_file::backup_closed(path, &to) {
            Ok(records) => records,
            Err(OpenError::InUse { admin: Some(admin), .. }) => {
                through(&Remote::new(admin, location.token()?), &to).await?
            }
            Err(error @ OpenError::InUse { admin: None, .. }) => {
                return Err(CliError::unavailable(format!(
                    "{error}, which has no admin address: stop it, or start it with --admin"
                )));
            }
            Err(error) => return Err(misnamed_or_unavailable(&error)),
        },
        (StoreUrl::Memory, None) => {
            return Err(CliError::usage(
                "a `memory:` store has no file, and ends with its gateway",
            ));
        }
        (_, None) => {
            return Err(CliError::usage(
                "`hapax backup` copies `file:` stores; back up this one with its server's tools",
            ));
        }
    };
    print(&format!(
        "{records} records written to {}. The secret is not in it: keep a copy of it elsewhere.\n",
        to.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Makes a gateway write the copy. Returns the number of its records.
async fn through(gateway: &Remote, to: &Path) -> Result<u64, CliError> {
    let Some(to) = to.to_str() else {
        let reason = "is not UTF-8, and cannot be sent to the gateway: choose another path";
        return Err(CliError::usage(format!("{} {reason}", to.display())));
    };
    let body = json!({ "path": to });
    let written = gateway.request_within(TIMEOUT, Method::POST, "/api/backup", Some(body)).await;
    let Written { records } = written?;
    Ok(records)
}

/// Restores a store from a backup. Blocks on the disk.
pub(crate) fn restore(args: &RestoreArgs) -> Result<ExitCode, CliError> {
    crate::gateway::environment::warn_of_unknown();
    let RestoreArgs { from, to, accept_forgetting, secret_file } = args;
    if !accept_forgetting {
        return Err(CliError::usage(
            "a restore loses the records since the backup: their keys look unused, and retries \
             execute again. If that is acceptable, pass --accept-forgetting",
        ));
    }
    let secret = secret_file.clone().unwrap_or_else(|| {
        let mut beside = to.clone().into_os_string();
        beside.push(".secret");
        beside.into()
    });
    secrets::warn_if_open(&secret);
    let restored = hapax_file::restore(from, to, &SecretSource::File(secret.clone()));
    let restored = restored.map_err(|error| match error {
        OpenError::OtherSecret => CliError::usage(format!(
            "{} is not the secret under which {} was written: pass that one with --secret-file",
            secret.display(),
            from.display()
        )),
        OpenError::SecretMissing { .. } => CliError::usage(format!(
            "there is no secret at {}: put the secret of the store there, or pass its path \
             with --secret-file",
            secret.display()
        )),
        error @ (OpenError::SecretUnreadable { .. } | OpenError::Unnamed { .. }) => {
            CliError::usage(error)
        }
        error => misnamed_or_unavailable(&error),
    })?;
    let (to, secret) = (to.display(), secret.display());
    print(&format!(
        "{} records restored to {to}; {} of them were in flight and are unknown now.\n\
         The records written after the backup are lost: requests with their keys execute again.\n\
         Before clients reach it, reject these keys; NAME is the namespace of the service, '' by default:\n  \
         hapax store quarantine --namespace NAME --any-namespace --for 6h --reason TEXT --store file:{to} \
         --secret-file {secret}\n\
         Then start the gateway with --store file:{to} --secret-file {secret}\n",
        restored.records, restored.unknown
    ));
    Ok(ExitCode::SUCCESS)
}

/// Returns a usage error for a path that is missing, exists already or is a directory.
fn misnamed_or_unavailable(error: &OpenError) -> CliError {
    use ErrorKind::{AlreadyExists, IsADirectory, NotFound};
    match error {
        OpenError::Io { source, .. }
            if matches!(source.kind(), AlreadyExists | IsADirectory | NotFound) =>
        {
            CliError::usage(error)
        }
        _ => CliError::unavailable(error),
    }
}

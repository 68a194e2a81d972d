//! The journal of `hapax call`: a file, or a store on a server.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax_client::{Client, ClientBuilder, Journal, JournalError};
use hapax_core::Namespace;
use hapax_gateway::{
    OpenStore, StoreFinding, StoreOpenError, StoreOpener, StoreUrl, parse_duration,
};

use super::{namespace, with_flags};
use crate::exit::CliError;
use crate::keys::TIMEOUT;
use crate::secrets;

/// The flag of the secret of a journal on a server.
const SECRET_FILE: &str = "--secret-file (HAPAX_JOURNAL_SECRET_FILE)";

/// The journal.
#[derive(Debug, Args)]
pub(super) struct JournalArgs {
    /// The journal: a file; or postgres://USER@HOST/DB, for any number of calls at the same time, or redis://HOST or
    /// rediss://HOST, if each server honors keys. The first call creates the journal, of a file its secret in PATH.secret
    /// too, and prints a line. Another file has another secret, and under it the same name has another key; another server
    /// knows no name: use the same journal in each run [default: hapax/calls.db in $XDG_STATE_HOME, else in ~/.local/state]
    #[arg(long, value_name = "PATH|URL", env = "HAPAX_JOURNAL", hide_env_values = true)]
    journal: Option<HiddenPlace>,
    /// The namespace of a journal on a server: the name of this program among those that use the server. It is a part
    /// of each key
    #[arg(long, value_name = "NAME", env = "HAPAX_JOURNAL_NAMESPACE")]
    namespace: Option<Namespace>,
    /// The file of the secret of a journal on a server: 64 hexadecimal digits, the same for each call. It makes the
    /// keys: with another one every name has another key
    #[arg(long, value_name = "PATH", env = "HAPAX_JOURNAL_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    /// Time to wait until another process has closed the file of the journal; then exit code 69
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    lock_wait: Duration,
}

/// The path of a file, or a URL. Its `Debug` form shows neither, since a URL may contain a password.
#[derive(Clone)]
struct HiddenPlace(PathBuf);

impl From<OsString> for HiddenPlace {
    fn from(text: OsString) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for HiddenPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HiddenPlace(..)")
    }
}

/// The lease of an operation.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct LeaseArg {
    /// In a journal on a server: the time after which another call continues an operation whose process was killed.
    /// A call whose journal is away for as long loses its operation to another call, and its response. At least 100ms
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = lease)]
    lease: Duration,
}

impl LeaseArg {
    /// Sets the lease of a client, if its journal is on a server.
    pub(super) fn of(self, client: ClientBuilder, journal: &JournalArgs) -> ClientBuilder {
        match journal.url() {
            Some(_) => client.lease(self.lease),
            None => client,
        }
    }
}

/// The place of a journal.
enum JournalPlace {
    File(PathBuf),
    Server(Box<StoreOpener>, Namespace),
}

impl JournalArgs {
    /// Opens the journal. A command that sends nothing creates none.
    pub(super) async fn existing(&self) -> Result<ClientBuilder, CliError> {
        match self.place()? {
            JournalPlace::File(path) => {
                warn_of_secret(&path);
                let journal = Journal::existing_file_within(path, self.lock_wait).await;
                Ok(Client::open(journal.map_err(|error| unopened(&error))?))
            }
            JournalPlace::Server(opener, namespace) => {
                let opener = StoreOpener { must_exist: true, ..*opener };
                let opened = opener.open().await;
                client(accepted(&opener, opened).await?, &namespace)
            }
        }
    }

    /// Opens the journal for calls, or creates it, unless it must exist, and says so.
    pub(super) async fn for_calls(&self, must_exist: bool) -> Result<ClientBuilder, CliError> {
        let path = match self.place()? {
            JournalPlace::File(_) if must_exist => return self.existing().await,
            JournalPlace::File(path) => path,
            JournalPlace::Server(opener, namespace) => {
                // Before anything is entered into an empty store: its journal needs a secret that names records.
                if opener.is_unnamed() {
                    return Err(CliError::usage(JournalError::NoSecret));
                }
                let opened = open_server(&opener, must_exist).await?;
                let (store, place) = (Arc::clone(&opened.store), opener.store.to_string());
                namespace::note(store, &namespace, must_exist, &place).await?;
                return client(opened, &namespace);
            }
        };
        self.create_folder(&path)?;
        warn_of_secret(&path);
        let journal = Journal::file_within(&path, self.lock_wait).await;
        let journal = journal.map_err(|error| unopened(&error))?;
        if journal.is_new() {
            let path = std::path::absolute(&path).unwrap_or(path);
            eprintln!(
                "hapax: a new journal was created, {}, with a new secret: a name that was sent from another \
                 journal is sent again, under another key; --journal-must-exist rejects this",
                path.display()
            );
        }
        Ok(Client::open(journal))
    }

    /// Rejects a journal in Redis for servers without keys: Redis may lose its last writes, and the next call of a name
    /// that it has lost sends it again.
    pub(super) fn check(&self, has_keys: bool) -> Result<(), CliError> {
        match self.place()? {
            JournalPlace::Server(opener, _)
                if !has_keys
                    && matches!(&opener.store, StoreUrl::Server(url) if url.is_redis()) =>
            {
                Err(CliError::usage(
                    "--server: expected a server that honors keys, for a journal in Redis, found without-keys: Redis may \
                     lose its last writes, and the request would be sent again; name the profile of the server, or use a \
                     journal in a file or in PostgreSQL",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the place of the journal, for texts.
    pub(super) fn shown(&self) -> Result<String, CliError> {
        Ok(match self.place()? {
            JournalPlace::File(path) => path.display().to_string(),
            JournalPlace::Server(opener, _) => opener.store.to_string(),
        })
    }

    /// Returns the URL of a journal on a server.
    fn url(&self) -> Option<&str> {
        self.journal.as_ref()?.0.to_str().filter(|text| text.contains("://"))
    }

    /// Rejects a URL that is not UTF-8: as the path of a file, errors would show its password.
    fn check_text(&self) -> Result<(), CliError> {
        let Some(HiddenPlace(place)) = &self.journal else { return Ok(()) };
        let bytes = place.as_os_str().as_encoded_bytes();
        if place.to_str().is_some() || !bytes.windows(3).any(|three| three == b"://") {
            return Ok(());
        }
        Err(CliError::usage(
            "--journal (HAPAX_JOURNAL): expected a URL in UTF-8, found one with other bytes: percent-encode them",
        ))
    }

    fn place(&self) -> Result<JournalPlace, CliError> {
        self.check_text()?;
        let Some(url) = self.url() else {
            for (flag, is_set) in [
                ("--namespace (HAPAX_JOURNAL_NAMESPACE)", self.namespace.is_some()),
                (SECRET_FILE, self.secret_file.is_some()),
            ] {
                if is_set {
                    return Err(CliError::usage(format!(
                        "{flag}: expected a journal on a server in --journal (postgres://HOST/DB, redis://HOST), \
                         found a file: remove one of them"
                    )));
                }
            }
            return self.path().map(JournalPlace::File);
        };
        let Ok(store @ StoreUrl::Server(_)) = url.parse() else {
            return Err(CliError::usage(
                "--journal (HAPAX_JOURNAL): expected the path of a file, or postgres://HOST/DB, redis://HOST or \
                 rediss://HOST, found another URL: correct it",
            ));
        };
        let namespace = self.namespace.clone().ok_or_else(|| {
            CliError::usage(
                "--namespace (HAPAX_JOURNAL_NAMESPACE): expected the name of this program among those that use the \
                 server of the journal, found none: set one, and never change it, because it is a part of each key",
            )
        })?;
        let Some(secret_file) = self.secret_file.clone() else {
            return Err(CliError::usage(format!(
                "{SECRET_FILE}: expected the file of the secret of a journal on a server, found none: create it once, \
                 `(umask 077; openssl rand -hex 32 > FILE)`, and use the same for each call"
            )));
        };
        let opener = StoreOpener {
            secret_file: Some(secret_file),
            timeout: TIMEOUT,
            ..StoreOpener::new(store)
        };
        Ok(JournalPlace::Server(Box::new(opener), namespace))
    }

    /// Returns the path of a journal in a file. The default depends on the user, and not on the directory: a
    /// new journal has a new secret, by which the same names have other keys.
    fn path(&self) -> Result<PathBuf, CliError> {
        if let Some(HiddenPlace(path)) = &self.journal {
            return Ok(path.clone());
        }
        // The XDG specification ignores a relative path, which would depend on the directory.
        let set =
            |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let state = set("XDG_STATE_HOME")
            .or_else(|| set("HOME").map(|home| home.join(".local/state")))
            .ok_or_else(|| {
                CliError::usage(
                    "expected --journal, HAPAX_JOURNAL or an absolute HOME, found none: set one of them",
                )
            })?;
        Ok(state.join("hapax").join("calls.db"))
    }

    /// Creates the folder of the default journal.
    fn create_folder(&self, path: &Path) -> Result<(), CliError> {
        let (None, Some(folder)) = (&self.journal, path.parent()) else { return Ok(()) };
        std::fs::create_dir_all(folder).map_err(|error| {
            let folder = folder.display();
            CliError::exit(
                69,
                "journal",
                format!("expected to create {folder}, found: {error}: create it, or set --journal"),
            )
        })
    }
}

/// Opens a journal on a server, or creates it, unless it must exist, and says so.
async fn open_server(opener: &StoreOpener, must_exist: bool) -> Result<OpenStore, CliError> {
    let opened = StoreOpener { must_exist: true, ..opener.clone() }.open().await;
    if must_exist || !matches!(opened, Err(StoreOpenError::Missing { .. })) {
        return accepted(opener, opened).await;
    }
    let opened = accepted(opener, opener.open().await).await?;
    eprintln!(
        "hapax: a new journal was created, {}: a name that was sent from another journal is sent again, and executed a second \
         time by a server that has no record of its key; --journal-must-exist rejects this",
        opener.store
    );
    Ok(opened)
}

/// Returns an opened journal on a server. One that was emptied or replaced is rejected, and settings because of which it
/// may lose operations are named.
async fn accepted(
    opener: &StoreOpener,
    opened: Result<OpenStore, StoreOpenError>,
) -> Result<OpenStore, CliError> {
    secrets::warn_of_store(opener);
    let opened = opened.map_err(|error| match error {
        error if secrets::is_not_there(&error, opener.secret_file.as_deref()) => {
            CliError::exit(69, "journal", with_flags(&error))
        }
        StoreOpenError::Secret { .. } | StoreOpenError::Url { .. } => {
            CliError::usage(with_flags(&error))
        }
        StoreOpenError::Missing { place, .. } => CliError::exit(
            69,
            "journal",
            format!(
                "expected a journal at {place}, found none: correct --journal, or restore its database; in another one no \
                 name is known"
            ),
        ),
        error => CliError::exit(69, "journal", with_flags(&error)),
    })?;
    if opened.is_replaced() {
        return Err(CliError::exit(
            69,
            "journal",
            format!(
                "expected the journal that calls have used at {0}, found one that was emptied or replaced since: restore its \
                 records, or look up what was sent and accept the loss by `hapax store confirm --store {0} --secret-file \
                 FILE --reason TEXT`",
                opener.store
            ),
        ));
    }
    for StoreFinding { subject, found, fix, .. } in opener.broken().await {
        eprintln!("hapax: warning: the journal may lose operations: {subject}: {found}; {fix}");
    }
    Ok(opened)
}

/// Returns a client of a journal on a server.
fn client(opened: OpenStore, namespace: &Namespace) -> Result<ClientBuilder, CliError> {
    let journal = Journal::over(opened.store).map_err(|error| unopened(&error))?;
    Ok(Client::open(journal.namespace(namespace.as_str())))
}

/// Warns if other users can read the secret of the journal at `path`.
fn warn_of_secret(path: &Path) {
    if let Some(secret) = StoreUrl::File(path.to_owned()).secret_file() {
        secrets::warn_if_open(&secret);
    }
}

fn lease(text: &str) -> Result<Duration, String> {
    let lease = parse_duration(text).map_err(|error| error.to_string())?;
    let is_long = lease >= Duration::from_millis(100);
    is_long.then_some(lease).ok_or_else(|| "expected at least 100ms".to_owned())
}

fn unopened(error: &JournalError) -> CliError {
    CliError::exit(69, "journal", with_flags(error))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        journal: JournalArgs,
    }

    fn parse(journal: OsString) -> JournalArgs {
        Command::try_parse_from(["call".into(), "--journal".into(), journal]).unwrap().journal
    }

    #[test]
    fn the_debug_form_has_no_password() {
        let args = parse("postgres://app:hidden@host/db".into());
        assert!(args.url().is_some());
        assert!(!format!("{args:?}").contains("hidden"));
    }

    #[cfg(unix)]
    #[test]
    fn a_url_that_is_not_utf_8_is_no_path_of_a_file() {
        use std::os::unix::ffi::OsStringExt as _;

        let args = parse(OsString::from_vec(b"postgres://app:hidden\xff@host/db".to_vec()));
        let error = args.shown().unwrap_err().to_string();
        assert!(error.contains("expected a URL in UTF-8") && !error.contains("hidden"), "{error}");
        let args = parse(OsString::from_vec(b"/journals/\xff.db".to_vec()));
        assert!(args.shown().unwrap().starts_with("/journals/"));
    }
}

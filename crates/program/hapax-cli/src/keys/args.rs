//! The flags of `hapax keys`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use hapax_core::{Key, Namespace, OperationId};
use hapax_gateway::{StoreUrl, UrlText};
use hapax_http::server::ScopePart;
use hapax_operators::{AdminToken, StateView, is_id_prefix};
use http::HeaderValue;
use http::header::AUTHORIZATION;
use serde_json::{Value, json};

use crate::exit::{CliError, of};
use crate::gateway::StoreSettings;
use crate::secrets;

/// The format of a file of decisions.
const FROM_FILE: &str = "\
    --from-file takes the file of `hapax keys list --state unknown --csv`, with its columns outcome (happened or \
    did-not-happen), status, body and body_file filled in. Lines without an outcome stay undecided. Nothing is decided \
    before the whole file was read: at most 10,000 lines of 64 KiB, and bodies of 1 MiB each and 64 MiB in all. After \
    an interruption run it again: decisions that hold already are skipped. FILE.released has the keys that it \
    releases. Exit code 1: a line was rejected.";

/// List, find, show, release and resolve the records of a store
///
/// While a gateway has the store open, the commands use its admin address, which the lock file
/// names. With a secret, records have a sealed description, which `list`, `find` and `show` open: key,
/// method, path and caller, with hashes of credentials. Without a secret they have ids alone, and
/// `show` finds the id of a key.
#[derive(Debug, Args)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    pub(super) command: KeysCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum KeysCommand {
    /// List records, of all callers and namespaces
    #[command(mut_arg("namespace", |arg| arg.help(NAMESPACE_UNUSED)))]
    List {
        #[command(flatten)]
        at: StoreSelector,
        /// Only records in this state [default: all that are neither released nor expired]
        #[arg(long, value_enum)]
        state: Option<StateArg>,
        /// Only records of the caller that sends this value of a header of the gateway's --scope or
        /// --auth-scope
        #[arg(long, value_name = "VALUE")]
        caller: Option<String>,
        /// Only records of the caller with this hash, as records show it
        #[arg(long, value_name = "HASH", conflicts_with = "caller")]
        caller_hash: Option<String>,
        /// Continue after this id, or the one that begins with these 8 digits or more
        #[arg(long, value_name = "ID")]
        after: Option<String>,
        /// Largest number of records
        #[arg(long, value_name = "N", default_value_t = 100,
            value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Print CSV, with columns for decisions: fill them in for `resolve --from-file`
        #[arg(long, conflicts_with = "json")]
        csv: bool,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Find the records of a key, of all callers and namespaces
    ///
    /// Opens the description of every record, since the id of a record is a hash of key and caller: a minute or less
    /// for a million small records. Needs a store with a secret: without one, records contain no keys. A record that is
    /// written during the search may be missed, so that a search that finds none is repeated once. Exit code 1: none
    /// was found.
    #[command(mut_arg("namespace", |arg| arg.help(NAMESPACE_UNUSED)))]
    Find {
        #[command(flatten)]
        at: StoreSelector,
        /// The Idempotency-Key, without quotes; @- reads it from standard input
        #[arg(value_name = "KEY")]
        key: String,
        /// Only records whose last execution began at most this long ago, like 2h
        #[arg(long, value_name = "DUR", value_parser = crate::duration)]
        since: Option<Duration>,
        /// Only requests to this path, or to one below it
        #[arg(long, value_name = "PATH")]
        path: Option<String>,
        /// Only requests of the route with this name
        #[arg(long, value_name = "NAME")]
        route: Option<String>,
        /// End after so many records
        #[arg(long, value_name = "N", default_value_t = 100,
            value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Print CSV, with columns for decisions: fill them in for `resolve --from-file`
        #[arg(long, conflicts_with = "json")]
        csv: bool,
        /// Print JSON at the end of the search; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Compute the hashes by which the access log names a key and a caller
    Hash {
        #[command(flatten)]
        at: StoreSelector,
        /// The Idempotency-Key, without quotes; @- reads it from standard input
        #[arg(value_name = "KEY", required_unless_present = "scope")]
        key: Option<String>,
        /// The caller: the value of Authorization, or 'NAME: VALUE' for each header, cookie:NAME or
        /// jwt:CLAIM of the gateway's --scope or --auth-scope, in its order, by which the hash has its parts; of jwt:CLAIM
        /// it is 'ISSUER CLAIM'
        #[arg(long, value_name = "VALUE")]
        scope: Vec<String>,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Count the records that wait for a decision, of all namespaces, by route, reason and minute
    #[command(mut_arg("namespace", |arg| arg.help(NAMESPACE_UNUSED)))]
    Count {
        #[command(flatten)]
        at: StoreSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Show one record: state, fingerprint, fence, times, response
    Show {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: RecordSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Release a key: the next request with it executes; a completed one needs --forget
    Release {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: RecordSelector,
        #[command(flatten)]
        sure: DecisionArgs,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Resolve a request whose outcome is unknown, or many from a file
    #[command(
        mut_arg("key", |key| key.required_unless_present("from_file")),
        after_help = FROM_FILE
    )]
    Resolve {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: RecordSelector,
        #[command(flatten)]
        sure: DecisionArgs,
        /// Decide the records in this CSV file, each only if it has the fence that its line names
        #[arg(long, value_name = "FILE", conflicts_with_all = [
            "key", "id", "scope", "fence", "force", "forget", "any_kind", "outcome", "status", "body"
        ])]
        from_file: Option<PathBuf>,
        /// Print what would be decided, and decide nothing
        #[arg(long, requires = "from_file")]
        dry_run: bool,
        /// Whether it happened
        #[arg(long, value_enum, required_unless_present = "from_file")]
        outcome: Option<VerdictArg>,
        /// Status of the response to retries [default: 200]
        #[arg(long, value_name = "N")]
        status: Option<u16>,
        /// Header of the response, like 'content-type: application/json'; may be repeated; with
        /// --from-file, of each response in the file
        #[arg(long = "header", value_name = "LINE", value_parser = header_line)]
        headers: Vec<(String, String)>,
        /// Body of the response: text, @PATH or @- for standard input
        #[arg(long, value_name = "BODY")]
        body: Option<String>,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Reconcile unknown outcomes without a retry of their clients
    ///
    /// The gateway that has the store open requests its --reconcile-url, with --reconcile-authorization in place of the
    /// caller's credentials, and the response decides as after a retry. Nothing executes before the client retries.
    #[command(
        mut_arg("key", |key| key.required_unless_present("all")),
        after_help = "Exit code 1: the outcome of a record is still unknown, because the service could not say, because it \
            is too early, or because no request is sent about it; the reason is printed."
    )]
    Reconcile {
        #[command(flatten)]
        at: StoreSelector,
        #[command(flatten)]
        target: RecordSelector,
        /// All records whose outcome is unknown, one after the other, by a walk through the whole store
        #[arg(long, conflicts_with_all = ["key", "id", "scope"])]
        all: bool,
        /// Print a line of JSON for each record as it comes, and a last one with the counts as `summary`; errors too, on
        /// standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Remove records that have expired
    ///
    /// A record is removed one lease after it has expired, since copies of a write may be in progress
    /// until then.
    #[command(mut_arg("namespace", |arg| arg.help(NAMESPACE_UNUSED)))]
    Purge {
        #[command(flatten)]
        at: StoreSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
}

/// Help of `--namespace` of a command that has a key.
pub(crate) const NAMESPACE_OF_KEY: &str = "The namespace of the service; for a KEY, a gateway that answers uses its own \
    [default: that of --config, else the empty one]";

/// Help of `--namespace` of a command about the records of all namespaces. Records without a reconcile hook do not show
/// theirs, so a filter would hide records that it should show.
const NAMESPACE_UNUSED: &str =
    "Not used here: the records of all namespaces of the store are meant";

/// Options that name the store.
#[derive(Debug, Args)]
pub(crate) struct StoreSelector {
    /// The gateway's file, for options that are not given here
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The store: file:PATH, redis://HOST, rediss://HOST or postgres://USER@HOST/DB [default:
    /// file:./hapax.db]
    #[arg(long, env = "HAPAX_STORE", value_name = "URL", hide_env_values = true)]
    store: Option<UrlText<StoreUrl>>,
    /// The namespace of the service [default: that of --config, else the empty one]
    #[arg(long, env = "HAPAX_NAMESPACE", value_name = "NAME")]
    namespace: Option<Namespace>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, env = "HAPAX_SECRET_FILE", value_name = "PATH")]
    secret_file: Option<PathBuf>,
    /// Use the gateway or the service with this admin address, whatever its store
    #[arg(long, value_name = "ADDR", value_parser = crate::addr)]
    admin: Option<SocketAddr>,
    /// The file of the token of that address [default: PATH.admin-token beside a file: store, else
    /// ./hapax.admin-token]
    #[arg(long, env = "HAPAX_ADMIN_TOKEN_FILE", value_name = "PATH")]
    admin_token_file: Option<PathBuf>,
    /// The file to which decisions are appended, if no gateway does it [default: PATH.audit.jsonl
    /// beside a file: store, else ./hapax.audit.jsonl]
    #[arg(long, env = "HAPAX_AUDIT_FILE", value_name = "PATH")]
    audit_file: Option<PathBuf>,
}

/// The place of the records.
#[derive(Clone, Debug)]
pub(crate) struct StoreLocation {
    pub(super) store: StoreUrl,
    pub(crate) namespace: Namespace,
    /// Whether an option or a file names the namespace.
    pub(crate) is_namespace_named: bool,
    pub(super) secret_file: Option<PathBuf>,
    /// The gateway that answers instead.
    pub(super) admin: Option<SocketAddr>,
    pub(super) admin_token_file: Option<PathBuf>,
    pub(crate) audit_file: PathBuf,
}

impl StoreLocation {
    /// Reads the token of the store's gateway.
    pub(super) fn token(&self) -> Result<Option<AdminToken>, CliError> {
        token(&self.store, self.admin_token_file.as_deref())
    }
}

/// Reads the token of a gateway: of the given file, else of the one beside the store, else of the
/// one in the working directory. Without a token the gateway is called without, and its answer
/// names what is missing.
pub(super) fn token(
    store: &StoreUrl,
    named: Option<&Path>,
) -> Result<Option<AdminToken>, CliError> {
    let read = |path: &Path| {
        let failed =
            |error| CliError::usage(format!("--admin-token-file: {}: {error}", path.display()));
        secrets::warn_if_open(path);
        AdminToken::read(path).map(Some).map_err(failed)
    };
    if let Some(path) = named {
        return read(path);
    }
    let default = [store.token_file(), AdminToken::default_path(None)];
    default.iter().find(|path| path.exists()).map_or(Ok(None), |path| read(path))
}

impl StoreSelector {
    /// Returns the options, completed by the gateway's file.
    pub(crate) fn location(&self) -> Result<StoreLocation, CliError> {
        let store = self.store.clone().map(UrlText::read).transpose().map_err(of("--store"))?;
        let is_named = store.is_some() || self.admin.is_some();
        let file = StoreSettings::complete_from_file(self.config.as_deref(), is_named)?;
        let store = store.or(file.store);
        let store = store.unwrap_or_else(|| StoreUrl::File("./hapax.db".into()));
        // A store in memory can be reached only through its gateway.
        let admin = file.admin.filter(|_| store == StoreUrl::Memory);
        let audit_file = self.audit_file.clone().or(file.audit_file);
        let namespace = self.namespace.clone().or(file.namespace);
        Ok(StoreLocation {
            audit_file: audit_file.unwrap_or_else(|| store.audit_file()),
            store,
            is_namespace_named: namespace.is_some(),
            namespace: namespace.unwrap_or_default(),
            secret_file: self.secret_file.clone().or(file.secret_file),
            admin: self.admin.or(admin),
            admin_token_file: self.admin_token_file.clone().or(file.admin_token_file),
        })
    }
}

/// Options that name a record. They come after those that name the store.
#[derive(Debug, Args)]
#[command(mut_arg("namespace", |arg| arg.help(NAMESPACE_OF_KEY)))]
pub(super) struct RecordSelector {
    /// The Idempotency-Key, without quotes
    #[arg(value_name = "KEY", required_unless_present = "id")]
    key: Option<String>,
    /// The caller of the key: the value of Authorization, or 'NAME: VALUE' for each header,
    /// cookie:NAME or jwt:CLAIM of the gateway's --scope or --auth-scope, in its order, like 'jwt:sub:
    /// https://login.example user-7'. Needed unless the gateway has --scope none or --scope-missing shared
    #[arg(long, value_name = "VALUE")]
    scope: Vec<String>,
    /// The id of the record, or its first 8 digits or more, instead of a key
    #[arg(long, value_name = "ID", conflicts_with_all = ["key", "scope"])]
    id: Option<String>,
}

/// Options of a decision.
#[derive(Debug, Args)]
pub(super) struct DecisionArgs {
    /// Only if the record has this fence [default: its present one; none with the first digits of an id and
    /// --force or --forget]
    #[arg(long, value_name = "N")]
    pub(super) fence: Option<u64>,
    /// Even if it is executing, or may still execute
    #[arg(long)]
    pub(super) force: bool,
    /// Even if it is completed: its response is lost, and it executes again
    #[arg(long)]
    pub(super) forget: bool,
    /// Even if the record is that of a function, not of an HTTP request
    #[arg(long)]
    pub(super) any_kind: bool,
    /// The reason, stored with the record and in the audit file
    #[arg(long, value_name = "TEXT")]
    pub(super) reason: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum StateArg {
    InFlight,
    Done,
    Unknown,
    Released,
    Expired,
}

impl From<StateArg> for StateView {
    fn from(state: StateArg) -> Self {
        match state {
            StateArg::InFlight => Self::InFlight,
            StateArg::Done => Self::Done,
            StateArg::Unknown => Self::Unknown,
            StateArg::Released => Self::Released,
            StateArg::Expired => Self::Expired,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum VerdictArg {
    Happened,
    DidNotHappen,
}

/// The name of a record.
#[derive(Debug)]
pub(super) enum RecordName {
    /// An id, or its first digits.
    Id(String),
    Key(Key, ScopeText),
}

/// A caller, as the operator typed it.
#[derive(Debug)]
pub(crate) enum ScopeText {
    /// A caller that sends nothing.
    NoCaller,
    /// The value of the one header that names the caller.
    Value(String),
    /// The headers that name the caller.
    Headers(Vec<(String, String)>),
}

impl RecordSelector {
    pub(super) fn parse(&self) -> Result<RecordName, CliError> {
        if let Some(id) = &self.id {
            return RecordName::id(id);
        }
        let key = Key::new(self.key.as_deref().unwrap_or_default()).map_err(CliError::usage)?;
        Ok(RecordName::Key(key, ScopeText::parse(&self.scope)?))
    }
}

impl RecordName {
    /// Returns whether it is the first digits of an id.
    pub(super) fn is_prefix(&self) -> bool {
        matches!(self, Self::Id(text) if is_id_prefix(text))
    }

    /// Reads an id, or its first digits.
    pub(super) fn id(text: &str) -> Result<Self, CliError> {
        if OperationId::from_hex(text).is_some() || is_id_prefix(text) {
            return Ok(Self::Id(text.to_owned()));
        }
        Err(CliError::usage(format!(
            "expected an id of 64 hexadecimal digits or its first 8 or more, found {text:?}: copy it from `list`"
        )))
    }
}

impl ScopeText {
    /// Reads the values of `--scope`.
    pub(crate) fn parse(given: &[String]) -> Result<Self, CliError> {
        let named = given.iter().map(|text| header_line(text)).collect::<Result<Vec<_>, _>>();
        match (given, named) {
            ([], _) => Ok(Self::NoCaller),
            (_, Ok(named)) => Ok(Self::Headers(named)),
            ([value], Err(_)) => Ok(Self::Value(value.clone())),
            (_, Err(error)) => Err(CliError::usage(format!("--scope: {error}"))),
        }
    }

    /// Returns the scope in a request of the operators' API.
    pub(crate) fn json(&self) -> Value {
        match self {
            Self::NoCaller => Value::Null,
            Self::Value(value) => value.as_str().into(),
            Self::Headers(named) => json!(named),
        }
    }

    /// Returns the headers; a value alone is that of `Authorization`.
    pub(crate) fn headers(&self) -> Result<Vec<(ScopePart, HeaderValue)>, CliError> {
        let bad = || CliError::usage("--scope: not a header's name or value");
        let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).map_err(|_| bad());
        match self {
            Self::NoCaller => Ok(Vec::new()),
            Self::Value(text) => Ok(vec![(AUTHORIZATION.into(), value(text)?)]),
            Self::Headers(named) => named
                .iter()
                .map(|(name, text)| {
                    let part = name.parse().map_err(|_| bad())?;
                    Ok((part, value(text)?))
                })
                .collect(),
        }
    }
}

/// Parses `NAME: VALUE`. The space is required: `Bearer a:b` is a value without a name.
fn header_line(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once(": ").ok_or("expected 'NAME: VALUE'")?;
    let part: ScopePart = name.parse().map_err(|_| "expected 'NAME: VALUE'")?;
    Ok((part.to_string(), value.trim().to_owned()))
}

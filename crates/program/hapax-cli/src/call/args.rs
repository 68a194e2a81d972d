//! The flags of `hapax call`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, Subcommand, ValueEnum};
use hapax_client::Server;
use hapax_gateway::parse_duration;
use http::{HeaderName, HeaderValue, Method};

use super::journal::{JournalArgs, LeaseArg};
use crate::exit::CliError;
use crate::proxies::ProxyArg;

const AFTER: &str = "\
Durations are written 250ms, 30s, 5m, 24h, 7d. The body of the response is on standard output, or with
--output json a JSON document: status, headers (pairs of name and value), body (text) or body_base64,
replayed, stored, tries. An error is on standard error. Exit codes:

   0  a response with 2xx; without a body on standard output if it was too large to be stored
  22  a response with another status
  64  the arguments are invalid
  65  the name, or at the server the key, belongs to another request, which may have happened
  69  the journal is unavailable, or its file is open in another process: run the command again
  74  the output could not be written: the error says whether the response is in the journal
  75  no response yet, from this process or from another one that sends the name now: run the command
      again, or `hapax call resume`
  76  unknown whether it happened, or the key is too old or has changed: see `hapax call list`
  77  the credentials are rejected, or are not those of an earlier try

  export TOKEN='Bearer abc'
  hapax call --name invoice-17 --server hapax --header-env authorization=TOKEN \\
    --json @payment.json POST https://api.example.com/payments";

/// Send an HTTP request under a name; run again, it continues or prints the stored response
///
/// The request and its idempotency key are in the journal before the first byte is sent, and the response is
/// in it before it is printed. Run the same command again after a crash, a timeout or exit code 75: it
/// continues the operation under the same key, or prints the stored response and sends nothing. Another
/// method, URL, header or body under the name is rejected. A response is final, whatever its status, and is
/// stored for 30 days, unless the server reports that it executed nothing.
///
/// Jobs that run at the same time need a journal in PostgreSQL: there the same name is sent once, and each
/// call gets the response, and calls of other names do not wait. So it is in Redis, which may lose its last
/// writes, and is for servers that honor keys only, never for money alone. A file is open in one process, also
/// during its request, and others wait for it (--lock-wait).
///
/// With a --server that honors idempotency keys the operation has one effect. With the default,
/// without-keys, nothing is sent again once a byte may have arrived.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, after_help = AFTER)]
pub(crate) struct CallArgs {
    #[command(subcommand)]
    pub(super) command: Option<CallCommand>,
    #[command(flatten)]
    pub(super) send: SendArgs,
}

#[derive(Debug, Subcommand)]
pub(super) enum CallCommand {
    /// List the operations of the journal: state, or status of the response; tries; begin of the first and of
    /// the last one; name, method and URL; key, and the server's operation id if it has sent one
    List {
        #[command(flatten)]
        journal: JournalArgs,
        /// Only operations without a response
        #[arg(long)]
        pending: bool,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Continue the operations without a response, until all have one or have stopped, or --wait is over
    ///
    /// Give it the --server, --key-header, --follow-accepted and credentials of the calls. Of an operation that may have arrived
    /// nothing is sent under another declaration, nor with the default, without-keys: it stops with
    /// key-changed. One that was never sent is sent without a key then. One that the server rejects before it
    /// executes anything stops with rejected. Operations of other servers than those
    /// in --origin are left as they are. Exit codes: 0 all have a response, 75 some are not finished, 76 all
    /// others have stopped: the list has the reasons.
    Resume {
        #[command(flatten)]
        journal: JournalArgs,
        /// A server whose operations are continued, like https://api.example.com; may be repeated for servers
        /// with the same declaration, but not with --header-env, whose header each of them would get
        #[arg(long, value_name = "ORIGIN", required = true)]
        origin: Vec<String>,
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        lease: LeaseArg,
        /// Time to wait; operations that are not finished then stay in the journal
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
        wait: Duration,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Accept that a stopped operation has no response: nothing is sent under its name
    ///
    /// Look it up at the server first. It leaves the list; its name stays taken for 30 days. Exit codes: 0
    /// acknowledged, 1 there is none without a response, or it may still be tried.
    Acknowledge {
        #[command(flatten)]
        journal: JournalArgs,
        /// The name of the operation
        #[arg(value_name = "NAME")]
        name: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// Remove an operation that has a response or has stopped: the next call of its name sends again
    ///
    /// The key stays the same. If the server has no record of it any more, or honors no keys, the next call is a
    /// second effect. Exit codes: 0 removed, 1 there is none, or it may still be tried.
    Forget {
        #[command(flatten)]
        journal: JournalArgs,
        /// The name of the operation
        #[arg(value_name = "NAME")]
        name: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
}

/// A request.
#[derive(Debug, Args)]
pub(super) struct SendArgs {
    #[command(flatten)]
    pub(super) journal: JournalArgs,
    /// Reject the call if there is no journal, or calls have not used its --namespace, rather than create it: a new
    /// one has no names, and a new file has other keys. Leave it out for the first call
    #[arg(long, env = "HAPAX_JOURNAL_MUST_EXIST", value_parser = BoolishValueParser::new())]
    pub(super) journal_must_exist: bool,
    /// The name of the operation, such as invoice-17: 1 to 255 printable ASCII characters. The same name is the
    /// same request and the same key in each run; never use it for another one
    #[arg(long, value_name = "NAME", required = true)]
    pub(super) name: Option<String>,
    #[command(flatten)]
    pub(super) server: ServerArgs,
    #[command(flatten)]
    pub(super) lease: LeaseArg,
    /// A header, such as 'x-note: one'. It is stored in the journal, sealed, so that authorization and cookie are
    /// rejected; pass any other secret, such as an API key, by --header-env too; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    pub(super) header: Vec<(String, String)>,
    /// The body, JSON: text, @PATH, or @- for standard input; at most 1 MiB. Sets content-type
    #[arg(long, value_name = "JSON", conflicts_with = "data")]
    pub(super) json: Option<String>,
    /// The body: text, @PATH, or @- for standard input; at most 1 MiB. Set content-type by --header
    #[arg(long, value_name = "TEXT")]
    pub(super) data: Option<String>,
    /// Form of the response on standard output: its body, or a JSON document with status, headers and body; then
    /// errors are JSON too, on standard error, with a code
    #[arg(long, value_enum, default_value = "body")]
    pub(super) output: OutputArg,
    /// Time to wait for the response; then exit code 75, and this process sends nothing more
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    pub(super) wait: Duration,
    /// Time from the first try after which the operation stops; the next run begins the time anew
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_duration)]
    pub(super) within: Duration,
    /// The HTTP method, such as POST
    #[arg(value_name = "METHOD", required = true)]
    pub(super) method: Option<Method>,
    /// The URL, http or https, without user and password: see --header-env
    #[arg(value_name = "URL", required = true)]
    pub(super) url: Option<String>,
}

/// The declaration of a server, and the credentials for it.
#[derive(Debug, Args)]
pub(super) struct ServerArgs {
    /// How the server treats idempotency keys: as a Hapax gateway or layer (hapax), as Stripe, by the documented
    /// header alone (plain), or not at all
    #[arg(long, value_enum, default_value = "without-keys")]
    pub(super) server: ProfileArg,
    /// Time for which the server keeps a key, as it documents it, above 60s: after nine tenths of it nothing is
    /// sent again. A longer time than the server's own can cause a second effect
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = parse_duration)]
    pub(super) retention: Duration,
    /// The server takes the account, and not the token, as part of a key: a retry may have another token. If
    /// that is wrong, it is a second operation
    #[arg(long)]
    pub(super) scoped_by_account: bool,
    /// The server accepts an operation by 202 with Location, and shows its end there: it is read by GET until its
    /// status is another than 202, and that is the response. Without this flag the 202 is the response
    #[arg(long)]
    pub(super) follow_accepted: bool,
    /// The name of the header with the key. Without effect for without-keys
    #[arg(long, value_name = "NAME", default_value = "idempotency-key")]
    pub(super) key_header: HeaderName,
    /// A header whose value is in an environment variable, such as authorization=TOKEN with TOKEN='Bearer abc'.
    /// Its value is not stored; may be repeated
    #[arg(long, value_name = "NAME=VARIABLE", value_parser = header_env)]
    pub(super) header_env: Vec<(HeaderName, String)>,
    /// A file of the root certificates to trust, in PEM [default: the system's]
    #[arg(long, value_name = "PATH")]
    pub(super) ca: Option<PathBuf>,
    #[command(flatten)]
    pub(super) proxy: ProxyArg,
}

impl ServerArgs {
    /// Returns the declaration of the server at an origin.
    pub(super) fn declaration(&self, origin: &str) -> Result<Server, CliError> {
        let server = match self.server {
            ProfileArg::Hapax => Server::hapax(),
            ProfileArg::Stripe => Server::stripe(),
            ProfileArg::Plain => Server::plain(),
            ProfileArg::WithoutKeys => Server::without_keys(),
        };
        let server = server.retention(self.retention).key_header(self.key_header.clone());
        let server = if self.scoped_by_account { server.scoped_by_account() } else { server };
        let server = if self.follow_accepted { server.follows_accepted() } else { server };
        Ok(match self.proxy.of(origin)? {
            Some(proxy) => server.proxy(proxy),
            None => server,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum ProfileArg {
    Hapax,
    Stripe,
    Plain,
    WithoutKeys,
}

/// The form of a response on standard output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum OutputArg {
    Body,
    Json,
}

fn header(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text
        .split_once(':')
        .ok_or("expected NAME: VALUE, such as `x-note: one`, found another form")?;
    let value = value.trim();
    let is_valid = HeaderName::try_from(name).is_ok() && HeaderValue::try_from(value).is_ok();
    is_valid
        .then(|| (name.to_owned(), value.to_owned()))
        .ok_or("expected NAME: VALUE, such as `x-note: one`, found another form")
}

fn header_env(text: &str) -> Result<(HeaderName, String), &'static str> {
    let (name, variable) = text
        .split_once('=')
        .ok_or("expected NAME=VARIABLE, such as authorization=TOKEN, found another form")?;
    let name = HeaderName::try_from(name)
        .map_err(|_| "expected NAME=VARIABLE, such as authorization=TOKEN, found another form")?;
    Ok((name, variable.to_owned()))
}

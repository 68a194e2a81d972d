//! The program `hapax`.

mod admin;
mod call;
mod consume;
mod doctor;
mod exit;
mod gateway;
mod keys;
mod logging;
mod messages;
mod output;
mod proxies;
mod registered;
mod relay;
mod saga;
mod secrets;
mod shutdown;
mod sql;
mod store;
mod webhooks;

use std::ffi::OsString;
use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use exit::CliError;

/// Makes retries safe: an operation has one effect and one response, however often it is requested.
#[derive(Debug, Parser)]
#[command(name = "hapax", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Gateway(Box<gateway::GatewayArgs>),
    Keys(keys::KeysArgs),
    Saga(saga::SagaArgs),
    Call(Box<call::CallArgs>),
    Doctor(doctor::DoctorArgs),
    Store(store::StoreArgs),
    Sql(sql::SqlArgs),
    Messages(messages::MessagesArgs),
    Relay(Box<relay::RelayArgs>),
    Consume(Box<consume::ConsumeArgs>),
    Backup(keys::BackupArgs),
    Restore(keys::RestoreArgs),
    /// Compare four setups under faults: no gateway, and the gateway with each --on-unknown
    #[cfg(feature = "demo")]
    Demo(hapax_torture::demo::DemoArgs),
}

fn main() -> ExitCode {
    // Read from the raw arguments, so that it is known if the flags cannot be parsed.
    let words = std::env::args_os().skip(1).take_while(|word| word != "--");
    let words: Vec<_> = words.collect();
    let as_json = match has_json_body(&words) {
        true => is_output_json(&words),
        false => words.iter().any(|word| word == "--json"),
    };
    if let Err(shown) = secrets::reject_shown(&Cli::command(), &words) {
        return shown.report(as_json);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return parse_error(&error, as_json),
    };
    let done = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let done = runtime.block_on(run(cli.command));
            // All tasks that must finish have finished. A DNS lookup of an upstream cannot be
            // cancelled, and an ordinary shutdown would wait for it.
            runtime.shutdown_background();
            done
        }
        Err(error) => Err(CliError::unavailable(format!("cannot start threads: {error}"))),
    };
    done.unwrap_or_else(|failure| failure.report(as_json))
}

async fn run(command: Command) -> Result<ExitCode, CliError> {
    match command {
        Command::Gateway(args) => Box::pin(gateway::run(*args)).await,
        Command::Keys(args) => Box::pin(keys::run(args)).await,
        Command::Saga(args) => Box::pin(saga::run(args)).await,
        Command::Call(args) => Box::pin(call::run(*args)).await,
        Command::Doctor(args) => Box::pin(doctor::run(args)).await,
        Command::Store(args) => Box::pin(store::run(args)).await,
        Command::Sql(args) => Ok(sql::run(&args)),
        Command::Messages(args) => Box::pin(messages::run(args)).await,
        Command::Relay(args) => Box::pin(relay::run(*args)).await,
        Command::Consume(args) => Box::pin(consume::run(*args)).await,
        Command::Backup(args) => Box::pin(keys::backup(args)).await,
        Command::Restore(args) => keys::restore(&args),
        #[cfg(feature = "demo")]
        Command::Demo(args) => {
            Box::pin(hapax_torture::demo::run(args)).await.map_err(CliError::unavailable)
        }
    }
}

/// Returns whether `--json` is the body of a request.
fn has_json_body(words: &[OsString]) -> bool {
    let commands = ["list", "resume", "acknowledge", "forget"].map(OsString::from);
    let [first, second, ..] = words else { return false };
    first == "call" && !commands.contains(second)
}

/// Returns whether a call prints its response as JSON.
fn is_output_json(words: &[OsString]) -> bool {
    let pairs = words.windows(2).any(|pair| pair[0] == "--output" && pair[1] == "json");
    pairs || words.iter().any(|word| word == "--output=json")
}

/// Parses an address to listen on or to connect to. A name is rejected: it may have several
/// addresses, or none of this machine.
fn addr(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "expected an IP address and a port, like 127.0.0.1:8080")
}

/// Parses a duration with its unit.
fn duration(text: &str) -> Result<std::time::Duration, String> {
    hapax_gateway::parse_duration(text).map_err(|error| error.to_string())
}

/// Reports invalid arguments in one line, without the usage.
fn parse_error(error: &clap::Error, as_json: bool) -> ExitCode {
    let text = without_secrets(error, error.render().to_string());
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // The reader is gone.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = std::io::stderr().write_all(text.as_bytes());
            ExitCode::from(64)
        }
        _ => {
            let first = text.split("\n\n").next().unwrap_or_default();
            let failure = CliError::usage(first.trim_start_matches("error: "));
            match error.get(ContextKind::SuggestedArg) {
                Some(ContextValue::String(flag)) => failure.and(&format!("; did you mean {flag}?")),
                _ => failure,
            }
            .report(as_json)
        }
    }
}

/// Repeats the arguments, except tokens and anything that may be a URL, which may contain a
/// password.
fn without_secrets(error: &clap::Error, text: String) -> String {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let (flag, value) = (context(ContextKind::InvalidArg), context(ContextKind::InvalidValue));
    let is_secret = ["<URL>", "<TOKEN>"].iter().any(|name| flag.contains(name));
    let hide = |text: String, secret: &str, is_secret: bool| match is_secret && !secret.is_empty() {
        true => text.replace(&format!(" '{secret}'"), ""),
        false => text,
    };
    let text = hide(text, value, is_secret || value.contains("://"));
    hide(text, flag, flag.contains("://"))
}

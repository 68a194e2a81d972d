//! `hapax call`.

mod args;
mod journal;
mod namespace;
mod render;

use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use hapax_client::{
    Client, ClientBuilder, ClientError, Credentials, JournalError, PendingOperation, PendingState,
    SendError, Sent,
};
use http::{HeaderValue, Uri};
use serde_json::json;
use tokio::time::{Instant, sleep};

pub(crate) use self::args::CallArgs;
use self::args::{CallCommand, OutputArg, ProfileArg, SendArgs, ServerArgs};
use self::journal::{JournalArgs, LeaseArg};
use crate::exit::{CliError, with_causes};
use crate::{keys, output};

/// Time for requests in progress when the program ends.
const DRAIN: Duration = Duration::from_secs(1);

/// The largest body of a response that the journal has.
const MAX_STORED: usize = 1 << 20;

/// First and longest interval at which `resume` checks whether all operations have a response or have stopped.
const LOOK: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// Part of the time for which `resume` reads the journal, at most: the operations need it too.
const READS: u32 = 10;

/// Names of libraries in their errors, and those of the flags that a user of the command has.
const FLAGS: [(&str, &str); 9] = [
    ("--store-must-exist", "--journal-must-exist"),
    ("--store", "--journal"),
    ("(HAPAX_SECRET_FILE)", "(HAPAX_JOURNAL_SECRET_FILE)"),
    (
        "a journal in Redis or PostgreSQL",
        "a journal in Redis or PostgreSQL (--journal redis://HOST or postgres://HOST/DB)",
    ),
    ("`ClientBuilder::credentials`", "--header-env"),
    ("`ClientBuilder::root_certificates`", "--ca"),
    ("`ClientBuilder::server`", "--origin"),
    ("`Journal::file_within`", "--lock-wait"),
    ("`Server::scoped_by_account`", "--scoped-by-account"),
];

/// Runs `hapax call`.
pub(crate) async fn run(args: CallArgs) -> Result<ExitCode, CliError> {
    crate::gateway::environment::warn_of_unknown();
    match args.command {
        Some(CallCommand::List { journal, pending, json }) => list(&journal, pending, json).await,
        Some(CallCommand::Resume { journal, origin, server, lease, wait, json }) => {
            resume(&journal, lease, &origin, &server, wait, json).await
        }
        Some(CallCommand::Acknowledge { journal, name, json }) => {
            end(&journal, &name, json, EndOf::Tries).await
        }
        Some(CallCommand::Forget { journal, name, json }) => {
            end(&journal, &name, json, EndOf::Record).await
        }
        None => send(args.send).await,
    }
}

async fn send(args: SendArgs) -> Result<ExitCode, CliError> {
    let SendArgs {
        journal,
        journal_must_exist,
        name,
        server,
        lease,
        header,
        json,
        data,
        output,
        wait,
        within,
        method,
        url,
    } = args;
    let (Some(name), Some(method), Some(url)) = (name, method, url) else {
        return Err(CliError::usage(
            "expected --name NAME METHOD URL, found fewer: such as --name invoice-17 POST https://api.example.com/payments",
        ));
    };
    let body = match (&json, &data) {
        (Some(text), _) => {
            let body = keys::read("--json", text)?;
            serde_json::from_slice::<serde::de::IgnoredAny>(&body).map_err(|error| {
                CliError::usage(format!("--json: expected JSON, found another text: {error}: correct it, or send other text by --data"))
            })?;
            body
        }
        (None, Some(text)) => keys::read("--data", text)?,
        (None, None) => Vec::new(),
    };
    let origin = origin(&url)?;
    let declaration = server.declaration(&origin)?;
    journal.check(server.server != ProfileArg::WithoutKeys)?;
    let opened = journal.for_calls(journal_must_exist).await?;
    let client = lease.of(opened, &journal).server(origin, declaration);
    let client = build(with_credentials(client, &server, &header)?).await?;
    let mut request = client.request(method, url).operation(&*name).body(body);
    if json.is_some() && !header.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
        request = request.header("content-type", "application/json");
    }
    for (name, value) in header {
        request = request.header(name, value);
    }
    let end = request.wait(wait).within(within).send().await;
    let progress = match &end {
        Err(SendError::Pending(_)) => progress(&client, &name).await,
        _ => String::new(),
    };
    client.close(DRAIN).await;
    answered(end, output, &progress)
}

/// Returns the number of tries and the last error of an operation without a response.
async fn progress(client: &Client, name: &str) -> String {
    let pending = client.pending().await.unwrap_or_default();
    let Some(it) = pending.into_iter().find(|it| it.name == name) else { return String::new() };
    let error = it.last_error.map(|error| format!("; last error: {error}")).unwrap_or_default();
    format!(" after {} tries{error}", it.tries)
}

/// Prints a response, or returns the error of a call without one.
fn answered(
    end: Result<Sent, SendError>,
    output: OutputArg,
    progress: &str,
) -> Result<ExitCode, CliError> {
    let sent = end.map_err(|error| match error {
        SendError::Pending(_) => waiting(progress),
        error => failure(&error),
    })?;
    let mut stdout = std::io::stdout().lock();
    let printed = match (output, std::str::from_utf8(&sent.response.body)) {
        (OutputArg::Json, _) => Cow::Owned(render::sent(&sent)?.into_bytes()),
        (OutputArg::Body, Ok(text)) if stdout.is_terminal() => {
            Cow::Owned(output::block(text).into_bytes())
        }
        (OutputArg::Body, _) => Cow::Borrowed(&sent.response.body[..]),
    };
    match stdout.write_all(&printed).and_then(|()| stdout.flush()) {
        // A reader that has gone needs no more: the exit code reports the status as well.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            return Err(unprinted(&sent, &error));
        }
        _ => {}
    }
    if sent.response.status.is_success() {
        return Ok(ExitCode::SUCCESS);
    }
    let then = match Fate::of(&sent) {
        Fate::Stored => {
            "it is stored, the same command prints it again, and `hapax call forget NAME` frees the name"
        }
        Fate::TooLarge => {
            "with more than 1 MiB it is not stored, and `hapax call forget NAME` frees the name"
        }
        Fate::NothingExecuted => {
            "the server executed nothing, and the name is free: correct the request, the flags or the server, and run the command again"
        }
    };
    let text = format!("expected a response with 2xx, found {}: {then}", sent.response.status);
    Err(CliError::exit(22, "answered", text))
}

/// Fate of a response that was returned.
#[derive(Clone, Copy)]
enum Fate {
    Stored,
    TooLarge,
    NothingExecuted,
}

impl Fate {
    fn of(sent: &Sent) -> Self {
        match sent.stored {
            true => Self::Stored,
            false if sent.response.body.len() > MAX_STORED => Self::TooLarge,
            false => Self::NothingExecuted,
        }
    }
}

/// Returns the error of a response that could not be printed.
fn unprinted(sent: &Sent, error: &std::io::Error) -> CliError {
    let then = match Fate::of(sent) {
        Fate::Stored => "it is in the journal; run the same command again",
        Fate::TooLarge => {
            "with more than 1 MiB it is not in the journal; look the result up at the server"
        }
        Fate::NothingExecuted => {
            "it is not in the journal, because the server executed nothing; run the same command again, which sends again"
        }
    };
    let text = format!("expected to write the response to standard output, found {error}: {then}");
    CliError::exit(74, "output", text)
}

/// Prints the text of a command.
fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(output::block(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let text = format!(
                "expected to write to standard output, found {error}: correct that, and run the command again"
            );
            Err(CliError::exit(74, "output", text))
        }
        _ => Ok(()),
    }
}

/// Returns the error of a call whose time to wait is over.
fn waiting(progress: &str) -> CliError {
    let text = format!(
        "expected a response within --wait, found none yet{progress}: run the same command again, or `hapax call resume`; this process sends nothing more"
    );
    CliError::exit(75, "pending", text)
}

/// Returns the text of an error of the library, with the flags of the program.
fn with_flags(error: &dyn std::error::Error) -> String {
    let text = with_causes(error);
    FLAGS.iter().fold(text, |text, (name, flag)| text.replace(name, flag))
}

fn failure(error: &SendError) -> CliError {
    let (code, name) = match error {
        SendError::Request(_) => (64, "usage"),
        SendError::Reused | SendError::ReusedAtServer(_) => (65, "reused"),
        SendError::Journal(_) => (69, "journal"),
        SendError::NotSent(_) => (75, "not-sent"),
        SendError::Pending(_) | SendError::Closed => return waiting(""),
        SendError::Unknown(_) => (76, "unknown"),
        SendError::Expired => (76, "expired"),
        SendError::KeyChanged => (76, "key-changed"),
        SendError::CredentialsChanged => (77, "credentials-changed"),
        SendError::Unauthorized => (77, "unauthorized"),
        SendError::InvalidToken => (77, "invalid-token"),
        SendError::ResponseNotRetained { status } if status.is_success() => {
            (0, "response-not-retained")
        }
        SendError::ResponseNotRetained { .. } => (22, "response-not-retained"),
        _ => (76, "unknown"),
    };
    CliError::exit(code, name, with_flags(error))
}

async fn list(
    journal: &JournalArgs,
    only_pending: bool,
    as_json: bool,
) -> Result<ExitCode, CliError> {
    let client = build(journal.existing().await?).await?;
    let pending = client.pending().await.map_err(|error| failure(&error))?;
    let finished = match only_pending {
        true => Vec::new(),
        false => client.finished().await.map_err(|error| failure(&error))?,
    };
    client.close(DRAIN).await;
    print(&match as_json {
        true => output::json(&render::listed_json(&pending, &finished))?,
        false => render::listed(&pending, &finished),
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn resume(
    journal: &JournalArgs,
    lease: LeaseArg,
    origins: &[String],
    server: &ServerArgs,
    wait: Duration,
    as_json: bool,
) -> Result<ExitCode, CliError> {
    if let ([_, _, ..], [_, ..]) = (origins, &server.header_env[..]) {
        return Err(CliError::usage(
            "expected one --origin with --header-env, found more: each of these servers would get the header; run the command once for each",
        ));
    }
    journal.check(server.server != ProfileArg::WithoutKeys)?;
    let mut client = lease.of(journal.existing().await?, journal);
    for url in origins {
        let origin = origin(url)?;
        let declaration = server.declaration(&origin)?;
        client = client.server(origin, declaration);
    }
    let client = build(with_credentials(client, server, &[])?).await?;
    let until = Instant::now() + wait;
    // One that could not be continued does not keep the others from it.
    let failed = client.resume().await.err();
    let [mut pause, longest] = LOOK;
    let left = loop {
        let begun = Instant::now();
        let left = client.pending().await.map_err(|error| failure(&error))?;
        // Others are left to calls that declare their servers.
        let is_in_progress = |it: &PendingOperation| {
            it.state == PendingState::UnderWay && client.is_declared(&it.url)
        };
        if !left.iter().any(is_in_progress) || until <= Instant::now() {
            break left;
        }
        sleep(pause.max(begun.elapsed() * READS)).await;
        pause = (pause * 2).min(longest);
    };
    client.close(DRAIN).await;
    print(&match as_json {
        true => output::json(&render::listed_json(&left, &[]))?,
        false => render::listed(&left, &[]),
    })?;
    if let Some(error) = failed {
        return Err(failure(&error));
    }
    // Of these nothing was sent, or they are in progress: the next call continues them.
    let continues = |it: &PendingOperation| match &it.state {
        PendingState::Stopped { reason, .. } => reason == "exhausted" && !it.may_have_happened,
        PendingState::Unreadable { .. } => false,
        _ => true,
    };
    Ok(ExitCode::from(match left.is_empty() {
        true => 0,
        false if left.iter().any(|it| it.state == PendingState::UnderWay) => 75,
        false if left.iter().all(continues) => 75,
        false => 76,
    }))
}

/// Parts of an operation that a command ends.
#[derive(Clone, Copy)]
enum EndOf {
    Tries,
    Record,
}

/// Acknowledges an operation, or removes it.
async fn end(
    journal: &JournalArgs,
    name: &str,
    as_json: bool,
    part: EndOf,
) -> Result<ExitCode, CliError> {
    let client = build(journal.existing().await?).await?;
    let ended = match part {
        EndOf::Tries => client.acknowledge(name).await,
        EndOf::Record => client.forget(name).await,
    };
    client.close(DRAIN).await;
    let (key, text) = match part {
        EndOf::Tries => ("acknowledged", "acknowledged: nothing is sent under this name\n"),
        EndOf::Record => {
            ("forgotten", "forgotten: the next call of this name sends again, under the same key\n")
        }
    };
    match ended {
        Ok(true) if as_json => print(&output::json(&json!({ key: name }))?)?,
        Ok(true) => print(text)?,
        Ok(false) => {
            let wanted = match part {
                EndOf::Tries => "an operation of this name without a response",
                EndOf::Record => "an operation of this name",
            };
            let journal = journal.shown()?;
            let text =
                format!("expected {wanted} in {journal}, found none: `hapax call list` has all");
            return Err(CliError::no(text).named("not-found"));
        }
        Err(SendError::Journal(JournalError::UnderWay)) => {
            let text = "expected an operation that has a response or has stopped, found one that may still be tried: run its command again, or `hapax call resume --origin ORIGIN`, then repeat this";
            return Err(CliError::no(text).named("under-way"));
        }
        Err(error) => return Err(failure(&error)),
    }
    Ok(ExitCode::SUCCESS)
}

async fn build(client: ClientBuilder) -> Result<Client, CliError> {
    client.build().await.map_err(|error| match error {
        ClientError::Journal(error) => CliError::exit(69, "journal", with_flags(&error)),
        error => CliError::usage(with_flags(&error)),
    })
}

/// Reads the headers whose values are in the environment. Those of the request are `stored`.
fn with_credentials(
    client: ClientBuilder,
    args: &ServerArgs,
    stored: &[(String, String)],
) -> Result<ClientBuilder, CliError> {
    let client = match &args.ca {
        Some(ca) => client.root_certificates(ca),
        None => client,
    };
    if args.header_env.is_empty() {
        return Ok(client);
    }
    let mut credentials = Credentials::new();
    for (name, variable) in &args.header_env {
        let is_stored = stored.iter().any(|(stored, _)| stored.eq_ignore_ascii_case(name.as_str()));
        if is_stored || *name == args.key_header {
            return Err(CliError::usage(format!(
                "--header-env: expected a header that is neither in --header nor that of the key, found {name}: remove one of them"
            )));
        }
        let value = std::env::var(variable).map_err(|_| {
            CliError::usage(format!(
                "--header-env: expected a value in the variable {variable}, found none: export it"
            ))
        })?;
        let value = Some(value).filter(|value| !value.trim().is_empty());
        let value = value.and_then(|value| HeaderValue::try_from(value).ok()).ok_or_else(|| {
            CliError::usage(format!(
                "--header-env: expected the value of a header in the variable {variable}, found none, or a control character or line break: remove it"
            ))
        })?;
        credentials = credentials.header(name.clone(), value);
    }
    Ok(client.credentials(move |_| std::future::ready(Ok(credentials.clone()))))
}

/// Returns the origin of a URL.
fn origin(url: &str) -> Result<String, CliError> {
    let wrong = || {
        CliError::usage(
            "expected http://HOST/PATH or https://HOST/PATH, found another URL: correct it",
        )
    };
    let parsed: Uri = url.parse().map_err(|_| wrong())?;
    let (scheme, authority) = parsed.scheme().zip(parsed.authority()).ok_or_else(wrong)?;
    if authority.as_str().contains('@') {
        // Not repeated: it may be a password.
        return Err(CliError::usage(
            "expected a URL without a user, found one before `@`: pass credentials by --header-env",
        ));
    }
    Ok(format!("{scheme}://{authority}"))
}

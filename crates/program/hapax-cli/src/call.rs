//! `hapax call`.

mod args;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use hapax_client::{
    Client, ClientBuilder, ClientError, Credentials, FinishedOperation, Journal, JournalError,
    PendingOperation, PendingState, SendError, Sent,
};
use hapax_gateway::StoreUrl;
use http::{HeaderValue, Uri};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

pub(crate) use self::args::CallArgs;
use self::args::{CallCommand, JournalArgs, SendArgs, ServerArgs};
use crate::exit::{CliError, with_causes};
use crate::{keys, output, secrets};

/// Time for requests in progress when the program ends.
const DRAIN: Duration = Duration::from_secs(1);

/// The largest body of a response that the journal has.
const MAX_STORED: usize = 1 << 20;

/// First and longest interval at which `resume` checks whether all operations have a response or have stopped.
const LOOK: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// Part of the time for which `resume` reads the journal, at most: the operations need it too.
const READS: u32 = 10;

/// Names of the library in its errors, and those of the flags that a user of the program has.
const FLAGS: [(&str, &str); 5] = [
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
        Some(CallCommand::Resume { journal, origin, server, wait, json }) => {
            resume(&journal, &origin, &server, wait, json).await
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
        header,
        json,
        data,
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
    let opened = match journal_must_exist {
        true => existing(&journal).await?,
        false => open_or_create(&journal).await?,
    };
    let client = opened.server(origin, server.declaration());
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
    answered(end, &progress)
}

/// Returns the number of tries and the last error of an operation without a response.
async fn progress(client: &Client, name: &str) -> String {
    let pending = client.pending().await.unwrap_or_default();
    let Some(it) = pending.into_iter().find(|it| it.name == name) else { return String::new() };
    let error = it.last_error.map(|error| format!("; last error: {error}")).unwrap_or_default();
    format!(" after {} tries{error}", it.tries)
}

/// Prints a response, or returns the error of a call without one.
fn answered(end: Result<Sent, SendError>, progress: &str) -> Result<ExitCode, CliError> {
    let sent = end.map_err(|error| match error {
        SendError::Pending(_) => waiting(progress),
        error => failure(&error),
    })?;
    let mut stdout = std::io::stdout().lock();
    let body = match std::str::from_utf8(&sent.response.body) {
        Ok(text) if stdout.is_terminal() => Cow::Owned(output::block(text).into_bytes()),
        _ => Cow::Borrowed(&sent.response.body[..]),
    };
    match stdout.write_all(&body).and_then(|()| stdout.flush()) {
        // A reader that has gone needs no more: the exit code reports the status as well.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            return Err(unprinted(&sent, &error));
        }
        _ => {}
    }
    if sent.response.status.is_success() {
        return Ok(ExitCode::SUCCESS);
    }
    let text = format!(
        "expected a response with 2xx, found {}: if `hapax call list` shows it, it is stored, the same command prints it again, and `hapax call forget NAME` frees the name",
        sent.response.status
    );
    Err(CliError::exit(22, "answered", text))
}

/// Returns the error of a response that could not be printed.
fn unprinted(sent: &Sent, error: &std::io::Error) -> CliError {
    let then = if sent.stored {
        "it is in the journal; run the same command again"
    } else if sent.response.body.len() > MAX_STORED {
        "with more than 1 MiB it is not in the journal; look the result up at the server"
    } else {
        "it is not in the journal, because the server executed nothing; run the same command again, which sends again"
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
        "expected a response within --wait, found none yet{progress}: run the same command again, or `hapax call resume`; nothing is sent until then"
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
    let client = build(existing(journal).await?).await?;
    let pending = client.pending().await.map_err(|error| failure(&error))?;
    let finished = match only_pending {
        true => Vec::new(),
        false => client.finished().await.map_err(|error| failure(&error))?,
    };
    client.close(DRAIN).await;
    print(&match as_json {
        true => output::json(&listed_json(&pending, &finished))?,
        false => listed(&pending, &finished),
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn resume(
    journal: &JournalArgs,
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
    let mut client = existing(journal).await?;
    for url in origins {
        client = client.server(origin(url)?, server.declaration());
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
        true => output::json(&listed_json(&left, &[]))?,
        false => listed(&left, &[]),
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
    let client = build(existing(journal).await?).await?;
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
            let journal = journal.path()?;
            let text = format!(
                "expected {wanted} in {}, found none: `hapax call list` has all",
                journal.display()
            );
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

/// Opens the journal that flags select. A command that sends nothing creates none.
async fn existing(args: &JournalArgs) -> Result<ClientBuilder, CliError> {
    let path = args.path()?;
    warn_of_secret(&path);
    let journal = Journal::existing_file_within(path, args.lock_wait).await;
    Ok(Client::open(journal.map_err(|error| unopened(&error))?))
}

/// Opens the journal that flags select, or creates it and says so.
async fn open_or_create(args: &JournalArgs) -> Result<ClientBuilder, CliError> {
    let path = args.path_to_create()?;
    warn_of_secret(&path);
    let journal = Journal::file_within(&path, args.lock_wait).await;
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

/// Warns if other users can read the secret of the journal at `path`.
fn warn_of_secret(path: &Path) {
    if let Some(secret) = StoreUrl::File(path.to_owned()).secret_file() {
        secrets::warn_if_open(&secret);
    }
}

fn unopened(error: &JournalError) -> CliError {
    CliError::exit(69, "journal", with_flags(error))
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

fn listed(pending: &[PendingOperation], finished: &[FinishedOperation]) -> String {
    let mut text = String::new();
    if pending.is_empty() && finished.is_empty() {
        text.push_str("no operations\n");
        return text;
    }
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{:<20} {:>5}  OPERATION", "STATE", "TRIES");
    for it in pending {
        let (state, _) = state_and_detail(&it.state);
        let id = it.id.to_string();
        let name = if it.name.is_empty() { &id } else { &it.name };
        let _ = writeln!(text, "{state:<20} {:>5}  {name}  {} {}", it.tries, it.method, it.url);
    }
    for it in finished {
        let status = it.status.as_u16();
        let _ =
            writeln!(text, "{status:<20} {:>5}  {}  {} {}", it.tries, it.name, it.method, it.url);
    }
    text
}

/// Returns the word for a state, and a sentence about it.
fn state_and_detail(state: &PendingState) -> (&str, Option<&String>) {
    match state {
        PendingState::Stopped { reason, detail } => (reason, Some(detail)),
        PendingState::Unreadable { detail } => ("unreadable", Some(detail)),
        _ => ("pending", None),
    }
}

fn listed_json(pending: &[PendingOperation], finished: &[FinishedOperation]) -> Value {
    let pending = pending.iter().map(|it| {
        let (state, detail) = state_and_detail(&it.state);
        json!({
            "operation": it.id.to_string(), "name": it.name, "method": it.method, "url": it.url, "state": state, "detail": detail,
            "tries": it.tries, "may_have_happened": it.may_have_happened, "last_error": it.last_error,
        })
    });
    let finished = finished.iter().map(|it| {
        json!({
            "name": it.name, "method": it.method, "url": it.url, "status": it.status.as_u16(),
            "tries": it.tries,
        })
    });
    json!({ "pending": pending.collect::<Vec<_>>(), "finished": finished.collect::<Vec<_>>() })
}

//! A client process: it resumes its journal, sends its operations, and records their answers.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, Credentials, Journal, SendError, Sent, Server};
use hapax_core::Secret;
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::SeededEntropy;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::{CallArgs, CallsError, PlantedCallBug, ServerKind, failed, name};

/// Operations that are sent at once.
const AT_ONCE: usize = 16;

/// One in this number of operations is sent by two callers of a process at once.
const TWICE_IN: u64 = 10;

/// Lease of the journal, on which other processes continue operations of a killed one.
const LEASE: Duration = Duration::from_secs(2);

/// Time for which the server may be silent: longer than the gateway waits, and shorter than a server in
/// Stripe's manner stalls.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for which a journal may be in use by a process that was killed.
const IN_USE: Duration = Duration::from_secs(10);

/// Tries under new keys, of clients with that bug.
const NEW_KEYS: u64 = 100;

/// Runs a client until it has sent all of its operations.
///
/// # Errors
/// [`CallsError`] if the journal or the file of answers cannot be opened, or the journal fails.
pub async fn call(args: CallArgs) -> Result<(), CallsError> {
    let answers = OpenOptions::new().create(true).append(true).open(&args.answers);
    let answers = Arc::new(answers.map_err(failed("opening the answers"))?);
    let client = open(&args).await?;
    client.resume().await.map_err(failed("resuming"))?;
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    let mut sends = JoinSet::new();
    for name in order(&args) {
        let permit = Arc::clone(&permits).acquire_owned().await.map_err(failed("waiting"))?;
        let (client, args, answers) = (client.clone(), args.clone(), Arc::clone(&answers));
        sends.spawn(async move {
            let end = send(&client, &args, &name).await;
            drop(permit);
            record(&answers, &name, end)
        });
    }
    while let Some(recorded) = sends.join_next().await {
        recorded.map_err(failed("sending"))?.map_err(failed("recording an answer"))?;
    }
    let pending = client.pending().await.map_err(failed("listing"))?.len();
    write(&answers, &format!("pending {pending}")).map_err(failed("recording"))?;
    client.close(Duration::from_secs(5)).await;
    Ok(())
}

async fn open(args: &CallArgs) -> Result<Client, CallsError> {
    let journal = if args.journal.starts_with("postgres:") {
        let options: PostgresOptions =
            args.journal.parse().map_err(failed("reading the URL of the journal"))?;
        let store = PostgresStore::connect(options.secret(Secret::new([7; 32]))).await;
        let journal = Journal::over(store.map_err(failed("connecting to the journal"))?);
        journal.map(|journal| journal.namespace("callers"))
    } else {
        if args.plant == Some(PlantedCallBug::ForgetJournal) {
            for path in [args.journal.clone(), format!("{}.secret", args.journal)] {
                let _ = std::fs::remove_file(Path::new(&path));
            }
        }
        Journal::file_within(&args.journal, IN_USE).await
    };
    let server = match args.kind {
        ServerKind::Hapax => Server::hapax(),
        ServerKind::Stripe => Server::stripe(),
    };
    Client::open(journal.map_err(failed("opening the journal"))?)
        .server(&args.server, server)
        .credentials(|_| async { Ok(Credentials::bearer("callers")?) })
        .lease(LEASE)
        .idle_timeout(IDLE_TIMEOUT)
        .build()
        .await
        .map_err(failed("building the client"))
}

/// Returns the names that a client sends, in an order of its own.
fn order(args: &CallArgs) -> Vec<String> {
    let dice = SeededEntropy::new(args.seed ^ (args.first << 32));
    let mut numbers = Vec::new();
    for number in (args.first % args.share..args.operations).step_by(args.share as usize) {
        numbers.push(number);
    }
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, dice.below(last as u64 + 1) as usize);
    }
    let copies = |number: u64| if number.is_multiple_of(TWICE_IN) { 2 } else { 1 };
    numbers
        .into_iter()
        .flat_map(|number| std::iter::repeat_n(name(number), copies(number)))
        .collect()
}

async fn send(client: &Client, args: &CallArgs, name: &str) -> Result<Sent, SendError> {
    let within = Duration::from_millis(args.within);
    let url = format!("{}/payments", args.server);
    if args.plant != Some(PlantedCallBug::NewKeys) {
        let post = client.post(url).operation(name).body(name.to_owned());
        return post.within(within).wait(within * 2).send().await;
    }
    let mut tried = 0;
    loop {
        // Another process has other names too.
        let new = format!("{name}/{}-{tried}", std::process::id());
        let post = client.post(&url).operation(new).body(name.to_owned());
        let end = post.within(Duration::from_millis(50)).wait(within).send().await;
        tried += 1;
        if end.is_ok() || tried == NEW_KEYS {
            return end;
        }
    }
}

/// Appends the end of a send: `answered NAME STATUS BODY`, or `open NAME REASON`.
fn record(answers: &File, name: &str, end: Result<Sent, SendError>) -> std::io::Result<()> {
    match end {
        Ok(sent) => {
            let body = String::from_utf8_lossy(&sent.response.body);
            write(answers, &format!("answered {name} {} {body}", sent.response.status.as_u16()))
        }
        Err(error) => {
            write(answers, &format!("open {name} {}", error.to_string().replace('\n', " ")))
        }
    }
}

/// Writes a line at once: another one cannot be inside of it.
fn write(mut answers: &File, line: &str) -> std::io::Result<()> {
    answers.write_all(format!("{line}\n").as_bytes())
}

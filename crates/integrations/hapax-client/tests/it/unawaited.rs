//! Operations for whose end no caller waits: they are listed, or an event has their name.

use std::sync::Arc;
use std::time::Duration;

use hapax_client::{
    Client, Credentials, CredentialsError, Journal, PendingOperation, PendingState, SendError,
    Server,
};
use hapax_core::MemoryStore;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::subscriber::DefaultGuard;

use crate::bank::{Act, Bank, answer};
use crate::secrets::Written;
use crate::world::{LONG, client, open, store};

/// Collects the log of this thread; the runtimes of these tests have one.
fn logged() -> (Written, DefaultGuard) {
    let log = Written::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    (log, tracing::subscriber::set_default(subscriber))
}

/// Waits until a condition is true.
async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !condition().await {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("not before the time-out: {what}"));
}

async fn only(client: &Client) -> PendingOperation {
    let mut pending = client.pending().await.unwrap();
    assert_eq!(pending.len(), 1, "{pending:?}");
    pending.remove(0)
}

fn reason(pending: &PendingOperation) -> &str {
    match &pending.state {
        PendingState::Stopped { reason, .. } => reason,
        _ => "none",
    }
}

async fn with_token(
    store: &Arc<MemoryStore>,
    bank: &Bank,
    token: Result<&'static str, &'static str>,
) -> Client {
    let client = Client::open(Journal::over(Arc::clone(store)).unwrap());
    let client = client.server(bank.origin(), Server::hapax()).credentials(move |_| async move {
        Ok(Credentials::bearer(token.map_err(CredentialsError::from)?)?)
    });
    client.build().await.unwrap()
}

#[tokio::test]
async fn a_resumed_operation_that_was_never_sent_and_is_rejected_stays_pending() {
    let (log, _logging) = logged();
    let (bank, store) = (Bank::start().await, store());
    let first = with_token(&store, &bank, Err("the vault is sealed")).await;
    let never = first.post(bank.url("/")).operation("invoice/17");
    let end = never.within(Duration::from_millis(50)).send().await;
    assert!(matches!(end, Err(SendError::NotSent(_))), "{end:?}");
    first.close(LONG).await;

    for status in [403, 413] {
        bank.act([Act::Answer(answer(status, &[], "no"))]);
        let second = with_token(&store, &bank, Ok("one")).await;
        assert_eq!(second.resume().await.unwrap().pending, 1);
        until("it stops", async || {
            reason(&only(&second).await) == "rejected"
                && log.text().contains("has stopped without a response")
        })
        .await;
        let pending = only(&second).await;
        assert!(!pending.may_have_happened && pending.name == "invoice/17", "{pending:?}");
        let PendingState::Stopped { detail, .. } = &pending.state else { panic!("{pending:?}") };
        assert!(detail.contains(&status.to_string()), "{detail}");
        assert!(second.finished().await.unwrap().is_empty());
        assert_eq!(second.census().await.unwrap().not_sent, 1);
        second.close(LONG).await;
    }
    // The event has the name of the operation.
    let event = |line: &&str| line.contains("WARN") && line.contains("name=\"invoice/17\"");
    assert!(log.text().lines().any(|line| event(&line)), "{}", log.text());

    let third = with_token(&store, &bank, Ok("one")).await;
    assert_eq!(third.resume().await.unwrap().pending, 1);
    until("it has a response", async || third.finished().await.unwrap().len() == 1).await;
    assert_eq!((bank.arrived().len(), bank.effects()), (3, vec![1]));
}

/// A client whose callback waits for a permit.
async fn gated(bank: &Bank) -> (Client, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let client = open(bank, Server::hapax()).credentials(move |_| {
        let gate = Arc::clone(&opened);
        async move {
            gate.acquire().await?.forget();
            Ok(Credentials::bearer("one")?)
        }
    });
    (client.build().await.unwrap(), gate)
}

#[tokio::test]
async fn a_rejected_operation_whose_caller_has_left_stays_pending_and_one_that_waits_gets_it() {
    let bank = Bank::start().await;
    let (client, gate) = gated(&bank).await;
    let send = |wait| client.post(bank.url("/")).operation("n").wait(wait).send();
    let end = send(Duration::ZERO).await;
    assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    drop(end);
    bank.act([Act::Answer(answer(403, &[], "no"))]);
    gate.add_permits(1);
    until("it stops", async || reason(&only(&client).await) == "rejected").await;

    bank.act([Act::Answer(answer(403, &[], "no"))]);
    gate.add_permits(1);
    let sent = send(LONG).await.unwrap();
    assert_eq!((sent.response.status.as_u16(), &sent.response.body[..]), (403, &b"no"[..]));
    assert!(!sent.stored);
    assert!(client.pending().await.unwrap().is_empty());
    gate.add_permits(1);
    let sent = send(LONG).await.unwrap();
    assert!(sent.response.status == 201 && sent.stored);
}

#[tokio::test]
async fn a_rejection_whose_body_is_too_large_is_not_returned_without_it() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    bank.act([Act::Answer(answer(413, &[], &"x".repeat((1 << 20) + 1)))]);
    let end = client.post(bank.url("/")).operation("n").send().await;
    assert!(matches!(&end, Err(SendError::NotSent(text)) if text.contains("413")), "{end:?}");
    let pending = only(&client).await;
    assert!(reason(&pending) == "rejected" && !pending.may_have_happened, "{pending:?}");
}

#[tokio::test]
async fn a_response_after_the_caller_has_left_is_one_event_with_the_name() {
    let (log, _logging) = logged();
    let bank = Bank::start().await;
    let (client, gate) = gated(&bank).await;
    let send = |name: &str| client.post(bank.url("/")).operation(name).wait(Duration::ZERO).send();
    let (left, kept) = (send("left").await, send("kept").await);
    assert!(matches!(left, Err(SendError::Pending(_))), "{left:?}");
    drop(left);
    let Err(SendError::Pending(handle)) = kept else { panic!("{kept:?}") };
    gate.add_permits(2);
    assert_eq!(handle.wait(LONG).await.unwrap().response.status, 201);
    until("it has a response", async || client.finished().await.unwrap().len() == 2).await;
    let events = |name: &str| {
        let name = format!("name=\"{name}\"");
        let text = log.text();
        text.lines().filter(|line| line.contains("no caller waits") && line.contains(&name)).count()
    };
    until("it is reported", async || events("left") > 0).await;
    assert!(client.close(LONG).await);
    assert_eq!((events("left"), events("kept")), (1, 0), "{}", log.text());
}

//! Servers that accept an operation by 202, and show its state in another resource.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::IntoResponse;
use hapax_client::{Client, ClientBuilder, Credentials, Journal, PendingState, SendError, Server};
use hapax_core::{Idempotency, MemoryStore};
use hapax_saga::routes::{SagaOutcome, SagaRoutes};
use hapax_saga::{Saga, Sagas, StepContext, StepError};
use serde_json::json;
use tokio::sync::watch;

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, client, open, process, store};

fn accepted(location: &str, retry_after: u32) -> Act {
    let lines = [format!("location: {location}"), format!("retry-after: {retry_after}")];
    Act::Execute(answer(202, &[&lines[0], &lines[1]], "accepted"))
}

fn shown(status: u16, headers: &[&str], body: &str) -> Act {
    Act::Answer(answer(status, headers, body))
}

fn lines(bank: &Bank) -> Vec<String> {
    let arrived = bank.arrived().into_iter();
    arrived.map(|it| it.line.trim_end_matches(" HTTP/1.1").to_owned()).collect()
}

fn with_token(client: ClientBuilder) -> ClientBuilder {
    client.credentials(|_| async { Ok(Credentials::bearer("hush")?) })
}

#[tokio::test]
async fn the_status_resource_is_read_until_it_responds_otherwise_than_202() {
    let bank = Bank::start().await;
    bank.act([
        accepted("/status/1?a=b#end", 0),
        shown(202, &["retry-after: 1"], ""),
        shown(503, &[], "busy"),
        Act::CutAnswer(0),
        shown(200, &["x-end: yes"], "settled"),
    ]);
    let client = with_token(open(&bank, Server::plain().follows_accepted())).build().await.unwrap();
    let post = || {
        let post = client.post(bank.url("/payments")).operation("n").header("x-tenant", "t");
        post.json(&json!({"cents": 1})).unwrap().wait(LONG).send()
    };
    let begun = tokio::time::Instant::now();
    let sent = post().await.unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1), "not before Retry-After");
    assert_eq!((sent.response.status.as_u16(), &sent.response.body[..]), (200, &b"settled"[..]));
    assert_eq!(sent.response.headers["x-end"], "yes");
    let read = "GET /status/1?a=b";
    assert_eq!(lines(&bank), ["POST /payments", read, read, read, read]);
    let read = &bank.arrived()[1];
    assert_eq!(read.header("authorization"), Some("Bearer hush"));
    assert_eq!(read.header("x-tenant"), Some("t"));
    for absent in ["idempotency-key", "content-type", "content-length"] {
        assert_eq!(read.header(absent), None, "{absent}");
    }
    assert_eq!(post().await.unwrap().response, sent.response, "it is kept");
    assert_eq!(bank.arrived().len(), 5);
}

#[tokio::test]
async fn a_status_resource_at_another_server_is_not_read() {
    let (bank, other) = (Bank::start().await, Bank::start().await);
    let server = Server::hapax().follows_accepted();
    // It is declared too, and still another server.
    let client = with_token(open(&bank, server.clone()).server(other.origin(), server));
    let client = client.build().await.unwrap();
    for (number, location) in
        [other.url("/status"), format!("//{}/status", other.address)].into_iter().enumerate()
    {
        bank.act([accepted(&location, 0)]);
        let post = client.post(bank.url("/")).operation(format!("n/{number}"));
        assert_eq!(post.send().await.unwrap().response.status, 202);
    }
    bank.act([Act::Execute(answer(202, &[], "no location"))]);
    let post = client.post(bank.url("/")).operation("n");
    assert_eq!(post.send().await.unwrap().response.status, 202);
    assert_eq!((bank.arrived().len(), other.connections()), (3, 0));
}

#[tokio::test]
async fn a_202_is_the_response_of_a_server_that_is_not_declared_to_accept() {
    let bank = Bank::start().await;
    bank.act([accepted("/status/1", 0)]);
    let client = client(&bank, Server::hapax()).await;
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.arrived().len()), (202, 1));
}

#[tokio::test]
async fn a_redirect_of_the_status_resource_is_the_response() {
    let (bank, other) = (Bank::start().await, Bank::start().await);
    let location = format!("location: {}", other.url("/payments/1"));
    bank.act([accepted("/status/1", 0), shown(303, &[&location], "")]);
    let client = with_token(open(&bank, Server::plain().follows_accepted())).build().await.unwrap();
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!(sent.response.status, 303);
    assert_eq!((bank.arrived().len(), other.connections()), (2, 0));
}

#[tokio::test]
async fn an_accepted_operation_that_does_not_end_is_unknown_after_its_time() {
    let bank = Bank::start().await;
    bank.act([accepted("/status/1", 0)]);
    bank.act(std::iter::repeat_n(shown(202, &["retry-after: 0"], ""), 100));
    let client = client(&bank, Server::hapax().follows_accepted()).await;
    let post = |within| client.post(bank.url("/")).operation("n").within(within).send();
    let end = post(Duration::from_secs(2)).await;
    let Err(SendError::Unknown(text)) = end else { panic!("{end:?}") };
    assert!(text.contains("a response within 2s") && text.contains("accepted"), "{text}");
    let reads = bank.arrived().len() - 1;
    assert!((1..=20).contains(&reads), "{reads}");
    // The request, and its end: reading is no try.
    assert_eq!(client.pending().await.unwrap()[0].tries, 2);
    // The next call goes on reading.
    assert!(matches!(post(Duration::from_millis(500)).await, Err(SendError::Unknown(_))));
    assert_eq!(lines(&bank).iter().filter(|line| line.starts_with("POST")).count(), 1);
}

/// Lets a process die once the server has got `before` requests, and another one continue. Returns the
/// requests of both.
fn killed_after(before: usize, acts: impl IntoIterator<Item = Act>) -> Vec<String> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let bank = runtime.block_on(Bank::start());
    bank.act(acts);
    let store = store();
    let open = || {
        let journal = Journal::over(Arc::clone(&store)).unwrap();
        let server = Server::without_keys().follows_accepted();
        let server = if before == 1 { Server::plain().follows_accepted() } else { server };
        Client::open(journal).server(bank.origin(), server).lease(Duration::from_secs(1)).build()
    };
    process(async || {
        let client = open().await.unwrap();
        tokio::spawn(client.post(bank.url("/")).operation("n").send());
        bank.wait_for(before).await;
    });
    process(async || {
        let client = open().await.unwrap();
        let sent = client.post(bank.url("/")).operation("n").wait(LONG).send().await.unwrap();
        assert_eq!(&sent.response.body[..], b"settled");
    });
    assert_eq!(bank.effects(), [1]);
    lines(&bank)
}

#[test]
fn an_accepted_operation_whose_process_died_is_accepted_again_under_its_key() {
    let acts = [Act::Silent, accepted("/status/1", 0), shown(200, &[], "settled")];
    assert_eq!(killed_after(1, acts), ["POST /", "POST /", "GET /status/1"]);
}

#[tokio::test]
async fn an_accepted_operation_whose_process_ended_is_read_without_another_request() {
    let (bank, store) = (Bank::start().await, store());
    bank.act([accepted("/status/1", 2), shown(200, &[], "settled")]);
    let open = || {
        let journal = Journal::over(Arc::clone(&store)).unwrap();
        // It honors no keys: a second request would be a second effect.
        let server = Server::without_keys().follows_accepted();
        Client::open(journal).server(bank.origin(), server).build()
    };
    let client = open().await.unwrap();
    let post = client.post(bank.url("/")).operation("n").wait(Duration::from_millis(1));
    let end = post.send().await;
    assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    bank.wait_for(1).await;
    assert!(client.close(LONG).await);
    let client = open().await.unwrap();
    let sent = client.post(bank.url("/")).operation("n").wait(LONG).send().await.unwrap();
    assert_eq!(&sent.response.body[..], b"settled");
    assert_eq!(lines(&bank), ["POST /", "GET /status/1"]);
    assert_eq!(bank.effects(), [1]);
}

#[test]
fn a_status_resource_that_was_read_is_read_again_after_a_crash_without_another_request() {
    // It honors no keys: a second request would be a second effect.
    let acts = [accepted("/status/1", 0), Act::Silent, shown(200, &[], "settled")];
    assert_eq!(killed_after(2, acts), ["POST /", "GET /status/1", "GET /status/1"]);
}

#[tokio::test]
async fn a_status_resource_is_read_when_the_key_is_too_old_and_a_request_is_not_sent() {
    // The last age is 1 s.
    let server = |server: Server| server.retention(Duration::from_secs(61)).follows_accepted();
    for (server, end) in [(Server::plain(), "settled"), (Server::hapax(), "settled")]
        .map(|(it, end)| (server(it), end))
    {
        let bank = Bank::start().await;
        bank.act([accepted("/status/1", 2), shown(200, &[], end)]);
        let client = client(&bank, server).await;
        let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
        assert_eq!(&sent.response.body[..], end.as_bytes());
    }
    let bank = Bank::start().await;
    let done = r#"{"state":"done","answer":{"status":201}}"#;
    bank.act([accepted("/status/1", 2), shown(200, &[], done)]);
    let client = client(&bank, server(Server::hapax())).await;
    let end = client.post(bank.url("/")).operation("n").send().await;
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    assert_eq!(lines(&bank), ["POST /", "GET /status/1"]);
    let pending = client.pending().await.unwrap();
    let PendingState::Stopped { detail, .. } = &pending[0].state else { panic!("{pending:?}") };
    assert!(detail.contains("it has ended"), "{detail}");
}

/// Charges an order once the gate is open.
async fn charge(
    at: StepContext<watch::Sender<bool>>,
    cents: u64,
) -> Result<u64, StepError<String>> {
    let _ = at.subscribe().wait_for(|is_open| *is_open).await;
    if cents == 13 { Err(StepError::Rejected("declined".into())) } else { Ok(cents) }
}

#[tokio::test]
async fn the_response_of_a_saga_is_got_whole_once_its_status_resource_shows_the_end() {
    let gate = watch::Sender::new(false);
    let mut order = Saga::define("order", 1, gate.clone());
    let charge = order.again("charge", charge).no_undo();
    let order = order.flow(move |op, cents: u64| async move { op.run(charge, cents).await });
    let order = order.unwrap();
    let engine = Idempotency::builder(MemoryStore::default()).build().unwrap();
    let sagas = Sagas::builder(engine).register(&order).build().unwrap();
    let answer = |end| match end {
        SagaOutcome::Done(cents) => {
            (StatusCode::CREATED, [("x-charge", "ch_1")], format!("{cents} cents")).into_response()
        }
        SagaOutcome::Undone(error) => (StatusCode::CONFLICT, error).into_response(),
        SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
    };
    let routes = SagaRoutes::builder(sagas.clone(), order, "/orders", answer);
    let app: axum::Router = routes.default_wait(Duration::ZERO).build().unwrap().router();
    let reads = watch::Sender::new(0_u32);
    let counted = reads.clone();
    let app = app.layer(axum::middleware::map_request(move |request: axum::extract::Request| {
        counted.send_modify(|reads| *reads += u32::from(request.method() == "GET"));
        std::future::ready(request)
    }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });

    let server = Server::hapax().follows_accepted();
    let client = Client::open(crate::world::journal()).server(&*origin, server);
    let client = with_token(client).build().await.unwrap();
    let post = |name: &str, cents: u64| {
        let post = client.post(format!("{origin}/orders")).operation(name);
        post.json(&cents).unwrap().wait(LONG).send()
    };
    let (done, undone) = (tokio::spawn(post("done", 1999)), tokio::spawn(post("undone", 13)));
    // Both are accepted, and not ended.
    reads.subscribe().wait_for(|reads| *reads >= 4).await.unwrap();
    assert!(!done.is_finished() && !undone.is_finished());
    gate.send_replace(true);
    let (done, undone) = (done.await.unwrap().unwrap(), undone.await.unwrap().unwrap());
    assert_eq!((done.response.status.as_u16(), &done.response.body[..]), (201, &b"1999 cents"[..]));
    assert_eq!(done.response.headers["x-charge"], "ch_1");
    assert_eq!(
        (undone.response.status.as_u16(), &undone.response.body[..]),
        (409, &b"declined"[..])
    );
    assert!(done.replayed, "the server replayed it");
}

//! Keys on the wire, after the declaration of their server has changed.

use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, ClientBuilder, Journal, PendingState, SendError, Server};
use hapax_core::MemoryStore;
use http::HeaderName;

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, store};

fn open(store: &Arc<MemoryStore>, origin: String, server: Server) -> ClientBuilder {
    Client::open(Journal::over(Arc::clone(store)).unwrap()).server(origin, server)
}

async fn send(client: &Client, bank: &Bank) -> Result<u16, SendError> {
    let sent = client.post(bank.url("/")).operation("n").send().await?;
    Ok(sent.response.status.as_u16())
}

/// Lets a process send under one declaration to a server that executes and gives no answer; then one under
/// another declaration, which resumes if `resumes`; then one under the first declaration.
async fn redeclare(first: &Server, other: &Server, resumes: bool) {
    let bank = Bank::start().await;
    let has_keys = *first != Server::without_keys();
    bank.act([match has_keys {
        true => Act::Execute(answer(503, &["retry-after: 1"], "")),
        false => Act::CutAnswer(10),
    }]);
    let store = store();
    let client = open(&store, bank.origin(), first.clone()).build().await.unwrap();
    let call = tokio::spawn(client.post(bank.url("/")).operation("n").send());
    bank.wait_for(1).await;
    assert!(client.close(LONG).await);
    call.await.unwrap().expect_err("there was no answer");

    let client = open(&store, bank.origin(), other.clone()).build().await.unwrap();
    if resumes {
        client.resume().await.unwrap();
    }
    for _ in 0..2 {
        let end = send(&client, &bank).await;
        assert!(matches!(end, Err(SendError::KeyChanged)), "{first:?}, {other:?}: {end:?}");
    }
    let pending = client.pending().await.unwrap();
    let PendingState::Stopped { reason, .. } = &pending[0].state else { panic!("{pending:?}") };
    assert_eq!((&**reason, pending[0].may_have_happened), ("key-changed", true));
    assert!(client.close(LONG).await);
    assert_eq!((bank.arrived().len(), bank.effects()), (1, vec![1]), "{first:?}, {other:?}");

    let client = open(&store, bank.origin(), first.clone()).build().await.unwrap();
    match send(&client, &bank).await {
        Ok(201) if has_keys => {}
        Err(SendError::Unknown(_)) if !has_keys => {}
        end => panic!("{first:?}: {end:?}"),
    }
    assert_eq!((bank.arrived().len(), bank.effects()), (1 + usize::from(has_keys), vec![1]));
}

#[tokio::test]
async fn a_key_is_not_sent_after_a_try_without_one_that_may_have_arrived() {
    for resumes in [false, true] {
        redeclare(&Server::without_keys(), &Server::hapax(), resumes).await;
    }
}

#[tokio::test]
async fn nothing_is_sent_without_a_key_after_a_try_with_one_that_may_have_arrived() {
    for resumes in [false, true] {
        redeclare(&Server::hapax(), &Server::without_keys(), resumes).await;
    }
}

#[tokio::test]
async fn another_form_or_header_of_a_key_is_not_sent_after_a_try_that_may_have_arrived() {
    let elsewhere = Server::plain().key_header(HeaderName::from_static("x-idempotency-key"));
    for other in [Server::stripe(), elsewhere] {
        for resumes in [false, true] {
            redeclare(&Server::plain(), &other, resumes).await;
        }
    }
}

#[tokio::test]
async fn another_declaration_is_sent_if_no_try_may_have_arrived() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let (store, origin) = (store(), format!("http://{address}"));
    let client = open(&store, origin.clone(), Server::without_keys()).build().await.unwrap();
    let post = client.post(format!("{origin}/")).operation("n");
    let end = post.within(Duration::from_millis(400)).send().await;
    assert!(matches!(end, Err(SendError::NotSent(_))), "{end:?}");
    assert!(client.close(LONG).await);
    let bank = Bank::serve(tokio::net::TcpListener::bind(address).await.unwrap());
    let client = open(&store, origin, Server::stripe()).build().await.unwrap();
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
    let key = client.key("n").unwrap();
    assert_eq!(bank.arrived()[0].header("idempotency-key"), Some(key.as_str()));
}

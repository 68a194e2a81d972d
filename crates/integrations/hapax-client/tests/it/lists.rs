//! Lists of operations, and what operators do with them.

use std::time::Duration;

use hapax_client::{JournalError, PendingState, SendError, Server};

use crate::bank::{Act, Bank, answer};
use crate::world::client;

#[tokio::test]
async fn finished_and_pending_operations_are_listed() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    for number in 0..600 {
        let post = client.post(bank.url("/done")).operation(format!("done/{number}"));
        post.send().await.unwrap();
    }
    bank.act([Act::Answer(answer(503, &["retry-after: 100"], ""))]);
    let post = client.post(bank.url("/later")).operation("later").wait(Duration::from_millis(300));
    assert!(matches!(post.send().await, Err(SendError::Pending(_))));
    let mut finished = client.finished().await.unwrap();
    finished.sort_by_key(|it| it.name.trim_start_matches("done/").parse::<u32>().unwrap());
    assert_eq!(finished.len(), 600);
    let last = &finished[599];
    assert_eq!((&*last.name, &*last.method, last.status.as_u16()), ("done/599", "POST", 201));
    assert_eq!((&*last.url, last.tries), (&*bank.url("/done"), 1));
    let pending = client.pending().await.unwrap();
    assert_eq!(pending.len(), 1);
    assert_eq!((&*pending[0].name, pending[0].tries), ("later", 1));
    assert_eq!(pending[0].state, PendingState::UnderWay);
    assert!(pending[0].may_have_happened);
    let end = client.acknowledge("later").await;
    assert!(matches!(end, Err(SendError::Journal(JournalError::UnderWay))), "{end:?}");
    let end = client.forget("later").await;
    assert!(matches!(end, Err(SendError::Journal(JournalError::UnderWay))), "{end:?}");
}

#[tokio::test]
async fn lists_have_keys_operation_ids_of_the_server_and_times_of_tries() {
    let bank = Bank::start().await;
    let id = "idempotency-operation-id: 4bf9";
    bank.act([
        Act::Execute(answer(201, &[id], "paid")),
        Act::Answer(answer(409, &["retry-after: 100", id], "")),
    ]);
    let client = client(&bank, Server::hapax()).await;
    let post = |name: &str| client.post(bank.url("/")).operation(name);
    post("done").send().await.unwrap();
    let later = post("later").wait(Duration::ZERO).send().await;
    assert!(matches!(later, Err(SendError::Pending(_))));
    let done = client.finished().await.unwrap().remove(0);
    assert_eq!(
        (Some(done.key), done.server_operation.as_deref()),
        (client.key("done"), Some("4bf9"))
    );
    assert!(done.begun.is_some() && done.begun <= done.last_try, "{:?}", done.last_try);
    let later = loop {
        // Once the end of the try is saved.
        let pending = client.pending().await.unwrap().remove(0);
        if pending.last_error.is_some() {
            break pending;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(
        (Some(later.key), later.server_operation.as_deref()),
        (client.key("later"), Some("4bf9"))
    );
    assert!(later.begun >= done.begun && later.begun <= later.last_try, "{:?}", later.begun);
}

#[tokio::test]
async fn an_acknowledged_operation_is_not_pending_and_its_name_stays_taken() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10)]);
    let client = client(&bank, Server::without_keys()).await;
    let send = || client.post(bank.url("/")).operation("n").send();
    assert!(matches!(send().await, Err(SendError::Unknown(_))));
    assert!(client.acknowledge("n").await.unwrap());
    assert!(client.pending().await.unwrap().is_empty());
    assert!(!client.acknowledge("n").await.unwrap(), "there is none any more");
    let end = send().await;
    assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
    let end = client.post(bank.url("/other")).operation("n").send().await;
    assert!(matches!(end, Err(SendError::Reused)), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
    assert!(client.forget("n").await.unwrap());
    assert_eq!(send().await.unwrap().response.status, 201);
    assert_eq!(bank.arrived().len(), 2);
}

#[tokio::test]
async fn a_forgotten_operation_is_sent_anew_under_its_key() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let send = || client.post(bank.url("/")).operation("n").send();
    send().await.unwrap();
    assert!(client.forget("n").await.unwrap());
    assert!(!client.forget("n").await.unwrap());
    assert!(client.finished().await.unwrap().is_empty());
    assert!(send().await.unwrap().replayed, "the server has not forgotten it");
    assert_eq!((bank.arrived().len(), bank.effects()), (2, vec![1]));
}

#[tokio::test]
async fn an_operation_without_a_response_is_forgotten_in_one_call() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10)]);
    let client = client(&bank, Server::without_keys()).await;
    let send = || client.post(bank.url("/")).operation("n").send();
    assert!(matches!(send().await, Err(SendError::Unknown(_))));
    assert!(client.forget("n").await.unwrap());
    assert!(client.pending().await.unwrap().is_empty());
    assert_eq!(send().await.unwrap().response.status, 201);
}

//! Journals that several processes share, on servers.

use std::time::Duration;

use futures_util::future::join_all;
use hapax_client::{Client, Journal, SendError, Server};
use hapax_core::Inspect;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::bank::Bank;
use crate::world::{LONG, process};

const OPERATIONS: usize = 40;

/// A server of a store, to which each process connects.
pub(crate) trait SharedJournal: Sync {
    type Store: Inspect;

    async fn connect(&self) -> Self::Store;
}

async fn open(journal: &impl SharedJournal, bank: &Bank) -> Client {
    let client = Client::open(Journal::over(journal.connect().await).unwrap().namespace(""));
    let client = client.server(bank.origin(), Server::hapax());
    client.lease(Duration::from_secs(1)).build().await.unwrap()
}

/// Sends all operations until each has an answer.
async fn send_all(client: &Client, bank: &Bank) {
    let sends = (0..OPERATIONS).map(async |number| {
        let post = client.post(bank.url("/")).operation(format!("n/{number}"));
        let sent = post.body(vec![b'x'; number]).wait(LONG).send().await.unwrap();
        assert_eq!(sent.response.status, 201, "{number}");
        assert_eq!(&sent.response.body[..], format!("paid {number}").as_bytes());
    });
    join_all(sends).await;
}

/// Checks that processes which share a journal, one of which is killed, have one effect and one answer
/// for each name. The runtime has the server of the store.
pub(crate) fn processes_have_one_effect_and_one_response(
    runtime: &Runtime,
    journal: &impl SharedJournal,
) {
    let bank = runtime.block_on(Bank::start());
    bank.storm(23);
    process(async || {
        let client = open(journal, &bank).await;
        let _ = timeout(Duration::from_millis(300), send_all(&client, &bank)).await;
    });
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| process(async || send_all(&open(journal, &bank).await, &bank).await));
        }
    });
    assert_eq!(bank.effects(), [1; OPERATIONS]);
    process(async || {
        let client = open(journal, &bank).await;
        assert_eq!(client.resume().await.unwrap().pending, 0);
        assert_eq!(client.finished().await.unwrap().len(), OPERATIONS);
        let before = bank.arrived().len();
        let other = client.post(bank.url("/")).operation("n/1").body("another");
        assert!(matches!(other.send().await, Err(SendError::Reused)));
        send_all(&client, &bank).await;
        assert_eq!(bank.arrived().len(), before, "every answer is kept");
    });
}

//! `Idempotency-Expires`: the server's own word about its retention.

use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, Journal, SendError, Server};
use hapax_core::{Clock, SystemClock};

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, client, process, store};

/// A failure that is tried again, with a key that expires in some seconds.
fn failed(expires_in: u64, retry_after: u64) -> Act {
    let at = SystemClock.now().as_micros() / 1_000_000 + expires_in;
    let (expires, retry) =
        (format!("idempotency-expires: @{at}"), format!("retry-after: {retry_after}"));
    Act::Execute(answer(500, &["idempotency-replayed: false", &expires, &retry], ""))
}

async fn send(client: &Client, bank: &Bank) -> Result<u16, SendError> {
    let sent = client.post(bank.url("/")).operation("n").wait(LONG).send().await?;
    Ok(sent.response.status.as_u16())
}

#[tokio::test]
async fn a_shorter_retention_that_the_server_states_ends_the_tries() {
    let bank = Bank::start().await;
    bank.act([failed(61, 2)]);
    let client = client(&bank, Server::hapax()).await;
    for _ in 0..2 {
        let end = send(&client, &bank).await;
        assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    }
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn a_longer_retention_that_the_server_states_extends_the_tries() {
    let bank = Bank::start().await;
    bank.act([failed(100_000, 2)]);
    let client = client(&bank, Server::hapax().retention(Duration::from_secs(61))).await;
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn the_header_of_a_server_with_another_profile_states_nothing() {
    let bank = Bank::start().await;
    bank.act([failed(61, 2)]);
    let client = client(&bank, Server::plain()).await;
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
}

#[tokio::test]
async fn a_stated_retention_outlives_a_process_that_ends_before_its_next_try() {
    let bank = Bank::start().await;
    // The last age is zero.
    bank.act([failed(60, 2)]);
    let store = store();
    let open = || {
        let journal = Journal::over(Arc::clone(&store)).unwrap();
        Client::open(journal).server(bank.origin(), Server::hapax()).build()
    };
    let client = open().await.unwrap();
    let post = client.post(bank.url("/")).operation("n").wait(Duration::from_millis(1));
    let end = post.send().await;
    assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    bank.wait_for(1).await;
    assert!(client.close(LONG).await);
    let end = send(&open().await.unwrap(), &bank).await;
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stated_retention_outlives_the_process_whose_next_try_began() {
    let bank = Bank::start().await;
    // The last age is 2 s.
    bank.act([failed(62, 0), Act::Silent]);
    let store = store();
    let open = || {
        let journal = Journal::over(Arc::clone(&store)).unwrap();
        let client = Client::open(journal).server(bank.origin(), Server::hapax());
        client.lease(Duration::from_secs(3)).build()
    };
    process(async || {
        let client = open().await.unwrap();
        tokio::spawn(client.post(bank.url("/")).operation("n").send());
        bank.wait_for(2).await;
    });
    // The other process continues once the lease of the first one has lapsed.
    let client = open().await.unwrap();
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    assert_eq!(bank.arrived().len(), 2);
}

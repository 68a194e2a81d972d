//! Clients that are killed, over a journal and against a server that fail at random.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hapax_client::{Client, Journal, SendError, Server};
use hapax_core::MemoryStore;
use hapax_testkit::faults::{FaultyRates, FaultyStore};
use tokio::time::{sleep, timeout};

use crate::bank::Bank;
use crate::world::{LONG, process, store};

const OPERATIONS: u32 = 60;

async fn open(store: &Arc<FaultyStore<MemoryStore>>, bank: &Bank) -> Client {
    let client = Client::open(Journal::over(Arc::clone(store)).unwrap());
    let client = client.server(bank.origin(), Server::hapax());
    client.lease(Duration::from_secs(1)).build().await.unwrap()
}

/// Sends an operation until it is known how it ended.
async fn send(client: &Client, bank: &Bank, number: u32) -> (u16, Vec<u8>) {
    let body = "x".repeat(usize::try_from(number).unwrap());
    loop {
        let post = client.post(bank.url("/")).operation(format!("n/{number}"));
        match post.body(body.clone()).wait(LONG).send().await {
            Ok(sent) => return (sent.response.status.as_u16(), sent.response.body.to_vec()),
            Err(SendError::Journal(_)) => sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("{number}: {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_clients_over_a_faulty_journal_have_one_effect_and_one_response_each() {
    let (bank, inner) = (Bank::start().await, store());
    bank.storm(17);
    let rates = FaultyRates {
        unavailable: 20,
        ambiguous_lost: 20,
        ambiguous_applied: 20,
        ambiguous_late: 20,
        delay: 20,
        delay_at_most: Duration::from_millis(20),
    };
    let faulty = |seed| {
        let store = FaultyStore::new(Arc::clone(&inner), seed);
        store.set(rates);
        Arc::new(store)
    };
    let mut faults = 0;
    for seed in 0..6 {
        let store = faulty(seed);
        process(async || {
            let client = open(&store, &bank).await;
            let sends = (0..OPERATIONS).map(|number| send(&client, &bank, number));
            let killed = Duration::from_millis(150 * (seed + 1));
            let _ = timeout(killed, join_all(sends)).await;
        });
        let counts = store.counts();
        faults += counts.unavailable + counts.lost + counts.applied + counts.late;
    }
    let client = open(&faulty(99), &bank).await;
    let sends = (0..OPERATIONS).map(|number| send(&client, &bank, number));
    let ends = join_all(sends).await;
    for (number, (status, body)) in ends.iter().enumerate() {
        assert_eq!((*status, &**body), (201, format!("paid {number}").as_bytes()));
    }
    let effects = bank.effects();
    assert_eq!(effects, vec![1; effects.len()]);
    assert_eq!(effects.len(), usize::try_from(OPERATIONS).unwrap());
    assert!(bank.faults() > 20 && faults > 10, "{} and {faults} faults", bank.faults());
}

#[tokio::test]
async fn nothing_is_sent_while_the_journal_is_unavailable() {
    let (bank, inner) = (Bank::start().await, store());
    let store = Arc::new(FaultyStore::new(inner, 1));
    store.set(FaultyRates { unavailable: 1_000, ..FaultyRates::default() });
    let client = open(&store, &bank).await;
    let post = || client.post(bank.url("/")).operation("n");
    for _ in 0..3 {
        let end = post().send().await;
        assert!(matches!(end, Err(SendError::Journal(_))), "{end:?}");
    }
    assert_eq!(bank.connections(), 0);
    store.set(FaultyRates::default());
    assert_eq!(post().send().await.unwrap().response.status, 201);
}

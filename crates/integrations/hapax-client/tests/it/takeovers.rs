//! Operations of a process that died, which another one continues.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, Journal, Server};
use hapax_core::{MemoryStore, Store as _, Timestamp};
use tokio::time::{sleep, timeout};

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, process, store};

const LEASE: Duration = Duration::from_secs(3);

async fn open(store: &Arc<MemoryStore>, bank: &Bank) -> Client {
    let client = Client::open(Journal::over(Arc::clone(store)).unwrap());
    client.server(bank.origin(), Server::hapax()).lease(LEASE).build().await.unwrap()
}

/// Returns the time for which the entry of the only operation is not due.
async fn due_in(store: &MemoryStore) -> Duration {
    let schedule = store.capabilities().schedule.unwrap();
    let page = schedule.entries(None, NonZeroU32::MAX).await.unwrap();
    let [(key, entry)] = &page.entries[..] else { panic!("{} entries", page.entries.len()) };
    let now: Timestamp = store.load(&key.operation).await.unwrap().now;
    entry.as_ref().unwrap().due.since(now)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_whose_caller_was_killed_continues_after_a_lease() {
    let (bank, store) = (Bank::start().await, store());
    // A pause that is shorter than the lease, and then a try in progress.
    bank.act([Act::Answer(answer(503, &["retry-after: 2"], "")), Act::Silent]);
    process(async || {
        let client = open(&store, &bank).await;
        client.resume().await.unwrap();
        tokio::spawn(client.post(bank.url("/")).operation("n").send());
        bank.wait_for(2).await;
        // Its own runner looks at the entry, and leaves the operation to the caller.
        let postponed = async {
            while due_in(&store).await < Duration::from_secs(1) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, postponed).await.unwrap();
    });
    let left = due_in(&store).await;
    assert!(left <= LEASE, "due in {left:?}: no process looks at it before");
    let client = open(&store, &bank).await;
    client.resume().await.unwrap();
    timeout(LONG, bank.wait_for(3)).await.expect("a lease after the kill");
    let sent = client.post(bank.url("/")).operation("n").wait(LONG).send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.effects()), (201, vec![1]));
}

/// An entry that is due much later, of an operation whose lease is current when the journal is resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resume_within_the_lease_continues_an_operation_once_it_has_lapsed() {
    let (bank, store) = (Bank::start().await, store());
    bank.act([Act::Silent]);
    process(async || {
        let client = open(&store, &bank).await;
        tokio::spawn(client.post(bank.url("/")).operation("n").send());
        bank.wait_for(1).await;
    });
    let schedule = store.capabilities().schedule.unwrap();
    let page = schedule.entries(None, NonZeroU32::MAX).await.unwrap();
    schedule.postpone(page.entries[0].0, None, LONG * 10).await.unwrap();
    let client = open(&store, &bank).await;
    client.resume().await.unwrap();
    assert!(due_in(&store).await <= LEASE);
    timeout(LONG, bank.wait_for(2)).await.expect("a lease after the kill");
}

//! Records whose logs are damaged, of another version, or missing.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_client::{Client, Credentials, Journal, PendingState, SendError, Server};
use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{Inspect, MemoryStore, OperationId, Store, WriteId};
use hapax_saga::log::{Blob, Log};

use crate::bank::{Act, Bank, answer};
use crate::hooked_store::{HookedStore, Moment};
use crate::world::{LONG, process, store};

const PAGE: NonZeroU32 = NonZeroU32::new(256).unwrap();

async fn open(store: &Arc<MemoryStore>, bank: &Bank, token: &'static str) -> Client {
    let client = Client::open(Journal::over(Arc::clone(store)).unwrap());
    let client = client.server(bank.origin(), Server::hapax()).lease(Duration::from_secs(1));
    let client = client.credentials(move |_| async move { Ok(Credentials::bearer(token)?) });
    client.build().await.unwrap()
}

/// Replaces the checkpoint of a record.
async fn damage(store: &MemoryStore, id: OperationId, change: impl FnOnce(&[u8]) -> Bytes) {
    let stored = store.load(&id).await.unwrap().stored.unwrap();
    let mut record = stored.record;
    record.checkpoint = Some(change(record.checkpoint.as_ref().unwrap()));
    let draft =
        Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, keep: Some(LONG * 1_000) };
    let write_id = WriteId::from_bytes([9; 16]);
    let swap = Swap { id, expected: Some(stored.write_id), write_id, draft };
    assert!(matches!(store.swap(swap).await.unwrap(), Swapped::Stored(_)));
}

/// Returns the operation that an entry of the schedule has with this name.
async fn id_of(store: &MemoryStore, name: &str) -> OperationId {
    let schedule = store.capabilities().schedule.unwrap();
    let page = schedule.entries(None, PAGE).await.unwrap();
    let mut named = page.entries.into_iter().filter(|(_, entry)| {
        let note = &entry.as_ref().unwrap().note;
        note.windows(name.len()).any(|window| window == name.as_bytes())
    });
    let id = named.next().unwrap().0.operation;
    assert!(named.next().is_none());
    id
}

/// Lets a process die while its server has not answered these operations.
fn pending(store: &Arc<MemoryStore>, bank: &Bank, names: &[&str]) {
    let later = || Act::Execute(answer(503, &["retry-after: 1"], ""));
    bank.act(names.iter().map(|_| later()));
    process(async || {
        let client = open(store, bank, "one").await;
        for (at, name) in names.iter().enumerate() {
            let post = client.post(bank.url("/")).operation(*name);
            let end = post.wait(Duration::from_millis(1)).send().await;
            assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
            bank.wait_for(at + 1).await;
        }
        assert!(client.close(LONG).await);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_cannot_be_read_does_not_stop_the_others() {
    let (bank, store) = (Bank::start().await, store());
    pending(&store, &bank, &["name-a", "name-b", "name-c"]);
    let damaged = id_of(&store, "name-b").await;
    damage(&store, damaged, |_| Bytes::from_static(b"no log")).await;

    let client = open(&store, &bank, "one").await;
    assert_eq!(client.resume().await.unwrap().pending, 2);
    bank.wait_for(5).await;
    for name in ["name-a", "name-c"] {
        let sent = client.post(bank.url("/")).operation(name).send().await.unwrap();
        assert_eq!((sent.response.status.as_u16(), sent.replayed), (201, true), "{name}");
    }
    assert_eq!(client.finished().await.unwrap().len(), 2);
    let pending = client.pending().await.unwrap();
    assert_eq!((pending.len(), &*pending[0].name, pending[0].id), (1, "name-b", damaged));
    assert!(matches!(pending[0].state, PendingState::Unreadable { .. }), "{pending:?}");
    // It is not sent: nothing tells whether it may be.
    let end = client.post(bank.url("/")).operation("name-b").wait(LONG).send().await;
    assert!(matches!(end, Err(SendError::Journal(_))), "{end:?}");
    assert!(client.forget("name-a").await.unwrap());
    assert_eq!((bank.arrived().len(), bank.effects()), (5, vec![1; 3]));
    // An operator finds it.
    let page = store.page(None, PAGE).await.unwrap();
    assert!(page.records.iter().any(|(id, _)| *id == damaged));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_whose_prepared_data_cannot_be_read_is_not_repeated_with_another_token() {
    for prepared in [None, Some(Blob(Bytes::from_static(b"of another version")))] {
        let (bank, store) = (Bank::start().await, store());
        pending(&store, &bank, &["name-a"]);
        let replace = |checkpoint: &[u8]| {
            let mut log = Log::decode(checkpoint).unwrap();
            let forward = &mut log.steps[0].forward;
            assert!(forward.arrived && forward.prepared.is_some());
            forward.prepared = prepared;
            log.encode().unwrap()
        };
        damage(&store, id_of(&store, "name-a").await, replace).await;
        let client = open(&store, &bank, "two").await;
        let end = client.post(bank.url("/")).operation("name-a").send().await;
        let is_rejected = matches!(end, Err(SendError::KeyChanged | SendError::CredentialsChanged));
        assert!(is_rejected, "{end:?}");
        assert_eq!((bank.arrived().len(), bank.effects()), (1, vec![1]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_whose_process_died_before_its_first_try_is_sent_by_the_next_caller() {
    let (bank, store) = (Bank::start().await, store());
    let (asked, is_asked) = tokio::sync::oneshot::channel();
    let asked = std::sync::Mutex::new(Some(asked));
    process(async || {
        let client = Client::open(Journal::over(Arc::clone(&store)).unwrap());
        let client = client.server(bank.origin(), Server::hapax()).lease(Duration::from_secs(1));
        // The first save comes after the credentials, for which this process waits until it dies.
        let client = client.credentials(move |_| {
            let _ = asked.lock().unwrap().take().unwrap().send(());
            std::future::pending()
        });
        let client = client.build().await.unwrap();
        let send = client.post(bank.url("/")).operation("name-a").send();
        tokio::select! {
            end = send => panic!("{end:?}"),
            asked = is_asked => asked.unwrap(),
        }
    });
    let page = store.page(None, PAGE).await.unwrap();
    let [(_, stored)] = &page.records[..] else { panic!("{} records", page.records.len()) };
    assert!(stored.as_ref().unwrap().record.checkpoint.is_none(), "a claim without a log");
    let client = open(&store, &bank, "one").await;
    let sent = client.post(bank.url("/")).operation("name-a").wait(LONG).send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.arrived().len()), (201, 1));
}

#[tokio::test]
async fn an_operation_whose_process_froze_before_its_first_try_is_sent_by_its_caller() {
    const LEASE: Duration = Duration::from_secs(1);
    let bank = Bank::start().await;
    let journal = HookedStore::new(store(), |number, moment| {
        // After claim and entry. The runtime has one thread: nothing renews the lease.
        if (number, moment) == (2, Moment::After) {
            std::thread::park_timeout(2 * LEASE);
        }
    });
    let journal = Arc::new(journal);
    let client = Client::open(Journal::over(Arc::clone(&journal)).unwrap());
    let client = client.server(bank.origin(), Server::hapax()).lease(LEASE);
    let client = client.build().await.unwrap();
    let sent = client.post(bank.url("/")).operation("name-a").wait(LONG).send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.arrived().len()), (201, 1));
}

//! Names that are free after an answer, for which two callers of two processes race.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_client::{Client, Journal, SendError, Server};
use hapax_core::store::{BoxFuture, Capabilities, Page, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Inspect, MemoryStore, OperationId, Store, StoreError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, store};

/// A store that does something before one of its loads.
struct Interrupted {
    store: Arc<MemoryStore>,
    /// The number of loads before it, and what it does.
    interrupt: Mutex<Option<(usize, BoxFuture<'static, ()>)>>,
}

impl fmt::Debug for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupted")
    }
}

impl Interrupted {
    /// Returns what is to be done before this load.
    fn due(&self) -> Option<BoxFuture<'static, ()>> {
        let mut interrupt = self.interrupt.lock().unwrap();
        match interrupt.as_mut()? {
            (0, _) => interrupt.take().map(|(_, act)| act),
            (left, _) => {
                *left -= 1;
                None
            }
        }
    }
}

impl Store for Interrupted {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            if let Some(act) = self.due() {
                act.await;
            }
            self.store.load(id).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for Interrupted {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.page(after, limit)
    }
}

async fn open(bank: &Bank, store: impl Inspect) -> Client {
    let client = Client::open(Journal::over(store).unwrap());
    client.server(bank.origin(), Server::hapax()).build().await.unwrap()
}

async fn send(client: &Client, bank: &Bank, body: &'static str) -> Result<u16, SendError> {
    let post = client.post(bank.url("/")).operation("n").body(body);
    // An interrupt that joins what it interrupts does not wait for it.
    Ok(post.wait(Duration::from_secs(2)).send().await?.response.status.as_u16())
}

/// Lets another process send a name with this body, before each of the loads of a caller of the same name in
/// turn. The name is free after a 403, which both may see. Returns how often the other one was answered
/// first.
async fn race(other_body: &'static str) -> usize {
    let mut firsts = 0;
    for loads in 0.. {
        let (bank, store) = (Bank::start().await, store());
        let other = open(&bank, Arc::clone(&store)).await;
        bank.act([Act::Answer(answer(403, &[], "no"))]);
        assert_eq!(send(&other, &bank, "one").await.unwrap(), 403);

        let (ended, mut end) = tokio::sync::oneshot::channel();
        let act = {
            let (other, bank) = (other.clone(), bank.clone());
            async move {
                let first = bank.arrived().len() == 1;
                let answered = send(&other, &bank, other_body).await;
                ended.send(first && answered.is_ok()).unwrap();
            }
        };
        let interrupt = Mutex::new(Some((loads, Box::pin(act) as BoxFuture<'static, ()>)));
        let caller = open(&bank, Interrupted { store, interrupt }).await;
        let end_of_caller = send(&caller, &bank, "one").await;
        let Ok(was_first) = end.try_recv() else {
            assert!(loads > 0, "no load was interrupted");
            return firsts;
        };
        firsts += usize::from(was_first);
        match end_of_caller {
            Ok(201) => {}
            Err(SendError::Reused) if was_first && other_body != "one" => {}
            end => panic!("before load {loads}: {end:?}"),
        }
        assert_eq!(bank.arrived().len(), 2, "before load {loads}: the answer was forgotten");
        assert_eq!(other.finished().await.unwrap().len(), 1, "before load {loads}");
    }
    unreachable!("the number of loads of a call is finite")
}

#[tokio::test]
async fn a_caller_that_frees_a_name_does_not_forget_the_response_of_another_caller() {
    for other_body in ["one", "another"] {
        assert!(race(other_body).await > 0, "the other one was never first");
    }
}

#[tokio::test]
async fn callers_that_wait_for_a_response_of_nothing_happened_take_it_as_theirs() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let (arrived, may_answer) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let (count, permits) = (Arc::clone(&arrived), Arc::clone(&may_answer));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            count.fetch_add(1, Ordering::SeqCst);
            let _permit = permits.acquire().await.unwrap();
            let answer = answer(403, &["connection: close"], "no");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    let client = Client::open(Journal::over(store()).unwrap()).server(&*origin, Server::hapax());
    let client = client.build().await.unwrap();
    let post = || client.post(format!("{origin}/")).operation("n");
    let mut handles = Vec::new();
    for _ in 0..16 {
        // It ends once the operation is accepted, which each caller has then found.
        let end = post().wait(Duration::ZERO).send().await;
        let Err(SendError::Pending(handle)) = end else { panic!("{end:?}") };
        handles.push(handle);
    }
    may_answer.add_permits(1);
    for handle in handles {
        let sent = handle.wait(LONG).await.unwrap();
        assert_eq!(sent.response.status, 403);
    }
    assert_eq!(arrived.load(Ordering::SeqCst), 1);
    // One that comes later is another one: nothing happened, and the name is free.
    assert_eq!(post().send().await.unwrap().response.status, 403);
    assert_eq!(arrived.load(Ordering::SeqCst), 2);
}
